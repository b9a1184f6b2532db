//! A policy as a version to be published.

use std::borrow::Cow;
use std::path::Path;

use driftless_transport::snapshot::{AuxFile, TensorInfo};
use driftless_transport::{self as transport, Checkpoint, Dtype, Snapshot};
use tch::{Kind, Tensor};

use crate::critic::Critic;
use crate::error::Result;
use crate::models::{Model, Parameter};
use crate::policy::Policy;
use crate::quantize::{check_shape, quantized_files, quantized_parts};
use crate::torch::bytes_of;
use crate::trained::Trained;

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
        PolicySnapshot::with_files(policy, Checkpoint::open(hf_checkpoint)?.files().to_vec())
    }

    /// The same with the layers' matrices in fp8, as [`quantize`](crate::quantize::quantize) has them, and a `config.json` that
    /// says so.
    ///
    /// # Errors
    /// As [`PolicySnapshot::new`], and [`crate::Error::Config`] for a model that engines do not load in fp8.
    pub fn fp8(policy: &Policy, hf_checkpoint: &Path) -> Result<PolicySnapshot> {
        PolicySnapshot::fp8_of(policy.model(), policy.optimizer().rounded(), hf_checkpoint)
    }

    /// The same of a model, whose other weights are published in `kind`.
    pub(crate) fn fp8_of(model: &Model, kind: Kind, hf_checkpoint: &Path) -> Result<PolicySnapshot> {
        check_shape(model.config())?;
        let files = quantized_files(Checkpoint::open(hf_checkpoint)?.files())?;
        PolicySnapshot::collect(model, kind, files, quantized_parts)
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
        let whole = |name: &str, tensor| Ok(vec![(name.to_owned(), tensor)]);
        PolicySnapshot::collect(&trained.model, trained.optimizer.rounded(), files, whole)
    }

    /// The weights in `kind`, each as the tensors that `parts` makes of it, in the order of their names.
    fn collect(
        model: &Model,
        kind: Kind,
        files: Vec<AuxFile>,
        parts: impl Fn(&str, Tensor) -> Result<Vec<(String, Tensor)>>,
    ) -> Result<PolicySnapshot> {
        let (mut tensors, mut bytes) = (Vec::new(), Vec::new());
        for parameter in model.parameters() {
            // They are rounded to it already.
            for (name, tensor) in parts(&parameter.name, parameter.tensor.f_to_kind(kind)?)? {
                tensors.push(TensorInfo { name, dtype: dtype_of(tensor.f_kind()?), shape: shape(&tensor) });
                bytes.push(bytes_of(&tensor)?);
            }
        }
        Ok(PolicySnapshot { tensors, bytes, files })
    }
}

/// Names, shapes and the published dtype of a model's weights.
pub(crate) fn infos(trained: &Trained) -> Vec<TensorInfo> {
    let dtype = dtype_of(trained.optimizer.rounded());
    let info =
        |weight: &Parameter| TensorInfo { name: weight.name.clone(), dtype, shape: shape(&weight.tensor) };
    trained.model.parameters().iter().map(info).collect()
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
