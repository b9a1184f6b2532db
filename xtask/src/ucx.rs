//! UCX for its lane: wheels from PyPI, in the cache.

use crate::error::{Error, Result};
use crate::process;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The oldest release that is supported and the newest, by package. TCP and shared memory; no InfiniBand,
/// which the lane does not use.
const WHEELS: [(&str, &str); 2] = [("libucx-cu12", "1.14.1.post2"), ("libucx-cu13", "1.22.0")];

/// What is missing and how to get it, or `None`.
pub(crate) fn missing(cache: &Path) -> Option<String> {
    let found = releases(cache).iter().all(|(_, libraries)| libraries.join("libucp.so.0").exists());
    (!found).then(|| "UCX 1.14 and 1.22 (cargo xtask test --ci ucx, 68 MB)".to_owned())
}

/// Each release's version, and the directory of its libraries.
pub(crate) fn releases(cache: &Path) -> [(&'static str, PathBuf); 2] {
    WHEELS.map(|(name, version)| (version, home(cache, name, version).join("libucx/lib")))
}

/// Installs what is not there.
pub(crate) fn install(cache: &Path) -> Result<()> {
    WHEELS.into_iter().try_for_each(|(name, version)| install_one(&home(cache, name, version), name, version))
}

fn install_one(home: &Path, name: &str, version: &str) -> Result<()> {
    if home.is_dir() {
        return Ok(());
    }
    println!("ucx: {name} {version}");
    // Into a sibling that is renamed, so that an interrupted installation leaves nothing half.
    let partial = home.with_extension(format!("partial-{}", std::process::id()));
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--target"]).arg(&partial);
    process::run(pip.arg(format!("{name}=={version}")).env("PIP_ROOT_USER_ACTION", "ignore"))?;
    match fs::rename(&partial, home) {
        // Another clone was faster: its copy is as good.
        Err(_) if home.is_dir() => fs::remove_dir_all(&partial).map_err(|source| Error::io(&partial, source)),
        renamed => renamed.map_err(|source| Error::io(home, source)),
    }
}

fn home(cache: &Path, name: &str, version: &str) -> PathBuf {
    cache.join(format!("{name}-{version}"))
}
