//! Traces: consecutive optimiser steps of a real training, for measuring the codec on.

use crate::error::{Error, Result};
use crate::{demo, install, libtorch, process};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Steps at a high learning rate, then at a tenth of it: together they end on a plateau of the loss.
const FAST_STEPS: u64 = 1200;
const SLOW_STEPS: u64 = 1800;
const FAST_LR: &str = "1e-3";
const SLOW_LR: &str = "1e-4";
/// The loss is compared between the last two stretches of so many steps.
const STRETCH: usize = 150;
/// Steps after a change of the learning rate that are not kept: the moments still remember the old gradients.
const SETTLE_STEPS: u64 = 20;
/// Pairs of consecutive versions that are kept for each learning rate.
const PAIRS: u64 = 20;
/// Learning rates at which about 0.3, 1 and 5 % of the bf16 weights change in a step.
const LRS: [&str; 3] = ["3e-7", "1.4e-6", "1e-5"];
/// Text is taken from the dependencies until it is so long.
const CORPUS_BYTES: usize = 24 << 20;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Seed of the weights and of the order of the text.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Where to train: cpu (hours on two cores), or cuda:N (minutes).
    #[arg(long, default_value = "cpu")]
    device: String,
    /// Learning rates to keep steps of.
    #[arg(long, num_args = 1.., default_values_t = LRS.map(str::to_owned))]
    lr: Vec<String>,
    /// Text to train on [default: the sources of the crates that driftless depends on].
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// The driftless command to train with, built with the feature torch [default: build it].
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
    /// Where the trace goes [default: trace/seed-N in the cache].
    #[arg(long)]
    dir: Option<PathBuf>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let dir = match &options.dir {
        Some(dir) => dir.clone(),
        None => crate::cache_dir()?.join("trace").join(format!("seed-{}", options.seed)),
    };
    std::fs::create_dir_all(&dir).map_err(Error::io(&dir))?;
    let program = match &options.program {
        Some(program) => program.clone(),
        None => {
            libtorch::install()?;
            demo::build(false)?
        }
    };
    let text = match &options.text {
        Some(text) => text.clone(),
        None => corpus(&dir.join("corpus.txt"))?,
    };
    let training = Training { program, text, device: &options.device, seed: options.seed, dir };
    training.to_plateau()?;
    for lr in &options.lr {
        training.keep_steps(lr)?;
    }
    println!("trace: {}; measured by `cargo bench --bench codec`", training.dir.display());
    Ok(())
}

struct Training<'o> {
    program: PathBuf,
    text: PathBuf,
    device: &'o str,
    seed: u64,
    dir: PathBuf,
}

impl Training<'_> {
    /// Trains until the loss no longer falls. A directory that exists is finished: it is made under another
    /// name.
    fn to_plateau(&self) -> Result<()> {
        let (fast, plateau) = (self.dir.join("fast"), self.plateau());
        self.once(&fast, |dir| self.train(FAST_STEPS, FAST_LR, None, dir, &dir.join("hf")).map(drop))?;
        self.once(&plateau, |dir| {
            let losses = self.train(FAST_STEPS + SLOW_STEPS, SLOW_LR, Some(&fast), dir, &dir.join("hf"))?;
            let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len().max(1) as f64;
            let [first, second] = [2, 1].map(|back| {
                let end = losses.len().saturating_sub((back - 1) * STRETCH);
                mean(&losses[end.saturating_sub(STRETCH)..end])
            });
            println!("trace: loss {first:.4}, then {second:.4} over {STRETCH} steps each");
            Ok(())
        })
    }

    /// Goes on from the plateau at `lr` and keeps the versions `lr-<lr>/step-<n>`.
    fn keep_steps(&self, lr: &str) -> Result<()> {
        let first = FAST_STEPS + SLOW_STEPS + SETTLE_STEPS;
        self.once(&self.dir.join(format!("lr-{lr}")), |dir| {
            let series = dir.join("step-{rollout_id}");
            self.train(first + PAIRS, lr, Some(&self.plateau()), &dir.join("state"), &series)?;
            let settling = (FAST_STEPS + SLOW_STEPS + 1..first).map(|step| dir.join(format!("step-{step}")));
            for path in settling.chain([dir.join("state")]) {
                std::fs::remove_dir_all(&path).map_err(Error::io(&path))?;
            }
            Ok(())
        })
    }

    fn plateau(&self) -> PathBuf {
        self.dir.join("plateau")
    }

    /// Makes the directory `path` by `make` unless it is there.
    fn once(&self, path: &Path, make: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
        if path.exists() {
            return Ok(());
        }
        println!("trace: {}", path.display());
        let partial = path.with_extension("partial");
        install::remove(&partial)?;
        make(&partial)?;
        std::fs::rename(&partial, path).map_err(Error::io(path))
    }

    /// Trains to step `steps` and returns the losses of the steps it did.
    fn train(&self, steps: u64, lr: &str, load: Option<&Path>, save: &Path, hf: &Path) -> Result<Vec<f64>> {
        let mut command = Command::new(&self.program);
        command.args(["--json", "train", "--die-with-parent", "--loss-type", "sft_loss"]);
        command.arg("--text").arg(&self.text).args(["--device", self.device]);
        command.args(["--seed", &self.seed.to_string(), "--num-rollout", &steps.to_string(), "--lr", lr]);
        command.arg("--save").arg(save).arg("--save-hf").arg(hf);
        if let Some(load) = load {
            command.arg("--load").arg(load);
        }
        let summary = process::json(&mut command)?;
        let losses = summary["losses"].as_array().into_iter().flatten();
        Ok(losses.filter_map(serde_json::Value::as_f64).collect())
    }
}

/// The Rust sources of the dependencies, in the order of their names: a text that every machine that built
/// driftless has.
fn corpus(path: &Path) -> Result<PathBuf> {
    if path.exists() {
        return Ok(path.to_owned());
    }
    let mut cargo = Command::new("cargo");
    cargo.current_dir(crate::workspace()).args(["metadata", "--format-version", "1", "--locked"]);
    let metadata = process::json(&mut cargo)?;
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let registry = packages.filter(|package| !package["source"].is_null());
    let mut manifests: Vec<&str> = registry.filter_map(|package| package["manifest_path"].as_str()).collect();
    manifests.sort_unstable();
    let mut text = Vec::new();
    for manifest in manifests {
        append_sources(&Path::new(manifest).with_file_name("src"), &mut text)?;
        if text.len() >= CORPUS_BYTES {
            break;
        }
    }
    text.truncate(CORPUS_BYTES);
    std::fs::write(path, &text).map_err(Error::io(path))?;
    Ok(path.to_owned())
}

/// Longest source file that is taken: longer ones are generated.
const SOURCE_BYTES_MAX: usize = 128 << 10;

fn append_sources(dir: &Path, text: &mut Vec<u8>) -> Result<()> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Ok(()) };
    let mut paths: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    for path in paths {
        if path.is_dir() {
            append_sources(&path, text)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let source = std::fs::read(&path).map_err(Error::io(&path))?;
            if source.len() <= SOURCE_BYTES_MAX {
                text.extend(source);
            }
        }
    }
    Ok(())
}
