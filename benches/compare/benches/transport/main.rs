//! How soon is a version visible across a long link, how fast is it applied, and what does publishing add to
//! encoding?
//!
//! `cargo bench --bench transport [-- --help]`. Both sides of each comparison are timed in the same run;
//! times are wall clock. Data are synthetic optimiser steps on bf16.

#![allow(clippy::expect_used, reason = "a bench ends where its own set-up fails")]

mod apply;
mod model;
mod offer;
mod publish;
mod tensors;
mod wire;

use std::path::PathBuf;

use clap::{Parser, ValueEnum};

/// A version's way: published, across a link, applied.
#[derive(Parser)]
pub(crate) struct Options {
    /// MiB of the model that is published and applied.
    #[arg(long, default_value_t = 4096)]
    pub(crate) mib: usize,
    /// MiB of each weight file that `apply` writes to; slime's receiver has one file [default: one file].
    #[arg(long)]
    pub(crate) shard_mib: Option<u64>,
    /// MiB of the model that crosses the link.
    #[arg(long, default_value_t = 8192)]
    pub(crate) wire_mib: usize,
    /// Share of the elements that change in the version that crosses the link.
    #[arg(long, default_value_t = 0.01)]
    pub(crate) wire_density: f64,
    /// Rate of the link in Mb/s.
    #[arg(long, default_value_t = 200)]
    pub(crate) link_mbps: u64,
    /// Round trip of the link in milliseconds.
    #[arg(long, default_value_t = 100)]
    pub(crate) link_ms: u64,
    /// The follower's poll in milliseconds.
    #[arg(long, default_value_t = 100)]
    pub(crate) poll_ms: u64,
    /// How often each side is timed; the median counts.
    #[arg(long, default_value_t = 3)]
    pub(crate) repeat: usize,
    /// Only these.
    #[arg(long, value_enum)]
    only: Vec<Part>,
    /// Where the files go, removed afterwards [default: a directory for temporary files].
    #[arg(long, value_name = "DIR")]
    pub(crate) dir: Option<PathBuf>,
    /// Where the follower's files of `wire` go, whose host is another one than the publisher's [default: as
    /// the other files].
    #[arg(long, value_name = "DIR")]
    pub(crate) host_dir: Option<PathBuf>,
    /// Runs one side of `apply` in a process of its own.
    #[arg(long, hide = true, num_args = 3)]
    child: Option<Vec<String>>,
    /// Given by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Part {
    Wire,
    Apply,
    Offer,
    Publish,
    Tensors,
}

/// Prints a measured value beside its target.
pub(crate) fn judge(what: &str, value: f64, target: f64, at_least: bool) {
    let reached = if at_least { value >= target } else { value <= target };
    let sign = if at_least { ">=" } else { "<=" };
    println!("  {:4} {what}: {value:.2} ({sign} {target})", if reached { "pass" } else { "MISS" });
}

pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn main() {
    let options = Options::parse();
    if let Some(child) = &options.child {
        return apply::child(&child[0], child[1].as_ref(), child[2].parse().expect("a version"));
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    println!("{cores} cores; medians of {} runs", options.repeat);
    let wanted = |part| options.only.is_empty() || options.only.contains(&part);
    if wanted(Part::Publish) {
        publish::run(&options);
    }
    if wanted(Part::Apply) {
        apply::run(&options);
    }
    if wanted(Part::Offer) {
        offer::run(&options);
    }
    if wanted(Part::Tensors) {
        tensors::run(&options);
    }
    if wanted(Part::Wire) {
        wire::run(&options);
    }
}
