//! A checkpoint directory on a host that holds one known version, and moves to the next by a write-ahead log,
//! the journal.
//!
//! An apply goes through these files, in this order:
//!
//! | File | Does |
//! |---|---|
//! | `plan` | says what an advance would fetch, without doing it |
//! | `advance` | reads chains, and applies portion by portion |
//! | `fold` | says which versions one journal takes together, and what they need |
//! | `objects` | fetches objects ahead of the threads that decode them |
//! | `stage` | writes the journal of a portion, or a whole checkpoint beside the old one |
//! | `decode` | takes each tensor through all versions |
//! | `foreign` | the same for versions that come as absolute bytes (slime) |
//! | `prefault` | prefaults the pages that will change |
//! | `buffers` | keeps decoding memory from tensor to tensor |
//! | `journal` | writes, syncs and seals the records |
//! | `own` | tells files of others from the replica's own, and refuses to replace them |
//! | `withhold` | keeps `config.json` out of the directory while files change |
//! | `redo`, `overwrite` | carry out a sealed journal through memory maps |
//! | `sync` | syncs the data behind the apply, and moves the marker |
//! | `state` | the marker, the manifest and the digest tables in `.driftless/` |
//! | `scrub`, `quarantine`, `repair` | find damage, set it aside, and finish what a crash left |

mod advance;
mod buffers;
mod decode;
mod fold;
mod foreign;
mod journal;
mod objects;
mod overwrite;
mod own;
mod plan;
mod prefault;
mod quarantine;
mod redo;
mod repair;
mod scrub;
mod stage;
mod state;
mod sync;
mod withhold;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use driftless_delta::DigestTable;
use driftless_store::download::{DownloadCache, DownloadOptions};
use driftless_store::os::watch::{self, Call};
use driftless_store::os::{Lock, crash_point, create_dir_synced, remove_dir, sync_dir};

use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::ids::Version;
use crate::manifest::{Base, File, Manifest};
use crate::prepared::{Offer, OfferWhen, Offering};
use crate::run::Committed;
use crate::snapshot::Snapshot as _;
use buffers::Buffers;
use journal::{Record, Sealed, Writer};
use own::refuse_stray;
use prefault::WriteMaps;
use state::{Layout, State};
use sync::{PendingSync, SYNC_DEADLINE, Syncing};

pub use advance::Advanced;
pub(crate) use advance::Observe;
pub(crate) use fold::check_same_form;
pub use foreign::{Foreign, Rewrite, Rewriter, SLICE_BYTES, position};
pub use objects::FetchObject;
pub(crate) use own::refuse_foreign_place;
pub use own::{foreign_file, refuse_foreign};
pub use plan::{OnDisk, Plan, PlannedVersion};
pub use repair::Repaired;
pub(crate) use scrub::Scrub;
pub use state::Applied;

/// The moment at which a range of an object has been kept.
const RANGE_POINT: &str = "follow.range";

/// A plain Hugging Face checkpoint directory that holds one version of a model and can be moved to later
/// ones.
///
/// Its state lies in `.driftless/` inside. An apply goes through a write-ahead log: it decodes to absolute
/// changes, and writes and syncs the journal. That commits the new version. Then it overwrites in place,
/// engines may load the version, and the call returns. Behind it, on a thread of its own ([`Replica::sync`]),
/// the data are synced, the marker is moved and the journal is dropped. After a crash, [`Replica::open`]
/// leaves exactly the old or the new version, and the new one once it could be loaded. The base is checked
/// before anything is written.
///
/// The directory belongs to one `Replica` at a time (a lock says so); engines may read it, nothing else may
/// write it.
#[derive(Debug)]
pub struct Replica {
    dir: PathBuf,
    layout: Layout,
    /// Held as long as the value lives, and as long as a version is being made durable.
    lock: Arc<Lock>,
    state: Option<State>,
    /// The applied version is in the page cache and the journal, and on its way into its place.
    syncing: Option<Syncing>,
    /// Files of the version that was set aside, until another one is in place.
    set_aside: Vec<File>,
    /// A committed journal could not be carried out; nothing else happens before it is.
    unfinished: bool,
    /// Objects that arrive.
    downloads: Arc<DownloadCache>,
    /// Memory of the apply that is under way.
    buffers: Arc<Buffers>,
    /// What plugins of engines are offered.
    offer: Option<Offer>,
    /// From when on a version that was offered is there before its bytes are, if it is.
    offers_first: Option<OfferWhen>,
}

/// What carrying out a journal took.
#[derive(Default)]
struct CarriedOut {
    /// Until the journal was synced; zero if that goes on behind.
    kept: Duration,
    /// Until an engine could load the version; zero if it is carried out behind.
    overwrite: Duration,
}

impl Replica {
    /// Opens the replica in `dir`, which is made if absent, and finishes what a crash interrupted.
    ///
    /// Every tensor is hashed when the last apply did not end cleanly or a weight file was touched since.
    ///
    /// # Errors
    ///
    /// [`Locked`](driftless_store::Error::Locked) if another process has it; [`Error::DamagedReplica`] if the
    /// directory does not hold what its state says and the journal cannot repair that; the file system's
    /// errors.
    pub fn open(dir: impl Into<PathBuf>) -> Result<Self> {
        let mut replica = Self::locked(dir.into())?;
        replica.recover()?;
        Ok(replica)
    }

    /// [`Replica::open`], but a directory that cannot be trusted is emptied ([`Replica::quarantine`]), so
    /// that the next [`Replica::advance`] builds it anew.
    ///
    /// # Errors
    ///
    /// As [`Replica::open`] and [`Replica::quarantine`].
    pub(crate) fn open_or_quarantine(dir: impl Into<PathBuf>) -> Result<Self> {
        let mut replica = Self::locked(dir.into())?;
        match replica.recover() {
            Err(damage @ Error::DamagedReplica { .. }) => replica.quarantine(damage)?,
            recovered => recovered?,
        }
        Ok(replica)
    }

    fn locked(dir: PathBuf) -> Result<Self> {
        let layout = Layout::new(&dir);
        if !layout.root.is_dir() {
            // Weights whose state was lost with the power would belong to no version.
            create_dir_synced(&layout.root)?;
        }
        let lock = Arc::new(Lock::take(&layout.lock())?);
        let downloads =
            Arc::new(DownloadCache::new(layout.downloads(), DownloadOptions::default(), RANGE_POINT));
        Ok(Self {
            dir,
            layout,
            lock,
            state: None,
            syncing: None,
            set_aside: Vec::new(),
            unfinished: true,
            downloads,
            buffers: Arc::default(),
            offer: None,
            offers_first: None,
        })
    }

    /// Sets aside, after `damage`, everything of this directory that belongs to the replica: afterwards it
    /// holds no version. The damaged files are kept until another version is in place, or until its space is
    /// needed. The run, the model and the version stay pinned.
    ///
    /// # Errors
    ///
    /// `damage` itself, if the directory holds weight files that this program did not put there: they would
    /// be lost. [`Error::Busy`] while the checkpoint is shared; the file system's errors, after which the
    /// call can be repeated.
    pub fn quarantine(&mut self, damage: Error) -> Result<()> {
        self.check_unshared()?;
        // Any other error is more damage.
        if let Err(error @ Error::Busy { .. }) = self.rest() {
            return Err(error);
        }
        if let Some(foreign) = quarantine::foreign_file(&self.dir, &self.layout)? {
            tracing::warn!(dir = %self.dir.display(), foreign, "damaged, and not to be rebuilt over a foreign file");
            return Err(damage);
        }
        tracing::warn!(
            dir = %self.dir.display(), damage = &damage as &dyn std::error::Error, "damaged: building it anew from the store"
        );
        self.state = None;
        quarantine::set_aside(&self.dir, &self.layout)?;
        self.recover()
    }

    /// How objects are kept while [`Replica::advance`] fetches them, so that a fetch that was stopped goes on
    /// where it was.
    pub fn set_download_options(&mut self, options: DownloadOptions) {
        self.downloads = Arc::new(DownloadCache::new(self.layout.downloads(), options, RANGE_POINT));
    }

    /// Has each delta that is applied from now on written to the plugins' directory `dir` too, as long as a
    /// plugin is there. Engines then write it into their weights instead of loading the checkpoint.
    pub fn set_plugin_dir(&mut self, dir: PathBuf) {
        self.offer = Some(Offer::new(dir, &self.dir));
    }

    /// Removes the delta that was offered last. The next one is offered anew.
    pub(crate) fn end_offer(&mut self) {
        self.offer.iter_mut().for_each(Offer::end);
    }

    /// Has a delta that was offered be the applied version before its bytes are there. They are written behind, which
    /// [`Checkpoint::wait`] waits for. With [`OfferWhen::Decoded`] its journal is not durable yet either, which
    /// [`Replica::keep`] waits for.
    pub fn offer_first(&mut self, when: OfferWhen) {
        self.offers_first = Some(when);
    }

    /// The directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The version that the directory holds, or `None` before the first. While an apply is unfinished, the
    /// version before it, or the one it leads to if that could be loaded for a while.
    #[must_use]
    pub fn applied(&self) -> Option<&Applied> {
        self.state.as_ref().map(|state| &state.applied)
    }

    /// The applied version by identity.
    #[must_use]
    pub fn identity(&self) -> Option<Base> {
        self.applied()
            .map(|applied| Base { version: applied.version, manifest_digest: applied.manifest_digest })
    }

    /// The applied version's manifest.
    #[must_use]
    pub fn manifest(&self) -> Option<&Manifest> {
        self.state.as_ref().map(|state| &state.manifest)
    }

    /// The applied version and its manifest.
    ///
    /// # Errors
    ///
    /// [`Error::NothingApplied`] before the first version.
    pub fn held(&self) -> Result<(&Applied, &Manifest)> {
        let state = self.state.as_ref().ok_or_else(|| Error::NothingApplied { path: self.dir.clone() })?;
        Ok((&state.applied, &state.manifest))
    }

    /// The applied version's tensors and files. A follower whose engines are patched first may still write
    /// their bytes ([`Checkpoint::wait`]).
    ///
    /// # Errors
    ///
    /// [`Error::NothingApplied`] before the first version, and while a committed apply could not be finished
    /// (a full disk): call [`Replica::advance`] again or open the replica anew.
    pub fn checkpoint(&self) -> Result<&Checkpoint> {
        Ok(&self.whole()?.checkpoint)
    }

    /// The checkpoint for another thread. While a clone is alive, the replica does not advance.
    pub(crate) fn share(&self) -> Result<Arc<Checkpoint>> {
        Ok(self.whole()?.checkpoint.clone())
    }

    fn whole(&self) -> Result<&State> {
        match &self.state {
            Some(state) if !self.unfinished => Ok(state),
            _ => Err(Error::NothingApplied { path: self.dir.clone() }),
        }
    }

    /// The block digests of a tensor of the applied version, by its main name.
    #[must_use]
    pub fn digests(&self, tensor: &str) -> Option<&DigestTable> {
        self.state.as_ref()?.tables.get(tensor)
    }

    /// Takes the version of `committed` from a checkpoint directory that is already here: version 0 by
    /// reference. Copies `source` (unless it is this directory itself) and checks the digest of every tensor
    /// and file. Does nothing if that version is applied.
    ///
    /// # Errors
    ///
    /// [`Error::TensorMismatch`] and [`DigestMismatch`](driftless_store::Error::DigestMismatch) name what
    /// differs from the manifest; [`Error::Rewind`] or [`Error::ForeignRun`] if another version is applied;
    /// [`Error::BadSetting`] if the directory holds other weights.
    pub fn adopt(&mut self, source: &Path, committed: &Committed) -> Result<()> {
        self.finish()?;
        if self.check_forward(&committed.manifest)? && self.identity() == Some(committed.identity()) {
            return Ok(());
        }
        let sealed = self.journal_adoption(source, committed);
        self.carry_out(sealed, WriteMaps::default(), None, OfferWhen::Durable).map(|_| ())
    }

    /// Hashes every tensor and file of the directory and compares with the manifest: a scrub, never needed
    /// per step.
    ///
    /// # Errors
    ///
    /// [`Error::TensorMismatch`] or [`DigestMismatch`](driftless_store::Error::DigestMismatch) name the first
    /// difference; [`Error::NothingApplied`].
    pub fn verify(&self) -> Result<()> {
        let (_, manifest) = self.held()?;
        if let Some(state) = &self.state {
            state.checkpoint.wait(SYNC_DEADLINE)?;
        }
        // Opened anew, so that replaced files are seen.
        let checkpoint = Checkpoint::open_replica(&self.dir)?;
        redo::check_tensors(&checkpoint, manifest)?;
        redo::check_files(&checkpoint, manifest)?;
        redo::hash_all(&checkpoint, manifest).map(|_| ())
    }

    /// Waits for the version before to be durable and finishes a committed journal, if one waits. Refuses
    /// while the checkpoint is shared: nothing may change behind a reader's map. Returns how long it waited.
    fn finish(&mut self) -> Result<Duration> {
        self.check_unshared()?;
        let started = Instant::now();
        self.sync()?;
        Ok(started.elapsed())
    }

    fn check_unshared(&self) -> Result<()> {
        if self.state.as_ref().is_some_and(|state| Arc::strong_count(&state.checkpoint) > 1) {
            return Err(Error::Busy { what: format!("`{}`", self.dir.display()), with: "a reader".into() });
        }
        Ok(())
    }

    /// Carries out a committed journal, to the end, or reads what is here.
    fn recover(&mut self) -> Result<()> {
        let journal = self.layout.journal().exists();
        if let Some((pending, _)) = self.redo(None, None)? {
            pending.sync().map_err(|error| self.classify(error))?;
        } else {
            if withhold::is_missing(&self.layout) {
                withhold::give_back(&self.layout)?;
            }
            let loaded = redo::load(&self.dir, &self.layout, journal).map_err(|error| self.classify(error));
            if matches!(loaded, Err(Error::DamagedReplica { .. })) {
                // No engine starts from what is known to be damaged.
                withhold::take(&self.layout)?;
            }
            self.state = loaded?;
            redo::drop_journal(&self.layout)?;
        }
        if self.state.is_some() {
            refuse_stray(&self.dir)?;
        }
        self.unfinished = false;
        Ok(())
    }

    /// Carries out a committed journal up to the page cache; returns what is left to do, and how long it
    /// took. With `sealed`, one that was just sealed.
    fn redo(
        &mut self,
        sealed: Option<WriteMaps>,
        offering: Option<Offering>,
    ) -> Result<Option<(PendingSync, Duration)>> {
        let before = self.state.as_ref().map(|state| &*state.checkpoint);
        let redone = redo::redo(&self.dir, &self.layout, before, sealed, offering)
            .map_err(|error| self.classify(error))?;
        Ok(redone.map(|mut redone| {
            redone.pending.before = self.state.replace(redone.state);
            (redone.pending, redone.overwrite)
        }))
    }

    fn damaged(&self, source: Error) -> Error {
        Error::DamagedReplica { path: self.dir.clone(), source: Box::new(source) }
    }

    /// Carries out a journal that was just sealed, on `maps`; if it could not be sealed or kept, what was written
    /// of it is removed. What it changes is offered by `offering`, and with `when` before it is kept. It becomes durable
    /// behind, and is carried out behind if engines' plugins were offered it first.
    fn carry_out(
        &mut self,
        sealed: Result<Sealed>,
        maps: WriteMaps,
        mut offering: Option<Offering>,
        when: OfferWhen,
    ) -> Result<CarriedOut> {
        let sealed = sealed.map_err(|error| self.give_up(error, &maps))?;
        if when == OfferWhen::Decoded
            && let Some(state) = self.offer_ahead(sealed.place(), &mut offering)?
        {
            self.carry_out_behind(state, maps, Some(sealed))?;
            return Ok(CarriedOut::default());
        }
        let started = Instant::now();
        sealed.keep().map_err(|error| self.give_up(error, &maps))?;
        let kept = started.elapsed();
        self.unfinished = true;
        self.layout.sync()?;
        crash_point("follow.journal")?;
        if offering.is_none() {
            self.offer.iter_mut().for_each(Offer::withdraw);
        }
        if when == OfferWhen::Durable
            && let Some(state) = self.offer_ahead(&self.layout.journal(), &mut offering)?
        {
            self.carry_out_behind(state, maps, None)?;
            return Ok(CarriedOut { kept, overwrite: Duration::ZERO });
        }
        let overwrite = match self.redo(Some(maps), offering)? {
            Some((pending, overwrite)) => {
                self.sync_behind(pending)?;
                self.unfinished = false;
                overwrite
            }
            None => {
                self.recover()?;
                self.downloads.resume();
                Duration::ZERO
            }
        };
        Ok(CarriedOut { kept, overwrite })
    }

    /// Offers what the journal at `path` changes, before a byte of it is carried out; the state that it leads to if that
    /// was done. A journal that does more than overwrite weights is carried out first.
    fn offer_ahead(&self, path: &Path, offering: &mut Option<Offering>) -> Result<Option<State>> {
        let before = self.state.as_ref().filter(|_| self.offers_first.is_some() && offering.is_some());
        let Some(before) = before else { return Ok(None) };
        let ahead = redo::ahead(&self.dir, &self.layout, path, &before.checkpoint);
        let Some(state) = ahead.map_err(|error| self.classify(error))? else { return Ok(None) };
        let finish = |offering: Offering| offering.finish(&state.manifest, state.applied.prepared(), true);
        Ok(offering.take().is_some_and(finish).then_some(state))
    }

    /// Removes what was written of an apply that did not come to a journal.
    fn give_up(&mut self, error: Error, maps: &WriteMaps) -> Error {
        self.buffers.clear();
        if let Err(leftover) = redo::drop_journal(&self.layout) {
            tracing::warn!(error = %leftover, "a part of an uncommitted apply stays behind");
        }
        if let Some(state) = self.state.as_mut().filter(|_| maps.moved_times())
            && let Err(error) = redo::restamp(&self.layout, state)
        {
            tracing::warn!(%error, "everything will be hashed: the weight files' new times are not noted");
        }
        self.make_room(&error);
        self.attribute(error)
    }

    /// An error of the codec may mean that the base has rotted in place, which nothing but its digests can
    /// tell.
    fn attribute(&mut self, error: Error) -> Error {
        let suspect = matches!(error, Error::Codec { .. } | Error::TensorMismatch { .. });
        let Some(state) = self.state.as_ref().filter(|_| suspect) else { return error };
        match redo::hash_all(&state.checkpoint, &state.manifest) {
            Ok(_) => error,
            Err(source) => {
                self.unfinished = true;
                self.damaged(source)
            }
        }
    }

    /// The version that is applied, or was before the directory was set aside.
    fn pinned(&self) -> Result<Option<Applied>> {
        match self.applied() {
            Some(applied) => Ok(Some(applied.clone())),
            None => quarantine::pinned(&self.layout),
        }
    }

    fn check_version(&self, have: &Applied, wanted: Version) -> Result<()> {
        if have.version <= wanted {
            return Ok(());
        }
        let subject = format!("`{}`", self.dir.display());
        Err(Error::Rewind { subject, run_id: have.run_id, have: have.version, wanted })
    }

    /// Refuses another run, another model or an older version; true if a version is applied.
    fn check_forward(&self, manifest: &Manifest) -> Result<bool> {
        let Some(applied) = self.applied() else { return Ok(false) };
        if applied.run_id != manifest.run_id {
            return Err(Error::ForeignRun {
                subject: format!("version {}", manifest.version),
                expected: applied.run_id,
                found: manifest.run_id,
            });
        }
        check_model(&self.dir, &applied.model, &manifest.model)?;
        self.check_version(applied, manifest.version)?;
        Ok(true)
    }

    /// Copies and checks a directory, and seals the journal that installs the copy.
    fn journal_adoption(&self, source: &Path, committed: &Committed) -> Result<Sealed> {
        let checkpoint = Checkpoint::open(source)?;
        redo::check_tensors(&checkpoint, &committed.manifest)?;
        redo::check_files(&checkpoint, &committed.manifest)?;
        let canonical =
            |path: &Path| fs::canonicalize(path).map_err(|source| Error::io("resolve", path, source));
        let own = canonical(source)? == canonical(&self.dir)?;
        if own {
            refuse_stray(&self.dir)?;
        }
        // Later versions are written into the files. What links lead to may be another's: copies take their
        // places.
        let in_place = own && !checkpoint.weight_files().any(Path::is_symlink);
        let mut stale = Vec::new();
        let mut names = Vec::new();
        let tables = if in_place {
            redo::hash_all(&checkpoint, &committed.manifest)?
        } else {
            if !own {
                stale = self.replaceable(&committed.manifest)?;
            }
            let staging = self.clean_staging()?;
            names = checkpoint.copy_weights(&staging)?;
            sync_dir(&staging)?;
            self.layout.sync()?;
            // The copy is what will be served, so the copy is what gets checked.
            redo::hash_all(&Checkpoint::open(&staging)?, &committed.manifest)?
        };
        let journal = Writer::create(&self.layout.journal())?;
        stage::journal_names(&journal, &names, &stale)?;
        for file in checkpoint.files().iter().filter(|_| !in_place) {
            if committed.manifest.files.iter().any(|listed| listed.name == file.name()) {
                journal.push(Record::File { name: file.name(), bytes: file.bytes() })?;
            }
        }
        stage::seal(journal, committed, &tables)
    }

    fn clean_staging(&self) -> Result<PathBuf> {
        let staging = self.layout.staging();
        remove_dir(&staging)?;
        watch::before(Call::Create, &staging)
            .and_then(|()| fs::create_dir(&staging))
            .map_err(|source| Error::io("create", &staging, source))?;
        Ok(staging)
    }
}

/// Begins to offer what leads from a version to the next.
fn begin(offer: &mut Option<Offer>, base: &State) -> Option<Offering> {
    offer.as_mut()?.begin(base.checkpoint.dir(), base.applied.prepared(), base.manifest.tensor_bytes())
}

fn check_model(dir: &Path, expected: &str, found: &str) -> Result<()> {
    if expected == found {
        return Ok(());
    }
    Err(Error::ForeignModel {
        subject: dir.display().to_string(),
        expected: expected.into(),
        found: found.into(),
    })
}
