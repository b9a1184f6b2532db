//! What `driftless train` measures on while it trains, and `driftless eval` without training; and how answers are drawn.
//! Flags have slime's names.

use super::hooks::{RewardArgs, missing};
use crate::cli::data::{self, source};
use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::{keys, numbers};
use clap::builder::{PossibleValue, PossibleValuesParser};
use driftless::bridge::fleet::FleetOptions;
use driftless::bridge::{Keys, SamplingParams};
use driftless::trainer::data::{DataOptions, Dataset, RowReader};
use driftless::trainer::metrics::{HELD_OUT, HELD_OUT_GREEDY};
use driftless::trainer::reward::Reward;
use driftless::trainer::rollout::EvalSet;
use driftless::trainer::tasks::problems::Kind;
use driftless::trainer::tasks::{DataSource, Generated, Prompts, Task};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// The names of tasks, for clap.
fn names() -> PossibleValuesParser {
    PossibleValuesParser::new(Kind::ALL.iter().map(|kind| PossibleValue::new(kind.name).help(kind.what)))
}

/// Prompts that are only measured on, and their rewards.
#[derive(clap::Args, serde::Serialize)]
pub(crate) struct EvalArgs {
    /// Problems that are made up, with rewards of their own.
    #[arg(long, value_name = "NAME", value_parser = names())]
    task: Option<String>,
    /// How large these problems are, from 1.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=i64::from(Kind::DIFFICULTY_MAX)))]
    pub(super) task_difficulty: u32,
    /// How many of the held-out problems of --task.
    #[arg(long, default_value_t = 512, value_parser = numbers::ordinal())]
    #[serde(skip)]
    n_eval_prompts: u64,
    /// Measure on the prompts of FILE, under NAME. May be given several times.
    #[arg(long, value_names = ["NAME", "FILE"], num_args = 2)]
    #[serde(skip)]
    pub(super) eval_prompt_data: Vec<String>,
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
    pub(crate) rewards: RewardArgs,
    #[command(flatten)]
    #[serde(flatten)]
    pub(super) data: DataOptions,
}

/// How answers are drawn.
#[derive(clap::Args)]
pub(crate) struct DrawArgs {
    /// Tokens a response may have.
    #[arg(long, default_value_t = 1024, value_parser = numbers::count::<u32>())]
    rollout_max_response_len: u32,
    /// Sampling temperature.
    #[arg(long, default_value_t = 1.0, value_parser = numbers::positive)]
    rollout_temperature: f64,
    /// Sample from the smallest set of tokens with this much probability. Log-probs are of the whole
    /// distribution.
    #[arg(long, default_value_t = 1.0, value_parser = numbers::share)]
    rollout_top_p: f64,
    /// Sample from so many of the likeliest tokens; -1: from all.
    #[arg(long, default_value_t = -1, allow_negative_numbers = true, value_parser = clap::value_parser!(i64).range(-1..=1 << 31))]
    rollout_top_k: i64,
    /// Texts that end a response, for engines with a tokenizer.
    #[arg(long, value_name = "TEXT", num_args = 1.., value_parser = clap::builder::NonEmptyStringValueParser::new())]
    rollout_stop: Vec<String>,
    /// Tokens that end a response, besides the model's own.
    #[arg(long, value_name = "ID", num_args = 1.., value_parser = clap::value_parser!(i32).range(0..))]
    rollout_stop_token_ids: Vec<i32>,
    /// Requests an engine is given at once.
    #[arg(long, default_value_t = 512, value_parser = numbers::count::<usize>())]
    pub(crate) sglang_server_concurrency: usize,
    /// Seconds that one generation may take, retries and recovering engines included; waiting for its turn is
    /// not.
    #[arg(long, default_value_t = 600, value_name = "SECONDS", value_parser = numbers::deadline())]
    pub(crate) generate_deadline: u64,
    #[command(flatten)]
    pub(crate) call: keys::CallArgs,
}

impl DrawArgs {
    /// How engines at these addresses are asked, and their keys.
    pub(crate) fn fleet(&self, addresses: &[String]) -> Result<(FleetOptions, Keys)> {
        let client = self.call.client("--rollout-external-engine-addrs", addresses)?;
        let mut options = FleetOptions::default()
            .with_concurrency(self.sglang_server_concurrency)
            .with_deadline(Duration::from_secs(self.generate_deadline));
        options.ca = client.ca;
        Ok((options, client.keys))
    }

    /// How tokens are drawn.
    pub(crate) fn sampling(&self) -> SamplingParams {
        SamplingParams {
            temperature: self.rollout_temperature,
            top_p: self.rollout_top_p,
            // SGLang knows no 0.
            top_k: if self.rollout_top_k == 0 { -1 } else { self.rollout_top_k },
            max_new_tokens: self.rollout_max_response_len,
            stop_token_ids: self.rollout_stop_token_ids.clone(),
            stop: self.rollout_stop.clone(),
            ..SamplingParams::default()
        }
    }
}

/// Problems of a task that are only for measuring, and how many.
pub(super) type HeldOut = (Arc<dyn DataSource>, u64);

/// A set that is named, without what its answers are worth.
type Named = (String, Arc<Prompts>);

impl EvalArgs {
    /// The problems that are made up, if they are asked for.
    pub(super) fn kind(&self) -> Option<&'static Kind> {
        self.task.as_deref().and_then(Kind::named)
    }

    /// The reward of prompts that somebody brings, if one was asked for.
    pub(super) fn reward(&self) -> Result<Option<Arc<dyn Reward>>> {
        self.rewards.reward(self.data.label_key.is_some())
    }

    /// Tokens that prompt and response may have together.
    pub(crate) fn context_len(&self) -> Option<usize> {
        self.data.rollout_max_context_len
    }

    /// What makes prompts of problems.
    pub(super) fn reader(&self, checkpoint: &Path) -> Result<RowReader> {
        Ok(RowReader::open(data::options(&self.data, "--task", &[])?, checkpoint)?)
    }

    /// Problems that are never practised.
    pub(super) fn held_out(&self, kind: &'static Kind, reader: &RowReader) -> Result<Option<HeldOut>> {
        let prompts = self.n_eval_prompts;
        let count = usize::try_from(prompts).unwrap_or(usize::MAX);
        let problems = || Generated::held_out(kind, self.task_difficulty, count, reader.clone());
        let problems = (count > 0).then(problems).transpose()?;
        Ok(problems.map(|problems| (Arc::new(problems) as Arc<dyn DataSource>, prompts)))
    }

    /// Refuses two sets of one name; a task's own problems have theirs.
    pub(super) fn check_names(&self) -> Result<()> {
        let own = self.task.iter().flat_map(|_| [HELD_OUT, HELD_OUT_GREEDY]);
        let mut names: BTreeSet<_> = own.collect();
        match self.eval_prompt_data.iter().step_by(2).find(|name| !names.insert(name.as_str())) {
            None => Ok(()),
            Some(name) => {
                let expected = "a name of its own for each file";
                Err(Error::usage("--eval-prompt-data", expected, format!("`{name}` twice")))
            }
        }
    }

    /// Reads the sets that are named, with the tokenizer of `checkpoint`.
    pub(super) fn named(&self, checkpoint: &Path) -> Result<Vec<Named>> {
        let mut named = Vec::new();
        for pair in self.eval_prompt_data.chunks_exact(2) {
            let file = source(&pair[1]).map_err(|error| missing("--eval-prompt-data", &error))?;
            let options = data::options(&self.data, "--eval-prompt-data", &[file])?;
            let data = Dataset::load(&options, checkpoint)?;
            warn_of_refused(&data);
            let prompts = Prompts::new(data, false, 0);
            prompts.check(checkpoint)?;
            named.push((pair[0].clone(), Arc::new(prompts)));
        }
        Ok(named)
    }

    /// The problems that are never practised, sampled as the rollouts are and greedily, and the sets that are named; with
    /// what answers are worth to `task`.
    pub(super) fn sets(
        &self,
        held_out: Option<&HeldOut>,
        named: Vec<Named>,
        task: &Task,
        sampling: &SamplingParams,
    ) -> Vec<EvalSet> {
        let of = |source: Arc<dyn DataSource>| Task { source, ..task.clone() };
        let own = |(source, prompts): &HeldOut| {
            [(HELD_OUT, sampling.temperature), (HELD_OUT_GREEDY, 0.0)].map(|(name, temperature)| EvalSet {
                name: name.to_owned(),
                task: of(source.clone()),
                prompts: *prompts,
                samples: 1,
                sampling: SamplingParams { temperature, ..sampling.clone() },
            })
        };
        let mut sets: Vec<_> = held_out.into_iter().flat_map(own).collect();
        for (name, prompts) in named {
            let sampling = SamplingParams {
                temperature: self.eval_temperature.unwrap_or(sampling.temperature),
                top_p: self.eval_top_p.unwrap_or(sampling.top_p),
                max_new_tokens: self.eval_max_response_len.unwrap_or(sampling.max_new_tokens),
                ..sampling.clone()
            };
            let (count, samples) = (prompts.len(), self.n_samples_per_eval_prompt);
            sets.push(EvalSet { name, task: of(prompts), prompts: count, samples, sampling });
        }
        sets
    }

    /// What is measured where nothing is learned, with the tokenizer of `checkpoint`.
    pub(crate) fn alone(&self, checkpoint: &Path, sampling: &SamplingParams) -> Result<Vec<EvalSet>> {
        self.check_names()?;
        let kind = self.kind();
        let reward = self.rewards.reward(kind.is_some() || self.data.label_key.is_some())?;
        if kind.is_none() && self.eval_prompt_data.is_empty() {
            return Err(missing("what to measure on", "--eval-prompt-data NAME FILE or --task NAME"));
        }
        let reward = reward.or_else(|| kind.map_or_else(|| self.rewards.given(), |_| None));
        if reward.is_none() && !self.eval_prompt_data.is_empty() {
            return Err(no_reward());
        }
        let held_out = kind.map(|kind| self.held_out(kind, &self.reader(checkpoint)?));
        let (held_out, named) = (held_out.transpose()?.flatten(), self.named(checkpoint)?);
        let reward = reward.or_else(|| kind.map(|kind| Arc::new(kind) as Arc<dyn Reward>));
        let first = held_out.as_ref().map(|(source, _)| source.clone());
        let first =
            first.or_else(|| named.first().map(|(_, prompts)| prompts.clone() as Arc<dyn DataSource>));
        let (Some(source), Some(reward)) = (first, reward) else {
            return Err(missing(
                "what to measure on",
                "--n-eval-prompts above 0, or --eval-prompt-data NAME FILE",
            ));
        };
        self.rewards.check_clients(&self.data)?;
        let task = self.rewards.task(source, checkpoint, reward, &self.data)?;
        Ok(self.sets(held_out.as_ref(), named, &task, sampling))
    }
}

/// Prompts that somebody brings have no reward of their own.
pub(super) fn no_reward() -> Error {
    missing("reward", "--rm-type NAME, --rm-url URL or --custom-rm-command HOOK")
}

pub(super) fn warn_of_refused(data: &Dataset) {
    if data.bad + data.too_long > 0 {
        tracing::warn!(
            broken = data.bad,
            too_long = data.too_long,
            "prompts left out; `driftless data` shows them"
        );
    }
}
