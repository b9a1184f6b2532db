//! `driftless try`: one prompt through hook, reward and engine, as a run would draw it.

mod show;

use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::output::{Output, say};
use crate::cli::shared::{numbers, paths};
use crate::cli::train::evaluation::DrawArgs;
use crate::cli::train::task::{Chosen, TaskArgs};
use driftless::bridge::engine::{Expected, Meter, Rid};
use driftless::bridge::{Fleet, SamplingParams};
use driftless::buffer::Scalars;
use driftless::http::runtime;
use driftless::trainer::data::vocabulary;
use driftless::trainer::reward::Given;
use driftless::trainer::rollout::{answer, rewards, sampling_seed};
use driftless::trainer::sample::{Prompt, Trajectory, Turn};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

const EXAMPLES: &str = "\
Marks of the lines: `>` is the prompt, `<` is trained on, `|` is not. On a terminal, what is trained on is green (NO_COLOR).

Examples:
  The first prompt of a run to come, whose hook and reward are mine.py:
    driftless try --hf-checkpoint models/Qwen3-0.6B --rollout-external-engine-addrs 10.0.0.1:30000 \\
        --prompt-data problems.jsonl --label-key label \\
        --custom-generate-command \"python -m driftless_rl.hook mine.py\" \\
        --custom-rm-command \"python -m driftless_rl.hook mine.py\"

Flags that `train` has mean the same here, and the same seed and number of samples give the same draws. Nothing is learned,
published or logged. The command ends with an error where an answer failed.";

/// Draw answers to one prompt with hook, reward and engine, and print conversation, mask and reward.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Checkpoint directory that the engines started from: it has the tokenizer and the chat template.
    #[arg(long, value_name = "DIR")]
    hf_checkpoint: PathBuf,
    /// Running engines, as host:port or https://host/path, with vllm+ before the URL for vLLM.
    #[arg(long, value_name = "ADDR", num_args = 1.., required = true)]
    rollout_external_engine_addrs: Vec<String>,
    /// Number of the prompt, as the run counts them.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = numbers::ordinal())]
    prompt: u64,
    /// Samples of the prompt, one after another.
    #[arg(long, default_value_t = 1, value_parser = numbers::count::<u64>())]
    n_samples_per_prompt: u64,
    /// Seed of sampling.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    task: TaskArgs,
    #[command(flatten)]
    draw: DrawArgs,
}

/// What became of an answer.
struct Tried {
    parts: Vec<Trajectory>,
    failed: Option<driftless::trainer::Error>,
    given: Option<Given>,
    seconds: f64,
}

/// What the reward of an answer is made of, by name: as the reward says it, or else the hook of the answer.
fn made_of(tried: &Tried) -> BTreeMap<String, f32> {
    let given = tried.given.as_ref().map(|given| &given.components);
    let parts = tried.parts.iter().rev().map(|part| &part.components);
    given.into_iter().chain(parts).find(|components| !components.is_empty()).cloned().unwrap_or_default()
}

pub(crate) fn run(args: Args, output: Output) -> Result<()> {
    paths::check_checkpoint("--hf-checkpoint", &args.hf_checkpoint)?;
    let chosen = args.task.choose(&args.hf_checkpoint, args.seed)?;
    let runtime = runtime::handle();
    let runtime = runtime.map_err(|source| Error::Io { path: PathBuf::from("threads"), source })?;
    let (prompt, tried, reward_seconds) = runtime::wait(&runtime, args.answers(&chosen))?;
    let first = args.first()?;
    let tokenizer = chosen.task.source.tokenizer();
    let mut failed = None;
    for (number, tried) in (first..).zip(tried) {
        let outcome = tried.failed.as_ref().map(driftless::trainer::Error::failure);
        let shown = show::Shown {
            prompt_id: args.prompt,
            answer: number,
            outcome,
            reward: tried.given.as_ref().map(|given| given.reward),
            reward_seconds: tried.given.as_ref().and(Some(reward_seconds)),
            rewards: made_of(&tried),
            seconds: tried.seconds,
            samples: show::samples(tokenizer, &prompt.tokens, &tried.parts)?,
        };
        output.print(&shown, show::render)?;
        failed = failed.or(tried.failed);
    }
    failed.map_or(Ok(()), |error| Err(error.into()))
}

impl Args {
    /// Number of the first answer, as a run has it.
    fn first(&self) -> Result<u64> {
        let end = self.prompt.checked_add(1).and_then(|next| next.checked_mul(self.n_samples_per_prompt));
        let end = end.filter(|end| *end <= Scalars::ANSWERS_MAX);
        let end = end.ok_or_else(|| {
            let expected = format!("one of the first {} answers", Scalars::ANSWERS_MAX);
            Error::usage("--prompt", expected, self.prompt)
        })?;
        Ok(end - self.n_samples_per_prompt)
    }

    /// The prompt, its answers, and the seconds that their rewards took.
    async fn answers(&self, chosen: &Chosen) -> Result<(Prompt, Vec<Tried>, f64)> {
        let (task, first) = (&chosen.task, self.first()?);
        task.ready().await?;
        let prompt = task.source.prompt(self.prompt).await?;
        let (addresses, expected) =
            (&self.rollout_external_engine_addrs, Expected::from_checkpoint(&self.hf_checkpoint)?);
        let (options, keys) = self.draw.fleet(addresses)?;
        let fleet = Fleet::attach(addresses, &keys, &expected, options).await?;
        let mut tried = Vec::new();
        for nth in 0..self.n_samples_per_prompt {
            tried.push(self.answer(chosen, &fleet, &prompt, first + nth).await?);
        }
        let begun = Instant::now();
        let mut left: Vec<(u64, &mut Tried)> =
            (first..).zip(&mut tried).filter(|(_, tried)| tried.failed.is_none()).collect();
        let answers = left.iter().map(|(sample, tried)| answer(task, *sample, &prompt, &tried.parts));
        let answers = answers.collect::<driftless::trainer::Result<Vec<_>>>()?;
        match rewards(task, &answers).await {
            Ok(rewards) => left.into_iter().zip(rewards).for_each(|((_, one), given)| match given {
                Ok(given) => one.given = Some(given),
                Err(error) => one.failed = Some(error),
            }),
            Err(error) => {
                if let Some((_, one)) = left.first_mut() {
                    one.failed = Some(error);
                }
            }
        }
        Ok((prompt, tried, begun.elapsed().as_secs_f64()))
    }

    /// An answer, made again as a run does it.
    async fn answer(&self, chosen: &Chosen, fleet: &Fleet, prompt: &Prompt, sample: u64) -> Result<Tried> {
        let scope = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos() as u64;
        let begun = Instant::now();
        let mut attempt = 0;
        loop {
            let sampling_seed = Some(sampling_seed(self.seed, sample, attempt));
            let turn = Turn {
                engines: fleet,
                minimum: None,
                sample,
                attempt,
                group: self.prompt,
                rid: Rid::new(scope, sample),
                sampling: SamplingParams { sampling_seed, ..self.draw.sampling() },
                max_context_len: chosen.context_len,
                vocabulary: vocabulary(&self.hf_checkpoint)?,
                evaluation: false,
                meter: Meter::default(),
                underway: None,
            };
            let (parts, failed) = match chosen.task.generate(prompt, &turn).await {
                Ok(parts) => (parts, None),
                Err(error) if error.is_made_again() && attempt < self.task.hook_retries() => {
                    say(&format!("try: {}: {error}; made again", error.failure().name()));
                    attempt += 1;
                    continue;
                }
                Err(error) => (Vec::new(), Some(error)),
            };
            return Ok(Tried { parts, failed, given: None, seconds: begun.elapsed().as_secs_f64() });
        }
    }
}
