//! What `driftless train` learns: prompts, rewards and held-out prompts, from flags with slime's names.

use super::hooks::{HookArgs, missing};
use crate::cli::data::{self, source};
use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::numbers;
use clap::builder::{PossibleValue, PossibleValuesParser};
use driftless::bridge::SamplingParams;
use driftless::trainer::Evaluation;
#[cfg(feature = "torch")]
use driftless::trainer::LossMask;
#[cfg(feature = "torch")]
use driftless::trainer::data::Order;
use driftless::trainer::data::{DataOptions, Dataset, RowReader, Source};
use driftless::trainer::hook::{Hooked, Hooks, Sourced};
use driftless::trainer::reward::Reward;
use driftless::trainer::rollout::EvalSet;
use driftless::trainer::tasks::arithmetic::{Arithmetic, Recipe};
use driftless::trainer::tasks::problems::Kind;
use driftless::trainer::tasks::{Generated, Prompts, Task};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

/// Steps, sizes and rates of a run, unless told.
pub(crate) struct Defaults {
    pub(crate) num_rollout: u64,
    pub(crate) rollout_batch_size: u64,
    pub(crate) n_samples_per_prompt: u64,
    pub(crate) rollout_max_response_len: u32,
    pub(crate) lr: f64,
    pub(crate) save_interval: u64,
}

impl Defaults {
    /// What suits a pretrained model on a user's prompts.
    const PROMPTS: Defaults = Defaults {
        num_rollout: 0,
        rollout_batch_size: 32,
        n_samples_per_prompt: 8,
        rollout_max_response_len: 1024,
        lr: 1e-6,
        save_interval: 20,
    };

    /// What makes the demo's small model learn.
    fn arithmetic() -> Defaults {
        let recipe = Recipe::default();
        Defaults {
            num_rollout: recipe.rl_steps,
            rollout_batch_size: recipe.rollout_batch_size,
            n_samples_per_prompt: recipe.n_samples_per_prompt,
            rollout_max_response_len: recipe.rollout_max_response_len,
            lr: recipe.rl_lr,
            save_interval: 1,
        }
    }
}

/// Sums of two-digit numbers, for the model of `--loss-type sft_loss` without data.
const ARITHMETIC: &str = "arithmetic";

/// The names of tasks, for clap.
fn names() -> PossibleValuesParser {
    let arithmetic = PossibleValue::new(ARITHMETIC)
        .help("sums of two-digit numbers, for the model of --loss-type sft_loss without data");
    let kinds = Kind::ALL.iter().map(|kind| PossibleValue::new(kind.name).help(kind.what));
    PossibleValuesParser::new(std::iter::once(arithmetic).chain(kinds))
}

#[derive(clap::Args)]
#[command(next_help_heading = "Task")]
pub(crate) struct TaskArgs {
    /// Prompts to learn on: JSONL or Parquet. `FILE@[a:b]` takes rows a to b - 1, counted from 0. May be
    /// given several times.
    #[arg(long, value_name = "FILE", value_parser = source, conflicts_with = "task")]
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
    num_epoch: Option<u64>,
    /// Measure on the prompts of FILE, under NAME. May be given several times.
    #[arg(long, value_names = ["NAME", "FILE"], num_args = 2)]
    eval_prompt_data: Vec<String>,
    /// Samples of each such prompt.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = numbers::count::<u64>())]
    n_samples_per_eval_prompt: u64,
    /// Sampling temperature of these [default: --rollout-temperature].
    #[arg(long, value_parser = numbers::at_least_zero)]
    eval_temperature: Option<f64>,
    /// Sample these from the smallest set of tokens with this much probability [default: --rollout-top-p].
    #[arg(long, value_parser = numbers::share)]
    eval_top_p: Option<f64>,
    /// Tokens that a response to these may have [default: --rollout-max-response-len].
    #[arg(long, value_parser = numbers::count::<u32>())]
    eval_max_response_len: Option<u32>,
    #[command(flatten)]
    hooks: HookArgs,
    #[command(flatten)]
    data: DataOptions,
}

/// A task with what depends on it.
pub(crate) struct Chosen {
    pub(crate) task: Arc<dyn Task>,
    pub(crate) defaults: Defaults,
    pub(crate) context_len: Option<usize>,
    /// Problems of the task that are only for measuring, and how many.
    held_out: Option<(Arc<dyn Task>, u64)>,
    /// Prompts of an epoch, and epochs, where the task has an end.
    epochs: Option<(u64, u64)>,
    reward: Option<Arc<dyn Reward>>,
}

impl Chosen {
    /// Steps of a run that is not told how many it has.
    pub(crate) fn num_rollout(&self, rollout_batch_size: u64) -> Result<u64> {
        let Some((prompts, epochs)) = self.epochs else {
            return match self.defaults.num_rollout {
                0 => Err(missing("steps of the run", "--num-rollout N")),
                steps => Ok(steps),
            };
        };
        match prompts.saturating_mul(epochs) / rollout_batch_size {
            0 => Err(Error::Usage {
                what: "--rollout-batch-size".into(),
                expected: format!("at most the {prompts} prompts of {epochs} epochs, or --num-rollout"),
                found: rollout_batch_size.to_string(),
            }),
            steps => Ok(steps),
        }
    }
}

impl TaskArgs {
    /// Reads the prompts, with the tokenizer of `checkpoint`. `seed` draws the problems of a task, of which
    /// `eval_prompts` are to be measured on.
    pub(crate) fn choose(&self, checkpoint: &Path, seed: u64, eval_prompts: u64) -> Result<Chosen> {
        if let Some(name) = &self.task {
            return self.built_in(name, checkpoint, seed, eval_prompts);
        }
        let reward = self
            .hooks
            .reward(self.data.label_key.is_some())?
            .ok_or_else(|| missing("reward", "--rm-type NAME, --rm-url URL or --custom-rm-command HOOK"));
        if let Some(source) = self.hooks.data_source()? {
            let reward = reward?;
            let options = data::options(&self.data, "--data-source-command", &[])?;
            let context_len = options.rollout_max_context_len;
            let reader = RowReader::open(options, checkpoint)?;
            return Ok(Chosen {
                task: self.hooked(Arc::new(Sourced::new(source, reader, reward.clone())), None)?,
                defaults: Defaults::PROMPTS,
                context_len,
                held_out: None,
                epochs: None,
                reward: Some(reward),
            });
        }
        if self.prompt_data.is_empty() {
            let expected = "--prompt-data FILE, --data-source-command HOOK or --task NAME";
            return Err(missing("what to learn", expected));
        }
        let reward = reward?;
        let options = data::options(&self.data, "--prompt-data", &self.prompt_data)?;
        if options.loss_mask.is_some() {
            return Err(Error::Usage {
                what: "--loss-mask-type".to_owned(),
                expected: "--loss-type sft_loss: RL learns what engines sample".to_owned(),
                found: "policy_loss".to_owned(),
            });
        }
        let data = Dataset::load(&options, checkpoint)?;
        warn_of_refused(&data);
        let prompts = Prompts::new(data, self.rollout_shuffle, self.rollout_seed, reward.clone());
        Ok(Chosen {
            epochs: Some((prompts.len(), self.num_epoch.unwrap_or(1))),
            task: self.hooked(Arc::new(prompts), None)?,
            defaults: Defaults::PROMPTS,
            context_len: options.rollout_max_context_len,
            held_out: None,
            reward: Some(reward),
        })
    }

    /// The conversations that `--loss-type sft_loss` learns, with the tokenizer and template of `checkpoint`: those
    /// of --prompt-data, or `worked` problems of the task; none without either.
    #[cfg(feature = "torch")]
    pub(crate) fn conversations(
        &self,
        checkpoint: Option<&Path>,
        worked: &Worked,
    ) -> Result<Option<Conversations>> {
        let kind = self.task.as_deref().and_then(Kind::named);
        if self.prompt_data.is_empty() && kind.is_none() {
            return Ok(None);
        }
        let checkpoint =
            checkpoint.ok_or_else(|| missing("model of the conversations", "--hf-checkpoint DIR"))?;
        let mut options = data::options(&self.data, "--prompt-data", &self.prompt_data)?;
        options.loss_mask.get_or_insert(LossMask::Generation);
        let data = match kind {
            None => Dataset::load(&options, checkpoint)?,
            Some(kind) => {
                let count = worked.count.ok_or_else(|| missing("steps of the run", "--num-rollout N"))?;
                let reader = RowReader::open(options, checkpoint)?;
                Generated::worked(kind, self.task_difficulty, worked.seed, count, reader)?
            }
        };
        warn_of_refused(&data);
        let (shuffle, seed) = (self.rollout_shuffle, self.rollout_seed);
        let order = Order { prompts: data.examples.len() as u64, shuffle, seed };
        Ok(Some(Conversations { data, order, epochs: self.num_epoch.unwrap_or(1) }))
    }

    fn built_in(&self, name: &str, checkpoint: &Path, seed: u64, eval_prompts: u64) -> Result<Chosen> {
        let reward = self.hooks.reward(true)?;
        let hooked = |task| self.hooked(task, reward.clone());
        let Some(kind) = Kind::named(name) else {
            let held_out = Arithmetic::held_out();
            let count = held_out.problems().unwrap_or_default().min(eval_prompts);
            return Ok(Chosen {
                task: hooked(Arc::new(Arithmetic::practice(seed)))?,
                defaults: Defaults::arithmetic(),
                context_len: None,
                held_out: (count > 0).then_some((hooked(Arc::new(held_out))?, count)),
                epochs: None,
                reward,
            });
        };
        let options = data::options(&self.data, "--task", &[])?;
        let context_len = options.rollout_max_context_len;
        let reader = RowReader::open(options, checkpoint)?;
        let difficulty = self.task_difficulty;
        let held_out = match usize::try_from(eval_prompts).unwrap_or(usize::MAX) {
            0 => None,
            count => {
                let problems = Generated::held_out(kind, difficulty, count, reader.clone())?;
                Some((hooked(Arc::new(problems))?, eval_prompts))
            }
        };
        Ok(Chosen {
            task: hooked(Arc::new(Generated::practice(kind, difficulty, seed, reader)))?,
            defaults: Defaults::PROMPTS,
            context_len,
            held_out,
            epochs: None,
            reward,
        })
    }

    /// `task` with the hooks that were named, and another reward if there is one.
    fn hooked(&self, task: Arc<dyn Task>, reward: Option<Arc<dyn Reward>>) -> Result<Arc<dyn Task>> {
        let hooks = Hooks { reward, ..self.hooks.hooks()? };
        Ok(Arc::new(Hooked::new(task, hooks)))
    }

    /// What is measured: the task's own problems, and the sets that are named.
    pub(crate) fn evaluation(
        &self,
        chosen: &Chosen,
        checkpoint: &Path,
        sampling: &SamplingParams,
    ) -> Result<Evaluation> {
        let mut names = BTreeSet::new();
        if let Some(name) = self.eval_prompt_data.iter().step_by(2).find(|name| !names.insert(*name)) {
            return Err(Error::Usage {
                what: "--eval-prompt-data".to_owned(),
                expected: "a name of its own for each file".to_owned(),
                found: format!("`{name}` twice"),
            });
        }
        let mut sets = Vec::new();
        for pair in self.eval_prompt_data.chunks_exact(2) {
            let (name, file) =
                (pair[0].clone(), source(&pair[1]).map_err(|error| missing("--eval-prompt-data", &error))?);
            let options = data::options(&self.data, "--eval-prompt-data", &[file])?;
            let Some(reward) = chosen.reward.clone() else {
                return Err(missing("--eval-prompt-data: reward", "--prompt-data with a reward"));
            };
            let task = Prompts::new(Dataset::load(&options, checkpoint)?, false, 0, reward);
            task.check(checkpoint)?;
            let (prompts, samples) = (task.len(), self.n_samples_per_eval_prompt);
            let task = self.hooked(Arc::new(task), None)?;
            let sampling = SamplingParams {
                temperature: self.eval_temperature.unwrap_or(sampling.temperature),
                top_p: self.eval_top_p.unwrap_or(sampling.top_p),
                max_new_tokens: self.eval_max_response_len.unwrap_or(sampling.max_new_tokens),
                ..sampling.clone()
            };
            sets.push(EvalSet { name, task, prompts, samples, sampling });
        }
        let Some((task, prompts)) = &chosen.held_out else {
            return Ok(Evaluation { held_out: None, sets });
        };
        let set = |temperature| EvalSet {
            name: "held-out".to_owned(),
            task: task.clone(),
            prompts: *prompts,
            samples: 1,
            sampling: SamplingParams { temperature, ..sampling.clone() },
        };
        Ok(Evaluation { held_out: Some([set(sampling.temperature), set(0.0)]), sets })
    }
}

/// How many problems of a task are worked for supervised training, where that is known, and what draws them.
#[cfg(feature = "torch")]
pub(crate) struct Worked {
    pub(crate) count: Option<u64>,
    pub(crate) seed: u64,
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
