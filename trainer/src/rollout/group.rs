//! One prompt: its samples, their rewards, and whether they are kept.

use std::sync::Arc;
use std::time::SystemTime;

use driftless_buffer::{Finish, Record};
use driftless_store::chain_text;

use super::parts::{Kept, parts};
use super::{Begun, Rollouts};
use crate::error::{Error, Result};
use crate::sample::{Answer, Prompt, Trajectory, answers_of};
use crate::tasks::Task;

/// A group that is no longer worked on.
pub(super) struct Group {
    pub(super) begun: Begun,
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
    /// No engine could generate it, for this reason.
    Returned(Error),
}

/// An answer with its reward.
pub(super) struct Made {
    pub(super) answer: u64,
    /// At least one.
    pub(super) parts: Vec<Trajectory>,
    pub(super) reward: f32,
    /// The reward before it was processed, where that changed it.
    pub(super) raw_reward: Option<f32>,
    /// When its last token had come.
    pub(super) at: SystemTime,
}

/// An answer before its reward.
struct Drawn {
    answer: u64,
    parts: Vec<Trajectory>,
    at: SystemTime,
    /// Whether the log has it.
    is_logged: bool,
}

impl Rollouts {
    /// Generates and rewards what the log lacks of a group.
    pub(super) async fn group(self: Arc<Self>, begun: Begun) -> Group {
        let outcome = match self.make(&begun).await {
            Ok(outcome) => outcome,
            Err(Error::Bridge(error)) if error.is_no_engine() => Outcome::Returned(error.into()),
            Err(error) => Outcome::Failed(chain_text(&error)),
        };
        Group { begun, outcome }
    }

    async fn make(&self, begun: &Begun) -> Result<Outcome> {
        let count = self.options.n_samples_per_prompt;
        let Begun { number, prompt, minimum, .. } = begun;
        let drawn = answers_of(*number, count)?.map(|answer| async move {
            // A crash may have come between the samples of a group that were appended together.
            if let Some(parts) = self.logged(*number, answer) {
                return Ok(Drawn { answer, parts, at: SystemTime::UNIX_EPOCH, is_logged: true });
            }
            let turn = self.turn(*number, answer, &self.options.sampling, minimum.as_ref(), false);
            let parts = self.task.generate(prompt, &turn).await?;
            Ok::<_, Error>(Drawn { answer, parts, at: SystemTime::now(), is_logged: false })
        });
        let drawn = futures_util::future::try_join_all(drawn).await?;
        let task = &self.task;
        let answers = drawn.iter().map(|drawn| answer(task, drawn.answer, prompt, &drawn.parts));
        let answers = answers.collect::<Result<Vec<_>>>()?;
        let rewards = rewards(task, &answers).await?;
        if let Some(why) = task.filters.leave_out(&answers, &rewards).await? {
            return Ok(Outcome::Filtered(why));
        }
        let removed = task.filters.remove(&answers, &rewards).await?;
        let raw = rewards.clone();
        let rewards = checked(&answers, task.filters.post_process(&answers, rewards).await?)?;
        let mut made = Vec::new();
        for (index, (drawn, (reward, raw))) in drawn.into_iter().zip(rewards.into_iter().zip(raw)).enumerate()
        {
            let Drawn { answer, mut parts, at, is_logged } = drawn;
            if is_logged {
                continue;
            }
            if removed.get(index) == Some(&true) {
                parts.iter_mut().for_each(|part| part.loss_mask.fill(0));
            }
            made.push(Made { answer, parts, reward, raw_reward: (raw != reward).then_some(raw), at });
        }
        Ok(Outcome::Kept(made))
    }

    /// The parts of an answer that is in the log, as far as rewards are told of them.
    fn logged(&self, group: u64, answer: u64) -> Option<Vec<Trajectory>> {
        let said = |record: &Record| Trajectory {
            finish: record.finish(),
            ..Trajectory::new(record.tokens().to_vec(), record.prompt_len().min(record.tokens().len()))
        };
        let records = parts(&self.log.reader(), group, answer)?;
        let mut parts: Vec<Trajectory> = records.iter().map(said).collect();
        let (first, record) = (parts.first_mut()?, records.first()?);
        first.metadata = Kept::of(record).metadata;
        Some(parts)
    }
}

/// The answer as rewards see it: what its last part says.
pub(super) fn answer(task: &Task, sample: u64, prompt: &Prompt, parts: &[Trajectory]) -> Result<Answer> {
    let last = parts.last();
    let response = last.and_then(|last| last.tokens.get(last.prompt_len..)).unwrap_or_default();
    let metadata = parts.iter().rev().find_map(|part| part.metadata.clone());
    Ok(Answer {
        sample,
        prompt: prompt.text.clone(),
        response: task.source.tokenizer().decode(response)?,
        label: prompt.label.clone(),
        metadata: metadata.or_else(|| prompt.metadata.clone()),
        truncated: last.is_some_and(|last| last.finish == Finish::Length),
        response_length: response.len(),
    })
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
