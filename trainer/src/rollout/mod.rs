//! Rollouts: groups that are generated, rewarded and logged, and from which steps learn.
//!
//! A group is generated for the log, and no step is named. Its prompt is logged as in flight before an engine is asked.
//! Tokens are logged as they come, where the engine streams, and an answer the moment it ends. Scores follow, together with the record that the prompt is done. [`Queue`]
//! says which groups are generated when, and which a step takes. A run that was interrupted goes on with the answers that
//! the prompts in flight lack, each behind its tokens, then takes the next prompts.

mod curriculum;
mod fates;
mod group;
mod keep;
mod log;
mod measure;
mod parts;
mod pieces;
mod queue;
mod record;

pub use crate::schedule::Policy;
pub use group::{answer, rewards};
pub use log::open_log;
pub use measure::{EVAL_FOLLOWER, EvalSet};
pub(crate) use parts::{Kept, group, raw_reward};
pub use queue::{Dropped, Failures, Queue, Since};
pub(crate) use record::leave_out;
pub use record::{EvaluationNote, FailedAnswer, PromptNote};

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use derive_setters::Setters;
use driftless_bridge::{Label, Rid, SamplingParams};
use driftless_buffer as buffer;
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::task::{AbortHandle, Id, JoinError, JoinSet};

use crate::error::{Error, Result};
use crate::sample::{Engines, Prompt, Turn, Underway, answers_of};
use crate::schedule::Seen;
use crate::seed::first_bits;
use crate::tasks::Task;
use curriculum::Curriculum;
use group::{Group, Outcome};
use keep::Keeper;
use pieces::Pieces;
use queue::Order;

/// Groups that may fail for one step, beyond a quarter of those that were tried.
const FAILED_MAX: u64 = 8;
/// Groups that the filter may leave out, for each that a step wants, while it keeps none.
const FILTERED_MAX: u64 = 16;
/// Groups in a row that come back, because no engine could generate them or their reward was away.
const RETURNED_MAX: usize = 3;

/// Times that an answer is made again whose hook died or was late, unless told.
pub const HOOK_RETRIES: u64 = 2;

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
    /// Times that an answer is made again whose hook died or was late.
    pub hook_retries: u64,
    /// How long a reward that is away is left alone before it is asked again.
    pub reward_pause: Duration,
    /// Prompts whose answers have at least this mean reward rest in the next epoch, longer each time. Only where the source has
    /// an [order](crate::tasks::DataSource::order).
    pub easy_threshold: Option<f64>,
}

impl RolloutOptions {
    /// So many prompts and samples of each, at the sampling's defaults and with seed 1. An answer is made again
    /// [`HOOK_RETRIES`] times at most, and a reward has 10 s to come back.
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
            hook_retries: HOOK_RETRIES,
            reward_pause: Duration::from_secs(10),
            easy_threshold: None,
        }
    }
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
    /// Which groups are generated when.
    pub queue: Arc<Queue>,
    /// Settings.
    pub options: RolloutOptions,
}

impl Rollouts {
    /// Generates groups as the queue says, until it is dropped. What it tells the queue of is durable.
    ///
    /// An answer whose hook died or was late is made again, with other draws. A group goes on without answers that fail, as
    /// long as it has two. One that has not is left out, and so is one that the task does not keep: the next prompt takes
    /// its place. A group that no engine could generate is tried again, and one whose reward was away is rewarded again.
    ///
    /// # Errors
    /// [`Error::Unlearnable`] when too many groups are left out, [`Error::OtherPrompt`] when the prompts have
    /// changed, [`Error::Bridge`] while no engine generates, that of a reward that stays away, and what the log says.
    pub async fn run(self: Arc<Self>) -> Result<()> {
        let mut running = Running::default();
        let mut returned = Returned::default();
        let (keeper, mut keeping) = Keeper::start(self.clone());
        let (order, threshold) = (self.task.source.order(), self.options.easy_threshold);
        let mut curriculum = blocking(|| Curriculum::open(&self.log.reader(), order, threshold))?;
        loop {
            running.stop(&self.queue.stopped());
            let (whole, begun) = self.begin(&mut curriculum, self.queue.start(now())).await?;
            for begun in begun {
                running.spawn(begun.number, self.clone().group(begun, keeper.clone()));
            }
            let mut arrived = whole;
            if arrived.is_empty() {
                tokio::select! {
                    biased;
                    // It has ended with an error of the log, as long as there is a handle of it.
                    ended = &mut keeping => return finished(ended)?,
                    Some(first) = running.tasks.join_next_with_id() => {
                        arrived.extend(self.reap(&mut running, first)?);
                    }
                    () = self.queue.changed() => continue,
                }
            }
            // What has arrived meanwhile shares the sync.
            while let Some(next) = running.tasks.try_join_next_with_id() {
                arrived.extend(self.reap(&mut running, next)?);
            }
            let mut arrived: Vec<_> = arrived.into_iter().map(|group| returned.judge(group)).collect();
            arrived.iter_mut().for_each(|group| self.see(&mut curriculum, group));
            // What was drawn of those would lie behind the end of their group, and no removal would find it done.
            if arrived.iter().any(Group::lacks_answers) && keeper.settle().await.is_err() {
                return finished((&mut keeping).await)?;
            }
            blocking(|| self.append(&arrived))?;
            for group in arrived {
                self.end(group, returned.row.len())?;
            }
        }
    }

    /// What became of the task of a group. One that was stopped is to be tried again, and is no failure.
    fn reap(&self, running: &mut Running, joined: Joined) -> Result<Option<Group>> {
        let id = joined.as_ref().map_or_else(JoinError::id, |(id, _)| *id);
        let number = running.groups.remove(&id).map(|(number, _)| number);
        match (joined, number) {
            (Err(error), Some(number)) if error.is_cancelled() => {
                self.queue.end(Seen::Returned(number), Dropped::default(), now());
                Ok(None)
            }
            (joined, _) => finished(joined.map(|(_, group)| group)).map(Some),
        }
    }

    /// Takes note of how easy the prompt of a group was that ended.
    fn see(&self, curriculum: &mut Curriculum, group: &mut Group) {
        if matches!(group.outcome, Outcome::Returned(_)) {
            return;
        }
        let mut rewards: Vec<f32> =
            group.scores().iter().filter_map(|score| score.rewards.first().copied()).collect();
        let is_scored = rewards.is_empty() && matches!(group.outcome, Outcome::Kept(_));
        if is_scored && curriculum.looks_at_rewards() {
            let logged = self.logged_group(group.begun.number);
            rewards = logged.iter().flat_map(|group| &group.records).map(raw_reward).collect();
        }
        group.begun.easy = curriculum.see(group.begun.number, &rewards);
    }

    /// Tells of a group that is no longer worked on; so many came back in a row.
    fn end(&self, group: Group, row: usize) -> Result<()> {
        let Group { begun, outcome, failed } = group;
        let (number, prompt) = (begun.number, begun.prompt.place);
        let is_again = matches!(outcome, Outcome::Returned(_));
        for FailedAnswer { outcome, .. } in failed {
            self.queue.failed(outcome, is_again);
        }
        let mut dropped = Dropped::default();
        let last = match outcome {
            Outcome::Kept(_) => {
                self.queue.end(Seen::Accepted(number), dropped, now());
                self.tell_progress();
                return Ok(());
            }
            Outcome::Returned(error) if row >= RETURNED_MAX => return Err(error),
            Outcome::Returned(error) => {
                tracing::warn!(%prompt, %error, "group is tried again");
                self.queue.end(Seen::Returned(number), dropped, now());
                return Ok(());
            }
            Outcome::Failed(error, failure) => {
                dropped.failed = 1;
                self.queue.failed(failure, false);
                error
            }
            Outcome::Filtered(_, why) => {
                dropped.filtered = 1;
                why
            }
        };
        tracing::warn!(%prompt, "group left out: {last}");
        let since = self.queue.end(Seen::LeftOut(number), dropped, now());
        self.check(since, last)
    }

    fn tell_progress(&self) {
        let RolloutOptions { n_samples_per_prompt: samples, rollout_batch_size: batch, .. } = self.options;
        (self.progress)(self.queue.next_step(), self.queue.finished() * samples, batch * samples);
    }

    /// The group of this number, if it is whole in the log, with all samples of its answers.
    #[must_use]
    pub fn logged_group(&self, number: u64) -> Option<buffer::Group> {
        parts::group(&self.log.reader(), number, self.options.n_samples_per_prompt)
    }

    /// Ends a run that loses more groups than chance explains.
    fn check(&self, since: Since, last: String) -> Result<()> {
        let Since { kept, dropped: Dropped { failed, filtered, .. }, .. } = since;
        let wanted = self.options.rollout_batch_size;
        let tried = kept + failed + filtered;
        if failed <= tried / 4 + FAILED_MAX && (kept > 0 || filtered <= wanted.saturating_mul(FILTERED_MAX)) {
            return Ok(());
        }
        Err(Error::Unlearnable { rollout: self.queue.next_step(), failed, filtered, kept, last })
    }

    /// Gets the prompts of these groups, and makes durable that new ones are in flight. Groups that a crash left
    /// whole without the record that they are done come first. Prompts that have changed are refused.
    async fn begin(
        &self,
        curriculum: &mut Curriculum,
        orders: Vec<Order>,
    ) -> Result<(Vec<Group>, Vec<Begun>)> {
        let orders = orders.into_iter().map(|order| {
            let asked = match order.start.is_new {
                true => curriculum.take(order.start.group),
                false => curriculum.place(&self.log.reader(), order.start.group)?,
            };
            Ok((order, asked))
        });
        let orders = orders.collect::<Result<Vec<_>>>()?;
        let prompts = orders.into_iter().map(async |(Order { start, minimum }, asked)| {
            let (number, seat) = (start.group, start.seat);
            answers_of(number, self.options.n_samples_per_prompt)?;
            let prompt = self.task.source.prompt(asked).await?;
            let pieces = Pieces::default();
            let begun = Begun { number, seat, asked, easy: None, prompt, minimum, pieces };
            Ok::<_, Error>((start.is_new, begun))
        });
        let prompts = futures_util::future::try_join_all(prompts).await?;
        let (fresh, known): (Vec<_>, Vec<_>) = prompts.into_iter().partition(|(is_new, _)| *is_new);
        let fresh: Vec<Begun> = fresh.into_iter().map(|(_, begun)| begun).collect();
        if !fresh.is_empty() {
            blocking(|| self.append_begun(&fresh))?;
        }
        let (mut whole, mut begun) = (Vec::new(), Vec::new());
        let numbers: Vec<u64> = known.iter().map(|(_, known)| known.number).collect();
        let mut pieces = blocking(|| pieces::read(&self.log.reader(), &numbers))?;
        for (_, mut known) in known {
            self.check_prompt(&known)?;
            let answers = answers_of(known.number, self.options.n_samples_per_prompt)?;
            known.pieces = pieces.extract_if(answers, |_, _| true).collect();
            match self.logged_group(known.number) {
                Some(_) => {
                    let outcome = Outcome::Kept(Vec::new());
                    whole.push(Group { begun: known, outcome, failed: Vec::new() });
                }
                None => begun.push(known),
            }
        }
        begun.extend(fresh);
        Ok((whole, begun))
    }

    /// Refuses a prompt that is another than when it was taken.
    fn check_prompt(&self, begun: &Begun) -> Result<()> {
        match self.log.reader().prompt(begun.number)? {
            Some(record) if record.tokens() != begun.prompt.tokens => {
                let source_now = begun.prompt.place.to_string();
                Err(Error::OtherPrompt { number: begun.number, source_now })
            }
            _ => Ok(()),
        }
    }

    /// How one sample of a group is to be generated; its tokens are kept as they come, unless it is measured only.
    fn turn<'a>(
        &'a self,
        group: u64,
        sample: u64,
        attempt: u64,
        sampling: &SamplingParams,
        minimum: Option<&'a Label>,
        underway: Option<&'a dyn Underway>,
    ) -> Turn<'a> {
        let sampling_seed = Some(sampling_seed(self.options.seed, sample, attempt));
        Turn {
            engines: &*self.engines,
            minimum,
            sample,
            attempt,
            group,
            rid: Rid::new(self.options.scope, sample),
            sampling: SamplingParams { sampling_seed, ..sampling.clone() },
            max_context_len: self.options.rollout_max_context_len,
            vocabulary: self.options.vocabulary,
            evaluation: underway.is_none(),
            meter: self.queue.meter(underway.is_some().then_some(group)),
            underway,
        }
    }
}

/// The task of a group that has ended.
type Joined = std::result::Result<(Id, Group), JoinError>;

/// The tasks of groups.
#[derive(Default)]
struct Running {
    tasks: JoinSet<Group>,
    groups: HashMap<Id, (u64, AbortHandle)>,
}

impl Running {
    fn spawn(&mut self, number: u64, group: impl Future<Output = Group> + Send + 'static) {
        let handle = self.tasks.spawn(group);
        self.groups.insert(handle.id(), (number, handle));
    }

    /// Stops the tasks of these groups in the order of their numbers. They then come as cancelled, or finished just before.
    fn stop(&self, numbers: &[u64]) {
        let stopped = self.groups.values().filter(|(number, _)| numbers.contains(number));
        let stopped: BTreeMap<u64, &AbortHandle> =
            stopped.map(|(number, handle)| (*number, handle)).collect();
        stopped.values().for_each(|handle| handle.abort());
    }
}

/// The groups that came back.
#[derive(Default)]
struct Returned {
    /// Those that did so one after another, by number.
    row: Vec<u64>,
    /// How often each did.
    times: BTreeMap<u64, usize>,
}

impl Returned {
    /// Counts a group that is no longer worked on. One that alone finds its reward away may be why that is away: it is
    /// left out.
    fn judge(&mut self, group: Group) -> Group {
        let Group { begun, outcome, failed } = group;
        let Outcome::Returned(error) = outcome else {
            self.times.remove(&begun.number);
            self.row.clear();
            return Group { begun, outcome, failed };
        };
        let times = self.times.entry(begun.number).or_default();
        *times += 1;
        self.row.push(begun.number);
        let is_alone = self.row.iter().all(|other| *other == begun.number);
        if error.is_away() && *times >= RETURNED_MAX && is_alone {
            self.times.remove(&begun.number);
            self.row.clear();
            return Group { begun, outcome: Outcome::failed(&error), failed };
        }
        Group { begun, outcome: Outcome::Returned(error), failed }
    }
}

/// A group under way.
pub(crate) struct Begun {
    number: u64,
    seat: u64,
    /// The number of its prompt, and how often in a row that was easy.
    asked: u64,
    easy: Option<u64>,
    prompt: Prompt,
    minimum: Option<Label>,
    /// What the log has of its answers that are not finished.
    pieces: Pieces,
}

/// The result of a task; a panic in it goes on here.
pub(crate) fn finished<T>(joined: std::result::Result<T, JoinError>) -> Result<T> {
    joined.map_err(|error| match error.try_into_panic() {
        Ok(panic) => std::panic::resume_unwind(panic),
        Err(_) => Error::Cancelled,
    })
}

/// Does what waits for a disk. Where the runtime has other threads, they go on meanwhile.
fn blocking<T>(work: impl FnOnce() -> T) -> T {
    match Handle::current().runtime_flavor() {
        RuntimeFlavor::CurrentThread => work(),
        _ => tokio::task::block_in_place(work),
    }
}

/// The time by the runtime's clock.
fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// The seed of an attempt at a sample is the same whenever it is asked for: one that a crash lost comes back as it was.
#[must_use]
pub fn sampling_seed(seed: u64, sample: u64, attempt: u64) -> u64 {
    let mut parts = [seed, sample].map(u64::to_le_bytes).to_vec();
    // Releases before knew the first attempt alone.
    parts.extend((attempt > 0).then(|| attempt.to_le_bytes()));
    let digest = blake3::hash(&parts.concat());
    // SGLang keeps seeds in signed 64-bit tensors.
    first_bits(digest.as_bytes()) >> 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Place;

    /// A group that was away.
    fn away(number: u64) -> Group {
        let place = Place { path: std::path::Path::new("prompts").into(), line: number };
        let prompt = Prompt::of_tokens(vec![1], place);
        let (pieces, minimum) = (Pieces::default(), None);
        let begun = Begun { number, seat: 0, asked: number, easy: None, prompt, minimum, pieces };
        let (expected, found) = ("a number".to_owned(), "nothing".to_owned());
        let error = Error::Reward { sample: number, expected, found, todo: "wait", is_away: true };
        Group { begun, outcome: Outcome::Returned(error), failed: Vec::new() }
    }

    #[test]
    fn group_that_is_away_behind_one_left_out_begins_a_row() {
        let mut returned = Returned::default();
        for nth in 1..=RETURNED_MAX {
            let is_left_out = matches!(returned.judge(away(7)).outcome, Outcome::Failed(..));
            assert_eq!(is_left_out, nth == RETURNED_MAX, "{nth}");
        }
        assert!(matches!(returned.judge(away(8)).outcome, Outcome::Returned(_)));
        assert_eq!(returned.row, [8]);
    }
}
