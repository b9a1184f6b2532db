//! Measuring on held-out prompts. Nothing is logged.

use std::sync::Arc;

use driftless_bridge::{Label, SamplingParams};
use tokio::task::JoinSet;

use super::group::{answer, rewards};
use super::{Rollouts, finished};
use crate::error::Result;
use crate::metrics::{SetMetrics, is_verdict};
use crate::tasks::Task;

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

/// The samples of one prompt.
struct Asked {
    rewards: Vec<f32>,
    tokens: usize,
    truncated: usize,
}

impl Rollouts {
    /// Asks every prompt of `set`, on engines with weights of `minimum` or later.
    ///
    /// # Errors
    /// The first error if no prompt could be measured.
    pub async fn measure(self: Arc<Self>, set: &EvalSet, minimum: Option<Label>) -> Result<SetMetrics> {
        let mut running = JoinSet::new();
        for number in 0..set.prompts {
            running.spawn(self.clone().ask(set.clone(), number, minimum.clone()));
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

    async fn ask(self: Arc<Self>, set: EvalSet, number: u64, minimum: Option<Label>) -> Result<Asked> {
        let prompt = set.task.source.prompt(number).await?;
        let drawn = (0..set.samples).map(|index| {
            // Evaluation ids count down from u64::MAX, so that they never meet a rollout's.
            let (group, sample) = (u64::MAX - number, u64::MAX - (number * set.samples + index));
            let turn = self.turn(group, sample, &set.sampling, minimum.as_ref(), true);
            let (task, prompt) = (&set.task, &prompt);
            async move {
                let made = task.generate(prompt, &turn).await?;
                answer(task, sample, prompt, &made)
            }
        });
        let answers = futures_util::future::try_join_all(drawn).await?;
        Ok(Asked {
            rewards: rewards(&set.task, &answers).await?,
            tokens: answers.iter().map(|answer| answer.response_length).sum(),
            truncated: answers.iter().filter(|answer| answer.truncated).count(),
        })
    }
}
