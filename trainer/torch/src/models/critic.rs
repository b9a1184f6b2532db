//! A model that says of each token what it expects from there on: any family's layers under a head of one value.

use std::path::Path;

use driftless_transport::Checkpoint;
use tch::{Device, Kind, Tensor};

use super::model::Model;
use super::weights::{check_depth, locate, read};
use crate::config::Config;
use crate::error::Result;

/// The head's weight `[1, hidden]`, as Hugging Face's models for sequence classification with one label name it.
pub(super) const VALUE_HEAD: &str = "score.weight";

impl Model {
    /// The layers of a checkpoint directory under a value head, whose logits are values. A checkpoint of
    /// `…ForSequenceClassification` with one label, such as a reward model, has a head; else its weights are 0.
    ///
    /// # Errors
    /// As for [`Model::open`].
    pub fn open_critic(checkpoint_dir: &Path, kind: Kind, device: Device) -> Result<Model> {
        let config = Config::open_critic(checkpoint_dir)?;
        let checkpoint = Checkpoint::open(checkpoint_dir)?;
        check_depth(&config, &checkpoint)?;
        let mut tensors = config.tensors();
        tensors.retain(|(name, _)| name != "lm_head.weight");
        tensors.push((VALUE_HEAD.to_owned(), vec![1, config.hidden_size]));
        let fresh = checkpoint.position(VALUE_HEAD).is_none();
        let stored = tensors.len() - usize::from(fresh);
        let places = locate(&tensors[..stored], &["lm_head.weight"], &checkpoint)?;
        let zeros = Tensor::f_zeros([1, config.hidden_size], (Kind::Float, Device::Cpu))?;
        let weights = places.iter().map(|&index| read(&checkpoint, index)).chain(fresh.then_some(Ok(zeros)));
        Model::build(config, &tensors, kind, device, weights)
    }
}
