//! A run of ours as a [`Source`].

use std::sync::Arc;
use std::time::Instant;

use driftless_store::Store;

use super::FollowerOptions;
use super::lease::LeaseRenewal;
use crate::error::{Error, Result};
use crate::gc::Ack;
use crate::ids::{RunId, Version};
use crate::replica::{Advanced, Replica};
use crate::run::{Committed, Run};
use crate::source::{Asked, Newest, Source};

/// Versions of a run in a store, with the lease that keeps what the follower needs.
pub(super) struct RunSource {
    store: Arc<dyn Store>,
    options: FollowerOptions,
    /// `None` until the run was found.
    opened: Option<(Run, LeaseRenewal)>,
    polls: Polls,
}

/// What earlier polls found.
#[derive(Default)]
struct Polls {
    /// The newest version, by the last poll that found another one than the replica's.
    newest: Option<Version>,
    /// That version, if the poll has read it.
    known: Option<Committed>,
    /// The last poll found nothing new, so that the next version will be the newest.
    caught_up: bool,
    /// When a poll last asked for the newest version, and not only for the next one. The next one may be
    /// missing because it was collected, on a host that slept longer than its lease.
    full: Option<Instant>,
}

impl RunSource {
    /// The run that `options` name. It need not exist yet.
    pub(super) fn new(store: Arc<dyn Store>, options: &FollowerOptions) -> Self {
        Self { store, options: options.clone(), opened: None, polls: Polls::default() }
    }

    fn open(&mut self) -> Result<Run> {
        if let Some((run, _)) = &self.opened {
            return Ok(run.clone());
        }
        let options = &self.options;
        let run = Run::open(self.store.clone(), &options.run)?.trusting(&options.trust_keys);
        let lease = LeaseRenewal::new(&run, &options.model, &options.id, options.renew)?;
        self.opened = Some((run.clone(), lease));
        Ok(run)
    }

    /// The version on disk, if it was the newest at the last poll and nothing is left to be finished.
    fn in_sync(&self, run: &Run, replica: &Replica) -> Option<Version> {
        let applied = replica.applied().filter(|_| replica.checkpoint().is_ok())?;
        let ours = applied.run_id == run.id() && applied.model == self.options.model;
        (ours && self.polls.newest == Some(applied.version)).then_some(applied.version)
    }
}

impl Source for RunSource {
    fn run_id(&self) -> Option<RunId> {
        self.opened.as_ref().map(|(run, _)| run.id())
    }

    fn newest(&mut self, replica: &mut Replica, asked: Asked) -> Result<Newest> {
        let run = self.open()?;
        let in_sync = self.in_sync(&run, replica).filter(|_| !matches!(asked, Asked::Version(_)));
        let assume_latest = std::mem::take(&mut self.polls.caught_up) && asked == Asked::Poll;
        let is_full = self.polls.full.is_none_or(|full| full.elapsed() >= self.options.renew);
        let (version, known) = match in_sync {
            Some(have) if !is_full => {
                let (newest, known) = run.newest_behind(&self.options.model, have, assume_latest)?;
                (Some(newest), known)
            }
            _ => {
                let newest = run.newest_version(&self.options.model)?;
                self.polls.full = Some(Instant::now());
                (newest, None)
            }
        };
        let is_reached = in_sync.is_some() && version == in_sync;
        self.polls.caught_up = is_reached;
        (self.polls.newest, self.polls.known) = (version, known);
        Ok(Newest { version, is_reached })
    }

    fn advance(&mut self, replica: &mut Replica, to: Version) -> Result<Advanced> {
        let options = &self.options;
        let Some((run, lease)) = &self.opened else {
            return Err(Error::NoSuchRun { name: options.run.clone(), store: self.store.to_string() });
        };
        replica.advance_observed(
            run,
            &options.model,
            to,
            self.polls.known.take(),
            options.hf_checkpoint.as_deref(),
            lease,
        )
    }

    fn acknowledge(&self, ack: Ack) {
        if let Some((_, lease)) = &self.opened {
            lease.acknowledge(ack);
        }
    }
}
