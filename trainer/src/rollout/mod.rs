//! Rollouts: the groups that a step learns from, generated, rewarded and logged.
//!
//! The log alone says how far a run has come. A prompt that is taken is logged as in flight, with its
//! rollout, before an engine is asked. The samples of its group follow together with the record that it is
//! done. A run that was interrupted goes on with the prompts in flight, then takes the next ones.

mod group;
mod measure;
mod parts;
mod record;

pub use measure::EvalSet;
pub(crate) use parts::groups;
pub use record::PromptNote;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use derive_setters::Setters;
use driftless_bridge::{Label, Rid, SamplingParams};
use driftless_buffer::{self as buffer, PromptState};
use tokio::task::{JoinError, JoinSet};

use crate::error::{Error, Result};
use crate::sample::{Engines, Prompt, Turn};
use crate::seed::first_bits;
use crate::tasks::Task;
use group::{Group, Outcome};

/// Groups of a rollout that may fail, beyond a quarter of it.
const FAILED_MAX: u64 = 8;
/// Groups that the filter may leave out, for each that is wanted.
const FILTERED_MAX: u64 = 16;

/// Takes the rollout, its samples in the log and its samples in all; called from several threads.
pub type Progress = Arc<dyn Fn(u64, u64, u64) + Send + Sync>;

/// Settings of rollouts. Field names follow slime's flags.
#[derive(Debug, Clone, Setters)]
#[setters(prefix = "with_", strip_option)]
#[non_exhaustive]
pub struct RolloutOptions {
    /// Keeps request ids of two runs apart on a shared engine.
    pub scope: u64,
    /// Seed of sampling.
    pub seed: u64,
    /// Prompts of a rollout.
    pub rollout_batch_size: u64,
    /// Samples of a prompt; they form a group.
    pub n_samples_per_prompt: u64,
    /// How tokens are drawn. Its seed is not used: each sample has its own.
    pub sampling: SamplingParams,
    /// Tokens that prompt and response may have together.
    pub rollout_max_context_len: Option<usize>,
    /// Ids of the model are below it, where that is known.
    pub vocabulary: Option<u64>,
}

impl RolloutOptions {
    /// So many prompts and samples of each, at the sampling's defaults and with seed 1.
    #[must_use]
    pub fn new(rollout_batch_size: u64, n_samples_per_prompt: u64) -> Self {
        RolloutOptions {
            scope: 0,
            seed: 1,
            rollout_batch_size,
            n_samples_per_prompt,
            sampling: SamplingParams::default(),
            rollout_max_context_len: None,
            vocabulary: None,
        }
    }
}

/// What became of a rollout's groups, besides those in the log.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Dropped {
    /// Groups with a sample that was not generated or got no reward.
    pub failed: u64,
    /// Groups that the task's filter left out.
    pub filtered: u64,
}

/// Everything a rollout is made from.
pub struct Rollouts {
    /// The engines.
    pub engines: Arc<dyn Engines>,
    /// What is learned.
    pub task: Task,
    /// Where samples and prompts are kept.
    pub log: buffer::Log,
    /// Called with the progress.
    pub progress: Progress,
    /// Settings.
    pub options: RolloutOptions,
}

impl Rollouts {
    /// Completes `rollout` in the log. On return all its samples are durable.
    ///
    /// No engine whose weights are older than `minimum` is asked; without one, any engine is. A group with a
    /// sample that fails is left out, and so is one that the task does not keep: the next prompt takes its
    /// place.
    ///
    /// # Errors
    /// [`Error::Unlearnable`] when too many groups are left out, [`Error::OtherPrompt`] when the prompts have
    /// changed, and what the log says.
    pub async fn generate(self: Arc<Self>, rollout: u64, minimum: Option<Label>) -> Result<Dropped> {
        let wanted = self.options.rollout_batch_size;
        let samples = self.options.n_samples_per_prompt as usize;
        let complete = self.groups(rollout);
        let complete: BTreeSet<u64> = complete.iter().map(|group| group.group_id).collect();
        let mut kept = complete.len() as u64;
        let mut running = JoinSet::new();
        let mut dropped = Dropped::default();
        let in_flight = self.in_flight(rollout).await?.into_iter();
        let (done, unfinished): (Vec<_>, Vec<_>) =
            in_flight.partition(|(number, _)| complete.contains(number));
        // A crash came between the last sample of these and the record that they are done.
        let done = done.into_iter().map(|(number, prompt)| Group {
            number,
            prompt,
            outcome: Outcome::Kept(Vec::new()),
        });
        tokio::task::block_in_place(|| self.append(rollout, &done.collect::<Vec<_>>()))?;
        for (number, prompt) in unfinished.into_iter().take(wanted.saturating_sub(kept) as usize) {
            running.spawn(self.clone().group(rollout, number, prompt, minimum.clone()));
        }
        loop {
            let missing = wanted.saturating_sub(kept + running.len() as u64);
            for (number, prompt) in self.assign(rollout, missing).await? {
                running.spawn(self.clone().group(rollout, number, prompt, minimum.clone()));
            }
            let Some(first) = running.join_next().await else { return Ok(dropped) };
            // What has arrived meanwhile shares the sync.
            let mut arrived = vec![finished(first)?];
            while let Some(next) = running.try_join_next() {
                arrived.push(finished(next)?);
            }
            tokio::task::block_in_place(|| self.append(rollout, &arrived))?;
            for group in &arrived {
                let last = match &group.outcome {
                    Outcome::Kept(_) => {
                        kept += 1;
                        continue;
                    }
                    Outcome::Failed(error) => {
                        dropped.failed += 1;
                        error.clone()
                    }
                    Outcome::Filtered(why) => {
                        dropped.filtered += 1;
                        why.clone()
                    }
                };
                tracing::warn!(rollout, prompt = %group.prompt.place, "group left out: {last}");
                self.check(rollout, kept, dropped, last)?;
            }
            (self.progress)(rollout, kept * samples as u64, wanted * samples as u64);
        }
    }

    /// The groups of a rollout that are whole in the log, with all samples of their answers.
    #[must_use]
    pub fn groups(&self, rollout: u64) -> Vec<driftless_buffer::Group> {
        groups(&self.log.reader(), rollout, self.options.n_samples_per_prompt as usize)
    }

    /// Ends a rollout that loses more groups than chance explains.
    fn check(&self, rollout: u64, kept: u64, dropped: Dropped, last: String) -> Result<()> {
        let Dropped { failed, filtered } = dropped;
        let wanted = self.options.rollout_batch_size;
        if failed <= wanted / 4 + FAILED_MAX && filtered <= wanted.saturating_mul(FILTERED_MAX) {
            return Ok(());
        }
        Err(Error::Unlearnable { rollout, failed, filtered, kept, last })
    }

    /// The prompts that a crash left in flight for `rollout`. Prompts that have changed are refused.
    async fn in_flight(&self, rollout: u64) -> Result<BTreeMap<u64, Prompt>> {
        let mut prompts = BTreeMap::new();
        for record in self.log.reader().prompts(PromptState::InFlight) {
            let number = record.scalars().sample_id;
            if record.scalars().rollout_id != rollout {
                continue;
            }
            let prompt = self.task.source.prompt(number).await?;
            if prompt.tokens != record.tokens() {
                return Err(Error::OtherPrompt { number, source_now: prompt.place.to_string() });
            }
            prompts.insert(number, prompt);
        }
        Ok(prompts)
    }

    /// Takes the next prompts for `rollout` and makes that durable.
    async fn assign(&self, rollout: u64, count: u64) -> Result<Vec<(u64, Prompt)>> {
        if count == 0 {
            return Ok(Vec::new());
        }
        let next = self.log.reader().next_prompt();
        let numbers = next..next.saturating_add(count);
        let prompts =
            numbers.map(async |number| Ok::<_, Error>((number, self.task.source.prompt(number).await?)));
        let prompts = futures_util::future::try_join_all(prompts).await?;
        let note = |(_, prompt): &(u64, Prompt)| PromptNote::in_flight(prompt).bytes();
        let notes: Vec<_> = prompts.iter().map(note).collect();
        let records = prompts.iter().zip(&notes);
        let records: Vec<_> = records
            .map(|((number, prompt), note)| {
                record::prompt(*number, rollout, PromptState::InFlight, &prompt.tokens, note)
            })
            .collect();
        tokio::task::block_in_place(|| self.log.append_all(&records))?;
        Ok(prompts)
    }

    /// How one sample is to be generated.
    fn turn<'a>(
        &'a self,
        sample: u64,
        sampling: &SamplingParams,
        minimum: Option<&'a Label>,
        evaluation: bool,
    ) -> Turn<'a> {
        let sampling_seed = Some(sampling_seed(self.options.seed, sample));
        Turn {
            engines: &*self.engines,
            minimum,
            sample,
            rid: Rid::new(self.options.scope, sample),
            sampling: SamplingParams { sampling_seed, ..sampling.clone() },
            max_context_len: self.options.rollout_max_context_len,
            vocabulary: self.options.vocabulary,
            evaluation,
        }
    }
}

/// The result of a task; a panic in it goes on here.
pub(crate) fn finished<T>(joined: std::result::Result<T, JoinError>) -> Result<T> {
    joined.map_err(|error| match error.try_into_panic() {
        Ok(panic) => std::panic::resume_unwind(panic),
        Err(_) => Error::Cancelled,
    })
}

/// The seed of a sample is the same whenever the sample is asked for: one that a crash lost comes back as it was.
fn sampling_seed(seed: u64, sample: u64) -> u64 {
    let digest = blake3::hash(&[seed.to_le_bytes(), sample.to_le_bytes()].concat());
    // SGLang keeps seeds in signed 64-bit tensors.
    first_bits(digest.as_bytes()) >> 1
}
