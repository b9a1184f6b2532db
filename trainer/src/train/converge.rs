//! Engines that answer, and from a version in the store to engines that serve it: followers bring it there, or the loop
//! pushes it.

use std::collections::BTreeSet;
use std::pin::pin;
use std::time::{Duration, Instant};

use driftless_bridge::activate::Compare;
use driftless_bridge::fleet::{EngineStatus, FleetOptions};
use driftless_bridge::{Expected, Fleet, Label};
use driftless_store::BoxError;
use driftless_transport::Snapshot;
use driftless_transport::gc::{self, GcOptions};

use super::session::{Session, addresses};
use super::{Event, LOOK_AFTER, update};
use crate::error::{Error, Result};
use crate::learner::MODEL;
use crate::metrics::PublicationMetrics;
use crate::push::Version;

/// How long followers may take to write that their engines serve a version.
const ACK_DEADLINE: Duration = Duration::from_secs(2);
/// Time between two attempts to attach engines that do not answer.
const ATTACH_AGAIN: Duration = Duration::from_millis(200);
/// Time between two attempts to push a version that too few engines took.
const AGAIN: Duration = Duration::from_secs(1);

impl Session<'_> {
    /// Attaches the engines once enough of them answer, and gives the others a little longer: they may be starting
    /// beside this process, or be started again by their supervisor. The fleet attaches later ones when they answer.
    pub(super) fn attach_those_up(&self, expected: &Expected, options: &FleetOptions) -> Result<Fleet> {
        let (keys, deadline) = (&self.options.keys, self.options.update_deadline);
        let addresses = addresses(&self.at_start);
        let (begin, patience) = (Instant::now(), options.patience.min(deadline));
        let what = "the engines to answer";
        self.wait_on(what, "");
        let fleet = self.block_on(async {
            loop {
                let attached = Fleet::attach(&addresses, keys, expected, options.clone()).await;
                let (time, lacks) = match &attached {
                    Ok(fleet) => (patience, away(fleet).join("; ")),
                    Err(error) if error.is_transient() => (deadline, error.to_string()),
                    Err(_) => return attached,
                };
                if lacks.is_empty() || begin.elapsed() >= time {
                    return attached;
                }
                self.wait_on(what, &lacks);
                tokio::time::sleep(ATTACH_AGAIN).await;
            }
        })?;
        for engine in away(&fleet) {
            tracing::warn!("begins without {engine}");
        }
        Ok(fleet)
    }

    /// Brings the fleet to the newest version, of which `metrics` tell, and adds what its followers wrote about it.
    /// Engines are pushed into from `weights`, if they are given.
    pub(super) fn converge(
        &mut self,
        mut metrics: PublicationMetrics,
        weights: Option<&(dyn Snapshot + Sync)>,
    ) -> Result<PublicationMetrics> {
        if self.fleet.is_none() {
            return self.let_come(metrics);
        }
        let begin = Instant::now();
        let label = self.newest_label()?;
        let (pushed, behind) = self.bring(&label, weights)?;
        metrics.engines_behind = behind;
        metrics.convergence_ms = Some(update::milliseconds(begin.elapsed()));
        self.tell(Event::Served { version: metrics.version, behind });
        self.hear(&mut metrics, &label, ACK_DEADLINE);
        if let (Some(why), Compare::Require) = (&metrics.not_compared, self.options.compare) {
            return Err(Error::NotCompared { label: label.to_string(), why: why.clone() });
        }
        metrics.pause_ms = update::longer(metrics.pause_ms, pushed.map(update::milliseconds));
        self.collect_old();
        Ok(metrics)
    }

    /// Adds what followers wrote about a version, and waits so long for those that have it.
    pub(super) fn hear(&mut self, metrics: &mut PublicationMetrics, label: &Label, deadline: Duration) {
        let Some(updates) = &mut self.updates else { return };
        match updates.acknowledged(driftless_transport::Version(metrics.version), deadline) {
            Ok(told) => {
                (metrics.prepare_ms, metrics.pause_ms) = (told.prepare_ms, told.pause_ms);
                (metrics.not_compared, metrics.hosts) = (told.not_compared, told.hosts);
            }
            Err(error) => tracing::warn!(%error, %label, "what its followers wrote cannot be read"),
        }
    }

    /// Has engines serve `label`, and returns the longest pause if they were pushed into, and how many engines the loop
    /// goes on without.
    pub(super) fn bring(
        &mut self,
        label: &Label,
        weights: Option<&(dyn Snapshot + Sync)>,
    ) -> Result<(Option<Duration>, u64)> {
        if self.fleet.is_none() {
            // The rollouts' process has them.
            return Ok((None, 0));
        }
        let (pause, behind) = if self.pusher.is_some() {
            let pause = self.push(label, weights)?;
            (Some(pause), self.engines(|engine| !(engine.up && serves(engine, label)))?)
        } else {
            (None, self.wait_for(label)?)
        };
        for engine in &behind {
            tracing::warn!(%label, "goes on without {engine}");
        }
        Ok((pause, behind.len() as u64))
    }

    /// Waits until followers have brought their engines to `label`, and says meanwhile which are not there. Returns
    /// those that the loop goes on without.
    fn wait_for(&self, label: &Label) -> Result<Vec<String>> {
        let what = format!("the engines to serve version {}", label.version());
        self.wait_on(&what, "");
        let fleet = self.fleet()?.clone();
        let waited = self.runtime.block_on(async {
            let mut wait = pin!(fleet.wait_for_those_up(label, self.options.update_deadline));
            loop {
                match tokio::time::timeout(LOOK_AFTER, &mut wait).await {
                    Ok(ended) => return ended,
                    Err(_) => {
                        let status = fleet.status();
                        let behind = status.iter().filter(|engine| !(engine.up && serves(engine, label)));
                        let behind: Vec<_> = behind.map(|engine| self.behind(engine, label)).collect();
                        self.wait_on(&what, &behind.join(", "));
                    }
                }
            }
        });
        waited.map_err(|source| self.not_followed(source))
    }

    /// Why engines do not come to a version: mostly there are no followers of this run.
    pub(super) fn not_followed(&self, source: driftless_bridge::Error) -> Error {
        match source {
            behind @ driftless_bridge::Error::Behind { .. } => {
                let (run, store) = (self.options.run.clone(), self.options.store_url.clone());
                Error::NotFollowed { run, store, source: Box::new(behind) }
            }
            other => other.into(),
        }
    }

    /// Says what an engine does instead of serving `label`. One that serves no version of the run has no follower, or
    /// that of another run.
    fn behind(&self, engine: &EngineStatus, label: &Label) -> String {
        let EngineStatus { url, up, serving, failure, .. } = engine;
        let serving = serving.as_deref().unwrap_or("nothing known");
        let is_ours = serving.parse::<Label>().is_ok_and(|serving| serving.run() == label.run());
        match (up, failure) {
            (false, Some(failure)) => format!("{url} ({failure})"),
            (false, None) => format!("{url} (does not answer)"),
            (true, _) if is_ours => format!("{url} (serves {serving})"),
            (true, _) => {
                format!("{url} (serves {serving}; is a follower of run `{}` beside it?)", self.options.run)
            }
        }
    }

    /// Removes the versions that no follower needs any more, beside the loop. What one collection leaves, the next one
    /// removes.
    pub(super) fn collect_old(&mut self) {
        let (Some(keep), Some(updates)) = (self.options.keep_versions, &self.updates) else { return };
        if self.collection.as_ref().is_some_and(|running| !running.is_finished()) {
            return;
        }
        let run = updates.run.clone();
        self.collection = Some(self.runtime.spawn_blocking(move || {
            if let Err(error) = gc::collect(&run, &GcOptions::new(MODEL).with_keep(keep)) {
                tracing::warn!(%error, "old versions were not removed; the next version tries again");
            }
        }));
    }

    /// Pushes the newest version into the engines that answer, and returns the longest pause. Tries until the deadline
    /// for updates, as long as fewer than have to serve it do: an engine may be starting.
    fn push(&mut self, label: &Label, weights: Option<&(dyn Snapshot + Sync)>) -> Result<Duration> {
        let after = self.options.update_deadline;
        let (end, wanted) = (Instant::now() + after, self.options.engines_min.max(1));
        loop {
            let engines = self.engines(|engine| engine.up)?;
            let source = if engines.len() < wanted {
                format!("{} engines answer, where {wanted} have to", engines.len()).into()
            } else {
                match self.push_into(&engines, label, weights, end)? {
                    Ok(pause) => match self.engines(|engine| engine.up && serves(engine, label))?.len() {
                        there if there >= wanted => return Ok(pause),
                        there => format!("{there} engines took it, where {wanted} have to").into(),
                    },
                    Err(error) => error,
                }
            };
            if Instant::now() + AGAIN >= end {
                return Err(Error::Push { label: label.to_string(), after, source });
            }
            tracing::warn!(%source, %label, "too few engines took the version; it is pushed again");
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
            return Err(Error::Bug { what: "a push without a pusher" });
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

/// The engines that do not answer, and why.
fn away(fleet: &Fleet) -> Vec<String> {
    let away = fleet.status().into_iter().filter(|engine| !engine.up);
    away.map(|engine| format!("{} ({})", engine.url, engine.failure.unwrap_or_default())).collect()
}

/// Whether an engine serves the version of this label, or a later one.
pub(super) fn serves(engine: &EngineStatus, label: &Label) -> bool {
    let serving = engine.serving.as_deref().and_then(|serving| serving.parse::<Label>().ok());
    serving.is_some_and(|serving| serving.at_least(label))
}
