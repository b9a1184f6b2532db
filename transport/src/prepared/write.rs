//! The follower's side of prepared deltas: where one goes, and what is in it.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use driftless_delta::JournaledPatch;
use driftless_store::ContentDigest;
use driftless_store::os::regular;

use super::{
    ALIGN, HEAD_BYTES, Head, Header, POSITION_BYTES, PreparedTensor, PreparedVersion, checksum, offer_path,
};
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::manifest::{Manifest, Tensor};
use crate::pool::{Bounds, as_they_come, threads};

/// More threads than this only wait for memory.
const THREADS_MAX: usize = 8;
/// Bytes of changes that may be held at once.
const HELD_BYTES: u64 = 1 << 30;
/// How the files begin that plugins put into the directory, one for each rank of an engine.
const RANK: &str = "rank-";

/// Patches of a tensor, each with the byte at which it begins, in the order in which they apply.
type Patches<'a> = Vec<(u64, &'a [u8])>;

/// Where prepared deltas of one checkpoint directory go: one file, in which each delta takes the place of the
/// one before, so that plugins can keep its pages locked. It goes with this value.
#[derive(Debug)]
pub(crate) struct Offer {
    dir: PathBuf,
    file: Option<(PathBuf, File)>,
}

impl Offer {
    /// Offers in the plugins' directory `dir`, which need not exist, for the directory `checkpoint`. What a
    /// process before this one left for it is removed.
    pub(crate) fn new(dir: PathBuf, checkpoint: &Path) -> Self {
        if let Ok(path) = offer_path(&dir, checkpoint) {
            remove(&path);
        }
        Self { dir, file: None }
    }

    /// Offers nothing.
    pub(crate) fn withdraw(&mut self) {
        if let Some((path, file)) = self.file.take() {
            // A file that keeps its head is removed, and never offered again.
            match file.write_all_at(&[0; HEAD_BYTES], 0) {
                Ok(()) => self.file = Some((path, file)),
                Err(_) => remove(&path),
            }
        }
    }

    /// Offers what `patches` change in `checkpoint`, which has the version `base` until this returns, on the
    /// way to `manifest`, if a plugin is there to read it. A failure costs the engines a reload and nothing
    /// else, so it is logged and not returned.
    pub(crate) fn offer(
        &mut self,
        checkpoint: &Checkpoint,
        base: PreparedVersion,
        manifest: &Manifest,
        target: PreparedVersion,
        patches: &[(&str, u64, &[u8])],
    ) {
        self.withdraw();
        if !wanted(&self.dir) {
            return;
        }
        let labels = (base.label.clone(), target.label.clone());
        let header = Header { base, target, checksum: 0, tensors: Vec::new() };
        let written = check_dir(&self.dir)
            .and_then(|()| self.open(checkpoint.dir()))
            .and_then(|(path, file)| write(path, file, checkpoint, manifest, header, patches));
        let (base, target) = labels;
        match written {
            Ok(Some(bytes)) => tracing::info!(base, target, bytes, "prepared delta"),
            Ok(None) => tracing::info!(base, target, "too much changes for a prepared delta: engines reload"),
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(error, base, target, "no prepared delta: engines reload");
            }
        }
    }

    /// The file, which offers nothing yet: the one that is there as long as it is this value's.
    fn open(&mut self, checkpoint: &Path) -> Result<&(PathBuf, File)> {
        let is_there = |(path, file): &(PathBuf, File)| {
            let (named, held) = (fs::symlink_metadata(path), file.metadata());
            named.is_ok_and(|named| {
                held.is_ok_and(|held| (named.dev(), named.ino()) == (held.dev(), held.ino()))
            })
        };
        let held = match self.file.take().filter(is_there) {
            Some(held) => held,
            None => {
                let path = offer_path(&self.dir, checkpoint)?;
                remove(&path);
                let mut options = File::options();
                let options = options.write(true).create_new(true).mode(0o600);
                let file = regular::open_with(options, &path);
                let file = file.map_err(|source| Error::io("create", &path, source))?;
                (path, file)
            }
        };
        Ok(self.file.insert(held))
    }
}

impl Drop for Offer {
    fn drop(&mut self) {
        if let Some((path, _)) = &self.file {
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
    let found = fs::symlink_metadata(dir).map_err(|source| Error::io("examine", dir, source))?;
    let own = rustix::process::geteuid().as_raw();
    if found.is_dir() && found.uid() == own && found.mode() & 0o077 == 0 {
        return Ok(());
    }
    Err(Error::BadSetting {
        name: "plugin_dir",
        expected: format!("a directory of user {own} that no other user can enter (mode 0700)"),
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

/// Writes a file that offers nothing yet, and returns how many bytes; `None`, and it goes on to offer
/// nothing, if they would be more than the weights or cannot say what changes.
fn write(
    path: &Path,
    file: &File,
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
    let out = Out { path, file, end: AtomicU64::new(HEAD_BYTES as u64), limit: manifest.tensor_bytes() };
    let fits = AtomicBool::new(true);
    let change = |index: usize| {
        let (tensor, patches) = &work[index];
        let written = match changes(tensor, checkpoint.named(&tensor.name)?, patches)? {
            Some(changes) if fits.load(Ordering::Relaxed) => out.add(tensor, &changes)?,
            _ => None,
        };
        if written.is_none() {
            fits.store(false, Ordering::Relaxed);
        }
        Ok(written)
    };
    let mut entries: BTreeMap<&str, PreparedTensor> = BTreeMap::new();
    as_they_come(
        &weights,
        Bounds { threads: threads(THREADS_MAX), weight: HELD_BYTES },
        change,
        |index, written| {
            if let Some((entry, sum)) = written {
                header.checksum = header.checksum.wrapping_add(sum);
                entries.insert(&work[index].0.name, entry);
            }
            Ok(())
        },
    )?;
    if !fits.into_inner() {
        return Ok(None);
    }
    let named = manifest.named_tensors();
    let entry = |(name, tensor): (&str, &Tensor)| match entries.get(tensor.name.as_str()) {
        Some(entry) => PreparedTensor { name: name.to_owned(), ..entry.clone() },
        None => unchanged(name, tensor),
    };
    header.tensors = named.into_iter().map(entry).collect();
    out.finish(&header).map(Some)
}

fn unchanged(name: &str, tensor: &Tensor) -> PreparedTensor {
    let (name, dtype, shape) = (name.to_owned(), tensor.dtype, tensor.shape.clone());
    PreparedTensor { name, dtype, shape, changed: 0, positions: 0, new: 0, old: 0 }
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

/// The file while it is written, by several threads.
struct Out<'a> {
    path: &'a Path,
    file: &'a File,
    /// Where the next arrays go.
    end: AtomicU64,
    limit: u64,
}

impl Out<'_> {
    /// Adds the arrays of a tensor, and returns them with their checksum; `None` for more than the limit.
    fn add(&self, tensor: &Tensor, changes: &Changes) -> Result<Option<(PreparedTensor, u64)>> {
        let arrays = [&changes.positions, &changes.new, &changes.old];
        let mut bytes = Vec::with_capacity(arrays.iter().map(|array| array.len() + ALIGN as usize).sum());
        let starts = arrays.map(|array| {
            let start = bytes.len() as u64;
            bytes.extend_from_slice(array);
            bytes.resize(bytes.len().next_multiple_of(ALIGN as usize), 0);
            start
        });
        let start = self.end.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        if start + bytes.len() as u64 > self.limit {
            return Ok(None);
        }
        self.write(&bytes, start)?;
        let [positions, new, old] = starts.map(|at| start + at);
        let changed = changes.positions.len() as u64 / POSITION_BYTES;
        let entry = PreparedTensor { changed, positions, new, old, ..unchanged(&tensor.name, tensor) };
        Ok(Some((entry, checksum(&bytes, start))))
    }

    /// Writes the header and then the head, which offers the delta; returns how many bytes there are.
    fn finish(self, header: &Header) -> Result<u64> {
        let subject = || format!("prepared delta `{}`", self.path.display());
        let text =
            serde_json::to_vec(header).map_err(|source| Error::Parse { subject: subject(), source })?;
        let start = self.end.load(Ordering::Relaxed);
        let end = start + text.len() as u64;
        let room = self.file.metadata().map_err(|source| Error::io("look at", self.path, source))?.len();
        self.write(&text, start)?;
        if end > room {
            // Room for a larger one: whoever keeps the pages locked has to lock them anew when it grows.
            let grown = self.file.set_len(end + end / 4);
            grown.map_err(|source| Error::io("enlarge", self.path, source))?;
        }
        let head = Head { start, bytes: text.len() as u64, digest: ContentDigest::of(&text) };
        self.write(&head.to_bytes(), 0)?;
        Ok(end)
    }

    fn write(&self, bytes: &[u8], at: u64) -> Result<()> {
        self.file.write_all_at(bytes, at).map_err(|source| Error::io("write", self.path, source))
    }
}
