//! One prompt: its samples, their rewards, and whether they are kept.

use std::sync::Arc;

use driftless_bridge::Label;
use driftless_buffer::{Finish, Record};
use serde_json::value::RawValue;

use super::Rollouts;
use super::parts::Kept;
use crate::error::{Error, Result};
use crate::sample::{Answer, Prompt, Trajectory, sample_id};
use crate::tasks::Task;

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
    /// The task does not learn from it, for this reason.
    Filtered(String),
}

/// An answer with its reward.
pub(super) struct Made {
    pub(super) answer: u64,
    /// At least one.
    pub(super) parts: Vec<Trajectory>,
    pub(super) reward: f32,
}

/// The parts of an answer before its reward: new, or from the log.
enum Drawn {
    New(Vec<Trajectory>),
    Logged(Vec<Record>),
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
        let outcome = made.unwrap_or_else(|error| Outcome::Failed(with_causes(&error)));
        Group { number, prompt, outcome }
    }

    async fn make(
        &self,
        rollout: u64,
        number: u64,
        prompt: &Prompt,
        minimum: Option<&Label>,
    ) -> Result<Outcome> {
        let count = self.options.n_samples_per_prompt;
        let drawn = (number * count..(number + 1) * count).map(|answer| async move {
            // A crash may have come between the samples of a group that were appended together.
            let drawn = match self.logged(rollout, number, answer) {
                Some(records) => Drawn::Logged(records),
                None => Drawn::New(self.draw(answer, prompt, minimum).await?),
            };
            Ok::<_, Error>((answer, drawn))
        });
        let drawn = futures_util::future::try_join_all(drawn).await?;
        let task = &*self.task;
        let answers = drawn.iter().map(|(sample, drawn)| match drawn {
            Drawn::New(parts) => answer(task, *sample, prompt, parts),
            Drawn::Logged(parts) => logged_answer(task, *sample, prompt, parts),
        });
        let answers = answers.collect::<Result<Vec<_>>>()?;
        let rewards = rewards(task, &answers).await?;
        if let Some(why) = task.leave_out(&answers, &rewards).await? {
            return Ok(Outcome::Filtered(why));
        }
        let removed = task.remove(&answers, &rewards).await?;
        let rewards = checked(&answers, task.post_process(&answers, rewards).await?)?;
        let mut made = Vec::new();
        for (index, ((answer, drawn), reward)) in drawn.into_iter().zip(rewards).enumerate() {
            let Drawn::New(mut parts) = drawn else { continue };
            if removed.get(index) == Some(&true) {
                parts.iter_mut().for_each(|part| part.loss_mask.fill(0));
            }
            made.push(Made { answer, parts, reward });
        }
        Ok(Outcome::Kept(made))
    }

    async fn draw(&self, answer: u64, prompt: &Prompt, minimum: Option<&Label>) -> Result<Vec<Trajectory>> {
        let turn = self.turn(answer, &self.options.sampling, minimum, false);
        self.task.generate(prompt, &turn).await
    }

    /// The parts of an answer that is in the log.
    fn logged(&self, rollout: u64, group: u64, answer: u64) -> Option<Vec<Record>> {
        let reader = self.log.reader();
        let part = |part| {
            let record = reader.sample(sample_id(answer, part)).ok().flatten();
            record
                .filter(|record| record.scalars().group_id == group && record.scalars().rollout_id == rollout)
        };
        let first = part(0)?;
        let others = (1..Kept::of(&first).parts()).map(part).collect::<Option<Vec<_>>>()?;
        Some(std::iter::once(first).chain(others).collect())
    }
}

/// An answer as rewards see it: the response of its last part.
pub(super) fn answer(task: &dyn Task, sample: u64, prompt: &Prompt, parts: &[Trajectory]) -> Result<Answer> {
    let metadata = parts.iter().rev().find_map(|part| part.metadata.clone());
    let response = parts.last().map(|last| (last.tokens.get(last.prompt_len..), last.finish));
    let (response, finish) = response.unwrap_or((None, Finish::Unfinished));
    seen(task, sample, prompt, response.unwrap_or_default(), finish, metadata)
}

fn logged_answer(task: &dyn Task, sample: u64, prompt: &Prompt, parts: &[Record]) -> Result<Answer> {
    let metadata = parts.first().and_then(|first| Kept::of(first).metadata);
    let (response, finish) =
        parts.last().map_or((&[][..], Finish::Unfinished), |last| (last.response(), last.finish()));
    seen(task, sample, prompt, response, finish, metadata)
}

fn seen(
    task: &dyn Task,
    sample: u64,
    prompt: &Prompt,
    response: &[i32],
    finish: Finish,
    metadata: Option<Box<RawValue>>,
) -> Result<Answer> {
    Ok(Answer {
        sample,
        prompt: prompt.text.clone(),
        response: task.decode(response)?,
        label: prompt.label.clone(),
        metadata: metadata.or_else(|| prompt.metadata.clone()),
        truncated: finish == Finish::Length,
        response_length: response.len(),
    })
}

/// The rewards of a group: as many as answers, and finite.
pub(super) async fn rewards(task: &dyn Task, answers: &[Answer]) -> Result<Vec<f32>> {
    checked(answers, task.reward(answers).await?)
}

fn checked(answers: &[Answer], rewards: Vec<f32>) -> Result<Vec<f32>> {
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
