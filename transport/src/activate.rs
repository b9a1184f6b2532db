//! The trait between a follower and the engines that serve the weights.

use std::fmt;
use std::time::{Duration, Instant};

use derive_setters::Setters;
use driftless_store::BoxError;
use driftless_store::wait::Stop;

use crate::checkpoint::Checkpoint;
pub use crate::gc::{Compared, How};
use crate::manifest::Manifest;
use crate::snapshot::Snapshot;

/// How long what is under way at an engine may go on after the follower was told to stop.
pub const STOP_GRACE: Duration = Duration::from_secs(5);

/// How long an activation may go on: for some time, and for 5 s at most after the follower was told to stop.
#[derive(Clone, Debug)]
pub struct Limit {
    until: Instant,
    stop: Stop,
}

impl Limit {
    /// A limit of `time` from now on, which `stop` cuts short.
    #[must_use]
    pub fn new(time: Duration, stop: Stop) -> Self {
        Self { until: Instant::now() + time, stop }
    }

    /// A limit of `time` from now on.
    #[must_use]
    pub fn within(time: Duration) -> Self {
        Self::new(time, Stop::new())
    }

    /// What is left of it. It may become less at any moment, never more.
    #[must_use]
    pub fn left(&self) -> Duration {
        let until = self.stop.since().map_or(self.until, |at| self.until.min(at + STOP_GRACE));
        until.saturating_duration_since(Instant::now())
    }
}

/// What an engine has to serve.
#[derive(Clone, Copy)]
pub struct Target<'a> {
    /// The directory, verified against the manifest; its bytes stay as they are until the call returns. Where
    /// [`Activate::waits`], they may still be written.
    pub checkpoint: &'a Checkpoint,
    /// The same tensors, for engines that are given them from this process's memory or its device's: `checkpoint`,
    /// unless the process has them elsewhere too.
    pub weights: &'a (dyn Snapshot + Sync),
    /// The version string to give to the engine: `<first 12 hex digits of the run id>:<version>`.
    pub label: &'a str,
    /// The version's manifest.
    pub manifest: &'a Manifest,
    /// How long the activation may go on. A driver that meets it leaves the engine in an honest state, which
    /// takes some seconds more.
    pub limit: &'a Limit,
}

impl fmt::Debug for Target<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Target")
            .field("checkpoint", self.checkpoint)
            .field("label", &self.label)
            .field("limit", self.limit)
            .finish_non_exhaustive()
    }
}

/// What an activation did, as far as the driver tells.
#[derive(Clone, Debug, Default, PartialEq, Eq, Setters)]
#[setters(prefix = "with_", strip_option)]
#[non_exhaustive]
pub struct Activated {
    /// How long the engine did not generate.
    pub pause: Duration,
    /// How it came by the weights.
    pub how: Option<How>,
    /// What was compared of them.
    pub compared: Option<Compared>,
    /// From the call until the engine could take them at once: its plugin had copied what changes, or the files were
    /// there.
    pub copy: Option<Duration>,
    /// From then until it served them.
    pub patch: Option<Duration>,
}

/// One inference engine, as a follower drives it: blocking calls from a thread of its own.
///
/// A call should end within a deadline of its own, an activation within its limit. The follower stops waiting
/// some time after it and records a failure, but it does not overwrite the checkpoint before the call has
/// returned.
pub trait Activate: Send {
    /// How the engine is named in status, acknowledgements and errors: its URL.
    fn name(&self) -> String;

    /// The version label that the engine serves now, `None` if it serves something that no follower gave it
    /// (it was restarted).
    ///
    /// # Errors
    ///
    /// Whatever keeps the engine from answering.
    fn serving(&mut self) -> Result<Option<String>, BoxError>;

    /// Makes the engine serve `target` and checks that it does: pause, load, verify, continue.
    ///
    /// # Errors
    ///
    /// Whatever went wrong. The engine may then serve anything or nothing; it is asked again and activated
    /// again.
    fn activate(&mut self, target: &Target<'_>) -> Result<Activated, BoxError>;

    /// How the weights of an engine that reports the label of `target` differ from it: another program may have written
    /// them since. A sample is compared while the engine generates, another one for each `turn`. `None` if it is equal, or
    /// if nothing can compare it.
    ///
    /// # Errors
    ///
    /// Whatever keeps the engine from answering.
    fn sample(&mut self, target: &Target<'_>, turn: u64) -> Result<Option<String>, BoxError> {
        let _ = (target, turn);
        Ok(None)
    }

    /// Whether an activation waits by itself ([`Checkpoint::wait`]) for the bytes of the checkpoint, and for
    /// an engine to load them; meanwhile it may patch the engine.
    fn waits(&self) -> bool {
        false
    }

    /// Whether the engine was paused when the last of these calls ended, by the follower or by others.
    fn is_paused(&self) -> bool {
        false
    }
}
