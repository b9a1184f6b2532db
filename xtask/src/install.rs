//! What installations in the cache have in common.

use crate::error::{Error, Result};
use crate::process;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

/// `pip install` by the interpreter `python`.
pub(crate) fn pip(python: impl AsRef<OsStr>) -> Command {
    let mut pip = Command::new(python);
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
    // It warns of installing as root into the system; this goes into a directory of ours.
    pip.env("PIP_ROOT_USER_ACTION", "ignore");
    pip
}

/// Unpacks wheels from PyPI into the directory `home`, among them `file`.
pub(crate) fn wheels(home: &Path, file: &str, wheels: &[&str]) -> Result<()> {
    into_place(home, file, |partial| {
        process::run(pip("python3").args(["--no-deps", "--target"]).arg(partial).args(wheels))
    })
}

/// Has `fill` fill a sibling of the directory `home` and renames it, so that an interrupted installation leaves
/// nothing half. A whole one has `file`: without it, what `fill` made is refused, and what lies at `home` is removed.
pub(crate) fn into_place(home: &Path, file: &str, fill: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let partial = home.with_extension(format!("partial-{}", std::process::id()));
    fs::create_dir_all(&partial).map_err(Error::io(&partial))?;
    fill(&partial)?;
    if !partial.join(file).exists() {
        remove(&partial)?;
        return Err(Error::check(&home.display().to_string(), file, "an installation without it"));
    }
    if !home.join(file).exists() {
        remove(home)?;
    }
    match fs::rename(&partial, home) {
        // Another clone was faster: its copy is as good.
        Err(_) if home.join(file).exists() => remove(&partial),
        renamed => renamed.map_err(Error::io(home)),
    }
}

/// What `present` finds, or `make` makes. Clones that do so at the same time wait for each other; an interrupted one
/// is gone on with by the next.
pub(crate) fn once(
    lock: &Path,
    present: impl Fn() -> Option<PathBuf>,
    make: impl FnOnce() -> Result<PathBuf>,
) -> Result<PathBuf> {
    if let Some(home) = present() {
        return Ok(home);
    }
    let file = File::create(lock).map_err(Error::io(lock))?;
    if file.try_lock().is_err() {
        println!("waiting for another clone that makes it ({})", lock.display());
        file.lock().map_err(Error::io(lock))?;
    }
    present().map_or_else(make, Ok)
}

/// Removes a directory, if there is one.
pub(crate) fn remove(dir: &Path) -> Result<()> {
    match fs::remove_dir_all(dir) {
        Err(source) if source.kind() == std::io::ErrorKind::NotFound => Ok(()),
        removed => removed.map_err(Error::io(dir)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_an_installation_is_replaced_and_a_whole_one_kept() {
        let root = std::env::temp_dir().join(format!("driftless-install-{}", std::process::id()));
        let home = root.join("home-1.0");
        let install = |word: &'static str| {
            into_place(&home, "lib/whole", |partial| {
                fs::create_dir_all(partial.join("lib")).map_err(Error::io(partial))?;
                fs::write(partial.join("lib").join(word), word).map_err(Error::io(partial))
            })
        };
        let mut refused = Vec::new();
        for word in ["half", "whole", "half"] {
            refused.push(install(word).is_err());
        }
        assert_eq!(refused, [true, false, true]);
        assert!(home.join("lib/whole").exists() && !home.join("lib/half").exists());
        fs::remove_file(home.join("lib/whole")).expect("a file");
        fs::write(home.join("stale"), "").expect("a file");
        install("whole").expect("an installation");
        assert!(home.join("lib/whole").exists() && !home.join("stale").exists());
        fs::write(home.join("stale"), "").expect("a file");
        install("whole").expect("the other clone's");
        assert!(home.join("stale").exists(), "another clone was faster");
        assert_eq!(fs::read_dir(&root).expect("a directory").count(), 1, "nothing is left beside it");
        remove(&root).expect("a directory");
    }
}
