//! How small and how fast is the codec, next to its peers and to the bound?
//!
//! `cargo bench --bench codec [-- --help]`. Sizes are exact; speeds are ratios of two things timed in the
//! same run, on one core unless said. Ceilings are the information bound and a bare compare scan.

#![allow(clippy::expect_used, reason = "a bench ends where its own data do not decode")]

mod cores;
mod plot;
mod sizes;
mod speeds;

use clap::Parser;
use driftless_compare::data::{Shape, checkpoints, synthetic, trace};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Sizes and speeds of the codec, its peers and the bound.
#[derive(Parser)]
struct Options {
    /// Two checkpoint directories to measure instead.
    #[arg(value_names = ["BASE", "NEW"], num_args = 0..=2)]
    checkpoints: Vec<PathBuf>,
    /// Traces that `cargo xtask trace` made [default: all in the cache].
    #[arg(long, value_name = "DIR")]
    trace: Vec<PathBuf>,
    /// Pairs of consecutive versions measured for each learning rate of a trace.
    #[arg(long, default_value_t = 5)]
    pairs: usize,
    /// Draw ratio against density there, as SVG.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Only sizes.
    #[arg(long)]
    no_speed: bool,
    /// Only speeds.
    #[arg(long, conflicts_with = "no_speed")]
    no_size: bool,
    /// MiB of the tensor that speeds are measured on.
    #[arg(long, default_value_t = 1024)]
    mib: usize,
    /// Only what two cores are worth against one.
    #[arg(long, conflicts_with_all = ["no_speed", "no_size", "sweep"])]
    cores: bool,
    /// Also tensors of 64 MiB to 4 GiB (needs 20 GiB of memory).
    #[arg(long)]
    sweep: bool,
    /// Given by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

/// Counts targets that were reached and missed.
#[derive(Default)]
struct Verdicts {
    passed: usize,
    missed: usize,
}

impl Verdicts {
    fn of(&mut self, ok: bool) -> &'static str {
        if ok {
            self.passed += 1;
            "pass"
        } else {
            self.missed += 1;
            "MISS"
        }
    }
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(verdicts) => {
            println!("\ntargets: {} reached, {} missed", verdicts.passed, verdicts.missed);
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<Verdicts, String> {
    let mut verdicts = Verdicts::default();
    if options.cores {
        speeds::cores(options.mib, &mut verdicts);
        return Ok(verdicts);
    }
    if !options.no_size && !sizes_of(options, &mut verdicts)? {
        return Ok(verdicts);
    }
    if !options.no_speed {
        speeds::print(options.mib, &mut verdicts);
    }
    if options.sweep {
        speeds::sweep(&mut verdicts);
    }
    Ok(verdicts)
}

/// Prints and draws sizes; says whether speeds are wanted, too.
fn sizes_of(options: &Options, verdicts: &mut Verdicts) -> Result<bool, String> {
    println!(
        "sizes: ratio to dense bf16, whole files with names and digests for ours, bare payloads for the peers"
    );
    println!("{}", sizes::HEADER);
    if let [base, new] = options.checkpoints.as_slice() {
        let sizes = sizes::Sizes::of(&checkpoints(base, new)?);
        sizes.print("checkpoints");
        sizes.judge(verdicts);
        return Ok(false);
    }
    let mut points = Vec::new();
    for dir in traces(options)? {
        let seed = dir.file_name().and_then(|name| name.to_str()).unwrap_or("trace");
        for (lr, steps) in trace(&dir)? {
            let sizes = sizes::of_trace(&steps, options.pairs)?;
            sizes.print(&format!("trace, {seed}, lr {lr}"));
            sizes.judge(verdicts);
            points.push(sizes);
        }
    }
    let small = Shape { tensors: 100, elements: 200_000 };
    let mut curve = Vec::new();
    for density in [0.0002, 0.0005, 0.001, 0.003, 0.01, 0.03, 0.05, 0.15, 0.5] {
        let sizes = sizes::Sizes::of(&synthetic(small, density, 1));
        sizes.print("synthetic, 100 tensors");
        curve.push(sizes);
    }
    if let Some(path) = &options.plot {
        plot::draw(path, &curve, &points).map_err(|error| format!("{}: {error}", path.display()))?;
        println!("drawn: {}", path.display());
    }
    Ok(true)
}

/// The traces asked for, else those in the cache.
fn traces(options: &Options) -> Result<Vec<PathBuf>, String> {
    if !options.trace.is_empty() {
        return Ok(options.trace.clone());
    }
    let found = cached().and_then(|dir| std::fs::read_dir(dir).ok()).into_iter().flatten();
    let mut dirs: Vec<_> = found.filter_map(|entry| Some(entry.ok()?.path())).collect();
    dirs.sort();
    if dirs.is_empty() {
        println!("no trace of a real training: `cargo xtask trace` makes one");
    }
    Ok(dirs)
}

/// Where `cargo xtask trace` leaves them.
fn cached() -> Option<PathBuf> {
    let of = |name: &str, rest: &str| Some(Path::new(&std::env::var_os(name)?).join(rest));
    of("DRIFTLESS_CACHE", "trace")
        .or_else(|| of("XDG_CACHE_HOME", "driftless/trace"))
        .or_else(|| of("HOME", ".cache/driftless/trace"))
}
