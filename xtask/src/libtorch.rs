//! libtorch 2.11 from PyPI: the torch wheel and the two NVIDIA wheels that `libtorch_cpu.so` needs at load.

use crate::error::{Error, Result};
use crate::install;
use std::path::{Path, PathBuf};

/// `tch` 0.24 accepts exactly this one.
const VERSION: &str = "2.11.0";
const LIBRARY: &str = "torch/lib/libtorch_cpu.so";

/// Where libtorch is: $LIBTORCH, or `.venv/libtorch`, which is made if absent.
pub(crate) fn install() -> Result<PathBuf> {
    if let Some(path) = present() {
        return Ok(path);
    }
    let home = crate::cache_dir()?.join(format!("libtorch-{VERSION}"));
    if !home.join(LIBRARY).exists() {
        println!("libtorch {VERSION}: downloading three wheels (1.25 GB) ...");
        let torch = format!("torch=={VERSION}");
        let wheels = [&torch, "nvidia-cuda-runtime==13.0.*", "nvidia-cuda-cupti==13.0.*"];
        install::wheels(&home, LIBRARY, &wheels)?;
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

/// Points `.venv/libtorch` at the cache.
fn link(home: &Path) -> Result<()> {
    let venv = crate::workspace().join(".venv");
    std::fs::create_dir_all(&venv).map_err(Error::io(&venv))?;
    let link = venv.join("libtorch");
    if link.is_symlink() {
        std::fs::remove_file(&link).map_err(Error::io(&link))?;
    }
    std::os::unix::fs::symlink(home.join("torch"), &link).map_err(Error::io(&link))
}
