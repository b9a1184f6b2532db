//! UCX for its lane: wheels from PyPI, in the cache.

use crate::error::Result;
use crate::install;
use std::path::{Path, PathBuf};

/// The oldest release that is supported and the newest, by package. TCP and shared memory; no InfiniBand,
/// which the lane does not use.
const WHEELS: [(&str, &str); 2] = [("libucx-cu12", "1.14.1.post2"), ("libucx-cu13", "1.22.0")];

const LIBRARY: &str = "libucx/lib/libucp.so.0";

/// What is missing and how to get it, or `None`.
pub(crate) fn missing(cache: &Path) -> Option<String> {
    let found = WHEELS.iter().all(|(name, version)| home(cache, name, version).join(LIBRARY).exists());
    (!found).then(|| "UCX 1.14 and 1.22 (cargo xtask test --ci ucx, 68 MB)".to_owned())
}

/// Each release's version, and the directory of its libraries.
pub(crate) fn releases(cache: &Path) -> [(&'static str, PathBuf); 2] {
    WHEELS.map(|(name, version)| (version, home(cache, name, version).join("libucx/lib")))
}

/// Installs what is not there.
pub(crate) fn install(cache: &Path) -> Result<()> {
    for (name, version) in WHEELS {
        let home = home(cache, name, version);
        if !home.join(LIBRARY).exists() {
            println!("ucx: {name} {version}");
            install::wheels(&home, LIBRARY, &[&format!("{name}=={version}")])?;
        }
    }
    Ok(())
}

fn home(cache: &Path, name: &str, version: &str) -> PathBuf {
    cache.join(format!("{name}-{version}"))
}
