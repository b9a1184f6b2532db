//! How close is the log to the disk and to memory, and how does it compare with LMDB? Every figure is a ratio
//! to what is measured beside it, in turns, in the same run; each row says whether it meets its target.
//!
//! `cargo run --release --manifest-path benches/log/Cargo.toml -- DIRECTORY` (on the disk to measure; 6 GB; 1
//! to 3 minutes).
#![expect(clippy::expect_used, reason = "a benchmark that cannot measure has nothing to say")]

mod append;
mod data;
mod latency;
mod memory;
mod read;
mod reopen;

use std::path::{Path, PathBuf};

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

/// Each in a directory of its own.
const PARTS: [(&str, fn(&Path) -> Vec<Row>); 5] = [
    ("append", append::run),
    ("latency", latency::run),
    ("read", read::run),
    ("reopen", reopen::run),
    ("memory", memory::run),
];

fn main() {
    let Some(root) = std::env::args().nth(1) else {
        eprintln!("usage: driftless-compare-log DIRECTORY [PART...] (on the disk to measure; parts: append latency read reopen memory)");
        std::process::exit(2);
    };
    let root = PathBuf::from(root).join(format!("log-bench-{}", std::process::id()));
    std::fs::create_dir_all(&root).expect("a directory on the disk to measure");
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    println!("load before: {}", load.trim());
    let chosen: Vec<String> = std::env::args().skip(2).collect();
    let chosen = PARTS.iter().filter(|(name, _)| chosen.is_empty() || chosen.iter().any(|one| one == name));
    let rows: Vec<Vec<Row>> = chosen.map(|(name, run)| run(&root.join(name))).collect();
    println!();
    for Row { what, ratio, at_least, target } in rows.iter().flatten() {
        let (sign, pass) = if *at_least { ("≥", ratio >= target) } else { ("≤", ratio <= target) };
        println!("{}  {what}: {ratio:.2} ({sign} {target})", if pass { "pass" } else { "MISS" });
    }
    std::fs::remove_dir_all(&root).expect("what was written here");
}
