//! What `driftless train` learns: prompts, rewards and held-out prompts, from flags with slime's names.

use super::environment::EnvironmentArgs;
use super::evaluation::{EvalArgs, HeldOut, no_reward, warn_of_refused};
use super::hooks::{HookArgs, missing};
use crate::cli::data::{self, source};
use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::numbers;
use driftless::bridge::SamplingParams;
#[cfg(feature = "torch")]
use driftless::trainer::LossMask;
#[cfg(feature = "torch")]
use driftless::trainer::data::Order;
use driftless::trainer::data::{Dataset, RowReader, Source};
use driftless::trainer::hook::{Hook, Rm};
use driftless::trainer::reward::Reward;
use driftless::trainer::rollout::EvalSet;
use driftless::trainer::tasks::problems::Kind;
#[cfg(feature = "torch")]
use driftless::trainer::tasks::tiny;
use driftless::trainer::tasks::{DataSource, Generated, Prompts, Sourced, Task};
use serde::Serializer;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

#[derive(clap::Args, serde::Serialize)]
#[command(next_help_heading = "Task")]
pub(crate) struct TaskArgs {
    /// Prompts to learn on: JSONL or Parquet. `FILE@[a:b]` takes rows a to b - 1, counted from 0. May be
    /// given several times.
    #[arg(long, value_name = "FILE", value_parser = source, conflicts_with = "task")]
    #[serde(serialize_with = "written")]
    prompt_data: Vec<Source>,
    /// Take the prompts of each epoch in an order of its own.
    #[arg(long)]
    rollout_shuffle: bool,
    /// Seed of that order.
    #[arg(long, default_value_t = 42)]
    rollout_seed: u64,
    /// Times that the prompts are gone through, where --num-rollout does not say how many steps there are
    /// [default: 1].
    #[arg(long, value_name = "N", value_parser = numbers::count::<u64>())]
    #[serde(skip)]
    num_epoch: Option<u64>,
    /// Let prompts rest in the next epoch whose answers had a mean reward of at least R, one epoch longer each time in a row
    /// [default: all come in each epoch].
    #[arg(long, value_name = "R", requires = "prompt_data", allow_negative_numbers = true, value_parser = numbers::reward)]
    easy_threshold: Option<f64>,
    #[command(flatten)]
    #[serde(flatten)]
    eval: EvalArgs,
    #[command(flatten)]
    #[serde(flatten)]
    hooks: HookArgs,
    #[command(flatten)]
    #[serde(flatten)]
    environment: EnvironmentArgs,
}

/// Files and their rows.
fn written<S: Serializer>(sources: &[Source], serializer: S) -> std::result::Result<S::Ok, S::Error> {
    serializer.collect_str(&sources.iter().map(Source::to_string).collect::<Vec<_>>().join(" "))
}

/// A task with what depends on it.
pub(crate) struct Chosen {
    pub(crate) task: Task,
    pub(crate) context_len: Option<usize>,
    /// Problems of the task that are only for measuring, and how many.
    held_out: Option<HeldOut>,
    /// Prompts of an epoch, and epochs, where the task has an end.
    epochs: Option<(u64, u64)>,
    /// Whether the reward is one that was asked for, and not the task's own.
    rewarded: bool,
}

impl Chosen {
    /// Steps of a run that is not told how many it has.
    pub(crate) fn num_rollout(&self, rollout_batch_size: u64) -> Result<u64> {
        let Some((prompts, epochs)) = self.epochs else {
            return Err(missing("steps of the run", "--num-rollout N"));
        };
        match prompts.saturating_mul(epochs) / rollout_batch_size {
            0 => {
                let expected = format!("at most the {prompts} prompts of {epochs} epochs, or --num-rollout");
                Err(Error::usage("--rollout-batch-size", expected, rollout_batch_size))
            }
            steps => Ok(steps),
        }
    }
}

impl TaskArgs {
    /// What prompts and rewards depend on, by name. Commands and URLs of hooks may hold secrets: it has digests of
    /// them.
    pub(crate) fn settings(&self) -> BTreeMap<String, String> {
        let Ok(Value::Object(settings)) = serde_json::to_value(self) else { return BTreeMap::new() };
        let text = |value: Value| match value {
            Value::String(text) => text,
            Value::Null => "none".to_owned(),
            other => other.to_string(),
        };
        settings.into_iter().map(|(name, value)| (name, text(value))).collect()
    }

    /// The mean reward from which on a prompt is easy.
    pub(crate) fn easy_threshold(&self) -> Option<f64> {
        self.easy_threshold
    }

    /// Times that an answer is made again.
    pub(crate) fn hook_retries(&self) -> u64 {
        self.eval.rewards.hook_retries
    }

    /// Reads the prompts, with the tokenizer of `checkpoint`. `seed` draws the problems of a task.
    pub(crate) fn choose(&self, checkpoint: &Path, seed: u64) -> Result<Chosen> {
        if let Some(command) = self.environment.command() {
            return self.of_environment(&command, checkpoint);
        }
        self.eval.rewards.check_clients(&self.eval.data)?;
        if let Some(kind) = self.eval.kind() {
            return self.made_up(kind, checkpoint, seed);
        }
        let reward = self.eval.reward()?.or_else(|| self.eval.rewards.given()).ok_or_else(no_reward);
        match self.hooks.data_source(&self.eval.rewards)? {
            Some(source) => self.sourced(source, checkpoint, reward?),
            None if self.prompt_data.is_empty() => {
                let expected =
                    "--prompt-data FILE, --data-source-command HOOK, --environment KIND:NAME or --task NAME";
                Err(missing("what to learn", expected))
            }
            None => self.of_files(checkpoint, reward?),
        }
    }

    /// What is learned from these prompts and rewards, with the hooks that were named.
    fn task(&self, source: Arc<dyn DataSource>, checkpoint: &Path, reward: Arc<dyn Reward>) -> Result<Task> {
        let filters = self.hooks.filters(&self.eval.rewards)?;
        Ok(Task { filters, ..self.eval.rewards.task(source, checkpoint, reward, &self.eval.data)? })
    }

    /// Prompts of files.
    fn of_files(&self, checkpoint: &Path, reward: Arc<dyn Reward>) -> Result<Chosen> {
        let options = data::options(&self.eval.data, "--prompt-data", &self.prompt_data)?;
        if options.loss_mask.is_some() {
            let expected = "--loss-type sft_loss: RL learns what engines sample";
            return Err(Error::usage("--loss-mask-type", expected, "policy_loss"));
        }
        let data = Dataset::load(&options, checkpoint)?;
        warn_of_refused(&data);
        let prompts = Prompts::new(data, self.rollout_shuffle, self.rollout_seed);
        Ok(Chosen {
            epochs: Some((prompts.len(), self.num_epoch.unwrap_or(1))),
            task: self.task(Arc::new(prompts), checkpoint, reward)?,
            context_len: options.rollout_max_context_len,
            held_out: None,
            rewarded: true,
        })
    }

    /// Prompts of a hook.
    fn sourced(&self, source: Hook, checkpoint: &Path, reward: Arc<dyn Reward>) -> Result<Chosen> {
        let options = data::options(&self.eval.data, "--data-source-command", &[])?;
        let context_len = options.rollout_max_context_len;
        let source = Sourced::new(source, RowReader::open(options, checkpoint)?);
        let task = self.task(Arc::new(source), checkpoint, reward)?;
        Ok(Chosen { task, context_len, held_out: None, epochs: None, rewarded: true })
    }

    /// Prompts, answers and rewards of an environment.
    fn of_environment(&self, command: &str, checkpoint: &Path) -> Result<Chosen> {
        let hook = |clients| self.eval.rewards.environment(command, clients, &self.eval.data);
        let generate = Some(Arc::new(hook(Some(checkpoint))?));
        let chosen = self.sourced(hook(None)?, checkpoint, Arc::new(Rm::new(hook(None)?)))?;
        Ok(Chosen { task: Task { generate, ..chosen.task }, ..chosen })
    }

    /// Problems of a kind.
    fn made_up(&self, kind: &'static Kind, checkpoint: &Path, seed: u64) -> Result<Chosen> {
        let reward = self.eval.rewards.reward(true)?;
        let rewarded = reward.is_some();
        let reader = self.eval.reader(checkpoint)?;
        let context_len = self.eval.context_len();
        let (difficulty, held_out) = (self.eval.task_difficulty, self.eval.held_out(kind, &reader)?);
        let practice = Generated::practice(kind, difficulty, seed, reader);
        let task = self.task(Arc::new(practice), checkpoint, reward.unwrap_or_else(|| Arc::new(kind)))?;
        Ok(Chosen { task, context_len, held_out, epochs: None, rewarded })
    }

    /// The conversations that `--loss-type sft_loss` learns, with the tokenizer and template of `checkpoint`, or of a
    /// fresh model: those of --prompt-data, or `count` worked problems of the task, drawn from `seed`.
    #[cfg(feature = "torch")]
    pub(crate) fn conversations(
        &self,
        checkpoint: Option<&Path>,
        count: Option<u64>,
        seed: u64,
    ) -> Result<Conversations> {
        let kind = self.eval.kind();
        if self.prompt_data.is_empty() && kind.is_none() {
            return Err(missing("what to learn", "--prompt-data FILE, --task NAME or --text FILE"));
        }
        let mut options = data::options(&self.eval.data, "--prompt-data", &self.prompt_data)?;
        options.loss_mask.get_or_insert(LossMask::Generation);
        let reader = match (checkpoint, kind) {
            (Some(checkpoint), _) => RowReader::open(options, checkpoint)?,
            (None, Some(kind)) if kind.name == tiny::KIND => tiny::reader(options)?,
            (None, _) => return Err(missing("model of the conversations", "--hf-checkpoint DIR")),
        };
        let data = match kind {
            None => Dataset::read(&reader)?,
            Some(kind) => {
                let count = count.ok_or_else(|| missing("steps of the run", "--num-rollout N"))?;
                Generated::worked(kind, self.eval.task_difficulty, seed, count, reader)?
            }
        };
        warn_of_refused(&data);
        let (shuffle, seed) = (self.rollout_shuffle, self.rollout_seed);
        let order = Order { prompts: data.examples.len() as u64, shuffle, seed };
        Ok(Conversations { data, order, epochs: self.num_epoch.unwrap_or(1) })
    }

    /// What is measured: the task's own problems, and the sets that are named.
    pub(crate) fn evaluation(
        &self,
        chosen: &Chosen,
        checkpoint: &Path,
        sampling: &SamplingParams,
    ) -> Result<Vec<EvalSet>> {
        self.eval.check_names()?;
        if !self.eval.eval_prompt_data.is_empty() && !chosen.rewarded {
            return Err(missing("--eval-prompt-data: reward", "--prompt-data with a reward"));
        }
        let named = self.eval.named(checkpoint)?;
        Ok(self.eval.sets(chosen.held_out.as_ref(), named, &chosen.task, sampling))
    }
}

/// What supervised training learns.
#[cfg(feature = "torch")]
pub(crate) struct Conversations {
    pub(crate) data: Dataset,
    pub(crate) order: Order,
    pub(crate) epochs: u64,
}
