//! The follower's side of prepared deltas: where one goes, and what is in it.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufWriter, ErrorKind, Write};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use driftless_delta::JournaledPatch;

use super::{Entry, Header, MAGIC, POSITION_BYTES, PreparedVersion, offer_path};
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::manifest::{Manifest, Tensor};
use crate::pool::{Bounds, as_they_come, threads};

/// Arrays begin at multiples of this.
const ALIGN: u64 = 64;
/// More threads than this only wait for memory.
const THREADS_MAX: usize = 8;
/// Bytes of changes that may wait to be written.
const HELD_BYTES: u64 = 1 << 30;
/// How the files begin that plugins put into the directory, one for each rank of an engine.
const RANK: &str = "rank-";

/// Patches of a tensor, each with the byte at which it begins, in the order in which they apply.
type Patches<'a> = Vec<(u64, &'a [u8])>;

/// Where prepared deltas of one checkpoint directory go. At most one file is there, the newest; it goes with
/// this value.
#[derive(Debug)]
pub(crate) struct Offer {
    dir: PathBuf,
    written: Option<PathBuf>,
}

impl Offer {
    /// Offers in the plugins' directory `dir`, which need not exist.
    pub(crate) fn new(dir: PathBuf) -> Self {
        Self { dir, written: None }
    }

    /// Removes what was offered, and what a process before this one left for the same checkpoint directory.
    pub(crate) fn withdraw(&mut self, checkpoint: &Path) {
        self.written = None;
        if let Ok(path) = offer_path(&self.dir, checkpoint) {
            remove(&path);
        }
    }

    /// Offers what `patches` change in `checkpoint`, which has the version `base` until this returns, on the
    /// way to `manifest`, if a plugin is there to read it. A failure costs the engines a reload and nothing
    /// else, so it is told and not returned.
    pub(crate) fn offer(
        &mut self,
        checkpoint: &Checkpoint,
        base: PreparedVersion,
        (manifest, target): (&Manifest, PreparedVersion),
        patches: &[(&str, u64, &[u8])],
    ) {
        self.withdraw(checkpoint.dir());
        if !wanted(&self.dir) {
            return;
        }
        let labels = (base.label.clone(), target.label.clone());
        let header = Header { base, target, tensors: Vec::new() };
        let written = check_dir(&self.dir)
            .and_then(|()| offer_path(&self.dir, checkpoint.dir()))
            .and_then(|path| write(&path, checkpoint, manifest, header, patches).map(|bytes| (path, bytes)));
        let (base, target) = labels;
        match written {
            Ok((path, Some(bytes))) => {
                tracing::info!(path = %path.display(), base, target, bytes, "prepared delta");
                self.written = Some(path);
            }
            Ok((_, None)) => {
                tracing::info!(base, target, "too much changes for a prepared delta: engines reload")
            }
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(error, base, target, "no prepared delta: engines reload");
            }
        }
    }
}

impl Drop for Offer {
    fn drop(&mut self) {
        if let Some(path) = &self.written {
            remove(path);
        }
    }
}

/// Refuses a directory of plugins that another user could write to: what is in it changes an engine's
/// weights.
///
/// # Errors
///
/// [`Error::BadSetting`] for a directory of another user, or open to others; the file system's errors.
pub fn check_dir(dir: &Path) -> Result<()> {
    let found = fs::symlink_metadata(dir).map_err(|source| Error::io("look at", dir, source))?;
    let own = rustix::process::geteuid().as_raw();
    if found.is_dir() && found.uid() == own && found.mode() & 0o077 == 0 {
        return Ok(());
    }
    Err(Error::BadSetting {
        name: "plugin_dir",
        expected: format!("a directory of user {own} that nobody else can enter (mode 0700)"),
        found: format!("`{}`, of user {}, mode {:o}", dir.display(), found.uid(), found.mode() & 0o7777),
    })
}

/// Whether a plugin has ever been there.
fn wanted(dir: &Path) -> bool {
    let Ok(mut entries) = fs::read_dir(dir) else { return false };
    entries.any(|entry| entry.is_ok_and(|entry| entry.file_name().to_string_lossy().starts_with(RANK)))
}

fn remove(path: &Path) {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            tracing::warn!(path = %path.display(), %error, "a prepared delta stays behind");
        }
        _ => {}
    }
}

/// Writes the file and returns its length; `None`, and no file, if it would be larger than the weights or
/// cannot say what changes.
fn write(
    path: &Path,
    checkpoint: &Checkpoint,
    manifest: &Manifest,
    mut header: Header,
    patches: &[(&str, u64, &[u8])],
) -> Result<Option<u64>> {
    let mut by_tensor: BTreeMap<&str, Patches<'_>> = BTreeMap::new();
    for (tensor, offset, bytes) in patches {
        by_tensor.entry(tensor).or_default().push((*offset, bytes));
    }
    let work: Vec<(&Tensor, Patches<'_>)> = manifest
        .tensors
        .iter()
        .filter_map(|tensor| Some((tensor, by_tensor.remove(tensor.name.as_str())?)))
        .collect();
    let weights: Vec<u64> = work
        .iter()
        .map(|(_, patches)| patches.iter().map(|(_, bytes)| 4 * bytes.len() as u64).sum::<u64>().max(1))
        .collect();
    let mut out = Out::create(&path.with_extension("partial"))?;
    let limit = manifest.tensor_bytes();
    let mut entries: BTreeMap<&str, Entry> = BTreeMap::new();
    let mut fits = true;
    let bounds = Bounds { threads: threads(THREADS_MAX), weight: HELD_BYTES };
    let changes = |index: usize| {
        let (tensor, patches) = &work[index];
        let at = checkpoint.position(&tensor.name).and_then(|index| checkpoint.tensor(index));
        changes(tensor, at.unwrap_or_default(), patches)
    };
    as_they_come(&weights, bounds, changes, |index, changes| {
        let tensor = work[index].0;
        let Some(Changes { positions, new, old }) = changes else {
            fits = false;
            return Ok(());
        };
        fits &= out.at + (positions.len() + new.len() + old.len()) as u64 <= limit;
        if fits {
            let changed = (positions.len() / POSITION_BYTES) as u64;
            let [positions, new, old] = [out.array(&positions)?, out.array(&new)?, out.array(&old)?];
            let entry = Entry { changed, positions, new, old, ..unchanged(&tensor.name, tensor) };
            entries.insert(&tensor.name, entry);
        }
        Ok(())
    })?;
    if !fits {
        return Ok(None);
    }
    let named = manifest.named_tensors();
    let entry = |(name, tensor): (&str, &Tensor)| match entries.get(tensor.name.as_str()) {
        Some(entry) => Entry { name: name.to_owned(), ..entry.clone() },
        None => unchanged(name, tensor),
    };
    header.tensors = named.into_iter().map(entry).collect();
    out.finish(&header, path).map(Some)
}

fn unchanged(name: &str, tensor: &Tensor) -> Entry {
    let (name, dtype, shape) = (name.to_owned(), tensor.dtype, tensor.shape.clone());
    Entry { name, dtype, shape, changed: 0, positions: 0, new: 0, old: 0 }
}

/// What changes in one tensor: the arrays of the file.
struct Changes {
    positions: Vec<u8>,
    new: Vec<u8>,
    old: Vec<u8>,
}

/// The elements of `old` that differ after all patches; `None` where positions of 32 bits do not name them.
fn changes(tensor: &Tensor, old: &[u8], patches: &Patches<'_>) -> Result<Option<Changes>> {
    let codec = |source| Error::Codec { tensor: tensor.name.clone(), source };
    let size = tensor.dtype.element().size();
    if size as u64 != tensor.dtype.size() || u32::try_from(old.len() / size).is_err() {
        return Ok(None);
    }
    let parsed = patches
        .iter()
        .map(|(offset, bytes)| Ok((*offset, JournaledPatch::from_bytes(bytes).map_err(codec)?)))
        .collect::<Result<Vec<_>>>()?;
    let mut found: Vec<(u32, &[u8])> = Vec::new();
    for (offset, patch) in &parsed {
        for (byte, run) in patch.byte_runs() {
            // Below the tensor's length, which was compared with 32 bits.
            let first = ((offset + byte) / size as u64) as u32;
            found.extend((first..).zip(run.chunks_exact(size)));
        }
    }
    if !found.is_sorted_by(|a, b| a.0 < b.0) {
        // Several versions at once: of two values for one element the later one counts.
        found.reverse();
        found.sort_by_key(|(position, _)| *position);
        found.dedup_by_key(|(position, _)| *position);
    }
    let mut changes = Changes { positions: Vec::new(), new: Vec::new(), old: Vec::new() };
    for (position, new) in found {
        let start = position as usize * size;
        let before = old.get(start..start + size).ok_or_else(|| Error::TensorMismatch {
            tensor: tensor.name.clone(),
            what: "element that a patch changes",
            expected: format!("below {}", old.len() / size),
            found: position.to_string(),
        })?;
        if before != new {
            changes.positions.extend_from_slice(&position.to_le_bytes());
            changes.new.extend_from_slice(new);
            changes.old.extend_from_slice(before);
        }
    }
    Ok(Some(changes))
}

/// The file while it is written. Dropped before [`Out::finish`], it is removed.
struct Out {
    path: PathBuf,
    file: BufWriter<File>,
    hash: blake3::Hasher,
    at: u64,
}

impl Out {
    fn create(path: &Path) -> Result<Self> {
        let mut options = File::options();
        options.write(true).create(true).truncate(true).mode(0o600);
        let file = options.open(path).map_err(|source| Error::io("create", path, source))?;
        let file = BufWriter::with_capacity(1 << 18, file);
        let mut out = Self { path: path.into(), file, hash: blake3::Hasher::new(), at: 0 };
        out.write(&MAGIC)?;
        Ok(out)
    }

    /// Adds an array, and returns where it begins.
    fn array(&mut self, bytes: &[u8]) -> Result<u64> {
        let gap = self.at.next_multiple_of(ALIGN) - self.at;
        self.write(&[0; ALIGN as usize][..gap as usize])?;
        let start = self.at;
        self.write(bytes)?;
        Ok(start)
    }

    /// Closes the file with its header and digest, moves it to its place, and returns its length.
    fn finish(mut self, header: &Header, place: &Path) -> Result<u64> {
        let subject = || format!("prepared delta `{}`", self.path.display());
        let text =
            serde_json::to_vec(header).map_err(|source| Error::Parse { subject: subject(), source })?;
        self.write(&text)?;
        self.write(&(text.len() as u64).to_le_bytes())?;
        let digest = *self.hash.finalize().as_bytes();
        self.write(&digest)?;
        self.file.flush().map_err(|source| Error::io("write", &self.path, source))?;
        fs::rename(&self.path, place).map_err(|source| Error::io("rename", &self.path, source))?;
        Ok(self.at)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.hash.update(bytes);
        self.file.write_all(bytes).map_err(|source| Error::io("write", &self.path, source))?;
        self.at += bytes.len() as u64;
        Ok(())
    }
}

impl Drop for Out {
    fn drop(&mut self) {
        // Gone from here if it was finished.
        remove(&self.path);
    }
}
