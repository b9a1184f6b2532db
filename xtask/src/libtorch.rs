//! libtorch 2.11 from PyPI: the torch wheel and the two NVIDIA wheels that `libtorch_cpu.so` needs at load.

use crate::error::{Error, Result};
use crate::process;
use std::path::{Path, PathBuf};
use std::process::Command;

/// `tch` 0.24 accepts exactly this one.
const VERSION: &str = "2.11.0";

/// Where libtorch is: $LIBTORCH, or `.venv/libtorch`, which is made if absent.
pub(crate) fn install() -> Result<PathBuf> {
    if let Some(path) = present() {
        return Ok(path);
    }
    let home = crate::cache_dir()?.join(format!("libtorch-{VERSION}"));
    if !home.join("torch/lib/libtorch_cpu.so").exists() {
        download(&home)?;
    }
    link(&home)?;
    Ok(local())
}

/// libtorch without downloading anything.
pub(crate) fn present() -> Option<PathBuf> {
    let exported = std::env::var_os("LIBTORCH").map(PathBuf::from);
    // Cargo's own configuration exports the clone's place whether or not it exists.
    if let Some(path) = exported.filter(|path| path.join("lib").exists()) {
        return Some(path);
    }
    let path = local();
    path.join("lib/libtorch_cpu.so").exists().then_some(path)
}

fn local() -> PathBuf {
    crate::workspace().join(".venv/libtorch")
}

/// Downloads into a sibling directory and renames, so that an interrupted run leaves nothing half.
fn download(home: &Path) -> Result<()> {
    println!("libtorch {VERSION}: downloading three wheels (1.25 GB) ...");
    let partial = home.with_extension(format!("partial-{}", std::process::id()));
    process::run(
        Command::new("python3")
            .args(["-m", "pip", "install", "--quiet", "--no-deps", "--target"])
            .arg(&partial)
            .arg(format!("torch=={VERSION}"))
            .args(["nvidia-cuda-runtime==13.0.*", "nvidia-cuda-cupti==13.0.*"])
            // It warns of installing as root into the system; this goes into a directory of ours.
            .env("PIP_ROOT_USER_ACTION", "ignore"),
    )?;
    match std::fs::rename(&partial, home) {
        Ok(()) => Ok(()),
        // Another clone was faster: its copy is as good.
        Err(_) if home.join("torch/lib/libtorch_cpu.so").exists() => {
            std::fs::remove_dir_all(&partial).map_err(|source| Error::io(&partial, source))
        }
        Err(source) => Err(Error::io(home, source)),
    }
}

/// Points `.venv/libtorch` at the cache.
fn link(home: &Path) -> Result<()> {
    let venv = crate::workspace().join(".venv");
    std::fs::create_dir_all(&venv).map_err(|source| Error::io(&venv, source))?;
    let link = venv.join("libtorch");
    if link.is_symlink() {
        std::fs::remove_file(&link).map_err(|source| Error::io(&link, source))?;
    }
    std::os::unix::fs::symlink(home.join("torch"), &link).map_err(|source| Error::io(&link, source))
}
