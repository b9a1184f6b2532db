//! Python packages that our rewards are compared with, that hooks call, that read what a run tells, and that call the
//! gateway, in an environment of their own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{Error, Result};
use crate::{install, process};

const PACKAGES: [&str; 5] = [
    "math-verify==0.9.0",
    "reasoning-gym==0.1.25",
    "tensorboard==2.21.0",
    "openai==3.57.0",
    "anthropic==2.14.0",
];
/// The directory in the cache: another one for other packages.
const HOME: &str = "math-verify-0.9.0-reasoning-gym-0.1.25-tensorboard-2.21.0-openai-3.57.0-anthropic-2.14.0";
/// File whose presence says that the installation ran to its end.
const MARKER: &str = "installed";

/// What is missing and how to get it, or `None`.
pub(crate) fn missing(cache: &Path) -> Option<String> {
    let found = cache.join(HOME).join(MARKER).is_file();
    (!found).then(|| {
        "math-verify, reasoning-gym, tensorboard, openai and anthropic (cargo xtask test --ci rewards)"
            .to_owned()
    })
}

/// Its interpreter.
pub(crate) fn python(cache: &Path) -> PathBuf {
    cache.join(HOME).join("bin/python")
}

/// Installs them. What an interrupted installation left is begun anew.
pub(crate) fn install(cache: &Path) -> Result<()> {
    println!("rewards: {} from PyPI (0.2 GB)", PACKAGES.join(", "));
    let home = cache.join(HOME);
    process::run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&home))?;
    process::run(install::pip(python(cache)).args(PACKAGES))?;
    let marker = home.join(MARKER);
    fs::write(&marker, "").map_err(Error::io(marker))
}
