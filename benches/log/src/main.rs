//! How close is the log to the disk and to memory, and how does it compare with LMDB? Every figure is a ratio to what is
//! measured beside it, in turns, in the same run; each row says whether it meets its target.
//!
//! `cargo run --release --manifest-path benches/log/Cargo.toml -- DIRECTORY` (on the disk to measure; 6 GB; 1 to 3 minutes).
#![expect(clippy::expect_used, reason = "a benchmark that cannot measure has nothing to say")]

mod append;
mod data;
mod latency;
mod memory;
mod read;
mod reopen;

use std::path::PathBuf;

/// One line of the table.
struct Row {
    what: String,
    ratio: f64,
    /// `true` for a least ratio, `false` for a largest.
    at_least: bool,
    target: f64,
}

impl Row {
    fn at_least(what: impl Into<String>, ratio: f64, target: f64) -> Self {
        Self { what: what.into(), ratio, at_least: true, target }
    }

    fn at_most(what: impl Into<String>, ratio: f64, target: f64) -> Self {
        Self { what: what.into(), ratio, at_least: false, target }
    }
}

fn main() {
    let Some(root) = std::env::args().nth(1) else {
        eprintln!("usage: driftless-compare-log DIRECTORY (on the disk to measure)");
        std::process::exit(2);
    };
    let root = PathBuf::from(root).join(format!("log-bench-{}", std::process::id()));
    std::fs::create_dir_all(&root).expect("a directory on the disk to measure");
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    println!("load before: {}", load.trim());
    let rows = [
        append::run(&root.join("append")),
        latency::run(&root.join("latency")),
        read::run(&root.join("read")),
        reopen::run(&root.join("reopen")),
        memory::run(&root.join("memory")),
    ];
    println!();
    for Row { what, ratio, at_least, target } in rows.iter().flatten() {
        let (sign, pass) = if *at_least { ("≥", ratio >= target) } else { ("≤", ratio <= target) };
        println!("{}  {what}: {ratio:.2} ({sign} {target})", if pass { "pass" } else { "MISS" });
    }
    std::fs::remove_dir_all(&root).expect("what was written here");
}
