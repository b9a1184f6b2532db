//! A policy as a version to be published.

use std::borrow::Cow;
use std::path::Path;

use driftless_transport::checkpoint::write_checkpoint;
use driftless_transport::snapshot::{AuxFile, TensorInfo};
use driftless_transport::{self as transport, Checkpoint, Dtype, Snapshot};
use tch::{Device, Kind, Tensor};

use crate::config::Config;
use crate::critic::Critic;
use crate::error::Result;
use crate::libtorch::bytes_of;
use crate::models::{Model, Parameter};
use crate::policy::Policy;
use crate::quantize::{check_shape, quantized_files, quantized_parts};
use crate::trained::Trained;

/// Tensor data per file of a checkpoint that is written for others.
pub(crate) const SHARD_BYTES_MAX: u64 = 5 << 30;

/// The weights of a [`Policy`] at one moment, rounded to the dtype that is published, with the auxiliary
/// files of the model: what a publisher takes, and what [`driftless_transport::checkpoint::write_checkpoint`] makes a
/// Hugging Face checkpoint of.
///
/// Holds a copy in host memory: the policy may go on training while this is published.
#[derive(Debug)]
pub struct PolicySnapshot {
    tensors: Vec<TensorInfo>,
    bytes: Vec<Vec<u8>>,
    files: Vec<AuxFile>,
}

impl PolicySnapshot {
    /// Copies the policy's weights; `config.json`, tokenizer and whatever else belongs to the model are those
    /// of the checkpoint directory `hf_checkpoint`.
    ///
    /// # Errors
    /// [`crate::Error::Transport`] if that directory cannot be read, [`crate::Error::Torch`] if libtorch
    /// cannot copy.
    pub fn new(policy: &Policy, hf_checkpoint: &Path) -> Result<PolicySnapshot> {
        PolicySnapshot::of_policy(policy, hf_checkpoint, false)
    }

    /// The same, or in `fp8` with the layers' matrices as [`quantize`](crate::quantize::quantize) has them and a
    /// `config.json` that says so.
    ///
    /// # Errors
    /// As [`PolicySnapshot::new`], and [`crate::Error::Config`] for a model that engines do not load in fp8.
    pub(crate) fn of_policy(policy: &Policy, hf_checkpoint: &Path, fp8: bool) -> Result<PolicySnapshot> {
        let files = files(policy.model(), hf_checkpoint, fp8)?;
        PolicySnapshot::collect(published(policy.model(), policy.optimizer().rounded(), fp8), files)
    }

    /// A model in fp8, whose other weights are published in `kind`.
    pub(crate) fn fp8_of(model: &Model, kind: Kind, hf_checkpoint: &Path) -> Result<PolicySnapshot> {
        PolicySnapshot::collect(published(model, kind, true), files(model, hf_checkpoint, true)?)
    }

    /// Copies a critic's weights, as those of a sequence classifier with one label; the other files are those of
    /// `hf_checkpoint`.
    pub(crate) fn of_critic(critic: &Critic, hf_checkpoint: &Path) -> Result<PolicySnapshot> {
        let files = critic.files(Checkpoint::open(hf_checkpoint)?.files())?;
        PolicySnapshot::of(&critic.trained, files)
    }

    /// The same with files that are not on disk yet, sorted by name.
    pub(crate) fn with_files(policy: &Policy, files: Vec<AuxFile>) -> Result<PolicySnapshot> {
        PolicySnapshot::of(&policy.trained, files)
    }

    fn of(trained: &Trained, files: Vec<AuxFile>) -> Result<PolicySnapshot> {
        PolicySnapshot::collect(published(&trained.model, trained.optimizer.rounded(), false), files)
    }

    pub(crate) fn collect(
        published: impl Iterator<Item = Result<(TensorInfo, Tensor)>>,
        files: Vec<AuxFile>,
    ) -> Result<PolicySnapshot> {
        let (mut tensors, mut bytes) = (Vec::new(), Vec::new());
        for part in published {
            let (info, tensor) = part?;
            tensors.push(info);
            bytes.push(bytes_of(&tensor)?);
        }
        Ok(PolicySnapshot { tensors, bytes, files })
    }
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
            let info = TensorInfo { name, dtype: dtype_of(tensor.f_kind()?), shape: shape(&tensor) };
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

fn shape(tensor: &Tensor) -> Vec<u64> {
    tensor.size().into_iter().map(i64::unsigned_abs).collect()
}

/// The dtype of what is published: of a kind that it is rounded to, or of a part of a matrix in fp8.
fn dtype_of(kind: Kind) -> Dtype {
    match kind {
        Kind::BFloat16 => Dtype::Bf16,
        Kind::Float8e4m3fn => Dtype::F8E4M3,
        _ => Dtype::F32,
    }
}

/// Writes the checkpoint `from` in fp8 to the directory `to` (`driftless quantize`). Engines start from it, and it is
/// what a run in fp8 that begins with `from` has at step 0, bit for bit.
///
/// # Errors
/// As [`crate::Config::open`] and [`PolicySnapshot::new`], also for a checkpoint that is quantised already;
/// [`crate::Error::Config`] for a model that engines do not load in fp8; [`crate::Error::Transport`] if `to` cannot be written.
pub fn quantize_checkpoint(from: &Path, to: &Path) -> Result<()> {
    let kind = Config::published_kind(from)?;
    let model = Model::open(from, kind, Device::Cpu)?;
    Ok(write_checkpoint(to, &PolicySnapshot::fp8_of(&model, kind, from)?, SHARD_BYTES_MAX)?)
}

impl Snapshot for PolicySnapshot {
    fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn bytes(&self, index: usize) -> transport::Result<Cow<'_, [u8]>> {
        Ok(Cow::Borrowed(&self.bytes[index]))
    }

    fn files(&self) -> &[AuxFile] {
        &self.files
    }
}
