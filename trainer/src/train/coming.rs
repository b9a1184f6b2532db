//! Versions that engines come to beside the loop: with bounded staleness the learner does not wait for them.

use std::time::{Duration, Instant};

use driftless_bridge::Label;
use driftless_bridge::activate::Compare;
use tokio::task::JoinHandle;

use super::session::Session;
use super::{Event, update};
use crate::error::Result;
use crate::metrics::{Converged, PublicationMetrics};
use crate::options::Mode;
use crate::rollout::finished;

/// A version that followers are bringing to the engines.
pub(super) struct Coming {
    version: u64,
    /// The engines that are gone on without, and how long it took.
    task: JoinHandle<(driftless_bridge::Result<Vec<String>>, Duration)>,
}

impl Session<'_> {
    /// Whether the loop goes on before engines serve what it has published: nothing of this step asks them for it.
    pub(super) fn goes_on_before_engines(&self, is_measured: bool) -> bool {
        let Mode::Bounded { .. } = self.options.mode else { return false };
        let asks = self.options.check_weight_update_equal || self.options.compare == Compare::Require;
        self.pusher.is_none() && !asks && !is_measured
    }

    /// Has the engines come to the newest version beside the loop.
    pub(super) fn let_come(&mut self, mut metrics: PublicationMetrics) -> Result<PublicationMetrics> {
        let label = self.newest_label()?;
        self.hear(&mut metrics, &label, Duration::ZERO);
        self.come(metrics.version, label);
        self.collect_old();
        self.look_at_coming()?;
        // A fleet that lags further generates only what is too old.
        while self.coming.len() as u64 > self.options.mode.max_staleness() {
            let what = format!("the engines to serve version {}", self.coming[0].version);
            self.wait_on(&what, "");
            self.end_coming()?;
        }
        Ok(metrics)
    }

    /// Has the engines, if there are any, come to a version.
    pub(super) fn come(&mut self, version: u64, label: Label) {
        let Some(fleet) = self.fleet.clone() else { return };
        let (begin, deadline) = (Instant::now(), self.options.update_deadline);
        let task = self.runtime.spawn(async move {
            let behind = fleet.wait_for_those_up(&label, deadline).await;
            (behind, begin.elapsed())
        });
        self.coming.push_back(Coming { version, task });
    }

    /// Takes note of versions that engines have come to, and ends the run with one that too few came to. Behind the last
    /// step it waits for all.
    pub(super) fn look_at_coming(&mut self) -> Result<()> {
        let is_over = self.step == self.options.num_rollout;
        while self.coming.front().is_some_and(|oldest| is_over || oldest.task.is_finished()) {
            self.end_coming()?;
        }
        Ok(())
    }

    /// Waits for the oldest version that is still coming.
    fn end_coming(&mut self) -> Result<()> {
        let Some(Coming { version, task }) = self.coming.pop_front() else { return Ok(()) };
        let (behind, time) = finished(self.runtime.block_on(task))?;
        let behind = behind.map_err(|source| self.not_followed(source))?;
        for engine in &behind {
            tracing::warn!(version, "goes on without {engine}");
        }
        let (convergence_ms, engines_behind) = (update::milliseconds(time), behind.len() as u64);
        self.tell(Event::Served { version, behind: engines_behind });
        self.converged.push(Converged { version, convergence_ms, engines_behind });
        Ok(())
    }
}
