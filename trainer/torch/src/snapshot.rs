//! A policy as a version to be published.

use std::path::Path;

use driftless_transport::checkpoint::write_checkpoint;
use driftless_transport::snapshot::{AuxFile, TensorInfo};
use driftless_transport::{Checkpoint, Snapshot as _, Tensors};
use tch::{Device, Kind, Tensor};

use crate::config::Config;
use crate::critic::Critic;
use crate::error::Result;
use crate::libtorch::{bytes_of, info_of};
use crate::models::{Model, Parameter};
use crate::policy::Policy;
use crate::quantize::{check_shape, quantized_files, quantized_parts};
use crate::trained::Trained;

/// Tensor data per file of a checkpoint that is written for others.
pub(crate) const SHARD_BYTES_MAX: u64 = 5 << 30;

/// Copies the policy's weights to host memory, rounded to the dtype that is published: what a publisher takes, and what
/// [`driftless_transport::checkpoint::write_checkpoint`] makes a Hugging Face checkpoint of. `config.json`, tokenizer
/// and whatever else belongs to the model are those of the checkpoint directory `hf_checkpoint`. In `fp8` the layers'
/// matrices are as [`quantize`](crate::quantize::quantize) has them, and a `config.json` says so.
///
/// # Errors
/// [`crate::Error::Transport`] if that directory cannot be read, [`crate::Error::Torch`] if libtorch cannot copy,
/// [`crate::Error::Config`] for a model that engines do not load in fp8.
pub fn policy_snapshot(policy: &Policy, hf_checkpoint: &Path, fp8: bool) -> Result<Tensors<'static>> {
    let files = files(policy.model(), hf_checkpoint, fp8)?;
    collect(published(policy.model(), policy.optimizer().rounded(), fp8), &files)
}

/// Copies a critic's weights, as those of a sequence classifier with one label; the other files are those of
/// `hf_checkpoint`.
pub(crate) fn of_critic(critic: &Critic, hf_checkpoint: &Path) -> Result<Tensors<'static>> {
    of_trained(&critic.trained, &critic.files(Checkpoint::open(hf_checkpoint)?.files())?)
}

/// Copies weights beside files that are not on disk yet.
pub(crate) fn of_trained(trained: &Trained, files: &[AuxFile]) -> Result<Tensors<'static>> {
    collect(published(&trained.model, trained.optimizer.rounded(), false), files)
}

pub(crate) fn collect(
    published: impl Iterator<Item = Result<(TensorInfo, Tensor)>>,
    files: &[AuxFile],
) -> Result<Tensors<'static>> {
    let mut copied = Tensors::new();
    for part in published {
        let (TensorInfo { name, dtype, shape }, tensor) = part?;
        copied = copied.tensor(name, dtype, shape, bytes_of(&tensor)?)?;
    }
    let mut files = files.iter();
    Ok(files.try_fold(copied, |copied, file| copied.file(file.name(), file.bytes()))?)
}

/// What is published of a model whose weights are rounded to `kind`, one after another, in the order of their names:
/// each weight, or in fp8 ([`quantized_parts`]) what a matrix of a layer is made of.
pub(crate) fn published(
    model: &Model,
    kind: Kind,
    fp8: bool,
) -> impl Iterator<Item = Result<(TensorInfo, Tensor)>> {
    let parts = move |weight: &Parameter| -> Result<Vec<_>> {
        let (name, tensor) = (&weight.name, weight.tensor.f_to_kind(kind)?);
        let parts = if fp8 { quantized_parts(name, tensor)? } else { vec![(name.clone(), tensor)] };
        let with_info = |(name, tensor): (_, Tensor)| {
            let info = info_of(name, &tensor)?;
            Ok((info, tensor))
        };
        parts.into_iter().map(with_info).collect()
    };
    model.parameters().iter().flat_map(move |weight| match parts(weight) {
        Ok(parts) => parts.into_iter().map(Ok).collect(),
        Err(error) => vec![Err(error)],
    })
}

/// The files of a version besides its weights: those of the checkpoint directory `hf_checkpoint`, in fp8 with a
/// `config.json` that says so.
pub(crate) fn files(model: &Model, hf_checkpoint: &Path, fp8: bool) -> Result<Vec<AuxFile>> {
    if fp8 {
        check_shape(model.config())?;
    }
    let checkpoint = Checkpoint::open(hf_checkpoint)?;
    if fp8 { quantized_files(checkpoint.files()) } else { Ok(checkpoint.files().to_vec()) }
}

/// Writes the checkpoint `from` in fp8 to the directory `to` (`driftless quantize`). Engines start from it, and it is
/// what a run in fp8 that begins with `from` has at step 0, bit for bit.
///
/// # Errors
/// As [`crate::Config::open`] and [`policy_snapshot`], also for a checkpoint that is quantised already;
/// [`crate::Error::Config`] for a model that engines do not load in fp8; [`crate::Error::Transport`] if `to` cannot be written.
pub fn quantize_checkpoint(from: &Path, to: &Path) -> Result<()> {
    let kind = Config::published_kind(from)?;
    let model = Model::open(from, kind, Device::Cpu)?;
    let quantized = collect(published(&model, kind, true), &files(&model, from, true)?)?;
    Ok(write_checkpoint(to, &quantized, SHARD_BYTES_MAX)?)
}
