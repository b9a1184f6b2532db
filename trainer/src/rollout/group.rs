//! One prompt: its answers, their rewards, and whether they are kept.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use driftless_bridge::engine::Meter;
use driftless_buffer::sample::Verdict;
use driftless_buffer::{Finish, Record, Scalars};
use driftless_store::chain_text;

use super::keep::Keeper;
use super::parts::{Kept, components, parts};
use super::pieces::{self, Durable};
use super::record::{Answered, FailedAnswer, Scored};
use super::{Begun, Rollouts};
use crate::error::{Error, Result, input};
use crate::failure::Failure;
use crate::metrics::unix_us;
use crate::reward::Given;
use crate::sample::{Answer, Prompt, Trajectory, answers_of};
use crate::tasks::Task;

/// Answers that may fail of a group of so many. Half of them are left, as a hook that mostly fails has a mistake; and two, as
/// one alone is compared with none.
fn failed_max(answers: u64) -> u64 {
    answers.saturating_sub(answers.div_ceil(2).max(2))
}

/// A group that is no longer worked on.
pub(super) struct Group {
    pub(super) begun: Begun,
    pub(super) outcome: Outcome,
    /// Its answers that failed. What failed the whole group is not among them.
    pub(super) failed: Vec<FailedAnswer>,
}

/// What became of a group. The log has its answers by then, as far as there are any.
pub(super) enum Outcome {
    /// The scores that the log lacks.
    Kept(Vec<Scored>),
    /// What went wrong, and which kind of failure that is.
    Failed(String, Failure),
    /// The task does not learn from it, for this reason.
    Filtered(Vec<Scored>, String),
    /// It is to be tried again, for this reason: no engine could generate it, or its reward was away.
    Returned(Error),
}

impl Outcome {
    pub(super) fn failed(error: &Error) -> Self {
        Outcome::Failed(chain_text(error), error.failure())
    }
}

impl Group {
    /// Whether it ended before answers of it did, or without some.
    pub(super) fn lacks_answers(&self) -> bool {
        match self.outcome {
            Outcome::Kept(_) | Outcome::Filtered(..) => !self.failed.is_empty(),
            Outcome::Failed(..) => true,
            Outcome::Returned(_) => false,
        }
    }

    /// The scores that are to be written.
    pub(super) fn scores(&self) -> &[Scored] {
        match &self.outcome {
            Outcome::Kept(scores) | Outcome::Filtered(scores, _) => scores,
            Outcome::Failed(..) | Outcome::Returned(_) => &[],
        }
    }
}

/// An answer that is durable.
struct Drawn {
    answered: Arc<Answered>,
    /// Whether its record has its reward, as those of releases before have.
    is_scored: bool,
    /// What this process drew of it in the attempt that came out well.
    meter: Option<Meter>,
}

/// Answers of a group that fail, of which it takes so many.
struct Failing<'a> {
    begun: &'a Begun,
    most: u64,
    failed: &'a Mutex<Vec<FailedAnswer>>,
}

impl Failing<'_> {
    /// How many more may fail.
    fn room(&self) -> usize {
        let failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner).len();
        (self.most as usize).saturating_sub(failed)
    }

    /// The group goes on without an answer.
    ///
    /// # Errors
    /// The error itself, where too many have failed before.
    fn goes_on(&self, answer: u64, error: Error) -> Result<()> {
        let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(error, Error::Cancelled) || failed.len() as u64 >= self.most {
            return Err(error);
        }
        let (prompt, error_text) = (&self.begun.prompt.place, chain_text(&error));
        tracing::warn!(%prompt, answer, error = error_text, "group goes on without an answer");
        failed.push(FailedAnswer::new(answer, &error));
        Ok(())
    }
}

impl Rollouts {
    /// Generates what the log lacks of a group, which is durable as each answer ends, and rewards it.
    pub(super) async fn group(self: Arc<Self>, begun: Begun, keeper: Keeper) -> Group {
        let failed = Mutex::default();
        let outcome = match self.make(&begun, &keeper, &failed).await {
            Ok(outcome) => outcome,
            Err(Error::Bridge(error)) if error.is_no_engine() => Outcome::Returned(error.into()),
            // The log could not be written, which the run ends with.
            Err(error @ Error::Cancelled) => Outcome::Returned(error),
            Err(error) => Outcome::failed(&error),
        };
        Group { begun, outcome, failed: failed.into_inner().unwrap_or_else(PoisonError::into_inner) }
    }

    async fn make(
        &self,
        begun: &Begun,
        keeper: &Keeper,
        failed: &Mutex<Vec<FailedAnswer>>,
    ) -> Result<Outcome> {
        let answers = self.options.n_samples_per_prompt;
        let failing = Failing { begun, most: failed_max(answers), failed };
        let drawn = answers_of(begun.number, answers)?.map(async |answer| {
            match self.draw(begun, keeper, answer).await {
                Ok(drawn) => Ok(Ok(Some(drawn))),
                // The group is tried again: the others go on, and are there by then.
                Err(Error::Bridge(error)) if error.is_no_engine() => Ok(Err(error)),
                Err(error) => failing.goes_on(answer, error).map(|()| Ok(None)),
            }
        });
        let drawn = futures_util::future::try_join_all(drawn).await?.into_iter();
        let drawn: Vec<Drawn> =
            drawn.filter_map(driftless_bridge::Result::transpose).collect::<driftless_bridge::Result<_>>()?;
        match self.score(drawn, &failing).await {
            Err(error) if error.is_away() => {
                // Its answers are in the log, and wait there for the reward.
                tokio::time::sleep(self.options.reward_pause).await;
                Ok(Outcome::Returned(error))
            }
            outcome => outcome,
        }
    }

    /// Makes an answer durable, unless the log has it.
    async fn draw(&self, begun: &Begun, keeper: &Keeper, answer: u64) -> Result<Drawn> {
        let Begun { number, seat, prompt, minimum, .. } = begun;
        if let Some(drawn) = self.logged(*number, answer) {
            return Ok(drawn);
        }
        let asked = unix_us(SystemTime::now()).cast_signed();
        let pieces = begun.pieces.get(&answer).map_or(&[][..], Vec::as_slice);
        let mut attempt = pieces::attempt(pieces);
        let (parts, first_us, meter) = loop {
            let underway = Durable::new(keeper, pieces, answer, *number, *seat);
            let sampling = &self.options.sampling;
            let turn = self.turn(*number, answer, attempt, sampling, minimum.as_ref(), Some(&underway));
            match self.task.generate(prompt, &turn).await {
                Ok(parts) => break (parts, underway.first_us(), turn.meter.clone()),
                Err(error) => {
                    let failure = error.failure();
                    // Without an engine, and at the end of the run, it goes on later behind its tokens.
                    let goes_on = matches!(&error, Error::Bridge(error) if error.is_no_engine());
                    if !goes_on && !matches!(error, Error::Cancelled) {
                        self.queue.lost(*number, &turn.meter);
                    }
                    attempt = self.attempt_after(attempt, error)?;
                    self.queue.failed(failure, true);
                }
            }
        };
        check_count(&parts)?;
        let scalars =
            Scalars { group_id: *number, rollout_id: *seat, score_follows: true, ..Scalars::default() };
        let times = [asked, first_us, unix_us(SystemTime::now()).cast_signed()];
        let answered = Arc::new(Answered { answer, beside: Kept::bytes(&parts), parts, scalars, times });
        keeper.keep(answered.clone()).await?;
        Ok(Drawn { answered, is_scored: false, meter: Some(meter) })
    }

    /// The attempt at an answer that follows one that failed, unless it may not be made again.
    pub(super) fn attempt_after(&self, attempt: u64, error: Error) -> Result<u64> {
        if !error.is_made_again() || attempt >= self.options.hook_retries {
            return Err(error);
        }
        tracing::warn!(error = chain_text(&error), "answer is made again");
        Ok(attempt + 1)
    }

    /// Rewards answers, and chooses what is learned from.
    async fn score(&self, drawn: Vec<Drawn>, failing: &Failing<'_>) -> Result<Outcome> {
        let (task, prompt) = (&self.task, &failing.begun.prompt);
        let answers =
            drawn.iter().map(|Drawn { answered, .. }| answer(task, answered.answer, prompt, &answered.parts));
        let answers = answers.collect::<Result<Vec<_>>>()?;
        let given = rewards(task, &answers).await?;
        let (mut left, mut answers_left, mut lacking) = (Vec::new(), Vec::new(), Vec::new());
        for ((drawn, answer), given) in drawn.into_iter().zip(answers).zip(given) {
            match given {
                Ok(given) => {
                    left.push((drawn, given));
                    answers_left.push(answer);
                }
                Err(error) => lacking.push((drawn, error)),
            }
        }
        let room = failing.room();
        if lacking.len() > room {
            return Err(lacking.swap_remove(room).1);
        }
        // A hook that is away has the group rewarded again: nothing has failed by then.
        let outcome = self.choose(&left, &answers_left).await?;
        for (drawn, error) in lacking {
            failing.goes_on(drawn.answered.answer, error)?;
            drawn.meter.iter().for_each(|meter| self.queue.lost(failing.begun.number, meter));
        }
        Ok(outcome)
    }

    /// Chooses what is learned from of answers that have rewards.
    async fn choose(&self, drawn: &[(Drawn, Given)], answers: &[Answer]) -> Result<Outcome> {
        let task = &self.task;
        let raw: Vec<f32> = drawn.iter().map(|(_, given)| given.reward).collect();
        let unscored = |verdict: &dyn Fn(usize) -> Verdict, rewards: &[f32]| {
            let all = drawn.iter().zip(rewards).enumerate();
            let lacking = all.filter(|(_, ((drawn, _), _))| !drawn.is_scored);
            let scored = lacking.map(|(index, ((drawn, given), &reward))| {
                let Answered { answer, parts, .. } = &*drawn.answered;
                Scored::new(*answer, given, reward, components(parts), verdict(index))
            });
            scored.collect::<Vec<_>>()
        };
        if let Some(why) = task.filters.leave_out(answers, &raw).await? {
            return Ok(Outcome::Filtered(unscored(&|_| Verdict::LeftOut, &raw), why));
        }
        let removed = task.filters.remove(answers, &raw).await?;
        let rewards = task.filters.post_process(answers, raw.clone()).await?;
        let verdict = |index| match removed.get(index) {
            Some(true) => Verdict::Masked,
            _ => Verdict::Kept,
        };
        Ok(Outcome::Kept(unscored(&verdict, &rewards)))
    }

    /// An answer that is in the log, as far as rewards are told of it.
    fn logged(&self, group: u64, answer: u64) -> Option<Drawn> {
        let said = |record: &Record| Trajectory {
            finish: record.finish(),
            ..Trajectory::new(record.tokens().to_vec(), record.prompt_len().min(record.tokens().len()))
        };
        let records = parts(&self.log.reader(), group, answer)?;
        let mut parts: Vec<Trajectory> = records.iter().map(said).collect();
        let (first, record) = (parts.first_mut()?, records.first()?);
        let kept = Kept::of(record);
        (first.metadata, first.reward, first.components) = (kept.metadata, kept.reward, kept.components);
        let (scalars, is_scored) = (*record.scalars(), !record.scalars().score_follows);
        let answered = Answered { answer, parts, scalars, times: [0; 3], beside: Vec::new() };
        Some(Drawn { answered: Arc::new(answered), is_scored, meter: None })
    }
}

/// Refuses answers of more samples than their records can count.
pub(super) fn check_count(parts: &[Trajectory]) -> Result<()> {
    let found = parts.len();
    match u16::try_from(found) {
        Ok(1..) => Ok(()),
        _ => Err(input("samples", format!("1 to {} samples of an answer", u16::MAX), found)),
    }
}

/// The answer as rewards see it: what its last part says.
///
/// # Errors
/// Those of the tokenizer.
pub fn answer(task: &Task, sample: u64, prompt: &Prompt, parts: &[Trajectory]) -> Result<Answer> {
    let last = parts.last();
    let response = last.and_then(|last| last.tokens.get(last.prompt_len..)).unwrap_or_default();
    let metadata = parts.iter().rev().find_map(|part| part.metadata.clone());
    Ok(Answer {
        sample,
        prompt: prompt.text.clone(),
        response: task.source.tokenizer().decode(response)?,
        label: prompt.label.clone(),
        metadata: metadata.or_else(|| prompt.metadata.clone()),
        given: parts.iter().rev().find_map(|part| part.reward),
        truncated: last.is_some_and(|last| last.finish == Finish::Length),
        response_length: response.len(),
    })
}

/// What each answer of a group is given, in order: a finite number, or why it has none. What its hook gave one is not asked
/// about.
///
/// # Errors
/// Those of the reward, and [`Error::Reward`] where it does not speak of each answer.
pub async fn rewards(task: &Task, answers: &[Answer]) -> Result<Vec<Result<Given>>> {
    let lacking: Vec<Answer> = answers.iter().filter(|answer| answer.given.is_none()).cloned().collect();
    let scored = if lacking.is_empty() { Vec::new() } else { task.reward.score(&lacking).await? };
    if let Some(first) = lacking.first().filter(|_| scored.len() != lacking.len()) {
        let found = format!("{} for {} answers", scored.len(), lacking.len());
        return Err(first.refused("a reward for each answer", found, "correct the reward"));
    }
    let mut scored = scored.into_iter();
    let of = |answer: &Answer| {
        let given = answer.given.map(|reward| Ok(reward.into())).or_else(|| scored.next())?;
        Some(given.and_then(|given| checked(answer, given)))
    };
    Ok(answers.iter().filter_map(of).collect())
}

fn checked(answer: &Answer, given: Given) -> Result<Given> {
    let odd = given.components.values().chain([&given.reward]).copied().find(|number| !number.is_finite());
    match odd {
        Some(number) => Err(answer.refused("one finite number", number, "correct the reward")),
        None => Ok(given),
    }
}
