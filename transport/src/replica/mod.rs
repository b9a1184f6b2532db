//! A host-local checkpoint directory at a known version, moved from version to version without ever being lost.

mod fetch;
#[cfg(feature = "slime")]
pub(crate) mod foreign;
mod journal;
mod redo;
mod state;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use driftless_delta::DigestTable;
use rustix::fs::{FlockOperation, flock};

use crate::checkpoint::{Checkpoint, remove_dir, sync_dir};
use crate::error::{Error, Result};
use crate::ids::Version;
use crate::manifest::{Base, Kind, Manifest};
use crate::run::{Committed, Run};
use crate::snapshot::{Snapshot as _, is_plain_name};
use journal::{Record, Writer};
use redo::Times;
use state::{Layout, State};

pub use fetch::FetchObject;
pub use state::Applied;

/// Directory inside a replica that holds its state.
pub(crate) const STATE_DIR: &str = ".driftless";

/// A plain Hugging Face checkpoint directory that holds one version of a model and can be moved to later
/// ones.
///
/// Its state lies in `.driftless/` inside. An apply is a redo log: decode to absolute changes, write and sync
/// the journal (now the new version is committed), overwrite in place, sync, move the marker, drop the
/// journal. A crash anywhere leaves, after [`Replica::open`], the old or the new version exactly. The base is
/// checked before anything is written.
///
/// The directory belongs to one `Replica` at a time (a lock says so); engines may read it, nobody else may
/// write it.
#[derive(Debug)]
pub struct Replica {
    dir: PathBuf,
    layout: Layout,
    /// Held as long as the value lives.
    _lock: File,
    state: Option<State>,
    /// A committed journal could not be carried out; nothing else happens before it is.
    unfinished: bool,
}

/// What one [`Replica::advance`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Advanced {
    /// Versions applied one after the other; 0 if there was nothing to do.
    pub links: u64,
    /// Bytes of the objects fetched.
    pub bytes: u64,
    /// Elements that changed, by the manifests' account, summed over the links.
    pub changed: u64,
    /// Fetching, checking, decoding and writing the journal, up to its sync.
    pub journal: Duration,
    /// Overwriting: at its end an engine could load the version.
    pub overwrite: Duration,
    /// Making the overwritten data durable.
    pub sync: Duration,
}

impl Replica {
    /// Opens the replica in `dir`, which is made if absent, and finishes what a crash interrupted.
    ///
    /// Every tensor is hashed when the last apply did not end cleanly or a weight file was touched since.
    ///
    /// # Errors
    ///
    /// [`Error::Locked`] if another process has it; [`Error::DamagedReplica`] if the directory does not hold
    /// what its state says and the journal cannot repair that; the file system's errors.
    pub fn open(dir: impl Into<PathBuf>) -> Result<Self> {
        let dir = dir.into();
        let layout = Layout::new(&dir);
        fs::create_dir_all(&layout.root).map_err(|source| Error::io("create", &layout.root, source))?;
        let lock = lock(&layout.lock())?;
        let mut replica = Self { dir, layout, _lock: lock, state: None, unfinished: true };
        replica.recover()?;
        Ok(replica)
    }

    /// The directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The version that the directory holds, or `None` before the first. While an apply is unfinished, the
    /// version before it.
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

    /// The applied version's tensors and files.
    ///
    /// # Errors
    ///
    /// [`Error::NothingApplied`] before the first version, and while a committed apply could not be finished
    /// (a full disk): call [`Replica::advance`] again or open the replica anew.
    pub fn checkpoint(&self) -> Result<&Checkpoint> {
        match &self.state {
            Some(state) if !self.unfinished => Ok(&state.checkpoint),
            _ => Err(Error::NothingApplied { path: self.dir.clone() }),
        }
    }

    /// The checkpoint for another thread. While a clone is alive, the replica does not advance.
    pub(crate) fn share(&self) -> Result<Arc<Checkpoint>> {
        match &self.state {
            Some(state) if !self.unfinished => Ok(state.checkpoint.clone()),
            _ => Err(Error::NothingApplied { path: self.dir.clone() }),
        }
    }

    /// The block digests of a tensor of the applied version, by its main name.
    #[must_use]
    pub fn digests(&self, tensor: &str) -> Option<&DigestTable> {
        self.state.as_ref()?.tables.get(tensor)
    }

    /// Takes the version of `link` from a checkpoint directory that is already here: version 0 by reference.
    /// Copies `source` (unless it is this directory itself) and checks the digest of every tensor and file.
    /// Does nothing if that version is applied.
    ///
    /// # Errors
    ///
    /// [`Error::TensorMismatch`] and [`Error::DigestMismatch`] name what differs from the manifest;
    /// [`Error::Rewind`] or [`Error::ForeignRun`] if another version is applied; [`Error::BadSetting`] if the
    /// directory holds other weights.
    pub fn adopt(&mut self, source: &Path, link: &Committed) -> Result<()> {
        self.finish()?;
        if self.check_forward(&link.manifest)? && self.identity() == Some(link.identity()) {
            return Ok(());
        }
        let sealed = self.journal_adoption(source, link);
        self.carry_out(sealed).map(|_| ())
    }

    /// Moves to version `to` of `model`: fetches what is missing, checks every object and every link of the
    /// chain, applies.
    ///
    /// Follows the deltas, or starts over at an anchor where that is cheaper or the only way. A replica
    /// without a version starts at the newest anchor, or adopts `reference` (a checkpoint directory) when the
    /// run begins by reference. Links that were applied before an error stay applied.
    ///
    /// # Errors
    ///
    /// [`Error::Rewind`], [`Error::ForeignRun`], [`Error::ForeignModel`] with both identities;
    /// [`Error::BrokenChain`]; [`Error::Corrupt`], [`Error::DigestMismatch`], [`Error::Codec`] for bytes that
    /// are not what they must be; [`Error::Unsupported`] when a reference is needed and `reference` is
    /// `None`; the store's and the file system's errors.
    pub fn advance(
        &mut self,
        run: &Run,
        model: &str,
        to: Version,
        reference: Option<&Path>,
    ) -> Result<Advanced> {
        self.finish()?;
        if let Some(applied) = self.applied() {
            run.check_id(self.dir.display(), applied.run_id)?;
            check_model(&self.dir, &applied.model, model)?;
        }
        let chain = run.chain(model, self.identity(), to)?;
        let mut total = Advanced::default();
        for link in &chain.links {
            match reference {
                Some(source) if link.manifest.kind == Kind::Reference => {
                    let started = Instant::now();
                    self.adopt(source, link)?;
                    total.links += 1;
                    total.journal += started.elapsed();
                }
                _ => total.add(self.advance_with(link, &mut |object| run.object(object))?),
            }
        }
        Ok(total)
    }

    /// Applies one publication whose objects `fetch` gives: a delta on the applied version, or a full one.
    ///
    /// # Errors
    ///
    /// As [`Replica::advance`].
    pub fn advance_with(&mut self, link: &Committed, fetch: &mut FetchObject<'_>) -> Result<Advanced> {
        self.finish()?;
        if self.check_forward(&link.manifest)? && self.identity() == Some(link.identity()) {
            return Ok(Advanced::default());
        }
        if self.state.as_ref().is_some_and(State::is_touched) {
            // Hashes everything, and refuses the directory if it is not what it was; nothing is served until it is.
            self.unfinished = true;
            self.recover()?;
        }
        let started = Instant::now();
        let sealed = self.journal_publication(link, fetch);
        let journal = started.elapsed();
        let bytes = sealed.as_ref().copied().unwrap_or_default();
        let times = self.carry_out(sealed)?;
        tracing::info!(
            dir = %self.dir.display(), version = %link.manifest.version, bytes, changed = link.manifest.changed,
            journal_ms = journal.as_millis() as u64, overwrite_ms = times.overwrite.as_millis() as u64, "applied"
        );
        let changed = link.manifest.changed;
        Ok(Advanced { links: 1, bytes, changed, journal, overwrite: times.overwrite, sync: times.sync })
    }

    /// Hashes every tensor and file of the directory and compares with the manifest: a scrub, never needed
    /// per step.
    ///
    /// # Errors
    ///
    /// [`Error::TensorMismatch`] or [`Error::DigestMismatch`] name the first difference;
    /// [`Error::NothingApplied`].
    pub fn verify(&self) -> Result<()> {
        let manifest = self.manifest().ok_or_else(|| Error::NothingApplied { path: self.dir.clone() })?;
        // Opened anew, so that replaced files are seen.
        let checkpoint = Checkpoint::open(&self.dir)?;
        redo::check_tensors(&checkpoint, manifest)?;
        redo::check_files(&checkpoint, manifest)?;
        redo::hash_all(&checkpoint, manifest).map(|_| ())
    }

    /// Finishes a committed journal, if one waits. Refuses while the checkpoint is shared: nothing may change
    /// behind a reader's map.
    fn finish(&mut self) -> Result<()> {
        if self.state.as_ref().is_some_and(|state| Arc::strong_count(&state.checkpoint) > 1) {
            return Err(Error::Busy { what: format!("`{}`", self.dir.display()), with: "a reader".into() });
        }
        if self.unfinished { self.recover().map(|_| ()) } else { Ok(()) }
    }

    fn recover(&mut self) -> Result<Times> {
        let damaged = |source: Error| match source {
            Error::Io { .. } | Error::NoSpace { .. } | Error::PermissionDenied { .. } => source,
            source => Error::DamagedReplica { path: self.dir.clone(), source: Box::new(source) },
        };
        let journal = self.layout.journal().exists();
        let (state, times) = match redo::redo(&self.dir, &self.layout).map_err(damaged)? {
            Some((state, times)) => (Some(state), times),
            None => (redo::load(&self.dir, &self.layout, journal).map_err(damaged)?, Times::default()),
        };
        redo::drop_journal(&self.layout)?;
        self.state = state;
        self.unfinished = false;
        Ok(times)
    }

    /// Carries out a journal that was just sealed; if it could not be sealed, what was written of it is removed.
    fn carry_out(&mut self, sealed: Result<u64>) -> Result<Times> {
        if let Err(error) = sealed {
            if let Err(leftover) = redo::drop_journal(&self.layout) {
                tracing::warn!(error = %leftover, "a part of an uncommitted apply stays behind");
            }
            return Err(error);
        }
        self.unfinished = true;
        self.layout.sync()?;
        crash_point("follow.journal")?;
        self.recover()
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
        if applied.version > manifest.version {
            return Err(Error::Rewind {
                subject: format!("`{}`", self.dir.display()),
                run_id: applied.run_id,
                have: applied.version,
                wanted: manifest.version,
            });
        }
        Ok(true)
    }

    /// Seals the journal of a publication; returns the bytes fetched.
    fn journal_publication(&self, link: &Committed, fetch: &mut FetchObject<'_>) -> Result<u64> {
        let mut objects = fetch::Objects::new(&link.manifest, fetch);
        match &self.state {
            Some(state) if link.manifest.kind == Kind::Delta && link.manifest.base == self.identity() => {
                fetch::check_same_form(&state.manifest, &link.manifest)?;
                fetch::journal_delta(&self.layout.journal(), state, link, &mut objects)?;
                Ok(objects.fetched())
            }
            Some(state) if !link.manifest.is_anchor() => Err(broken_chain(state, &link.manifest)),
            state => {
                let stale = self.weight_names(state.is_some())?;
                let staging = self.clean_staging()?;
                let old_files = state.as_ref().map_or(&[][..], |state| &state.manifest.files);
                fetch::journal_full(&self.layout.journal(), &staging, link, objects, old_files, &stale)
            }
        }
    }

    /// Copies and checks a directory, and seals the journal that installs the copy.
    fn journal_adoption(&self, source: &Path, link: &Committed) -> Result<u64> {
        let checkpoint = Checkpoint::open(source)?;
        redo::check_tensors(&checkpoint, &link.manifest)?;
        redo::check_files(&checkpoint, &link.manifest)?;
        let canonical =
            |path: &Path| fs::canonicalize(path).map_err(|source| Error::io("resolve", path, source));
        let in_place = canonical(source)? == canonical(&self.dir)?;
        let mut stale = Vec::new();
        let mut names = Vec::new();
        let tables = if in_place {
            redo::hash_all(&checkpoint, &link.manifest)?
        } else {
            stale = self.weight_names(self.state.is_some())?;
            let staging = self.clean_staging()?;
            names = checkpoint.copy_weights(&staging)?;
            sync_dir(&staging)?;
            // The copy is what will be served, so the copy is what gets checked.
            redo::hash_all(&Checkpoint::open(&staging)?, &link.manifest)?
        };
        let mut journal = Writer::create(&self.layout.journal())?;
        for name in &names {
            journal.push(Record::Install { name })?;
        }
        for name in stale.iter().filter(|name| !names.contains(name)) {
            journal.push(Record::Remove { name })?;
        }
        for file in checkpoint.files().iter().filter(|_| !in_place) {
            if link.manifest.files.iter().any(|listed| listed.name == file.name()) {
                journal.push(Record::File { name: file.name(), bytes: file.bytes() })?;
            }
        }
        fetch::seal(journal, link, &tables)?;
        Ok(0)
    }

    /// Names of the weight files in the directory. They are only ours to replace if we put them there.
    fn weight_names(&self, ours: bool) -> Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.dir).map_err(|source| Error::io("list", &self.dir, source))? {
            let name = entry.map_err(|source| Error::io("list", &self.dir, source))?.file_name();
            let Some(name) = name.to_str().filter(|name| is_plain_name(name)) else { continue };
            if name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json") {
                names.push(name.to_owned());
            }
        }
        match names.first() {
            Some(name) if !ours => Err(Error::BadSetting {
                name: "checkpoint directory",
                expected: "a new or empty directory, or one that this program made".into(),
                found: format!("`{}` with a foreign `{name}`", self.dir.display()),
            }),
            _ => Ok(names),
        }
    }

    fn clean_staging(&self) -> Result<PathBuf> {
        let staging = self.layout.staging();
        remove_dir(&staging)?;
        fs::create_dir(&staging).map_err(|source| Error::io("create", &staging, source))?;
        Ok(staging)
    }
}

impl Advanced {
    pub(crate) fn add(&mut self, other: Self) {
        self.links += other.links;
        self.bytes += other.bytes;
        self.changed += other.changed;
        self.journal += other.journal;
        self.overwrite += other.overwrite;
        self.sync += other.sync;
    }
}

fn lock(path: &Path) -> Result<File> {
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(path)
        .map_err(|source| Error::io("open", path, source))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(Error::Locked { path: path.into() }),
        Err(errno) => Err(Error::io("lock", path, errno.into())),
    }
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
            what: "a link is missing",
            expected: format!("a delta from version {}", state.applied.version),
            found: base.map_or("none".into(), |base| format!("one from version {}", base.version)),
        },
    }
}

/// A named moment of the protocol at which tests stop or fail the process; nothing in other builds.
pub(crate) fn crash_point(name: &'static str) -> Result<()> {
    // Builds without crash points have no other use for the name.
    let _ = name;
    fail::fail_point!(name, |_| Err(Error::io("pass crash point", name, std::io::Error::other("injected"))));
    Ok(())
}
