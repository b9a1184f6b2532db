//! The critic of PPO: what it expects from each token on, and one step towards what came.

use driftless_trainer::metrics::StepStats;
use driftless_trainer::options::CriticOptions;
use driftless_transport::snapshot::AuxFile;
use serde_json::json;
use tch::Tensor;

use crate::batch::Batch;
use crate::config::edit_config;
use crate::error::{Result, input};
use crate::loss::value_loss;
use crate::trained::{Trained, hidden};

/// A model with a value head, and the optimizer that moves it. It rests in host memory while it is not asked.
#[derive(Debug)]
pub struct Critic {
    pub(crate) trained: Trained,
}

impl Critic {
    /// Of a model of [`Model::open_critic`](crate::Model::open_critic).
    pub(crate) fn of(mut trained: Trained) -> Result<Critic> {
        trained.offload()?;
        Ok(Critic { trained })
    }

    /// Has the critic on its device for as long as `work` takes.
    pub(crate) fn awake<T>(&mut self, work: impl FnOnce(&mut Critic) -> Result<T>) -> Result<T> {
        self.trained.onload()?;
        let done = work(self);
        self.trained.offload()?;
        done
    }

    /// Values `[M]` f32 of a batch's trained tokens, without gradients: what the critic expects before each.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] if libtorch refuses.
    pub fn values(&self, batch: &Batch) -> Result<Tensor> {
        match batch.trains() {
            true => batch.pass(|| tch::no_grad(|| self.head(&hidden(&self.trained.model, batch)?))),
            false => Ok(batch.weights.shallow_clone()),
        }
    }

    /// One step over micro-batches that together are the batch, towards their returns.
    ///
    /// # Errors
    /// As for [`crate::Policy::policy_step`]; [`crate::Error::Input`] if a batch has no values or returns.
    pub fn step(&mut self, batches: &[Batch], options: &CriticOptions, lr: f64) -> Result<StepStats> {
        let mut stats = StepStats { critic_lr: lr, ..StepStats::default() };
        self.trained.optimizer.gradients.clear()?;
        for batch in batches.iter().filter(|batch| batch.trains()) {
            batch.pass(|| self.pass(batch, options, &mut stats))?;
        }
        stats.critic_grad_norm = self.trained.apply(stats.value_loss, lr)?;
        Ok(stats)
    }

    /// Adds the gradients of a micro-batch, and its figures.
    fn pass(&mut self, batch: &Batch, options: &CriticOptions, stats: &mut StepStats) -> Result<()> {
        let (Some(old), Some(returns)) = (&batch.values, &batch.returns) else {
            return Err(input("batch of a critic", "values and returns", "none"));
        };
        let (pass, hidden) = self.trained.forward(batch)?;
        let values = tch::no_grad(|| self.head(&hidden))?.f_set_requires_grad(true)?;
        let (loss, clipped) = value_loss(&values, old, returns, &batch.weights, options.value_clip)?;
        stats.value_loss += f64::try_from(&loss)?;
        stats.value_clipfrac += f64::try_from(&clipped)?;
        let gradients = Tensor::f_run_backward(&[loss], &[&values], false, false)?;
        let of_logits = gradients[0].f_unsqueeze(-1)?.f_to_kind(hidden.f_kind()?)?;
        let Trained { model, optimizer, .. } = &mut self.trained;
        let gradient = model.head().backward(&of_logits, &hidden, &mut optimizer.gradients)?;
        self.trained.backward(pass, batch, &gradient)
    }

    fn head(&self, hidden: &Tensor) -> Result<Tensor> {
        Ok(self.trained.model.logits(hidden)?.f_squeeze_dim(-1)?)
    }

    /// The files of the policy's checkpoint as the critic's own: those of a sequence classifier with one label.
    pub(crate) fn files(&self, files: &[AuxFile]) -> Result<Vec<AuxFile>> {
        edit_config(files, |config| {
            config["architectures"] = json!([self.trained.model.config().family.classifier()]);
            config["id2label"] = json!({ "0": "value" });
            config["label2id"] = json!({ "value": 0 });
        })
    }
}
