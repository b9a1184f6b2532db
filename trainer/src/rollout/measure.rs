//! Measuring on held-out prompts. Their answers are logged, and never learned from.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use driftless_bridge::{Label, SamplingParams};
use driftless_buffer::{Log, Scalars};
use tokio::task::JoinSet;

use super::group::{answer, check_count, rewards};
use super::record::{Answered, EvaluationNote, append_answers};
use super::{Policy, Progress, Queue, RolloutOptions, Rollouts, blocking, finished};
use crate::error::{Error, Result};
use crate::metrics::{EvalMetrics, SetMetrics, is_verdict, unix_us};
use crate::options::Mode;
use crate::sample::Engines;
use crate::tasks::Task;

/// What the names of followers begin with that bring versions to evaluations: they are no hosts of the run.
pub const EVAL_FOLLOWER: &str = "driftless-eval-";

/// Prompts to measure on.
#[derive(Debug, Clone)]
pub struct EvalSet {
    /// Its name in `metrics.jsonl`.
    pub name: String,
    /// Its prompts from number 0 on, how answers to them are made, and their reward.
    pub task: Task,
    /// How many prompts.
    pub prompts: u64,
    /// Samples of each prompt.
    pub samples: u64,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
}

/// What is measured.
#[derive(Clone)]
struct Measure {
    set: EvalSet,
    step: u64,
    minimum: Option<Label>,
}

/// The samples of one prompt.
struct Asked {
    rewards: Vec<f32>,
    tokens: usize,
    truncated: usize,
}

impl Rollouts {
    /// What only measures on sets with the parts of `task`, and generates nothing to learn from.
    #[must_use]
    pub fn to_measure(engines: Arc<dyn Engines>, task: Task, log: Log, options: RolloutOptions) -> Arc<Self> {
        let policy = Policy::new(Mode::Synchronous, options.rollout_batch_size, 0);
        let queue = Queue::open(policy, &log.reader(), options.n_samples_per_prompt, 0, BTreeMap::new());
        let (progress, queue): (Progress, _) = (Arc::new(|_, _, _| {}), Arc::new(queue));
        Arc::new(Rollouts { engines, task, log, progress, queue, options })
    }

    /// Measures on each of these sets, one after the other, with weights of `step`, and of `minimum` or later. One of which no
    /// prompt could be measured is left out, unless that `is_mistake`.
    ///
    /// # Errors
    /// That of the first prompt of such a set, if it is a mistake; otherwise what the log says.
    pub async fn measure_all(
        self: &Arc<Self>,
        sets: &[EvalSet],
        step: u64,
        minimum: Option<Label>,
        is_mistake: bool,
    ) -> Result<EvalMetrics> {
        let mut eval = EvalMetrics::default();
        for set in sets {
            match self.clone().measure(set, step, minimum.clone()).await {
                Ok(measured) => _ = eval.sets.insert(set.name.clone(), measured),
                Err(error) if is_mistake => return Err(error),
                Err(error) => tracing::warn!(set = set.name, %error, "none of its prompts was measured"),
            }
        }
        Ok(eval)
    }

    /// Asks every prompt of `set` after `step` steps, on engines with weights of `minimum` or later. Each prompt's
    /// answers are durable, with their rewards, once it is measured.
    ///
    /// # Errors
    /// The first error if no prompt could be measured.
    pub async fn measure(
        self: Arc<Self>,
        set: &EvalSet,
        step: u64,
        minimum: Option<Label>,
    ) -> Result<SetMetrics> {
        let mut running = JoinSet::new();
        let measure = Measure { set: set.clone(), step, minimum };
        for number in 0..set.prompts {
            running.spawn(self.clone().ask(measure.clone(), number));
        }
        let mut metrics = SetMetrics { samples: set.samples, ..SetMetrics::default() };
        let (mut tokens, mut truncated, mut failure) = (0, 0, None);
        let (mut solved, mut right, mut verdicts) = (0, 0, true);
        while let Some(asked) = running.join_next().await {
            match finished(asked)? {
                Ok(asked) => {
                    metrics.prompts += 1;
                    metrics.reward += asked.rewards.iter().map(|reward| f64::from(*reward)).sum::<f64>();
                    let ones = asked.rewards.iter().filter(|reward| **reward == 1.0).count();
                    right += ones;
                    solved += usize::from(ones > 0);
                    verdicts &= asked.rewards.iter().all(|reward| is_verdict(*reward));
                    tokens += asked.tokens;
                    truncated += asked.truncated;
                }
                Err(error) => {
                    tracing::warn!(set = set.name, %error, "prompt left out");
                    metrics.failed += 1;
                    failure.get_or_insert(error);
                }
            }
        }
        if let Some(error) = failure.filter(|_| metrics.prompts == 0) {
            return Err(error);
        }
        let prompts = metrics.prompts.max(1) as f64;
        let samples = prompts * set.samples.max(1) as f64;
        metrics.reward /= samples;
        // Prompts that fail are often the long ones: a share of the others would rise with them.
        let all = set.prompts.max(1) as f64;
        metrics.pass = verdicts.then(|| solved as f64 / all);
        metrics.pass_1 = verdicts.then(|| right as f64 / (all * set.samples.max(1) as f64));
        metrics.response_length = tokens as f64 / samples;
        metrics.truncated = truncated as f64 / samples;
        Ok(metrics)
    }

    async fn ask(self: Arc<Self>, measure: Measure, number: u64) -> Result<Asked> {
        let Measure { set, step, minimum } = &measure;
        let (task, prompt) = (&set.task, &set.task.source.prompt(number).await?);
        // Evaluation ids count down from u64::MAX, so that engines never see one of a rollout.
        let group = u64::MAX - number;
        let drawn = (0..set.samples).map(async |index| {
            let sample = u64::MAX - (number * set.samples + index);
            let asked = unix_us(SystemTime::now()).cast_signed();
            let mut attempt = 0;
            let parts = loop {
                let turn = self.turn(group, sample, attempt, &set.sampling, minimum.as_ref(), None);
                match task.generate(prompt, &turn).await {
                    Ok(parts) => break parts,
                    Err(error) => attempt = self.attempt_after(attempt, error)?,
                }
            };
            check_count(&parts)?;
            let answered = answer(task, sample, prompt, &parts)?;
            Ok::<_, Error>((answered, parts, [asked, 0, unix_us(SystemTime::now()).cast_signed()]))
        });
        let drawn = futures_util::future::try_join_all(drawn).await?;
        let answers: Vec<_> = drawn.iter().map(|(answer, ..)| answer.clone()).collect();
        let given = rewards(task, &answers).await?.into_iter();
        let rewards = given.map(|given| Ok(given?.reward)).collect::<Result<Vec<f32>>>()?;
        let beside = EvaluationNote::new(&set.name, prompt).bytes();
        let logged = drawn.into_iter().zip(&rewards).map(|((answer, parts, times), &reward)| {
            let scalars = Scalars {
                group_id: group,
                rollout_id: *step,
                reward,
                evaluation: true,
                ..Scalars::default()
            };
            Arc::new(Answered { answer: answer.sample, parts, scalars, times, beside: beside.clone() })
        });
        let logged: Vec<_> = logged.collect();
        blocking(|| append_answers(&self.log, &logged))?;
        Ok(Asked {
            rewards,
            tokens: answers.iter().map(|answer| answer.response_length).sum(),
            truncated: answers.iter().filter(|answer| answer.truncated).count(),
        })
    }
}
