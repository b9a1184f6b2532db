//! The crate's one error type.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::failure::Failure;

/// Everything that can go wrong in this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file or directory could not be read, written or renamed.
    #[error("cannot {action} {path}")]
    Io {
        /// What was attempted, as a verb: `read`, `write`, `rename` …
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The operating system's answer.
        source: std::io::Error,
    },
    /// A value cannot be written as JSON, or a JSON file does not parse.
    #[error("{path} is not the JSON expected of it")]
    Json {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// An option, or a file that it names, is not what it has to be.
    #[error("{what}: expected {expected}, found {found}")]
    Input {
        /// The option or file.
        what: String,
        /// What is allowed.
        expected: String,
        /// What was given.
        found: String,
    },
    /// A row of a data file cannot become a prompt.
    #[error("{place}: expected {expected}, found {found}; {todo}")]
    Row {
        /// File and line.
        place: Place,
        /// What a row has to be.
        expected: String,
        /// What this one is.
        found: String,
        /// What to do about it.
        todo: &'static str,
    },
    /// Every row of the data was refused.
    #[error("{files}: none of {rows} rows is a prompt to train on; the first was refused because: {first}")]
    NoPrompts {
        /// The files.
        files: String,
        /// Rows read.
        rows: u64,
        /// Why the first was refused; "there are no rows" if there are none.
        first: String,
    },
    /// The checkpoint's chat template or tokenizer cannot be used.
    #[error(transparent)]
    Agent(#[from] driftless_agent::Error),
    /// The tokens of a checkpoint are not those of what is to be learned.
    #[error(
        "the tokens of {path} are not the task's: expected {expected}, found {found}; give `prompt_data` of your own, or the checkpoint that goes with the task"
    )]
    OtherTokenizer {
        /// The checkpoint directory.
        path: PathBuf,
        /// What its tokens have to be.
        expected: String,
        /// What they are.
        found: String,
    },
    /// A prompt that the log knows is another now.
    #[error(
        "prompt {number} of the run is another than when it was first asked, now from {source_now}: the prompt files, their options or the seed have changed; go on with the same ones, or begin in another `save`"
    )]
    OtherPrompt {
        /// Number of the prompt in the run.
        number: u64,
        /// Where the prompt of that number is from now.
        source_now: String,
    },
    /// So many groups of a rollout were left out that something must be wrong.
    #[error(
        "rollout {rollout}: {failed} groups failed and {filtered} were filtered out before {kept} were complete; the last: {last}"
    )]
    Unlearnable {
        /// The rollout.
        rollout: u64,
        /// Groups with a sample that was not generated or got no reward.
        failed: u64,
        /// Groups that the filter left out.
        filtered: u64,
        /// Groups to learn from.
        kept: u64,
        /// Why the last was left out.
        last: String,
    },
    /// A publication or a store answered with an error.
    #[error(transparent)]
    Transport(#[from] driftless_transport::Error),
    /// Nobody answers for a run that is to be asked for its engines.
    #[error(
        "no run answered at {path} within {after:?}: its loop does not run, or has not attached its engines yet"
    )]
    NoRun {
        /// The socket.
        path: PathBuf,
        /// The deadline.
        after: Duration,
        /// What became of the connection.
        source: std::io::Error,
    },
    /// A run that is to be asked for its engines at a URL did not answer.
    #[error("the run at {url} gave no answer: its loop does not run, or has not attached its engines yet")]
    NoRunAt {
        /// Where it was asked.
        url: String,
        /// What became of the call.
        source: driftless_http::Error,
    },
    /// The engines of a run cannot be changed over HTTP.
    #[error("the engines cannot be listed and changed at `fleet_listen`")]
    FleetListen {
        /// Why not.
        source: driftless_http::Error,
    },
    /// The metrics of a run cannot be read over HTTP.
    #[error("the run's metrics cannot be read at `metrics_listen`")]
    MetricsListen {
        /// Why not.
        source: driftless_http::Error,
    },
    /// A run did not change its engines.
    #[error("the run at {run} refused: {why}")]
    FleetRefused {
        /// The run's directory, or its URL.
        run: String,
        /// Its reason.
        why: String,
    },
    /// The engines of this run cannot change while it runs.
    #[error(
        "the loop pushes versions into its engines (`push`), which are those that it began with: end the run, and go on with others in `rollout_external_engine_addrs`"
    )]
    FleetFixed,
    /// The state directory belongs to another run.
    #[error(
        "the state in {path} is of run `{found}`, not `{expected}`; give each run a directory of its own"
    )]
    OtherRun {
        /// The state directory.
        path: PathBuf,
        /// The run asked for.
        expected: String,
        /// The run it belongs to.
        found: String,
    },
    /// The training checkpoint was made with another setting, with which one run does not go on.
    #[error(
        "the run in {path} has {what} {found}, not {expected}; go on with that, or begin in another `save`"
    )]
    Resume {
        /// The state directory.
        path: PathBuf,
        /// The setting.
        what: String,
        /// What was asked for.
        expected: String,
        /// What the run has.
        found: String,
    },
    /// The process of the run's other half did not come, or did not go on.
    #[error("no {what} run beside {path}: waited {after:?} for the process that writes it")]
    NoHalf {
        /// The half.
        what: &'static str,
        /// What its process would write.
        path: PathBuf,
        /// How long it was waited for.
        after: Duration,
    },
    /// The same half of the run is another process already.
    #[error(
        "{path} is another process's, which runs this half of the run; end that one, or give another `save`"
    )]
    HalfRuns {
        /// What this half writes.
        path: PathBuf,
    },
    /// The halves of a run are to share files and locks.
    #[error(
        "{path} is on a {found}, whose locks and maps do not reach another process for sure; use a `save` on a disk of this host"
    )]
    NetworkFiles {
        /// The run's directory.
        path: PathBuf,
        /// The file system.
        found: &'static str,
    },
    /// A rollout that is to be learned from is not whole in the log.
    #[error(
        "rollout {rollout} has {found} complete groups in the log, expected {expected}; generate it first, or train with the batch and group sizes it was generated with"
    )]
    IncompleteRollout {
        /// The rollout.
        rollout: u64,
        /// Groups that it should have.
        expected: u64,
        /// Groups with enough samples.
        found: u64,
    },
    /// Nothing was compared of an engine's live weights, which was asked for.
    #[error(
        "nothing was compared of the live weights of an engine that serves {label}, which `compare` requires: {why}; install \
         driftless-rl into its environment, or leave out `compare`"
    )]
    NotCompared {
        /// The version's label.
        label: String,
        /// The engine, and why.
        why: String,
    },
    /// The engine's checksums say nothing about the weights here, so that an equality that was asked for
    /// cannot be checked.
    #[error(
        "the checksums of engine {engine} cannot be compared: {reason}; leave out `check_weight_update_equal`"
    )]
    NotComparable {
        /// URL of the engine.
        engine: String,
        /// Why not.
        reason: String,
    },
    /// A learner in this process answered with an error.
    #[error("the learner, {learner}")]
    Learner {
        /// What it is.
        learner: String,
        /// Its error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A loss, a gradient or a weight became NaN or infinite; the weights before the step are kept.
    #[error(
        "the learner, {learner}: {what} at rollout {rollout}, and {row} steps in a row were not finite; lower the learning rate, look at the rewards, or raise `max_skipped_steps`"
    )]
    NotFinite {
        /// What it is.
        learner: String,
        /// The quantity and its value.
        what: String,
        /// The rollout that was learned from.
        rollout: u64,
        /// Such steps, one after another.
        row: u64,
    },
    /// A learner's process has ended, or did not answer in time. Loaded again, it goes on from its last
    /// checkpoint.
    #[error("learner {learner}: {call}: expected an answer, found {found}; what it wrote is above")]
    LearnerLost {
        /// Its name or command, with its process.
        learner: String,
        /// What it was asked for.
        call: &'static str,
        /// What came.
        found: String,
    },
    /// A learner's process says that it cannot do what it was asked for.
    #[error("learner {learner}: {call}: it says: {reason}")]
    LearnerRefused {
        /// Its name or command, with its process.
        learner: String,
        /// What it was asked for.
        call: &'static str,
        /// Its words.
        reason: String,
    },
    /// A learner's process answers with something that is no answer.
    #[error("learner {learner}: {call}: expected {expected}, found {found}; see docs/wire/learner.md")]
    LearnerReply {
        /// Its name or command, with its process.
        learner: String,
        /// What it was asked for.
        call: &'static str,
        /// What the answer has to be.
        expected: &'static str,
        /// What came.
        found: String,
    },
    /// A learner of an earlier loop has not ended.
    #[error(
        "a learner of an earlier loop, process {holder}, still holds {path} after {} s; end it, then start again", waited.as_secs_f64()
    )]
    LearnerStillRuns {
        /// The lock.
        path: PathBuf,
        /// Its process.
        holder: String,
        /// How long it was waited for.
        waited: Duration,
    },
    /// The checkpoint that engines start from is not what the learner publishes at step 0.
    #[error(
        "{path}, which engines start from, is not what the learner has for them at step 0: {what}: expected {expected}, \
         found {found}; make it of `hf_checkpoint` with `driftless quantize`"
    )]
    OtherStart {
        /// The checkpoint.
        path: PathBuf,
        /// The tensor or the file.
        what: String,
        /// What the learner has.
        expected: String,
        /// What the checkpoint has.
        found: String,
    },
    /// The rollout log answered with an error.
    #[error(transparent)]
    Buffer(#[from] driftless_buffer::Error),
    /// An engine, or the client of it, answered with an error.
    #[error(transparent)]
    Bridge(#[from] driftless_bridge::Error),
    /// Too few engines took a version that was pushed.
    #[error(
        "too few engines took {label} within {} s; engines stay paused where their weights may be a mixture, until a push \
         succeeds: mend what the reason names and run the same command again, which pushes before it goes on",
        after.as_secs_f64()
    )]
    Push {
        /// The version's label.
        label: String,
        /// How long it was tried.
        after: Duration,
        /// Why the last push failed.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Too few engines came to the newest version of the run.
    #[error(
        "too few engines came to the newest version of run `{run}`: is a follower of it beside each of them?"
    )]
    NotFollowed {
        /// Name of the run.
        run: String,
        /// The store, as its user names it.
        store: String,
        /// What each of them does instead.
        source: Box<driftless_bridge::Error>,
    },
    /// A learner says that it has done steps of which the run has no trace.
    #[error(
        "learner {learner} has done {step} steps, and neither the log, the store nor the metrics of the run in {path} \
         have one: its state is of another run, or these were removed; bring them back, or begin with another directory"
    )]
    LearnerAhead {
        /// Its name or command.
        learner: String,
        /// Its steps.
        step: u64,
        /// The state directory.
        path: PathBuf,
    },
    /// A run cannot be done again: it did not keep what that needs.
    #[error("the run in {path} cannot be replayed: {what}: expected {expected}, found {found}; {todo}")]
    NotReplayable {
        /// The state directory.
        path: PathBuf,
        /// The file, the step or the checkpoint.
        what: String,
        /// What it has to be.
        expected: String,
        /// What it is.
        found: String,
        /// What to do about it.
        todo: &'static str,
    },
    /// A step comes out otherwise than the run recorded.
    #[error(
        "step {} of {of}, which `ledger.jsonl` has as {step}, is not what the run did: {what}: expected {expected}, found \
         {found}; {todo}",
        step + 1
    )]
    Differs {
        /// The step, from 0.
        step: u64,
        /// Steps that were to be done.
        of: u64,
        /// The sample, the figure or the digest.
        what: String,
        /// What the run recorded.
        expected: String,
        /// What it is now.
        found: String,
        /// What to do about it.
        todo: &'static str,
    },
    /// What pushes versions into engines cannot be set up.
    #[error("weights cannot be pushed")]
    PushSetUp {
        /// What it lacks.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Something is not there that always is at this place.
    #[error("{what}: this is a bug of driftless; please report it with the log")]
    Bug {
        /// What is not as it always is.
        what: &'static str,
    },
    /// The loop was stopped while it waited.
    #[error("the loop was stopped while it waited")]
    Cancelled,
    /// Engines that are to be brought to other versions belong to somebody else.
    #[error("in use: {engines}; give engines of your own, or take these all the same (`engines_in_use`)")]
    EnginesInUse {
        /// Where each is, and who has it.
        engines: String,
    },
    /// A hook gave no answer, or one that cannot be.
    #[error("{hook}: {about}: expected {expected}, found {found}; {todo}")]
    Hook {
        /// The flag that names it.
        hook: &'static str,
        /// What it was asked about.
        about: String,
        /// What its answer has to be.
        expected: String,
        /// What came.
        found: String,
        /// What to do about it.
        todo: &'static str,
        /// Whether nothing came that could be an answer: it is late, ended, or cannot be reached.
        is_away: bool,
        /// What kind of failure it is.
        failure: Failure,
    },
    /// An answer got no reward.
    #[error("reward of sample {sample}: expected {expected}, found {found}; {todo}")]
    Reward {
        /// Number of the sample.
        sample: u64,
        /// What was asked for.
        expected: String,
        /// What came.
        found: String,
        /// What to do about it.
        todo: &'static str,
        /// Whether nothing came that could be a reward.
        is_away: bool,
    },
}

impl Error {
    /// Whether a learner has to be loaded again, from its last checkpoint, before it is asked anything else.
    #[must_use]
    pub fn is_learner_lost(&self) -> bool {
        matches!(self, Error::LearnerLost { .. })
    }

    /// What kind of failure an answer has by this.
    #[must_use]
    pub fn failure(&self) -> Failure {
        match self {
            Error::Hook { failure, .. } => *failure,
            Error::Reward { .. } => Failure::Reward,
            Error::Bridge(_) => Failure::Refused,
            _ => Failure::Hook,
        }
    }

    /// Whether an answer that failed by this may be made again: what it was made by died or was late.
    #[must_use]
    pub fn is_made_again(&self) -> bool {
        matches!(self, Error::Hook { failure: Failure::Environment | Failure::Deadline, .. })
    }

    /// Whether a hook or a reward gave no answer at all, which says nothing of what it was asked about.
    #[must_use]
    pub fn is_away(&self) -> bool {
        matches!(self, Error::Hook { is_away: true, .. } | Error::Reward { is_away: true, .. })
    }
}

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Adds the path and the verb to an I/O error.
pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.into();
    move |source| Error::Io { action, path, source }
}

/// An [`Error::Input`] from anything that can be shown.
pub(crate) fn input(what: impl ToString, expected: impl ToString, found: impl ToString) -> Error {
    Error::Input { what: what.to_string(), expected: expected.to_string(), found: found.to_string() }
}

/// Where a prompt is from, for messages and the log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Place {
    /// The file, or what made the prompt.
    pub path: Arc<Path>,
    /// The line, or the row of a Parquet file, from 1; else the prompt's number.
    pub line: u64,
}

impl From<Place> for String {
    fn from(place: Place) -> String {
        place.to_string()
    }
}

impl TryFrom<String> for Place {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let place = text.rsplit_once(':').and_then(|(path, line)| Some((path, line.parse().ok()?)));
        let (path, line) = place.ok_or("no FILE:LINE")?;
        Ok(Place { path: Path::new(path).into(), line })
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.path.display(), self.line)
    }
}

/// Enough of a text to recognise it by, in one line.
pub(crate) fn short(text: &str) -> String {
    cut(text, 120)
}

/// So many letters of a text at most, in one line and without what a terminal would obey.
pub(crate) fn cut(text: &str, letters: usize) -> String {
    let mut start = text.chars();
    let line = start.by_ref().take(letters).map(|letter| if letter.is_control() { ' ' } else { letter });
    let line: String = line.collect();
    if start.next().is_none() { line } else { line + "…" }
}

/// A line that another program wrote, without what a terminal would obey.
pub(crate) fn plain(line: &[u8]) -> String {
    let text = String::from_utf8_lossy(line);
    text.trim_end().chars().map(|letter| if letter.is_control() { ' ' } else { letter }).collect()
}
