//! The follower's side of prepared deltas: where one goes, and what is in it.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use driftless_delta::Patch;
use driftless_delta::elements::Elements;
use driftless_store::ContentDigest;
use driftless_store::os::regular;
use driftless_store::wait::lock;

use super::{
    ALIGN, DELTA, HEAD_BYTES, Head, Header, POSITION_BYTES, PreparedTensor, PreparedVersion, checksum,
    offer_path,
};
use crate::error::{Error, Result};
use crate::manifest::{Manifest, Tensor};

/// How the files begin that plugins put into the directory, one for each rank of an engine.
const RANK: &str = "rank-";

/// Where prepared deltas of one checkpoint directory go: one file, in which each delta takes the place of the
/// one before, so that plugins can keep its pages locked. It goes with this value.
#[derive(Debug)]
pub(crate) struct Offer {
    dir: PathBuf,
    file: Option<(PathBuf, File)>,
}

impl Offer {
    /// Offers in the plugins' directory `dir`, which need not exist, for the directory `checkpoint`. What a
    /// process before this one left for it is removed, and so is what killed followers left for other directories.
    pub(crate) fn new(dir: PathBuf, checkpoint: &Path) -> Self {
        if let Ok(path) = offer_path(&dir, checkpoint) {
            remove(&path);
        }
        if check_dir(&dir).is_ok() {
            sweep(&dir);
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

    /// Offers nothing, and gives the file's memory back.
    pub(crate) fn end(&mut self) {
        if let Some((path, _)) = self.file.take() {
            remove(&path);
        }
    }

    /// Begins to offer what leads from `base` to the next version, whose weights have so many bytes; nothing
    /// if no plugin is there to read it. A failure costs the engines a reload and nothing else, so it is
    /// logged and not returned.
    pub(crate) fn begin(&mut self, checkpoint: &Path, base: PreparedVersion, limit: u64) -> Option<Offering> {
        self.withdraw();
        if !wanted(&self.dir) {
            return None;
        }
        let opened = check_dir(&self.dir).and_then(|()| self.open(checkpoint)).and_then(|(path, file)| {
            let file = file.try_clone().map_err(|source| Error::io("open", path, source))?;
            Ok((path.clone(), file))
        });
        match opened {
            Ok((path, file)) => {
                let (end, made) = (AtomicU64::new(HEAD_BYTES as u64), Mutex::new(Ok(Some(Made::default()))));
                Some(Offering { path, file, base, limit, end, made, free: Mutex::default() })
            }
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(error, base = base.label, "no prepared delta: engines reload");
                None
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
                // Until this process ends: `sweep`. Without locks the file stays, which is no harm.
                let _ = file.try_lock();
                (path, file)
            }
        };
        Ok(self.file.insert(held))
    }
}

impl Drop for Offer {
    fn drop(&mut self) {
        self.end();
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

/// Removes the deltas that no follower holds a lock on: their followers were killed. A live one of a release that took
/// no locks writes its next delta into a new file.
fn sweep(dir: &Path) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for entry in entries.flatten().filter(|entry| entry.file_name().to_string_lossy().starts_with(DELTA)) {
        let path = entry.path();
        if regular::open(&path).is_ok_and(|file| file.try_lock().is_ok()) {
            remove(&path);
        }
    }
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

fn unchanged(name: &str, tensor: &Tensor) -> PreparedTensor {
    let (name, dtype, shape) = (name.to_owned(), tensor.dtype, tensor.shape.clone());
    PreparedTensor { name, dtype, shape, changed: 0, positions: 0, new: 0, old: 0 }
}

/// A delta that is written by several threads, and not offered yet.
#[derive(Debug)]
pub(crate) struct Offering {
    path: PathBuf,
    file: File,
    base: PreparedVersion,
    /// Bytes of the weights: a larger delta helps nobody.
    limit: u64,
    /// Where the next arrays go.
    end: AtomicU64,
    /// None once it cannot say what changes, or an error.
    made: Mutex<Result<Option<Made>>>,
    /// Memory for the next tensors.
    free: Mutex<Vec<Elements>>,
}

/// The tensors that change, by name, and the sum of their arrays' checksums.
#[derive(Debug, Default)]
struct Made {
    entries: BTreeMap<String, PreparedTensor>,
    checksum: u64,
}

impl Offering {
    /// Adds what patches, each with the byte at which it begins, change in a tensor whose bytes are `old`.
    pub(crate) fn add(&self, tensor: &Tensor, old: &[u8], patches: &[(u64, Patch)]) {
        if patches.is_empty() || !matches!(&*self.made(), Ok(Some(_))) {
            return;
        }
        let mut elements = lock(&self.free).pop().unwrap_or_default();
        let element = tensor.dtype.element();
        let added = match elements.take(element, old, patches) {
            // Positions count what the codec counts.
            Ok(true) if element.size() as u64 == tensor.dtype.size() => {
                self.write_arrays(tensor, &mut elements)
            }
            Ok(_) => Ok(None),
            Err(source) => Err(Error::Codec { tensor: tensor.name.clone(), source }),
        };
        lock(&self.free).push(elements);
        let mut made = self.made();
        match (added, &mut *made) {
            (Ok(Some((entry, checksum))), Ok(Some(made))) => {
                made.checksum = made.checksum.wrapping_add(checksum);
                made.entries.insert(entry.name.clone(), entry);
            }
            (Ok(Some(_)), _) => {}
            (Ok(None), _) => *made = Ok(None),
            (Err(error), _) => *made = Err(error),
        }
    }

    fn made(&self) -> MutexGuard<'_, Result<Option<Made>>> {
        lock(&self.made)
    }

    /// Writes the arrays of a tensor, and returns where, with their checksum; `None` beyond the limit.
    fn write_arrays(
        &self,
        tensor: &Tensor,
        elements: &mut Elements,
    ) -> Result<Option<(PreparedTensor, u64)>> {
        let changed = elements.positions.len() as u64 / POSITION_BYTES;
        let arrays = [&mut elements.positions, &mut elements.new, &mut elements.old];
        let mut bytes = 0;
        for array in &arrays {
            bytes += array.len().next_multiple_of(ALIGN as usize) as u64;
        }
        let start = self.end.fetch_add(bytes, Ordering::Relaxed);
        if start + bytes > self.limit {
            return Ok(None);
        }
        let (mut at, mut sum, mut starts) = (start, 0u64, [0; 3]);
        for (array, place) in arrays.into_iter().zip(&mut starts) {
            array.resize(array.len().next_multiple_of(ALIGN as usize), 0);
            write_at(&self.path, &self.file, array, at)?;
            sum = sum.wrapping_add(checksum(array, at));
            *place = at;
            at += array.len() as u64;
        }
        let [positions, new, old] = starts;
        let entry = PreparedTensor { changed, positions, new, old, ..unchanged(&tensor.name, tensor) };
        Ok(Some((entry, sum)))
    }

    /// Offers the delta, which leads to this version; `first`: before the checkpoint has it. True if it did.
    pub(crate) fn finish(self, manifest: &Manifest, target: PreparedVersion, first: bool) -> bool {
        let (base, label) = (self.base.label.clone(), target.label.clone());
        let Self { made, path, file, base: version, end, .. } = self;
        let made = made.into_inner().unwrap_or_else(PoisonError::into_inner);
        let offered = made.and_then(|made| {
            let Some(Made { entries, checksum }) = made else { return Ok(None) };
            let entry = |(name, tensor): (&str, &Tensor)| match entries.get(tensor.name.as_str()) {
                Some(entry) => PreparedTensor { name: name.to_owned(), ..entry.clone() },
                None => unchanged(name, tensor),
            };
            let tensors = manifest.named_tensors().into_iter().map(entry).collect();
            let header = Header { base: version, target, first, checksum, tensors };
            write_header(&path, &file, end.into_inner(), &header).map(Some)
        });
        match &offered {
            Ok(Some(bytes)) => tracing::info!(base, target = label, bytes, "prepared delta"),
            Ok(None) => {
                tracing::info!(base, target = label, "too much changes for a prepared delta: engines reload");
            }
            Err(error) => {
                let error = error as &dyn std::error::Error;
                tracing::warn!(error, base, target = label, "no prepared delta: engines reload");
            }
        }
        matches!(offered, Ok(Some(_)))
    }
}

/// Writes the header and then the head, which offers the delta; returns how many bytes there are.
fn write_header(path: &Path, file: &File, start: u64, header: &Header) -> Result<u64> {
    let subject = || format!("prepared delta `{}`", path.display());
    let text = serde_json::to_vec(header).map_err(|source| Error::Parse { subject: subject(), source })?;
    let end = start + text.len() as u64;
    let room = file.metadata().map_err(|source| Error::io("look at", path, source))?.len();
    write_at(path, file, &text, start)?;
    if end > room {
        // Room for a larger one: whoever keeps the pages locked has to lock them anew when it grows.
        file.set_len(end + end / 4).map_err(|source| Error::io("enlarge", path, source))?;
    }
    let head = Head { start, bytes: text.len() as u64, digest: ContentDigest::of(&text) };
    write_at(path, file, &head.to_bytes(), 0)?;
    Ok(end)
}

fn write_at(path: &Path, file: &File, bytes: &[u8], at: u64) -> Result<()> {
    file.write_all_at(bytes, at).map_err(|source| Error::io("write", path, source))
}
