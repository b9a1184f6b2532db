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
        let task = &self.task;
        let answers = drawn.iter().map(|(sample, drawn)| {
            let said = match drawn {
                Drawn::New(parts) => Said::of(parts),
                Drawn::Logged(parts) => Said::logged(parts),
            };
            said.answer(task, *sample, prompt)
        });
        let answers = answers.collect::<Result<Vec<_>>>()?;
        let rewards = rewards(task, &answers).await?;
        if let Some(why) = task.filters.leave_out(&answers, &rewards).await? {
            return Ok(Outcome::Filtered(why));
        }
        let removed = task.filters.remove(&answers, &rewards).await?;
        let rewards = checked(&answers, task.filters.post_process(&answers, rewards).await?)?;
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

/// What the parts of an answer say.
pub(super) struct Said<'a> {
    /// Of the last part.
    response: &'a [i32],
    /// Why the last part ended.
    finish: Finish,
    metadata: Option<Box<RawValue>>,
}

impl<'a> Said<'a> {
    pub(super) fn of(parts: &'a [Trajectory]) -> Self {
        let last = parts.last();
        Said {
            response: last.and_then(|last| last.tokens.get(last.prompt_len..)).unwrap_or_default(),
            finish: last.map_or(Finish::Unfinished, |last| last.finish),
            metadata: parts.iter().rev().find_map(|part| part.metadata.clone()),
        }
    }

    fn logged(parts: &'a [Record]) -> Self {
        let last = parts.last();
        Said {
            response: last.map(Record::response).unwrap_or_default(),
            finish: last.map_or(Finish::Unfinished, Record::finish),
            metadata: parts.first().and_then(|first| Kept::of(first).metadata),
        }
    }

    /// The answer as rewards see it.
    pub(super) fn answer(self, task: &Task, sample: u64, prompt: &Prompt) -> Result<Answer> {
        Ok(Answer {
            sample,
            prompt: prompt.text.clone(),
            response: task.source.tokenizer().decode(self.response)?,
            label: prompt.label.clone(),
            metadata: self.metadata.or_else(|| prompt.metadata.clone()),
            truncated: self.finish == Finish::Length,
            response_length: self.response.len(),
        })
    }
}

/// The rewards of a group: as many as answers, and finite.
pub(super) async fn rewards(task: &Task, answers: &[Answer]) -> Result<Vec<f32>> {
    checked(answers, task.reward.score(answers).await?)
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
