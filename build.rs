//! Lets the binary and the tests find libtorch without LD_LIBRARY_PATH, and the command say what it was built from.

use std::process::Command;

/// The features that a user of the command chooses.
const FEATURES: [&str; 9] =
    ["arrow", "cuda", "failpoints", "nccl", "object", "relay", "slime", "torch", "ucx"];

fn main() {
    println!("cargo:rerun-if-env-changed=LIBTORCH");
    let has = |feature: &str| std::env::var_os(format!("CARGO_FEATURE_{}", feature.to_uppercase())).is_some();
    if has("torch")
        && let Ok(libtorch) = std::env::var("LIBTORCH")
    {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{libtorch}/lib");
    }
    let features: Vec<_> = FEATURES.into_iter().filter(|feature| has(feature)).collect();
    println!("cargo:rustc-env=DRIFTLESS_BUILD={}; features {}", commit(), features.join(", "));
}

/// The commit of a release build from a clone. Other builds would be made anew with each commit for its sake.
fn commit() -> String {
    if std::env::var("PROFILE").as_deref() != Ok("release") {
        return "debug build".to_owned();
    }
    let git = |args: &[&str]| {
        let output = Command::new("git").args(args).output().ok().filter(|output| output.status.success())?;
        Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
        println!("cargo:rerun-if-changed={log}");
    }
    git(&["rev-parse", "--short=12", "HEAD"])
        .map_or("release".to_owned(), |commit| format!("commit {commit}"))
}
