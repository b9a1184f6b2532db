//! What `driftless train` learns: prompts, rewards and held-out prompts, from flags with slime's names.

use super::hooks::{HookArgs, missing};
use crate::cli::data::{self, source};
use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::numbers;
use clap::builder::{PossibleValue, PossibleValuesParser};
use driftless::bridge::SamplingParams;
#[cfg(feature = "torch")]
use driftless::trainer::LossMask;
#[cfg(feature = "torch")]
use driftless::trainer::data::Order;
use driftless::trainer::data::{DataOptions, Dataset, RowReader, Source};
use driftless::trainer::hook::Hook;
use driftless::trainer::metrics::{HELD_OUT, HELD_OUT_GREEDY};
use driftless::trainer::reward::Reward;
use driftless::trainer::rollout::EvalSet;
use driftless::trainer::tasks::problems::Kind;
#[cfg(feature = "torch")]
use driftless::trainer::tasks::tiny;
use driftless::trainer::tasks::{DataSource, Generated, Prompts, Sourced, Task};
use serde::Serializer;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

/// The names of tasks, for clap.
fn names() -> PossibleValuesParser {
    PossibleValuesParser::new(Kind::ALL.iter().map(|kind| PossibleValue::new(kind.name).help(kind.what)))
}

#[derive(clap::Args, serde::Serialize)]
#[command(next_help_heading = "Task")]
pub(crate) struct TaskArgs {
    /// Prompts to learn on: JSONL or Parquet. `FILE@[a:b]` takes rows a to b - 1, counted from 0. May be
    /// given several times.
    #[arg(long, value_name = "FILE", value_parser = source, conflicts_with = "task")]
    #[serde(serialize_with = "written")]
    prompt_data: Vec<Source>,
    /// Problems that are made up, with rewards of their own.
    #[arg(long, value_name = "NAME", value_parser = names())]
    task: Option<String>,
    /// How large these problems are, from 1.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=i64::from(Kind::DIFFICULTY_MAX)))]
    task_difficulty: u32,
    /// Take the prompts of each epoch in an order of its own.
    #[arg(long)]
    rollout_shuffle: bool,
    /// Seed of that order.
    #[arg(long, default_value_t = 42)]
    rollout_seed: u64,
    /// Times that the prompts are gone through, where --num-rollout does not say how many steps there are
    /// [default: 1].
    #[arg(long, value_name = "N", value_parser = numbers::count::<u64>(), conflicts_with = "num_rollout")]
    #[serde(skip)]
    num_epoch: Option<u64>,
    /// Measure on the prompts of FILE, under NAME. May be given several times.
    #[arg(long, value_names = ["NAME", "FILE"], num_args = 2)]
    #[serde(skip)]
    eval_prompt_data: Vec<String>,
    /// Samples of each such prompt.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = numbers::count::<u64>())]
    #[serde(skip)]
    n_samples_per_eval_prompt: u64,
    /// Sampling temperature of these [default: --rollout-temperature].
    #[arg(long, value_parser = numbers::at_least_zero)]
    #[serde(skip)]
    eval_temperature: Option<f64>,
    /// Sample these from the smallest set of tokens with this much probability [default: --rollout-top-p].
    #[arg(long, value_parser = numbers::share)]
    #[serde(skip)]
    eval_top_p: Option<f64>,
    /// Tokens that a response to these may have [default: --rollout-max-response-len].
    #[arg(long, value_parser = numbers::count::<u32>())]
    #[serde(skip)]
    eval_max_response_len: Option<u32>,
    #[command(flatten)]
    #[serde(flatten)]
    hooks: HookArgs,
    #[command(flatten)]
    #[serde(flatten)]
    data: DataOptions,
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
    held_out: Option<(Arc<dyn DataSource>, u64)>,
    /// Prompts of an epoch, and epochs, where the task has an end.
    epochs: Option<(u64, u64)>,
    /// Whether the reward is one that was asked for, and not the task's own.
    rewarded: bool,
}

impl Chosen {
    /// The task's own problems that are only for measuring, sampled as the rollouts are and greedily.
    fn held_out(&self, sampling: &SamplingParams) -> Vec<EvalSet> {
        let Some((source, prompts)) = &self.held_out else { return Vec::new() };
        let set = |name: &str, temperature| EvalSet {
            name: name.to_owned(),
            task: Task { source: source.clone(), ..self.task.clone() },
            prompts: *prompts,
            samples: 1,
            sampling: SamplingParams { temperature, ..sampling.clone() },
        };
        vec![set(HELD_OUT, sampling.temperature), set(HELD_OUT_GREEDY, 0.0)]
    }

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

    /// The problems that are made up, if they are asked for.
    fn kind(&self) -> Option<&'static Kind> {
        self.task.as_deref().and_then(Kind::named)
    }

    /// Reads the prompts, with the tokenizer of `checkpoint`. `seed` draws the problems of a task, of which
    /// `eval_prompts` are to be measured on.
    pub(crate) fn choose(&self, checkpoint: &Path, seed: u64, eval_prompts: u64) -> Result<Chosen> {
        if let Some(kind) = self.kind() {
            return self.made_up(kind, checkpoint, seed, eval_prompts);
        }
        let reward = self
            .hooks
            .reward(self.data.label_key.is_some())?
            .ok_or_else(|| missing("reward", "--rm-type NAME, --rm-url URL or --custom-rm-command HOOK"));
        match self.hooks.data_source()? {
            Some(source) => self.sourced(source, checkpoint, reward?),
            None if self.prompt_data.is_empty() => {
                let expected = "--prompt-data FILE, --data-source-command HOOK or --task NAME";
                Err(missing("what to learn", expected))
            }
            None => self.of_files(checkpoint, reward?),
        }
    }

    /// Prompts of files.
    fn of_files(&self, checkpoint: &Path, reward: Arc<dyn Reward>) -> Result<Chosen> {
        let options = data::options(&self.data, "--prompt-data", &self.prompt_data)?;
        if options.loss_mask.is_some() {
            let expected = "--loss-type sft_loss: RL learns what engines sample";
            return Err(Error::usage("--loss-mask-type", expected, "policy_loss"));
        }
        let data = Dataset::load(&options, checkpoint)?;
        warn_of_refused(&data);
        let prompts = Prompts::new(data, self.rollout_shuffle, self.rollout_seed);
        Ok(Chosen {
            epochs: Some((prompts.len(), self.num_epoch.unwrap_or(1))),
            task: self.hooks.task(Arc::new(prompts), reward)?,
            context_len: options.rollout_max_context_len,
            held_out: None,
            rewarded: true,
        })
    }

    /// Prompts of a hook.
    fn sourced(&self, source: Hook, checkpoint: &Path, reward: Arc<dyn Reward>) -> Result<Chosen> {
        let options = data::options(&self.data, "--data-source-command", &[])?;
        let context_len = options.rollout_max_context_len;
        let source = Sourced::new(source, RowReader::open(options, checkpoint)?);
        let task = self.hooks.task(Arc::new(source), reward)?;
        Ok(Chosen { task, context_len, held_out: None, epochs: None, rewarded: true })
    }

    /// Problems of a kind.
    fn made_up(
        &self,
        kind: &'static Kind,
        checkpoint: &Path,
        seed: u64,
        eval_prompts: u64,
    ) -> Result<Chosen> {
        let reward = self.hooks.reward(true)?;
        let rewarded = reward.is_some();
        let options = data::options(&self.data, "--task", &[])?;
        let context_len = options.rollout_max_context_len;
        let reader = RowReader::open(options, checkpoint)?;
        let difficulty = self.task_difficulty;
        let count = usize::try_from(eval_prompts).unwrap_or(usize::MAX);
        let held_out = || Generated::held_out(kind, difficulty, count, reader.clone());
        let held_out = (count > 0).then(held_out).transpose()?;
        let held_out = held_out.map(|problems| (Arc::new(problems) as Arc<dyn DataSource>, eval_prompts));
        let practice = Generated::practice(kind, difficulty, seed, reader);
        let task = self.hooks.task(Arc::new(practice), reward.unwrap_or_else(|| Arc::new(kind)))?;
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
        let kind = self.kind();
        if self.prompt_data.is_empty() && kind.is_none() {
            return Err(missing("what to learn", "--prompt-data FILE, --task NAME or --text FILE"));
        }
        let mut options = data::options(&self.data, "--prompt-data", &self.prompt_data)?;
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
                Generated::worked(kind, self.task_difficulty, seed, count, reader)?
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
        let mut sets = chosen.held_out(sampling);
        let mut names: BTreeSet<_> = sets.iter().map(|set| set.name.clone()).collect();
        let mut named = self.eval_prompt_data.iter().step_by(2);
        if let Some(name) = named.find(|name| !names.insert((*name).clone())) {
            let expected = "a name of its own for each file";
            return Err(Error::usage("--eval-prompt-data", expected, format!("`{name}` twice")));
        }
        for pair in self.eval_prompt_data.chunks_exact(2) {
            let (name, file) =
                (pair[0].clone(), source(&pair[1]).map_err(|error| missing("--eval-prompt-data", &error))?);
            let options = data::options(&self.data, "--eval-prompt-data", &[file])?;
            if !chosen.rewarded {
                return Err(missing("--eval-prompt-data: reward", "--prompt-data with a reward"));
            }
            let source = Prompts::new(Dataset::load(&options, checkpoint)?, false, 0);
            source.check(checkpoint)?;
            let (prompts, samples) = (source.len(), self.n_samples_per_eval_prompt);
            let task = Task { source: Arc::new(source), ..chosen.task.clone() };
            let sampling = SamplingParams {
                temperature: self.eval_temperature.unwrap_or(sampling.temperature),
                top_p: self.eval_top_p.unwrap_or(sampling.top_p),
                max_new_tokens: self.eval_max_response_len.unwrap_or(sampling.max_new_tokens),
                ..sampling.clone()
            };
            sets.push(EvalSet { name, task, prompts, samples, sampling });
        }
        Ok(sets)
    }
}

/// What supervised training learns.
#[cfg(feature = "torch")]
pub(crate) struct Conversations {
    pub(crate) data: Dataset,
    pub(crate) order: Order,
    pub(crate) epochs: u64,
}

fn warn_of_refused(data: &Dataset) {
    if data.bad + data.too_long > 0 {
        tracing::warn!(
            broken = data.bad,
            too_long = data.too_long,
            "prompts left out; `driftless data` shows them"
        );
    }
}
