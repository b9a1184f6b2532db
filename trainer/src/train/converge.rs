//! From a version in the store to engines that serve it: followers bring it there, or the loop pushes it.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use driftless_bridge::Label;
use driftless_bridge::fleet::EngineStatus;
use driftless_store::BoxError;
use driftless_transport::Snapshot;

use super::session::Session;
use super::{Event, update};
use crate::error::{Error, Result};
use crate::metrics::PublicationMetrics;
use crate::push::Version;

/// Time between two attempts to push a version that no engine took.
const AGAIN: Duration = Duration::from_secs(1);

impl Session<'_> {
    /// Tells of a publication, brings the fleet to it and collects what its followers wrote about it. Engines are
    /// pushed into from `weights`, if they are given.
    pub(super) fn converge(
        &mut self,
        mut metrics: PublicationMetrics,
        weights: Option<&(dyn Snapshot + Sync)>,
    ) -> Result<PublicationMetrics> {
        let version = driftless_transport::Version(metrics.version);
        self.tell(Event::Published { version: version.0 });
        let label = self.label()?.ok_or(Error::Cancelled)?;
        let begin = Instant::now();
        let (pushed, behind) = self.bring(&label, weights)?;
        metrics.engines_behind = behind;
        metrics.convergence_ms = update::milliseconds(begin.elapsed());
        if let Some(updates) = &self.updates {
            (metrics.prepare_ms, metrics.pause_ms) = updates.acknowledged(version)?;
            metrics.pause_ms = metrics.pause_ms.max(update::milliseconds(pushed));
        }
        Ok(metrics)
    }

    /// Brings the fleet to the newest version, which is in the store.
    pub(super) fn come_to(&mut self, label: &Label) -> Result<()> {
        self.bring(label, None).map(drop)
    }

    /// Has engines serve `label`, and returns the longest pause that a push took, and how many engines the loop goes on
    /// without.
    fn bring(&mut self, label: &Label, weights: Option<&(dyn Snapshot + Sync)>) -> Result<(Duration, u64)> {
        let (pause, behind) = if self.pusher.is_some() {
            let pause = self.push(label, weights)?;
            (pause, self.engines(|engine| !(engine.up && serves(engine, label)))?)
        } else {
            let wait = self.fleet()?.wait_for_those_up(label, self.options.update_deadline);
            (Duration::ZERO, self.block_on(wait)?)
        };
        for engine in &behind {
            tracing::warn!(%label, "goes on without {engine}");
        }
        Ok((pause, behind.len() as u64))
    }

    /// Pushes the newest version into the engines that answer, and returns the longest pause. Tries until the deadline
    /// for updates: an engine may be starting.
    fn push(&mut self, label: &Label, weights: Option<&(dyn Snapshot + Sync)>) -> Result<Duration> {
        let after = self.options.update_deadline;
        let end = Instant::now() + after;
        loop {
            let engines = self.engines(|engine| engine.up)?;
            let source = match engines.as_slice() {
                [] => "no engine answers".into(),
                engines => match self.push_into(engines, label, weights, end)? {
                    Ok(pause) => return Ok(pause),
                    Err(error) => error,
                },
            };
            if Instant::now() + AGAIN >= end {
                return Err(Error::Push { label: label.to_string(), after, source });
            }
            tracing::warn!(%source, %label, "no engine took the version; it is pushed again");
            std::thread::sleep(AGAIN);
        }
    }

    /// Pushes the newest version into engines that have come back without it, while a rollout is waited for. Those
    /// that do not take it are added to `refused`, and left alone.
    pub(super) fn bring_back(&mut self, refused: &mut BTreeSet<String>) -> Result<()> {
        let (Some(_), Some(label)) = (&self.pusher, self.label()?) else { return Ok(()) };
        for engine in
            self.engines(|engine| engine.up && !serves(engine, &label) && !refused.contains(&engine.url))?
        {
            let end = Instant::now() + self.options.update_deadline;
            if let Err(error) = self.push_into(std::slice::from_ref(&engine), &label, None, end)? {
                tracing::warn!(engine, %error, %label, "the engine does not take the version");
                refused.insert(engine);
            }
        }
        Ok(())
    }

    /// One attempt to push the newest version into these engines. What engines do is inside; outside, what the
    /// store or the publisher's baseline do.
    fn push_into(
        &mut self,
        engines: &[String],
        label: &Label,
        weights: Option<&(dyn Snapshot + Sync)>,
        end: Instant,
    ) -> Result<Result<Duration, BoxError>> {
        let (Some(pusher), Some(updates)) = (&mut self.pusher, &mut self.updates) else {
            return Err(Error::Cancelled);
        };
        let (checkpoint, manifest) = updates.at_rest(&self.place.baseline)?;
        let (weights, label) = (weights.unwrap_or(&checkpoint), label.to_string());
        let version = Version { checkpoint: &checkpoint, weights, manifest: &manifest, label: &label };
        Ok(pusher.push(engines, &version, end.saturating_duration_since(Instant::now())))
    }

    /// URLs of the engines that are so, now.
    fn engines(&self, are: impl Fn(&EngineStatus) -> bool) -> Result<Vec<String>> {
        let status = self.block_on(self.fleet()?.look())?;
        Ok(status.into_iter().filter(|engine| are(engine)).map(|engine| engine.url).collect())
    }
}

/// Whether an engine serves the version of this label, or a later one.
fn serves(engine: &EngineStatus, label: &Label) -> bool {
    let serving = engine.serving.as_deref().and_then(|serving| serving.parse::<Label>().ok());
    serving.is_some_and(|serving| serving.at_least(label))
}
