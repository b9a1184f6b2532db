//! `driftless delta`.

use crate::cli::publish::PROFILES;
use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::output::{Output, table};
use crate::cli::shared::{numbers, paths, progress};
use driftless::delta::bundle::{self, Bundle, Summary, Tensor};
use driftless::delta::{Patch, Profile};
use driftless::transport::checkpoint::write_checkpoint;
use driftless::transport::snapshot::{AuxFile, TensorInfo};
use driftless::transport::{self, Checkpoint, Snapshot};
use serde_json::json;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Tensor data per file of a checkpoint that `delta apply` writes.
const SHARD_BYTES_MAX: u64 = 5 << 30;

/// Encode, apply and look at a delta between two checkpoint directories.
///
/// A delta file holds the tensors' differences; config and tokenizer files are not part of it.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Encode what turns the checkpoint BASE into NEW.
    Encode {
        /// Checkpoint directory to start from.
        base: PathBuf,
        /// Checkpoint directory to arrive at.
        new: PathBuf,
        /// File to write.
        #[arg(short, long, value_name = "FILE")]
        output: PathBuf,
        /// As small as it gets, or quick to decode.
        #[arg(long, value_parser = numbers::one_of(&PROFILES), default_value = "wire")]
        profile: Profile,
    },
    /// Write the checkpoint that FILE makes of BASE; its auxiliary files are BASE's.
    Apply {
        /// Checkpoint directory that the delta starts from.
        base: PathBuf,
        /// Delta file, as `delta encode` writes it.
        file: PathBuf,
        /// Checkpoint directory to write.
        #[arg(short, long, value_name = "DIR")]
        output: PathBuf,
    },
    /// Check that FILE makes exactly NEW of BASE: reads and digests every byte of both checkpoints.
    Verify {
        /// Checkpoint directory that the delta starts from.
        base: PathBuf,
        /// Delta file, as `delta encode` writes it.
        file: PathBuf,
        /// Checkpoint directory that it should arrive at.
        new: PathBuf,
    },
    /// Show what a delta file holds.
    Stat {
        /// Delta file, as `delta encode` writes it.
        file: PathBuf,
    },
}

pub(crate) fn run(args: Args, output: Output) -> Result<()> {
    match args.command {
        Command::Encode { base, new, output: file, profile } => encode(&base, &new, &file, profile, output),
        Command::Apply { base, file, output: dir } => apply(&base, &file, &dir, output),
        Command::Verify { base, file, new } => verify(&base, &file, &new, output),
        Command::Stat { file } => stat(&file, output),
    }
}

fn encode(base: &Path, new: &Path, file: &Path, profile: Profile, output: Output) -> Result<()> {
    paths::check_output("--output", file)?;
    paths::check_outside("--output", file, "BASE", base)?;
    paths::check_outside("--output", file, "NEW", new)?;
    let (base, new) = (paths::checkpoint("BASE", base)?, paths::checkpoint("NEW", new)?);
    let begin = Instant::now();
    let mut bytes = Vec::new();
    let summary = progress::during("encode", "", |_| {
        bundle::encode(&tensors(&base), &tensors(&new), profile, &mut bytes)
    })?;
    let elapsed_ms = begin.elapsed().as_secs_f64() * 1e3;
    // Written whole or not at all: a torn delta would only be found by whoever applies it.
    let partial = file.with_extension("partial");
    let write = || std::fs::write(&partial, &bytes).and_then(|()| std::fs::rename(&partial, file));
    write().map_err(|source| Error::Io { path: file.to_path_buf(), source })?;
    let full_bytes = paths::tensor_bytes(&base)?;
    let value = json!({
        "file": file.display().to_string(), "bytes": bytes.len(), "full_bytes": full_bytes, "changed": summary.changed,
        "elements": summary.elements, "changed_tensors": summary.changed_tensors, "tensors": summary.tensors,
        "encode_ms": elapsed_ms,
    });
    output.print(&value, |_| {
        let ratio = full_bytes as f64 / bytes.len().max(1) as f64;
        format!(
            "{}\n{ratio:.1}x smaller than the {full_bytes} bytes in full, {elapsed_ms:.0} ms",
            describe(&summary, bytes.len())
        )
    })
}

fn apply(base: &Path, file: &Path, dir: &Path, output: Output) -> Result<()> {
    paths::check_place("--output", dir)?;
    let bytes = read(file)?;
    let base = paths::checkpoint("BASE", base)?;
    let mut patches = BTreeMap::new();
    let changed_tensors = progress::during("apply", "tensors decoded", |work| -> Result<usize> {
        Bundle::read(&bytes)?.decode(&tensors(&base), |index, patch| -> Result<()> {
            work.add(1);
            patches.insert(index, patch.clone());
            Ok(())
        })?;
        let changed_tensors = patches.len();
        write_checkpoint(dir, &Patched { base, patches }, SHARD_BYTES_MAX)?;
        Ok(changed_tensors)
    })?;
    let value = json!({"dir": dir.display().to_string(), "changed_tensors": changed_tensors});
    output.print(&value, |_| format!("{}: {changed_tensors} tensors changed", dir.display()))
}

fn verify(base: &Path, file: &Path, new: &Path, output: Output) -> Result<()> {
    let bytes = read(file)?;
    let bundle = Bundle::read(&bytes)?;
    let (base, new) = (paths::checkpoint("BASE", base)?, paths::checkpoint("NEW", new)?);
    progress::during("verify", "", |_| bundle.verify(&tensors(&base), &tensors(&new)))?;
    let Summary { tensors, elements, .. } = bundle.summary();
    let value = json!({"file": file.display().to_string(), "tensors": tensors, "elements": elements});
    output
        .print(&value, |_| format!("{}: exact in all {tensors} tensors, {elements} elements", file.display()))
}

fn stat(file: &Path, output: Output) -> Result<()> {
    let bytes = read(file)?;
    let summary = Bundle::read(&bytes)?.summary();
    let value = json!({
        "bytes": bytes.len(), "changed": summary.changed, "elements": summary.elements,
        "changed_tensors": summary.changed_tensors, "tensors": summary.tensors,
    });
    output.print(&value, |_| describe(&summary, bytes.len()))
}

fn describe(summary: &Summary, bytes: usize) -> String {
    let row = vec![
        bytes.to_string(),
        format!("{} of {}", summary.changed_tensors, summary.tensors),
        format!("{} of {}", summary.changed, summary.elements),
        format!("{:.4} %", 100.0 * summary.changed as f64 / summary.elements.max(1) as f64),
        format!("{:.2}", 8.0 * bytes as f64 / summary.changed.max(1) as f64),
    ];
    table(&["bytes", "tensors", "elements changed", "density", "bits/change"], [row])
}

/// A delta file; of any other no more than the first bytes, which [`Bundle::read`] refuses.
fn read(file: &Path) -> Result<Vec<u8>> {
    let mut opened = paths::open("FILE", file)?;
    let mut bytes = Vec::new();
    let mut read = opened.by_ref().take(bundle::MAGIC.len() as u64).read_to_end(&mut bytes);
    if bytes == bundle::MAGIC {
        read = opened.read_to_end(&mut bytes);
    }
    read.map_err(|source| Error::Io { path: file.to_path_buf(), source })?;
    Ok(bytes)
}

fn tensors(checkpoint: &Checkpoint) -> Vec<Tensor<'_>> {
    let infos = checkpoint.tensors().iter().enumerate();
    infos
        .map(|(index, info)| Tensor {
            name: &info.name,
            dtype: info.dtype.name(),
            shape: &info.shape,
            bytes: checkpoint.tensor(index).unwrap_or_default(),
        })
        .collect()
}

/// A checkpoint with patches over it, patched tensor by tensor as it is read.
struct Patched {
    base: Checkpoint,
    patches: BTreeMap<usize, Patch>,
}

impl Snapshot for Patched {
    fn tensors(&self) -> &[TensorInfo] {
        self.base.tensors()
    }

    fn bytes(&self, index: usize) -> transport::Result<Cow<'_, [u8]>> {
        let mut bytes = self.base.bytes(index)?;
        if let Some(patch) = self.patches.get(&index) {
            let tensor = || self.tensors().get(index).map(|info| info.name.clone()).unwrap_or_default();
            patch
                .apply_to(bytes.to_mut())
                .map_err(|source| transport::Error::Codec { tensor: tensor(), source })?;
        }
        Ok(bytes)
    }

    fn files(&self) -> &[AuxFile] {
        self.base.files()
    }
}
