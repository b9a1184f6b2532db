//! What `driftless train` learns: prompts, rewards and held-out prompts, from flags with slime's names.

use crate::cli::data::{DataArgs, source};
use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::numbers;
use driftless::bridge::SamplingParams;
use driftless::trainer::Evaluation;
use driftless::trainer::data::{Dataset, Source};
use driftless::trainer::reward::{BuiltIn, Command, CommandOptions, Remote, Reward};
use driftless::trainer::rollout::EvalSet;
use driftless::trainer::tasks::arithmetic::{Arithmetic, Recipe};
use driftless::trainer::tasks::{Filter, Prompts, Task};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

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

#[derive(Clone, Copy, PartialEq, clap::ValueEnum)]
enum BuiltInTask {
    /// Sums of two-digit numbers, for the model of `--loss-type sft_loss`.
    Arithmetic,
}

#[derive(clap::Args)]
#[command(next_help_heading = "Task")]
pub(crate) struct TaskArgs {
    /// Prompts to learn on: JSONL or Parquet. `FILE@[a:b]` takes rows a to b - 1, counted from 0. May be
    /// given several times.
    #[arg(long, value_name = "FILE", value_parser = source, conflicts_with = "task")]
    prompt_data: Vec<Source>,
    /// A task that needs no data.
    #[arg(long, value_enum)]
    task: Option<BuiltInTask>,
    /// How answers are rewarded: exact, math, dapo, deepscaler, f1, gpqa, regex, or remote_rm with --rm-url.
    #[arg(long, value_name = "NAME", conflicts_with = "custom_rm_command")]
    rm_type: Option<String>,
    /// Service that rewards answers: it is sent {"prompt", "response", "label", "metadata"} and answers with
    /// a number.
    #[arg(long, value_name = "URL")]
    rm_url: Option<String>,
    /// Command that rewards answers, over JSON lines on standard input and output: see docs/loop.md.
    #[arg(long, value_name = "COMMAND")]
    custom_rm_command: Option<String>,
    /// Processes of --custom-rm-command that work side by side.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = numbers::count::<usize>())]
    custom_rm_processes: usize,
    /// Seconds that a command or service may take for a reply.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = numbers::deadline())]
    rm_deadline: u64,
    /// Learn only from groups whose rewards differ; the next prompts take the others' place.
    #[arg(long, value_enum, value_name = "NAME")]
    dynamic_sampling_filter: Option<SamplingFilter>,
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
    data: DataArgs,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum SamplingFilter {
    #[value(name = "check_reward_nonzero_std")]
    NonzeroStd,
}

/// A task with what depends on it.
pub(crate) struct Chosen {
    pub(crate) task: Arc<dyn Task>,
    pub(crate) defaults: Defaults,
    pub(crate) context_len: Option<usize>,
    /// Prompts of an epoch, and epochs, where the task has an end.
    epochs: Option<(u64, u64)>,
    reward: Option<Arc<dyn Reward>>,
}

impl Chosen {
    /// Steps of a run that is not told how many it has.
    pub(crate) fn num_rollout(&self, rollout_batch_size: u64) -> Result<u64> {
        let Some((prompts, epochs)) = self.epochs else { return Ok(self.defaults.num_rollout) };
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
    /// Reads the prompts, with the tokenizer of `checkpoint`. `seed` draws the problems of a task without
    /// data.
    pub(crate) fn choose(&self, checkpoint: &Path, seed: u64) -> Result<Chosen> {
        if self.task == Some(BuiltInTask::Arithmetic) {
            let task = Arc::new(Arithmetic::practice(seed));
            let defaults = Defaults::arithmetic();
            return Ok(Chosen { task, defaults, context_len: None, epochs: None, reward: None });
        }
        if self.prompt_data.is_empty() {
            return Err(missing("what to learn", "--prompt-data FILE, or --task arithmetic"));
        }
        let reward = self.reward()?;
        let options = self.data.options("--prompt-data", &self.prompt_data)?;
        let data = Dataset::load(&options, checkpoint)?;
        if data.bad + data.too_long > 0 {
            tracing::warn!(
                broken = data.bad,
                too_long = data.too_long,
                "prompts left out; `driftless data` shows them"
            );
        }
        let filter = match self.dynamic_sampling_filter {
            Some(SamplingFilter::NonzeroStd) => Filter::NonzeroStd,
            None => Filter::None,
        };
        let prompts = Prompts::new(data, self.rollout_shuffle, self.rollout_seed, reward.clone(), filter);
        Ok(Chosen {
            epochs: Some((prompts.len(), self.num_epoch.unwrap_or(1))),
            task: Arc::new(prompts),
            defaults: Defaults::PROMPTS,
            context_len: options.rollout_max_context_len,
            reward: Some(reward),
        })
    }

    fn reward(&self) -> Result<Arc<dyn Reward>> {
        let deadline = Duration::from_secs(self.rm_deadline);
        if let Some(command) = &self.custom_rm_command {
            let processes = self.custom_rm_processes;
            return Ok(Arc::new(Command::new(&CommandOptions {
                command: command.clone(),
                processes,
                deadline,
            })));
        }
        match (self.rm_type.as_deref(), &self.rm_url) {
            (Some("remote_rm") | None, Some(url)) => Ok(Arc::new(Remote::new(url, deadline)?)),
            (Some("remote_rm"), None) => Err(missing("--rm-type remote_rm", "--rm-url URL")),
            (Some(name), _) => {
                if self.data.label_key().is_none() {
                    return Err(missing(&format!("labels of --rm-type {name}"), "--label-key FIELD"));
                }
                Ok(Arc::new(name.parse::<BuiltIn>()?))
            }
            (None, None) => {
                Err(missing("reward", "--rm-type NAME, --rm-url URL or --custom-rm-command COMMAND"))
            }
        }
    }

    /// What is measured: the task's own problems, at most `problems` of them, and the sets that are named.
    pub(crate) fn evaluation(
        &self,
        chosen: &Chosen,
        checkpoint: &Path,
        problems: u64,
        sampling: &SamplingParams,
    ) -> Result<Evaluation> {
        let mut sets = Vec::new();
        for pair in self.eval_prompt_data.chunks_exact(2) {
            let (name, file) =
                (pair[0].clone(), source(&pair[1]).map_err(|error| missing("--eval-prompt-data", &error))?);
            let options = self.data.options("--eval-prompt-data", &[file])?;
            let Some(reward) = chosen.reward.clone() else {
                return Err(missing("--eval-prompt-data: reward", "--prompt-data with a reward"));
            };
            let task = Prompts::new(Dataset::load(&options, checkpoint)?, false, 0, reward, Filter::None);
            task.check(checkpoint)?;
            let (prompts, samples) = (task.len(), self.n_samples_per_eval_prompt);
            let sampling = SamplingParams {
                temperature: self.eval_temperature.unwrap_or(sampling.temperature),
                top_p: self.eval_top_p.unwrap_or(sampling.top_p),
                max_new_tokens: self.eval_max_response_len.unwrap_or(sampling.max_new_tokens),
                ..sampling.clone()
            };
            sets.push(EvalSet { name, task: Arc::new(task), prompts, samples, sampling });
        }
        if self.task.is_none() || problems == 0 {
            return Ok(Evaluation { held_out: None, sets });
        }
        let held_out = Arithmetic::held_out();
        let prompts = held_out.problems().unwrap_or_default().min(problems);
        let task: Arc<dyn Task> = Arc::new(held_out);
        let set = |temperature| EvalSet {
            name: "arithmetic".to_owned(),
            task: task.clone(),
            prompts,
            samples: 1,
            sampling: SamplingParams { temperature, ..sampling.clone() },
        };
        Ok(Evaluation { held_out: Some([set(sampling.temperature), set(0.0)]), sets })
    }
}

fn missing(what: &str, expected: &str) -> Error {
    Error::Usage { what: what.to_owned(), expected: expected.to_owned(), found: "nothing".to_owned() }
}
