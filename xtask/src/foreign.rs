//! Tests on machines that this one is not: Miri's, a 64-bit Arm that QEMU imitates, and a Mac as far as its compiler goes.

use crate::error::Result;
use crate::process::{self, found};
use std::process::Command;

const ARM: &str = "aarch64-unknown-linux-gnu";
const MACOS: &str = "aarch64-apple-darwin";
const QEMU: &str = "qemu-aarch64";
const LINKER: &str = "aarch64-linux-gnu-gcc";
const PACKAGES: [&str; 3] = ["qemu-user", "gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross"];

/// Dependencies as they come: procedural macros, which the host alone runs, are built minutes sooner, and
/// nothing here is measured.
const PLAIN: [&str; 2] = ["--config", "profile.dev.package.\"*\".opt-level=0"];

/// What Miri's processor has. The codec asks for it, so that its vector paths run: nothing else is unsafe
/// there.
const VECTORS: &str = "-Ctarget-feature=+avx2,+bmi1,+bmi2,+lzcnt,+popcnt,+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512vpopcntdq";

/// What Miri lacks and how to get it, or `None`.
pub(crate) fn miri_missing() -> Option<String> {
    let version = Command::new("cargo").args(["+nightly", "miri", "--version"]).output();
    let found = version.is_ok_and(|output| output.status.success());
    (!found).then(|| {
        "Miri (rustup toolchain install nightly --profile minimal --component miri,rust-src)".to_owned()
    })
}

pub(crate) fn install_miri() -> Result<()> {
    // Not every nightly has a build of Miri. `toolchain install` takes the newest that has, `component add`
    // would fail.
    let install = ["toolchain", "install", "nightly", "--profile", "minimal", "--component", "miri,rust-src"];
    process::run(Command::new("rustup").args(install))
}

/// `cargo miri` with what the lanes have in common.
pub(crate) fn miri(package: &str) -> Command {
    let mut command = Command::new("cargo");
    command.args(["+nightly", "miri", "test", "-p", package]).args(PLAIN);
    command.env("CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUSTFLAGS", VECTORS);
    // The log asks for the time of day.
    command.env("MIRIFLAGS", "-Zmiri-disable-isolation -Zmiri-strict-provenance");
    command
}

/// What the Arm lacks and how to get it, or `None`.
pub(crate) fn arm_missing() -> Option<String> {
    if let Some(program) = [QEMU, LINKER].into_iter().find(|program| !found(program)) {
        return Some(format!("`{program}` (as root: apt-get install {})", PACKAGES.join(" ")));
    }
    library_missing(ARM)
}

/// What the compiler for a Mac lacks and how to get it, or `None`.
pub(crate) fn macos_missing() -> Option<String> {
    library_missing(MACOS)
}

fn library_missing(target: &str) -> Option<String> {
    let targets = Command::new("rustup").args(["target", "list", "--installed"]).output();
    let added = targets.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains(target));
    (!added).then(|| format!("Rust's library for {target} (rustup target add {target})"))
}

pub(crate) fn install_arm() -> Result<()> {
    if ![QEMU, LINKER].into_iter().all(found) {
        process::apt("neon", &PACKAGES)?;
    }
    process::run(Command::new("rustup").args(["target", "add", ARM]))
}

pub(crate) fn install_macos() -> Result<()> {
    process::run(Command::new("rustup").args(["target", "add", MACOS]))
}

/// `cargo check` for a Mac, without its C compiler: hashing is in Rust then.
pub(crate) fn macos() -> Command {
    let mut command = Command::new("cargo");
    command.args(["check", "--target", MACOS]).args(PLAIN).env("CARGO_FEATURE_PURE", "1");
    command
}

/// `cargo` with a subcommand, for the Arm.
pub(crate) fn arm(subcommand: &str) -> Command {
    let mut command = Command::new("cargo");
    command.args([subcommand, "--target", ARM]).args(PLAIN);
    let variable = |what: &str| format!("CARGO_TARGET_{}_{what}", ARM.to_uppercase().replace('-', "_"));
    command.env(variable("LINKER"), LINKER);
    command.env(variable("RUNNER"), format!("{QEMU} -L /usr/aarch64-linux-gnu"));
    command
}
