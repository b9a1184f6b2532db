//! What lanes need beyond the Rust toolchain: whether it is there, and how it is had.

use crate::error::Result;
use crate::{
    book, browser, cache_dir, foreign, libtorch, process, python, rewards, sglang, smollm2, stores, ucx,
};
use std::path::Path;
use std::process::Command;

/// What a lane needs beyond the Rust toolchain, in an order in which it can be installed: `Python` takes the
/// interpreter of `Sglang`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Need {
    Libtorch,
    Sglang,
    Smollm2,
    Python,
    Rewards,
    Browser,
    Mdbook,
    CargoFuzz,
    Stores,
    Ucx,
    Miri,
    Arm,
    Macos,
    Gpu,
    /// What vLLM's kernels for the CPU are compiled for.
    Avx2,
}

impl Need {
    /// What is missing and how to get it, or `None`.
    pub(crate) fn missing(self) -> Option<String> {
        let unless = |found: bool, how: &str| (!found).then(|| how.to_owned());
        let in_cache = |missing: fn(&Path) -> Option<String>| match cache_dir() {
            Ok(cache) => missing(&cache),
            Err(error) => Some(error.to_string()),
        };
        match self {
            Need::Libtorch => unless(libtorch::present().is_some(), "libtorch 2.11 (cargo xtask setup)"),
            Need::Sglang => in_cache(sglang::missing),
            Need::Smollm2 => in_cache(smollm2::missing),
            Need::Python => in_cache(python::missing),
            Need::Rewards => in_cache(rewards::missing),
            Need::Browser => in_cache(browser::missing),
            Need::Mdbook => in_cache(book::missing),
            Need::Stores => in_cache(stores::missing),
            Need::Ucx => in_cache(ucx::missing),
            Need::Miri => foreign::miri_missing(),
            Need::Arm => foreign::arm_missing(),
            Need::Macos => foreign::macos_missing(),
            Need::Gpu => {
                let found = Command::new("nvidia-smi").arg("-L").output();
                let found = found.is_ok_and(|output| output.status.success() && !output.stdout.is_empty());
                unless(found, "an NVIDIA GPU (nvidia-smi -L), and a libtorch for CUDA in LIBTORCH")
            }
            Need::Avx2 => {
                let processor = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
                unless(processor.contains(" avx2 "), "a processor with AVX2 (/proc/cpuinfo)")
            }
            Need::CargoFuzz => {
                let version = Command::new("cargo").args(["+nightly", "fuzz", "--version"]).output();
                let how = "cargo-fuzz on a nightly toolchain (cargo install --locked cargo-fuzz; \
                           rustup toolchain install nightly)";
                unless(version.is_ok_and(|output| output.status.success()), how)
            }
        }
    }

    /// Installs what is missing. A GPU or a processor cannot be.
    pub(crate) fn install(self) -> Result<()> {
        if self.missing().is_none() {
            return Ok(());
        }
        match self {
            Need::Libtorch => libtorch::install().map(drop),
            Need::Sglang => sglang::install(&cache_dir()?).map(drop),
            Need::Smollm2 => smollm2::install(&cache_dir()?).map(drop),
            Need::Python => python::install(&cache_dir()?),
            Need::Rewards => rewards::install(&cache_dir()?),
            Need::Browser => browser::install(&cache_dir()?),
            Need::Mdbook => book::install(&cache_dir()?),
            Need::Stores => stores::install(&cache_dir()?),
            Need::Ucx => ucx::install(&cache_dir()?),
            Need::CargoFuzz => {
                process::run(Command::new("cargo").args(["install", "--locked", "--quiet", "cargo-fuzz"]))
            }
            Need::Miri => foreign::install_miri(),
            Need::Arm => foreign::install_arm(),
            Need::Macos => foreign::install_macos(),
            Need::Gpu | Need::Avx2 => Ok(()),
        }
    }
}
