//! Carries out a committed journal up to the page cache, and reads back what a directory holds.
//!
//! Every step is idempotent, and the marker moves last (`sync.rs`). After a crash the same steps are
//! repeated.

use std::io::ErrorKind;
use std::path::Path;
use std::time::{Duration, Instant};

use driftless_delta::DigestTable;
use driftless_store::ContentDigest;
use driftless_store::os::{if_there, map, regular, remove_dir, remove_if_there, rename, sync_dir};

use super::decode::check_digest;
use super::journal::{self, Record};
use super::overwrite::overwrite;
use super::prefault::WriteMaps;
use super::state::{
    Applied, Copy, Layout, Marker, Stamp, State, Tables, digests_from_bytes, digests_to_bytes, read_optional,
    stamps,
};
use super::sync::PendingSync;
use super::withhold;
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::manifest::Manifest;
use crate::prepared::Offering;
use crate::snapshot::{Snapshot as _, TensorInfo, is_plain_name};

/// A version whose journal was carried out: an engine could load it, but it is not in its place on the disk.
pub(super) struct Redone {
    pub(super) state: State,
    pub(super) pending: PendingSync,
    /// What carrying it out took.
    pub(super) overwrite: Duration,
}

/// Carries out the committed journal of `dir`, up to the page cache; `None` if there is none, or one that was
/// never committed. With `sealed`, this process has just sealed it, and has these files open; what it changes
/// is then offered to plugins.
pub(super) fn redo(
    dir: &Path,
    layout: &Layout,
    before: Option<&Checkpoint>,
    sealed: Option<WriteMaps>,
    offering: Option<Offering>,
) -> Result<Option<Redone>> {
    let path = layout.journal();
    let opened = if_there(regular::open(&path)).map_err(|source| Error::io("open", &path, source))?;
    let Some(file) = opened else { return Ok(None) };
    let bytes = map::map(&path, &file)?;
    let records = if sealed.is_some() { journal::sealed(&bytes) } else { journal::committed(&bytes) };
    let Some(records) = records else {
        tracing::warn!(path = %path.display(), "dropping a journal that was never committed");
        return Ok(None);
    };
    let (copy, digests) = documents(&path, &records)?;
    let parsed = Copy::parse(copy)?;
    check_base(layout, &records, &parsed)?;

    let started = Instant::now();
    withhold::take(layout)?;
    driftless_store::os::crash_point("follow.apply")?;
    move_files(dir, layout, &records)?;
    let mut checkpoint = Checkpoint::open_weights(dir, before)?;
    check_tensors(&checkpoint, &parsed.manifest)?;
    if let Some(offering) = offering {
        let applied = Applied::of(&parsed.manifest, parsed.digest);
        offering.finish(&parsed.manifest, applied.prepared(), false);
    }
    let overwritten = overwrite(&checkpoint, &parsed.manifest, &records, sealed.unwrap_or_default())?;
    withhold::give_back(layout)?;
    checkpoint.read_files()?;
    let overwrite = started.elapsed();

    let mut state = adopt(checkpoint, parsed, digests)?;
    // As they are left: a later write, also during the sync, is another program's.
    state.weights = stamps(state.checkpoint.weight_files())?;
    let pending = PendingSync {
        layout: layout.clone(),
        applied: state.applied.clone(),
        overwritten,
        before: None,
        weights: state.weights.clone(),
        copy: copy.to_vec(),
        digests: digests.to_vec(),
    };
    Ok(Some(Redone { state, pending, overwrite }))
}

/// The state that the journal at `path`, which was just sealed, leads to, before a byte of it is carried out; `None` if
/// it does more than overwrite weights.
pub(super) fn ahead(dir: &Path, layout: &Layout, path: &Path, before: &Checkpoint) -> Result<Option<State>> {
    let file = regular::open(path).map_err(|source| Error::io("open", path, source))?;
    let bytes = map::map(path, &file)?;
    let Some(records) = journal::sealed(&bytes) else { return Ok(None) };
    let is_more = |record: &Record<'_>| {
        matches!(record, Record::Install { .. } | Record::Remove { .. } | Record::File { .. })
    };
    if records.iter().any(is_more) {
        return Ok(None);
    }
    let (copy, digests) = documents(path, &records)?;
    let parsed = Copy::parse(copy)?;
    check_base(layout, &records, &parsed)?;
    let mut checkpoint = Checkpoint::open_weights(dir, Some(before))?;
    checkpoint.read_files()?;
    check_tensors(&checkpoint, &parsed.manifest)?;
    adopt(checkpoint, parsed, digests).map(Some)
}

/// Removes the journal and what was staged for it.
pub(super) fn drop_journal(layout: &Layout) -> Result<()> {
    journal::retire(&layout.journal())?;
    remove_dir(&layout.staging())?;
    layout.sync()
}

/// What the directory holds by its own account, checked; `None` if it never held a version.
///
/// With `doubt`, or where a weight file's size or time is not as it was left, every tensor is hashed again.
pub(super) fn load(dir: &Path, layout: &Layout, doubt: bool) -> Result<Option<State>> {
    let Some(marker) = Marker::read(&layout.marker())? else { return Ok(None) };
    let path = layout.manifest();
    let bytes = read_optional(&path)?.unwrap_or_default();
    marker.manifest_file.check(&bytes, format_args!("`{}`", path.display()))?;
    let copy = Copy::parse(&bytes)?;
    let applied = Applied::of(&copy.manifest, copy.digest);
    if applied != marker.applied {
        return Err(Error::Corrupt {
            subject: format!("`{}`", layout.marker().display()),
            what: "it contradicts the manifest beside it",
            expected: applied.label(),
            found: marker.applied.label(),
        });
    }
    let checkpoint = Checkpoint::open_replica(dir)?;
    check_tensors(&checkpoint, &copy.manifest)?;
    check_files(&checkpoint, &copy.manifest)?;
    let tables =
        read_optional(&layout.digests())?.and_then(|bytes| digests_from_bytes(&bytes, &copy.manifest));
    let weights = stamps(checkpoint.weight_files())?;
    let touched = weights != marker.weights;
    let stale = touched || tables.is_none();
    let tables = match tables {
        Some(tables) if !doubt && !touched => tables,
        _ => {
            tracing::info!(dir = %dir.display(), doubt, touched, "hashing the whole checkpoint");
            hash_all(&checkpoint, &copy.manifest)?
        }
    };
    let state = State { applied, manifest: copy.manifest, tables, checkpoint: checkpoint.into(), weights };
    if stale {
        let digests = digests_to_bytes(&state.tables);
        write_state(layout, &state.applied, &state.weights, &bytes, &digests)?;
    }
    Ok(Some(state))
}

/// Hashes every tensor, tied names included, and compares with the manifest.
pub(super) fn hash_all(checkpoint: &Checkpoint, manifest: &Manifest) -> Result<Tables> {
    let mut tables = Tables::new();
    for (name, tensor) in manifest.named_tensors() {
        let table = DigestTable::of(tensor.dtype.element(), checkpoint.named(name)?)
            .map_err(|source| Error::Codec { tensor: name.to_owned(), source })?;
        check_digest(tensor, &table)?;
        tables.insert(tensor.name.clone(), table);
    }
    Ok(tables)
}

/// Refuses a checkpoint whose tensors are not the manifest's, by name, element type and shape.
pub(super) fn check_tensors(checkpoint: &Checkpoint, manifest: &Manifest) -> Result<()> {
    let expected = manifest.named_tensors();
    let found = checkpoint.tensors();
    let describe = |info: Option<&TensorInfo>| {
        info.map_or("none".to_owned(), |info| format!("{} {:?}", info.dtype, info.shape))
    };
    for (name, tensor) in &expected {
        let info = checkpoint.position(name).and_then(|index| found.get(index));
        if info.is_none_or(|info| info.dtype != tensor.dtype || info.shape != tensor.shape) {
            return Err(Error::TensorMismatch {
                tensor: (*name).to_owned(),
                what: "type and shape in the checkpoint",
                expected: describe(Some(&tensor.info())),
                found: describe(info),
            });
        }
    }
    match found
        .iter()
        .find(|info| expected.binary_search_by_key(&info.name.as_str(), |(name, _)| name).is_err())
    {
        Some(extra) => Err(Error::TensorMismatch {
            tensor: extra.name.clone(),
            what: "type and shape in the checkpoint",
            expected: "none, the version does not have it".into(),
            found: describe(Some(extra)),
        }),
        None => Ok(()),
    }
}

/// Refuses auxiliary files that are missing or not the manifest's; others are none of our business.
pub(super) fn check_files(checkpoint: &Checkpoint, manifest: &Manifest) -> Result<()> {
    for file in &manifest.files {
        let found = checkpoint.files().iter().find(|found| found.name() == file.name);
        let subject = checkpoint.dir().join(&file.name);
        file.blake3
            .check(found.map_or(&[], |found| found.bytes()), format_args!("`{}`", subject.display()))?;
        if found.is_none() {
            return Err(Error::io("open", subject, ErrorKind::NotFound.into()));
        }
    }
    Ok(())
}

/// The manifest and the digest tables of a journal.
fn documents<'a>(path: &Path, records: &[Record<'a>]) -> Result<(&'a [u8], &'a [u8])> {
    let (mut manifest, mut digests) = (None, None);
    for record in records {
        match record {
            Record::Manifest(bytes) => manifest = Some(*bytes),
            Record::Digests(bytes) => digests = Some(*bytes),
            _ => {}
        }
    }
    manifest.zip(digests).ok_or_else(|| Error::Corrupt {
        subject: format!("`{}`", path.display()),
        what: "its records are incomplete",
        expected: "a manifest and digest tables".into(),
        found: format!("{} records", records.len()),
    })
}

/// Patches are made for one base: a journal that was copied here from elsewhere must not be applied.
fn check_base(layout: &Layout, records: &[Record<'_>], target: &Copy) -> Result<()> {
    if !records.iter().any(|record| matches!(record, Record::Patch { .. })) {
        return Ok(());
    }
    let have = Marker::read(&layout.marker())?.map(|marker| marker.applied);
    let stated =
        records.iter().find_map(|record| if let Record::Base(bytes) = record { Some(*bytes) } else { None });
    // A journal that does not state its base holds one delta.
    let base = match stated {
        Some(bytes) => <[u8; 32]>::try_from(bytes).ok().map(ContentDigest::from_bytes),
        None => target.manifest.base.map(|base| base.manifest_digest),
    };
    let fits = have
        .as_ref()
        .is_some_and(|have| Some(have.manifest_digest) == base || have.manifest_digest == target.digest);
    if fits {
        return Ok(());
    }
    Err(Error::Corrupt {
        subject: format!("`{}`", layout.journal().display()),
        what: "it was written for another base",
        expected: base.map_or("no base".into(), |base| format!("the version with manifest {base}")),
        found: have.map_or("no version".into(), |have| {
            format!("{}, manifest {}", have.label(), have.manifest_digest)
        }),
    })
}

fn move_files(dir: &Path, layout: &Layout, records: &[Record<'_>]) -> Result<()> {
    let mut moved = false;
    for record in records {
        match *record {
            Record::Install { name } => {
                let (source, target) = (layout.staging().join(checked(name)?), dir.join(name));
                match rename(&source, &target) {
                    // Installed before the crash.
                    Err(error) if error.kind() == ErrorKind::NotFound && target.exists() => {}
                    renamed => renamed.map_err(|error| Error::io("install", &target, error))?,
                }
            }
            Record::Remove { name } => {
                remove_if_there(&withhold::place(layout, checked(name)?))?;
            }
            Record::File { name, bytes } => {
                layout.replace(&withhold::place(layout, checked(name)?), bytes)?
            }
            Record::Manifest(_)
            | Record::Digests(_)
            | Record::Patch { .. }
            | Record::Base(_)
            | Record::Commit(_) => continue,
        }
        moved = true;
        driftless_store::os::crash_point("follow.apply")?;
    }
    if moved {
        // Where the file that is withheld lies must be durable before it is durable that it is not in its
        // place.
        layout.sync()?;
        sync_dir(dir)?;
    }
    Ok(())
}

fn checked(name: &str) -> Result<&str> {
    if is_plain_name(name) { Ok(name) } else { Err(Error::BadFileName { name: name.to_owned() }) }
}

/// The state that a finished journal leaves.
fn adopt(checkpoint: Checkpoint, copy: Copy, digests: &[u8]) -> Result<State> {
    let tables = digests_from_bytes(digests, &copy.manifest).ok_or_else(|| Error::Corrupt {
        subject: "journal".into(),
        what: "its digest tables do not belong to its manifest",
        expected: copy.manifest.label(),
        found: format!("{} bytes of tables", digests.len()),
    })?;
    check_files(&checkpoint, &copy.manifest)?;
    let applied = Applied::of(&copy.manifest, copy.digest);
    Ok(State { applied, manifest: copy.manifest, tables, checkpoint: checkpoint.into(), weights: Vec::new() })
}

/// Records the weight files' times as those that this crate left. Their pages were prefaulted for a version
/// that did not come, and every byte is as before.
pub(super) fn restamp(layout: &Layout, state: &mut State) -> Result<()> {
    state.weights = stamps(state.checkpoint.weight_files())?;
    let Some(marker) = Marker::read(&layout.marker())? else { return Ok(()) };
    layout.replace(&layout.marker(), &marker.restamped(state.weights.clone()).to_bytes()?)?;
    layout.sync()
}

/// Writes the files `manifest` and `digests` and, last of all, the marker.
pub(super) fn write_state(
    layout: &Layout,
    applied: &Applied,
    weights: &[Stamp],
    copy: &[u8],
    digests: &[u8],
) -> Result<()> {
    layout.replace(&layout.digests(), digests)?;
    layout.replace(&layout.manifest(), copy)?;
    let marker = Marker::new(applied.clone(), ContentDigest::of(copy), weights.to_vec());
    layout.replace(&layout.marker(), &marker.to_bytes()?)?;
    layout.sync()
}
