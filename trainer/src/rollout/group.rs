//! One prompt: its samples, their rewards, and whether they are kept.

use std::sync::Arc;

use driftless_bridge::{Label, SamplingParams};
use driftless_buffer::{Finish, Record};

use super::Rollouts;
use crate::error::{Error, Result};
use crate::reward::Answer;
use crate::tasks::{Prompt, Task, Trajectory, Turn};

/// A group that is no longer worked on.
pub(super) struct Group {
    pub(super) number: u64,
    pub(super) prompt: Prompt,
    pub(super) outcome: Outcome,
}

/// What became of a group.
pub(super) enum Outcome {
    /// Its samples that are not in the log yet.
    Kept(Vec<Made>),
    /// What went wrong.
    Failed(String),
    /// The task does not learn from it.
    Filtered,
}

/// A sample with its reward.
pub(super) struct Made {
    pub(super) sample: u64,
    pub(super) trajectory: Trajectory,
    pub(super) reward: f32,
}

/// A sample before its reward: new, or from the log.
enum Drawn {
    New(Trajectory),
    Logged(Record),
}

impl Rollouts {
    /// Generates and rewards what the log lacks of a group.
    pub(super) async fn group(
        self: Arc<Self>,
        rollout: u64,
        number: u64,
        prompt: Prompt,
        minimum: Option<Label>,
    ) -> Group {
        let made = self.make(rollout, number, &prompt, minimum.as_ref()).await;
        let outcome = match made {
            Ok(Some(made)) => Outcome::Kept(made),
            Ok(None) => Outcome::Filtered,
            Err(error) => Outcome::Failed(with_causes(&error)),
        };
        Group { number, prompt, outcome }
    }

    async fn make(
        &self,
        rollout: u64,
        number: u64,
        prompt: &Prompt,
        minimum: Option<&Label>,
    ) -> Result<Option<Vec<Made>>> {
        let count = self.options.n_samples_per_prompt;
        // A crash may have come between the samples of a group that were appended together.
        let logged = |sample: u64| {
            let record = self.log.reader().sample(sample).ok().flatten();
            record.filter(|record| {
                record.scalars().group_id == number && record.scalars().rollout_id == rollout
            })
        };
        let drawn = (number * count..(number + 1) * count).map(|sample| async move {
            let drawn = match logged(sample) {
                Some(record) => Drawn::Logged(record),
                None => Drawn::New(self.draw(sample, prompt, &self.options.sampling, minimum).await?),
            };
            Ok::<_, Error>((sample, drawn))
        });
        let drawn = futures_util::future::try_join_all(drawn).await?;
        let task = &*self.task;
        let answers = drawn.iter().map(|(sample, drawn)| match drawn {
            Drawn::New(made) => answer(task, *sample, prompt, &made.tokens[made.prompt_len..], made.finish),
            Drawn::Logged(record) => answer(task, *sample, prompt, record.response(), record.finish()),
        });
        let answers = answers.collect::<Result<Vec<_>>>()?;
        let mut rewards = rewards(task, &answers).await?;
        if !task.keep(&rewards) {
            return Ok(None);
        }
        task.post_process(&mut rewards);
        let new = drawn.into_iter().zip(rewards).filter_map(|((sample, drawn), reward)| match drawn {
            Drawn::New(trajectory) => Some(Made { sample, trajectory, reward }),
            Drawn::Logged(_) => None,
        });
        Ok(Some(new.collect()))
    }

    /// Generates one sample.
    pub(super) async fn draw(
        &self,
        sample: u64,
        prompt: &Prompt,
        sampling: &SamplingParams,
        minimum: Option<&Label>,
    ) -> Result<Trajectory> {
        let (rid, sampling) = self.request(sample, prompt, sampling);
        let turn = Turn { engines: &*self.engines, minimum, rid, sampling };
        self.task.generate(prompt, &turn).await
    }
}

/// A response as rewards see it.
pub(super) fn answer(
    task: &dyn Task,
    sample: u64,
    prompt: &Prompt,
    response: &[i32],
    finish: Finish,
) -> Result<Answer> {
    Ok(Answer {
        sample,
        prompt: prompt.text.clone(),
        response: task.decode(response)?,
        label: prompt.label.clone(),
        metadata: prompt.metadata.clone(),
        truncated: finish == Finish::Length,
        response_length: response.len(),
    })
}

/// The rewards of a group: as many as answers, and finite.
pub(super) async fn rewards(task: &dyn Task, answers: &[Answer]) -> Result<Vec<f32>> {
    let rewards = task.reward(answers).await?;
    let todo = "correct the reward";
    if let Some(first) = answers.first().filter(|_| rewards.len() != answers.len()) {
        let found = format!("{} for {} answers", rewards.len(), answers.len());
        return Err(first.refused("a reward for each answer", found, todo));
    }
    match answers.iter().zip(&rewards).find(|(_, reward)| !reward.is_finite()) {
        Some((answer, reward)) => Err(answer.refused("one finite number", reward, todo)),
        None => Ok(rewards),
    }
}

/// An error with what caused it, in one line.
fn with_causes(error: &Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}
