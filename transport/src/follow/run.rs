//! A run of ours as a [`Source`].

use std::sync::Arc;
use std::time::Instant;

use driftless_store::Store;

use super::FollowerOptions;
use super::keeper::Keeper;
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
    /// There is one as soon as the run was seen.
    opened: Option<(Run, Keeper)>,
    polls: Polls,
}

/// What earlier polls found.
#[derive(Default)]
struct Polls {
    /// The newest version, by the last poll that found another one than the replica's.
    newest: Option<Version>,
    /// That version, if the poll has read it.
    known: Option<Committed>,
    /// The last one found nothing new, so that the next version will be the newest.
    quiet: bool,
    /// When one last asked for the newest version, and not only for the next one. That the next one is
    /// missing says nothing new where it was collected, as it may be for a host that slept longer than its
    /// lease.
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
        let keeper = Keeper::new(&run, &options.model, &options.id, options.renew)?;
        self.opened = Some((run.clone(), keeper));
        Ok(run)
    }

    /// The version on disk, if it was the newest at the last poll and nothing is left to be finished.
    fn level(&self, run: &Run, replica: &Replica) -> Option<Version> {
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
        let level = self.level(&run, replica).filter(|_| !matches!(asked, Asked::Version(_)));
        let alone = std::mem::take(&mut self.polls.quiet) && asked == Asked::Poll;
        let is_full = self.polls.full.is_none_or(|full| full.elapsed() >= self.options.renew);
        let (version, known) = match level {
            Some(have) if !is_full => {
                let (newest, known) = run.newest_behind(&self.options.model, have, alone)?;
                (Some(newest), known)
            }
            _ => {
                let newest = run.newest_version(&self.options.model)?;
                self.polls.full = Some(Instant::now());
                (newest, None)
            }
        };
        let is_reached = level.is_some() && version == level;
        self.polls.quiet = is_reached;
        (self.polls.newest, self.polls.known) = (version, known);
        Ok(Newest { version, is_reached })
    }

    fn advance(&mut self, replica: &mut Replica, to: Version) -> Result<Advanced> {
        let options = &self.options;
        let Some((run, keeper)) = &self.opened else {
            return Err(Error::NoSuchRun { name: options.run.clone(), store: self.store.to_string() });
        };
        let place = (options.model.as_str(), to);
        replica.advance_observed(
            run,
            place,
            self.polls.known.take(),
            options.hf_checkpoint.as_deref(),
            keeper,
        )
    }

    fn acknowledge(&self, ack: Ack) {
        if let Some((_, keeper)) = &self.opened {
            keeper.acknowledge(ack);
        }
    }
}
