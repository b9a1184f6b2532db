//! A policy as a version to be published.

use std::borrow::Cow;
use std::path::Path;

use driftless_transport::snapshot::{AuxFile, TensorInfo};
use driftless_transport::{self as transport, Checkpoint, Dtype, Snapshot};
use tch::Kind;

use crate::critic::Critic;
use crate::error::Result;
use crate::models::Parameter;
use crate::policy::Policy;
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
        let kind = trained.optimizer.rounded();
        // They are rounded to it already.
        let bytes = trained.model.parameters().iter().map(|weight| bytes_of(&weight.tensor.f_to_kind(kind)?));
        Ok(PolicySnapshot { tensors: infos(trained), bytes: bytes.collect::<Result<_>>()?, files })
    }
}

/// Names, shapes and the published dtype of a model's weights.
pub(crate) fn infos(trained: &Trained) -> Vec<TensorInfo> {
    let dtype = if trained.optimizer.rounded() == Kind::BFloat16 { Dtype::Bf16 } else { Dtype::F32 };
    let info = |weight: &Parameter| {
        let shape = weight.tensor.size().into_iter().map(i64::unsigned_abs).collect();
        TensorInfo { name: weight.name.clone(), dtype, shape }
    };
    trained.model.parameters().iter().map(info).collect()
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
