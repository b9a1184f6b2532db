//! Plain Hugging Face checkpoint directories: what engines load, read by memory map and written crash-safely.

mod header;
mod index;
mod pieces;
mod write;
mod writing;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fmt;
use std::fs::{self, File, Permissions};
use std::io::{self, Read as _, Write as _};
use std::ops::Range;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use driftless_store::os::watch::{self, Call};
use driftless_store::os::{map, regular, sync_file};
use driftless_store::wait::Awaited;
use memmap2::Mmap;

use crate::error::{Error, Result};
use crate::snapshot::{
    AUX_FILE_BYTES_MAX, AUX_FILES_BYTES_MAX, AuxFile, Snapshot, TensorInfo, is_aux_name, is_plain_name,
};
pub(crate) use header::METADATA;
use header::bad;

pub use pieces::Pieces;
pub use write::write_checkpoint;
pub(crate) use write::write_weights;

/// Directory inside a replica that holds its state.
pub const STATE_DIR: &str = ".driftless";

/// The one weight file of a small checkpoint.
const SINGLE: &str = "model.safetensors";
/// The list of shards of a large one.
const INDEX: &str = "model.safetensors.index.json";
/// Bytes that are copied at a time: four folios of the size that a processor maps as one.
const COPY_BYTES: u64 = 8 << 20;

/// A checkpoint directory, open for reading: `model.safetensors`, or shards and
/// `model.safetensors.index.json`, plus auxiliary files.
///
/// Weight files are memory-mapped. They must not be rewritten in place or truncated by others while
/// this value lives: readers would see torn bytes or be killed. Replacing a file by rename is harmless, the
/// old content stays readable.
pub struct Checkpoint {
    dir: PathBuf,
    tensors: Vec<TensorInfo>,
    places: Vec<(usize, Range<usize>)>,
    shards: Vec<Shard>,
    files: Vec<AuxFile>,
    /// Set while a follower writes the bytes of the version.
    written: Option<Awaited>,
}

/// A weight file and its map, which later checkpoints of the same file share: pages that are mapped once stay so.
struct Shard {
    path: PathBuf,
    map: Arc<Mmap>,
    device_and_inode: (u64, u64),
}

/// The weight files that a directory's index lists, or the one without an index.
struct Listed {
    names: Vec<String>,
    weight_map: Option<index::WeightMap>,
}

impl Listed {
    fn read(dir: &Path) -> Result<Self> {
        let weight_map = index::read(dir)?;
        let names = match &weight_map {
            Some(map) => map.values().cloned().collect::<BTreeSet<_>>().into_iter().collect(),
            None => vec![SINGLE.to_owned()],
        };
        Ok(Self { names, weight_map })
    }

    /// The tensors that the files' headers have, each once, and as the index says.
    fn table(&self, dir: &Path, headers: Vec<Vec<header::Entry>>) -> Result<index::Found> {
        let mut found = BTreeMap::new();
        for (position, entries) in headers.into_iter().enumerate() {
            for entry in entries {
                // Bounded by the file's length, which a usize holds.
                let range = entry.range.start as usize..entry.range.end as usize;
                let name = entry.info.name.clone();
                if let Some((info, (first, _))) = found.insert(name, (entry.info, (position, range))) {
                    let [path, first] = [position, first].map(|at| dir.join(&self.names[at]));
                    let (what, first) = ("tensor in two files", first.display());
                    return Err(bad(&path, Some(&info.name), what, "one file", first));
                }
            }
        }
        if let Some(map) = &self.weight_map {
            index::check(dir, map, &self.names, &found)?;
        }
        Ok(found)
    }
}

/// Where a tensor's bytes lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place<'a> {
    /// The weight file.
    pub path: &'a Path,
    /// First byte within the file.
    pub offset: u64,
    /// Number of bytes.
    pub length: u64,
}

impl Checkpoint {
    /// Opens and validates a checkpoint directory. Every weight file's header is read, no tensor is.
    ///
    /// With an index, its files are the checkpoint and must hold exactly the tensors it lists; without one,
    /// `model.safetensors` is. Symbolic links are followed, as the Hugging Face cache consists of them.
    /// Directories, hidden files and other weight formats are left out of the auxiliary files.
    ///
    /// # Errors
    ///
    /// [`Error::Corrupt`] or [`Error::Parse`] name the file and tensor for: a missing shard, a truncated
    /// file, a header that contradicts its file, overlaps, gaps, a tensor twice, an index that disagrees with
    /// the shards. [`NotAFile`](driftless_store::Error::NotAFile) for a FIFO, a device or a socket in place
    /// of any of these files. [`Error::TooLarge`] for an auxiliary file above [`AUX_FILE_BYTES_MAX`], or
    /// above [`AUX_FILES_BYTES_MAX`] together with those before it. [`Error::Unsupported`] for a sub-byte
    /// element type, [`Io`](driftless_store::Error::Io) and
    /// [`PermissionDenied`](driftless_store::Error::PermissionDenied) for the file system's refusals.
    pub fn open(dir: impl Into<PathBuf>) -> Result<Self> {
        let mut checkpoint = Self::open_shards(dir.into(), &[], regular::open)?;
        checkpoint.files = read_files(&checkpoint.dir, Strays::Refused)?;
        Ok(checkpoint)
    }

    /// [`Checkpoint::open`] for a replica's directory, in which the manifest says what is part of the
    /// version. Versions are written into its weight files, so that none may be a symbolic link.
    ///
    /// # Errors
    /// As [`Checkpoint::open`]; [`NotAFile`](driftless_store::Error::NotAFile) also for such a link.
    pub fn open_replica(dir: impl Into<PathBuf>) -> Result<Self> {
        let mut checkpoint = Self::open_weights(dir, None)?;
        checkpoint.read_files()?;
        Ok(checkpoint)
    }

    /// [`Checkpoint::open_replica`] without the auxiliary files. Maps of the version `before` stay in use.
    pub(crate) fn open_weights(dir: impl Into<PathBuf>, before: Option<&Self>) -> Result<Self> {
        let before = before.map_or(&[][..], |before| &before.shards);
        Self::open_shards(dir.into(), before, |path| regular::open_own(File::options().read(true), path))
    }

    /// The weight files, each opened by `open`, mapped anew unless they are among those `before`.
    fn open_shards(dir: PathBuf, before: &[Shard], open: impl Fn(&Path) -> io::Result<File>) -> Result<Self> {
        let listed = Listed::read(&dir)?;
        let shards = listed.names.iter().map(|name| Shard::open(&dir, name, before, &open));
        let shards = shards.collect::<Result<Vec<_>>>()?;
        let headers =
            shards.iter().map(|shard| header::parse(&shard.path, &shard.map, shard.map.len() as u64));
        let found = listed.table(&dir, headers.collect::<Result<_>>()?)?;
        let (tensors, places) = found.into_values().unzip();
        Ok(Self { dir, tensors, places, shards, files: Vec::new(), written: None })
    }

    /// Reads the auxiliary files of a replica as they are now.
    pub(crate) fn read_files(&mut self) -> Result<()> {
        self.files = read_files(&self.dir, Strays::LeftOut)?;
        Ok(())
    }

    /// The directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The weight files, sorted by name.
    pub fn weight_files(&self) -> impl Iterator<Item = &Path> {
        self.shards.iter().map(|shard| shard.path.as_path())
    }

    /// Position of a tensor in [`Snapshot::tensors`].
    #[must_use]
    pub fn position(&self, name: &str) -> Option<usize> {
        self.tensors.binary_search_by(|info| info.name.as_str().cmp(name)).ok()
    }

    /// The bytes of `tensors()[index]`, straight from the map; `None` past the end.
    #[must_use]
    pub fn tensor(&self, index: usize) -> Option<&[u8]> {
        let (shard, range) = self.places.get(index)?;
        self.shards.get(*shard)?.map.get(range.clone())
    }

    /// The bytes of the tensor of this name.
    ///
    /// # Errors
    /// [`Error::TensorMismatch`] if there is none.
    pub(crate) fn named(&self, name: &str) -> Result<&[u8]> {
        self.position(name)
            .and_then(|index| self.tensor(index))
            .ok_or_else(|| Error::mismatch(name, "entry in the checkpoint", "present", "absent"))
    }

    /// Copies the weight files and the index, if there is one, into `target` and syncs each. Returns their
    /// names.
    pub(crate) fn copy_weights(&self, target: &Path) -> Result<Vec<String>> {
        let mut names = Vec::new();
        let index = self.dir.join(INDEX);
        let index = index.exists().then_some(index.as_path());
        for path in self.weight_files().chain(index) {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let copy = target.join(&name);
            copy_file(path, &copy)?;
            names.push(name);
        }
        Ok(names)
    }

    /// Where `tensors()[index]` lies on disk; `None` past the end.
    #[must_use]
    pub fn place(&self, index: usize) -> Option<Place<'_>> {
        let (shard, range) = self.places.get(index)?;
        let path = &self.shards.get(*shard)?.path;
        Some(Place { path, offset: range.start as u64, length: range.len() as u64 })
    }
}

impl Snapshot for Checkpoint {
    fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn bytes(&self, index: usize) -> Result<Cow<'_, [u8]>> {
        self.tensor(index).map(Cow::Borrowed).ok_or_else(|| {
            bad(&self.dir, None, "position of a tensor", format!("below {}", self.tensors.len()), index)
        })
    }

    fn files(&self) -> &[AuxFile] {
        &self.files
    }
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checkpoint")
            .field("dir", &self.dir)
            .field("tensors", &self.tensors.len())
            .field("weight_files", &self.shards.len())
            .finish_non_exhaustive()
    }
}

impl Shard {
    fn open(
        dir: &Path,
        name: &str,
        before: &[Self],
        open: impl Fn(&Path) -> io::Result<File>,
    ) -> Result<Self> {
        let path = dir.join(name);
        let file = open(&path).map_err(|source| no_shard(dir, name, source))?;
        let found = file.metadata().map_err(|source| Error::io("inspect", &path, source))?;
        let device_and_inode = (found.dev(), found.ino());
        let is_this = |shard: &&Self| {
            shard.device_and_inode == device_and_inode && shard.map.len() as u64 == found.len()
        };
        let map = match before.iter().find(is_this) {
            Some(shard) => shard.map.clone(),
            None => Arc::new(map::map(&path, &file)?),
        };
        Ok(Self { path, map, device_and_inode })
    }
}

/// A weight file that is listed cannot be opened.
fn no_shard(dir: &Path, name: &str, source: io::Error) -> Error {
    match source.kind() {
        io::ErrorKind::NotFound => bad(dir, None, "weight file", format!("`{name}`"), "no such file"),
        _ => Error::io("open", dir.join(name), source),
    }
}

/// Copies a file and syncs the copy.
///
/// Where the file system can, the copy shares the source's blocks. Else it is written in pieces so large that
/// the kernel keeps it in large folios: a map of it then costs one fault where it costs 32 after
/// `copy_file_range`.
fn copy_file(source: &Path, copy: &Path) -> Result<()> {
    let from = regular::open(source).map_err(|error| Error::io("open", source, error))?;
    let io = |error| Error::io("write", copy, error);
    let mut to = watch::before(Call::Write, copy).and_then(|()| File::create(copy)).map_err(io)?;
    // Weights that are private stay so; versions that follow are written into the copy.
    let mode = from.metadata().map_err(|error| Error::io("inspect", source, error))?.mode() & 0o777;
    to.set_permissions(Permissions::from_mode(mode | 0o200)).map_err(io)?;
    if !share_blocks(&from, &to) {
        let mut piece = Vec::new();
        loop {
            piece.clear();
            let read = (&from).take(COPY_BYTES).read_to_end(&mut piece);
            if read.map_err(|error| Error::io("read", source, error))? == 0 {
                break;
            }
            to.write_all(&piece).map_err(io)?;
        }
    }
    sync_file(&to, copy).map_err(|error| Error::io("sync", copy, error))
}

/// Lets a copy share the blocks of its source, which Btrfs and XFS can; false where that is not to be had.
#[cfg(target_os = "linux")]
fn share_blocks(from: &File, to: &File) -> bool {
    rustix::fs::ioctl_ficlone(to, from).is_ok()
}

#[cfg(not(target_os = "linux"))]
fn share_blocks(_: &File, _: &File) -> bool {
    false
}

/// What becomes of that which no version can have, but which is named like a file of one.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Strays {
    Refused,
    LeftOut,
}

/// The directory's auxiliary files, sorted by name.
fn read_files(dir: &Path, strays: Strays) -> Result<Vec<AuxFile>> {
    let (mut found, mut total) = (Vec::new(), 0u64);
    for entry in fs::read_dir(dir).map_err(|source| Error::io("list", dir, source))? {
        let entry = entry.map_err(|source| Error::io("list", dir, source))?;
        let (name, path) = (entry.file_name(), entry.path());
        let Some(name) = name.to_str().filter(|name| is_aux_name(name)).map(str::to_owned) else {
            if strays == Strays::Refused && is_odd(&name) && !path.is_dir() {
                return Err(Error::BadSetting {
                    name: "name of an auxiliary file",
                    expected: "UTF-8 without control characters and `\\`".into(),
                    found: format!("{path:?} (rename it, or move it elsewhere if engines do not need it)"),
                });
            }
            continue;
        };
        // Follows links, and a dangling one is an error worth hearing about.
        let metadata = fs::metadata(&path).map_err(|source| Error::io("inspect", &path, source))?;
        let fits = metadata.is_file() && metadata.len() <= AUX_FILE_BYTES_MAX;
        if metadata.is_dir() || (!fits && strays == Strays::LeftOut) {
            continue;
        }
        total = total.saturating_add(metadata.len());
        if strays == Strays::Refused {
            check_size(&path, metadata.len(), total)?;
        }
        found.push((name, path));
    }
    // Read once all sizes are known: what people leave here may be larger than the memory.
    found.sort();
    let read = |(name, path): (String, PathBuf)| {
        let bytes = regular::read(&path).map_err(|source| Error::io("read", &path, source))?;
        AuxFile::new(name, bytes)
    };
    found.into_iter().map(read).collect()
}

/// Whether no version can have a file of this name, which is not hidden.
fn is_odd(name: &OsStr) -> bool {
    let text = name.to_string_lossy();
    let is_plain = name.to_str().is_some_and(is_plain_name);
    !is_plain && !text.starts_with('.')
}

/// Refuses an auxiliary file that is too large by itself, or together with others.
fn check_size(path: &Path, size: u64, total: u64) -> Result<()> {
    let what = |which| format!("{which} `{}` (move it elsewhere if engines do not need it)", path.display());
    if size > AUX_FILE_BYTES_MAX {
        return Err(Error::TooLarge { what: what("the auxiliary file"), max: AUX_FILE_BYTES_MAX });
    }
    if total > AUX_FILES_BYTES_MAX {
        return Err(Error::TooLarge {
            what: what("all auxiliary files together, with"),
            max: AUX_FILES_BYTES_MAX,
        });
    }
    Ok(())
}
