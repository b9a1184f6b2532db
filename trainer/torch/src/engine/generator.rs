//! What the server tells the model between two passes.

use std::borrow::Cow;
use std::path::Path;

use driftless_bridge::sglang::{DiskUpdate, Feature, Load, checksums_of};
use driftless_server::{Checksums, Ended, Generator, Job, Updated};
use driftless_store::chain_text;
use driftless_transport::Checkpoint;

use super::batcher::Batcher;
use super::sequence::Sequence;
use crate::error::Error;
use crate::libtorch::bytes_of;

impl Batcher {
    fn load_from(&mut self, path: &Path) -> Result<(), Error> {
        let weights = Checkpoint::open(path)?;
        let loaded = tch::no_grad(|| self.model.load_from(&weights));
        match &loaded {
            // Everything that can be wrong with a checkpoint is found before the first weight is written;
            // what is left is libtorch failing between two weights.
            Err(Error::Torch(error)) => self.torn = Some(format!("weights are half loaded: {error}")),
            Err(_) => {}
            Ok(()) => self.torn = None,
        }
        loaded
    }
}

impl Generator for Batcher {
    fn submit(&mut self, job: Job) {
        let seed = self.next_seed;
        self.next_seed = seed.wrapping_add(1);
        let sequence = Sequence::new(job, seed);
        match &self.torn {
            Some(reason) => sequence.finish(Ended::Failed(reason.clone()), &self.version),
            None if sequence.sampling.max_new_tokens == 0 => sequence.finish(Ended::Length, &self.version),
            None => self.waiting.push_back(sequence),
        }
    }

    fn step(&mut self) -> bool {
        if self.paused || (self.running.is_empty() && self.waiting.is_empty()) {
            return false;
        }
        if let Err(error) = tch::no_grad(|| self.pass()) {
            tracing::error!(error = %chain_text(&error), "generation failed");
            self.fail_all(&chain_text(&error));
        }
        true
    }

    fn pause(&mut self, retract: bool) {
        self.paused = true;
        if retract {
            self.drop_aborted();
            self.retract_all();
        }
    }

    fn resume(&mut self) {
        self.paused = false;
    }

    fn abort(&mut self, prefix: Option<&str>, now: bool) {
        self.abort_matching(|rid| prefix.is_none_or(|prefix| rid.starts_with(prefix)));
        if now || !self.paused {
            self.drop_aborted();
        }
    }

    /// Running requests always hold cache; waiting ones count unless the dialect ignores them while paused.
    fn flush(&mut self) -> bool {
        if !self.paused {
            self.drop_aborted();
        }
        let waiting_counts = !(self.paused && self.dialect.has(Feature::FlushWhileRetracted));
        self.running.is_empty() && (self.waiting.is_empty() || !waiting_counts)
    }

    fn load(&mut self, update: &DiskUpdate) -> Updated {
        let flushable = self.flush();
        if update.flush_cache && !flushable && !self.dialect.has(Feature::SurvivesRefusedFlush) {
            return Updated::WouldEnd;
        }
        if let Err(error) = self.load_from(&update.model_path) {
            tracing::error!(path = %update.model_path.display(), error = %chain_text(&error), "update refused");
            return Updated::Refused(chain_text(&error));
        }
        if let Some(version) = &update.weight_version {
            self.set_version(version);
        }
        match update.flush_cache && !flushable {
            true => Updated::NotFlushed,
            false => Updated::Loaded,
        }
    }

    /// Requests that have tokens note under which name those were made.
    fn set_version(&mut self, label: &str) {
        if label == self.version {
            return;
        }
        let old = std::mem::replace(&mut self.version, label.to_owned());
        for sequence in self.running.iter_mut().chain(&mut self.waiting) {
            sequence.version_changed(&old);
        }
    }

    fn session(&mut self, open: bool) -> bool {
        std::mem::replace(&mut self.in_session, open) != open
    }

    fn checksums(&mut self) -> Result<Checksums, String> {
        checksums_of(self.fusing.as_ref().map_err(String::clone)?, |name| {
            let found = self.model.parameters().iter().find(|parameter| parameter.name == name);
            let parameter = found.ok_or_else(|| format!("the model has no {name}"))?;
            bytes_of(&parameter.tensor).map(Cow::Owned).map_err(|error| chain_text(&error))
        })
    }

    fn busy(&self) -> Load {
        Load {
            num_running_reqs: self.running.len() as u64,
            num_waiting_reqs: self.waiting.len() as u64,
            num_used_tokens: self.used_tokens() as u64,
        }
    }
}
