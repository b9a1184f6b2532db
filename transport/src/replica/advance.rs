//! Moves a replica from version to version: chains in, one journal for as many versions as go together.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use driftless_store::wait::lock;

use super::journal::Sealed;
use super::prefault::WriteMaps;
use super::state::State;
use super::{CarriedOut, Replica, begin, check_model, fold, objects, stage};
use crate::chain::Chain;
use crate::error::{Error, Result};
use crate::ids::Version;
use crate::manifest::{Kind, Manifest};
use crate::prepared::Offering;
use crate::run::{Committed, Run};
use objects::FetchObject;

/// How often a chain is looked up again because versions of it were collected while they were read.
const COLLECTED_MAX: usize = 8;

/// What one [`Replica::advance`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Advanced {
    /// Versions applied, several of them at once where they allow it; 0 if there was nothing to do.
    pub versions: u64,
    /// Bytes of the objects fetched.
    pub bytes: u64,
    /// Elements that changed, by the manifests' account, summed over the versions.
    pub changed: u64,
    /// Fetching, checking, decoding and writing the journal, up to its sync; without that where the offer comes first.
    pub journal: Duration,
    /// Of `journal`, until the last byte had arrived.
    pub fetch: Duration,
    /// Of `journal`, from then until everything was decoded and checked, and the journal written.
    pub decode: Duration,
    /// From then until engines could be asked to take the version: `overwrite`, or an offer to plugins.
    pub offer: Duration,
    /// Overwriting: at its end an engine could load the version.
    pub overwrite: Duration,
    /// Waiting, before any of it, until the version before was durable, which it becomes behind its own
    /// apply.
    pub sync: Duration,
}

/// Hears how far an advance is.
pub(crate) trait Observe: Sync {
    /// The oldest version that will be read, before anything of it is.
    fn planned(&self, oldest: Version);
    /// An object is to be fetched.
    fn fetching(&self);
}

impl Observe for () {
    fn planned(&self, _: Version) {}
    fn fetching(&self) {}
}

impl Replica {
    /// Moves to version `to` of `model`: fetches what is missing, checks every object and every version of
    /// the chain, applies.
    ///
    /// Follows the deltas, several of them in one apply. Starts over at an anchor where that is cheaper or
    /// the only way, also when versions are collected while they are read. A replica without a version starts
    /// at the newest anchor, or adopts `reference` (a checkpoint directory) when the run begins by reference.
    /// Versions that were applied before an error stay applied.
    ///
    /// # Errors
    ///
    /// [`Error::Rewind`], [`Error::ForeignRun`], [`Error::ForeignModel`] with both identities;
    /// [`Error::BrokenChain`]; [`Error::Corrupt`],
    /// [`DigestMismatch`](driftless_store::Error::DigestMismatch), [`Error::Codec`] for bytes that are not
    /// what they must be; [`Error::DamagedReplica`] if it is this directory's that are not;
    /// [`Error::Collected`] if `to` was collected; [`Error::Unsupported`] when a reference is needed and
    /// `reference` is `None`; the store's and the file system's errors.
    pub fn advance(
        &mut self,
        run: &Run,
        model: &str,
        to: Version,
        reference: Option<&Path>,
    ) -> Result<Advanced> {
        self.advance_observed(run, model, to, None, reference, &())
    }

    /// [`Replica::advance`] with an observer, for a caller that may have read the manifest of `to`.
    pub(crate) fn advance_observed(
        &mut self,
        run: &Run,
        model: &str,
        to: Version,
        mut known: Option<Committed>,
        reference: Option<&Path>,
        observer: &dyn Observe,
    ) -> Result<Advanced> {
        let mut total = Advanced { sync: self.finish()?, ..Advanced::default() };
        if let Some(pinned) = self.pinned()? {
            run.check_id(self.dir.display(), pinned.run_id)?;
            check_model(&self.dir, &pinned.model, model)?;
            self.check_version(&pinned, to)?;
            if self.state.is_none() {
                // Which files were the version's, the store says, where the directory itself could not.
                let version = run.get(model, pinned.version).ok();
                let version = version.filter(|found| found.digest == pinned.manifest_digest);
                self.set_aside = version.map_or_else(Vec::new, |found| found.manifest.files);
            }
        }
        let mut tries = 0;
        loop {
            let chain = run.chain_with(model, self.identity(), to, known.take())?;
            let start = if chain.restart { None } else { self.identity().map(|base| base.version) };
            observer.planned(
                start.or(chain.versions.first().map(|committed| committed.manifest.version)).unwrap_or(to),
            );
            tries += 1;
            match self.follow(run, &chain, reference, observer, &mut total) {
                // Another chain leads there now.
                Err(Error::Collected { .. }) if tries < COLLECTED_MAX => {}
                followed => return followed.map(|()| total),
            }
        }
    }

    /// Applies a chain, adding to `total`.
    fn follow(
        &mut self,
        run: &Run,
        chain: &Chain,
        reference: Option<&Path>,
        observer: &dyn Observe,
        total: &mut Advanced,
    ) -> Result<()> {
        let downloads = self.downloads.clone();
        let fetch = |object: &driftless_store::Object| {
            Ok(downloads.object(&**run.store(), object, &|| observer.fetching())?)
        };
        let mut rest = chain.versions.as_slice();
        while let Some(committed) = rest.first() {
            let taken = match reference {
                Some(source) if committed.manifest.kind == Kind::Reference => {
                    let started = Instant::now();
                    self.adopt(source, committed)?;
                    total.versions += 1;
                    total.journal += started.elapsed();
                    1
                }
                _ => {
                    let length = fold::fold_length(rest, !self.is_base_of(committed));
                    let versions = rest.get(..length).unwrap_or(rest);
                    let objects: BTreeSet<_> = versions
                        .iter()
                        .flat_map(|committed| &committed.manifest.objects)
                        .map(|object| object.blake3)
                        .collect();
                    downloads.retain(|digest| objects.contains(digest));
                    let applied = self.apply(versions, &fetch);
                    total.add(applied.map_err(|error| collected_instead(run, versions, error))?);
                    length
                }
            };
            rest = rest.get(taken..).unwrap_or_default();
        }
        Ok(())
    }

    /// Applies one publication whose objects `fetch` gives: a delta on the applied version, or a full one.
    ///
    /// # Errors
    ///
    /// As [`Replica::advance`].
    pub fn advance_with(&mut self, committed: &Committed, fetch: &FetchObject<'_>) -> Result<Advanced> {
        self.apply(std::slice::from_ref(committed), fetch)
    }

    /// Applies publications in a row at once: one journal, one pass over the checkpoint.
    fn apply(&mut self, versions: &[Committed], fetch: &FetchObject<'_>) -> Result<Advanced> {
        let sync = self.finish()?;
        let Some(last) = versions.last() else { return Ok(Advanced::default()) };
        if self.check_forward(&last.manifest)? && self.identity() == Some(last.identity()) {
            return Ok(Advanced::default());
        }
        if self.state.as_ref().is_some_and(State::is_touched) {
            // Hashes everything, and refuses the directory if it is not what it was; nothing is served until
            // it is.
            self.unfinished = true;
            self.recover()?;
        }
        let started = Instant::now();
        let objects = objects::Objects::new(versions, fetch);
        let base =
            self.state.as_ref().filter(|_| versions.first().is_some_and(|first| self.is_base_of(first)));
        let offering = base.and_then(|base| begin(&mut self.offer, base));
        // What is offered first is written behind: its page faults would only hold up the offer.
        let written_now = base.filter(|_| offering.is_none() || self.offers_first.is_none());
        let mut maps = written_now.map_or_else(WriteMaps::default, |base| WriteMaps::open(&base.checkpoint));
        let sealed = self.journal_publications(versions, &objects, &mut maps, offering.as_ref());
        let (decoded, bytes) = (started.elapsed(), objects.fetched());
        let fetch = lock(&objects.came).map_or(Duration::ZERO, |at| at.duration_since(started));
        let decode = decoded.saturating_sub(fetch);
        let when = self.offers_first.unwrap_or_default();
        let CarriedOut { kept, overwrite } = self.carry_out(sealed, maps, offering, when)?;
        let journal = decoded + kept;
        let offer = started.elapsed().saturating_sub(journal);
        let changed = versions.iter().map(|committed| committed.manifest.changed).sum();
        tracing::info!(
            dir = %self.dir.display(), version = %last.manifest.version, versions = versions.len(), bytes, changed,
            journal_ms = journal.as_millis() as u64, overwrite_ms = overwrite.as_millis() as u64, "applied"
        );
        let versions = versions.len() as u64;
        Ok(Advanced { versions, bytes, changed, journal, fetch, decode, offer, overwrite, sync })
    }

    /// Whether `committed` is a delta on the version that is here.
    fn is_base_of(&self, committed: &Committed) -> bool {
        committed.manifest.kind == Kind::Delta
            && self.state.is_some()
            && committed.manifest.base == self.identity()
    }

    /// Seals the journal of publications in a row. Pages of `maps` that will be overwritten are made ready.
    fn journal_publications(
        &self,
        versions: &[Committed],
        objects: &objects::Objects<'_>,
        maps: &mut WriteMaps,
        offering: Option<&Offering>,
    ) -> Result<Sealed> {
        let (Some(first), Some(last)) = (versions.first(), versions.last()) else {
            return Err(Error::Internal { what: "a journal of no version" });
        };
        match &self.state {
            Some(state) if self.is_base_of(first) => {
                let (path, buffers) = (self.layout.journal(), &self.buffers);
                stage::journal_deltas(&path, state, maps, versions, objects, buffers, offering)
            }
            Some(state) if !first.manifest.is_anchor() => Err(broken_chain(state, &first.manifest)),
            state => {
                let stale = self.replaceable(&last.manifest)?;
                let staging = self.clean_staging()?;
                let old_files = state.as_ref().map_or(&self.set_aside, |state| &state.manifest.files);
                stage::journal_full(&self.layout.journal(), &staging, versions, objects, old_files, &stale)
            }
        }
    }
}

impl Advanced {
    /// Counts another advance in.
    pub fn add(&mut self, other: Self) {
        self.versions += other.versions;
        self.bytes += other.bytes;
        self.changed += other.changed;
        self.journal += other.journal;
        self.fetch += other.fetch;
        self.decode += other.decode;
        self.offer += other.offer;
        self.overwrite += other.overwrite;
        self.sync += other.sync;
    }
}

/// Why an object is not there: its version may have been collected while it was read.
fn collected_instead(run: &Run, versions: &[Committed], error: Error) -> Error {
    if !error.is_not_found() {
        return error;
    }
    let gone = |committed: &Committed| match run.get(&committed.manifest.model, committed.manifest.version) {
        Err(collected @ Error::Collected { .. }) => Some(collected),
        _ => None,
    };
    versions.iter().find_map(gone).unwrap_or(error)
}

/// A delta that does not start from what is here.
fn broken_chain(state: &State, manifest: &Manifest) -> Error {
    match manifest.base {
        Some(base) if base.version == state.applied.version => Error::BrokenChain {
            version: manifest.version,
            base: base.version,
            expected: base.manifest_digest,
            found: state.applied.manifest_digest,
        },
        base => Error::Corrupt {
            subject: format!("chain of run {}", manifest.run_id),
            what: "a version is missing",
            expected: format!("a delta from version {}", state.applied.version),
            found: base.map_or("none".into(), |base| format!("one from version {}", base.version)),
        },
    }
}
