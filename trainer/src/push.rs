//! Pushes: the loop brings a version into engines by itself, where no follower beside them would.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use driftless_store::BoxError;
use driftless_transport::activate::{Activate, Limit, Target};
use driftless_transport::manifest::Manifest;
use driftless_transport::{Checkpoint, Snapshot};

type Make = dyn Fn(&[String]) -> Result<Box<dyn Activate>, BoxError> + Send + Sync;

/// How versions come into engines without a follower: one activator of all that it is given the URLs of.
#[derive(Clone)]
pub struct Pushes(Arc<Make>);

impl Pushes {
    /// `make` makes the activator of the engines at these URLs. It is called again when other engines answer than
    /// before; the activator of those is dropped first.
    pub fn new(
        make: impl Fn(&[String]) -> Result<Box<dyn Activate>, BoxError> + Send + Sync + 'static,
    ) -> Self {
        Pushes(Arc::new(make))
    }
}

impl fmt::Debug for Pushes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pushes").finish_non_exhaustive()
    }
}

/// A version that is to be pushed.
pub(crate) struct Version<'a> {
    /// The publisher's baseline, which holds it.
    pub(crate) checkpoint: &'a Checkpoint,
    /// The same weights where they are read from.
    pub(crate) weights: &'a (dyn Snapshot + Sync),
    pub(crate) manifest: &'a Manifest,
    pub(crate) label: &'a str,
}

/// The activator of the engines that were pushed into last.
pub(crate) struct Pusher {
    pushes: Pushes,
    engines: Vec<String>,
    activator: Option<Box<dyn Activate>>,
}

impl Pusher {
    /// Makes the activator of all engines, so that what it lacks is told at once.
    pub(crate) fn open(pushes: Pushes, engines: &[String]) -> Result<Self, BoxError> {
        let mut pusher = Pusher { pushes, engines: Vec::new(), activator: None };
        pusher.of(engines)?;
        Ok(pusher)
    }

    /// Brings a version into these engines, and returns the longest pause: into all at once, in half of `time`, or
    /// else into each by itself, so that one that cannot take it does not keep it from the others.
    ///
    /// # Errors
    /// If none of them takes it: why the last one did not.
    pub(crate) fn push(
        &mut self,
        engines: &[String],
        version: &Version<'_>,
        time: Duration,
    ) -> Result<Duration, BoxError> {
        let end = Instant::now() + time;
        let first = if engines.len() > 1 { time / 2 } else { time };
        let error = match self.activate(engines, version, first) {
            Err(error) if engines.len() > 1 => error,
            outcome => return outcome,
        };
        tracing::warn!(%error, "no push into all engines at once; each is pushed into by itself");
        let mut longest = Err(error);
        for (engine, left) in engines.iter().zip((1..=engines.len()).rev()) {
            let time = end.saturating_duration_since(Instant::now()) / left as u32;
            match self.activate(std::slice::from_ref(engine), version, time) {
                Ok(pause) => longest = Ok(longest.map_or(pause, |longest: Duration| longest.max(pause))),
                Err(error) => {
                    tracing::warn!(engine, %error, "not pushed into");
                    longest = longest.or(Err(error));
                }
            }
        }
        longest
    }

    /// Has these engines serve a version, unless they do. One that was left paused with it goes on.
    fn activate(
        &mut self,
        engines: &[String],
        version: &Version<'_>,
        time: Duration,
    ) -> Result<Duration, BoxError> {
        let activator = self.of(engines)?;
        if activator.serving()?.as_deref() == Some(version.label) {
            return Ok(Duration::ZERO);
        }
        let Version { checkpoint, weights, manifest, label } = *version;
        let limit = Limit::within(time);
        let target = Target { checkpoint, weights, label, manifest, limit: &limit };
        Ok(activator.activate(&target)?.pause)
    }

    /// The activator of these engines.
    fn of(&mut self, engines: &[String]) -> Result<&mut dyn Activate, BoxError> {
        if self.engines != engines {
            self.activator = None;
        }
        let activator = match self.activator.take() {
            Some(activator) => activator,
            None => (self.pushes.0)(engines)?,
        };
        engines.clone_into(&mut self.engines);
        Ok(&mut **self.activator.insert(activator))
    }
}
