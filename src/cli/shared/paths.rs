//! Checks of files and directories that the command line names. One that is not what its flag says is a
//! mistake of the command line (code 2), not damage (code 3).

use crate::cli::shared::error::{Error, Result};
use driftless::store::redact;
use driftless::transport::replica::foreign_file;
use driftless::transport::snapshot::TensorInfo;
use driftless::transport::{Checkpoint, Snapshot as _};
use std::fs::{File, Metadata, OpenOptions};
use std::io::{ErrorKind, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

/// Most bytes of a file of keys, figures or places, which has a few hundred.
pub(crate) const SMALL: u64 = 64 << 20;

/// What is neither a file nor a directory.
const NO_FILE: &str = "a device, a pipe or a socket";

/// What makes a directory a checkpoint.
const WEIGHTS: [&str; 2] = ["model.safetensors", "model.safetensors.index.json"];

/// The checkpoint in the directory that `name` gives.
pub(crate) fn checkpoint(name: &str, dir: &Path) -> Result<Checkpoint> {
    check_checkpoint(name, dir)?;
    Ok(Checkpoint::open(dir)?)
}

/// Bytes of all tensors of a checkpoint.
pub(crate) fn tensor_bytes(checkpoint: &Checkpoint) -> Result<u64> {
    let lengths = checkpoint.tensors().iter().map(TensorInfo::byte_len);
    Ok(lengths.sum::<driftless::transport::Result<u64>>()?)
}

/// Refuses a directory without weights.
pub(crate) fn check_checkpoint(name: &str, dir: &Path) -> Result<()> {
    check_dir(name, dir)?;
    if WEIGHTS.iter().any(|file| dir.join(file).symlink_metadata().is_ok()) {
        return Ok(());
    }
    Err(wrong(name, dir, &WEIGHTS.join(" or "), "a directory with neither"))
}

/// Refuses what is no directory.
pub(crate) fn check_dir(name: &str, dir: &Path) -> Result<()> {
    match std::fs::metadata(dir) {
        Ok(metadata) if metadata.is_dir() => Ok(()),
        Ok(_) => Err(wrong(name, dir, "a directory", "a file")),
        Err(_) if name == "--hf-checkpoint" && is_hub_name(dir) => {
            let found = format!(
                "no such directory; `hf download {0} --local-dir {0}` fetches a model",
                dir.display()
            );
            Err(wrong(name, dir, "a directory", &found))
        }
        Err(source) => Err(unopened(name, dir, "a directory", source)),
    }
}

/// Whether the name that a checkpoint should have may be one of Hugging Face's hub.
fn is_hub_name(dir: &Path) -> bool {
    let letters =
        |part: &str| part.chars().all(|letter| letter.is_ascii_alphanumeric() || "-_.".contains(letter));
    let parts =
        |name: &str| name.split_once('/').is_some_and(|(owner, model)| letters(owner) && letters(model));
    dir.is_relative() && !dir.exists() && dir.to_str().is_some_and(parts)
}

/// Refuses a place for a directory that something else has.
pub(crate) fn check_place(name: &str, dir: &Path) -> Result<()> {
    if dir.exists() { check_dir(name, dir) } else { Ok(()) }
}

/// Refuses a directory that another flag names, too.
pub(crate) fn check_apart(name: &str, dir: &Path, other: &str, place: &Path) -> Result<()> {
    match is_same(dir, place) {
        true => Err(wrong(name, dir, &format!("another directory than that of {other}"), "the same")),
        false => Ok(()),
    }
}

/// Refuses to write a file into a directory that is read, where it might replace what is read.
pub(crate) fn check_outside(name: &str, file: &Path, other: &str, dir: &Path) -> Result<()> {
    let parent = file.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match is_same(parent, dir) {
        true => Err(wrong(name, file, &format!("a file elsewhere than in {other}"), "one in it")),
        false => Ok(()),
    }
}

/// Whether both name one place, which need not be there.
fn is_same(one: &Path, other: &Path) -> bool {
    let resolved = |path: &Path| path.canonicalize().or_else(|_| std::path::absolute(path)).ok();
    resolved(one).is_some_and(|one| resolved(other) == Some(one))
}

/// Refuses, before anything is made in it, a directory with a checkpoint, or a part of one, that this program
/// has not put there. `start` is one that it may go on from in place.
pub(crate) fn check_own(name: &str, dir: &Path, start: Option<&Path>) -> Result<()> {
    check_place(name, dir)?;
    match foreign_file(dir, start)? {
        None => Ok(()),
        Some(file) => {
            let found = format!("the foreign file `{file}`");
            Err(wrong(name, dir, "a new or empty directory, or one that driftless made", &found))
        }
    }
}

/// Refuses what is not there, and all that has a name and is no file. The nameless pipe that a shell makes of
/// `<(command)` will do.
pub(crate) fn check_file(name: &str, path: &Path) -> Result<()> {
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() || path.canonicalize().is_ok() => {
            check_regular(name, path, &metadata)
        }
        Ok(_) => Ok(()),
        Err(source) => Err(unopened(name, path, "a file", source)),
    }
}

/// Refuses to write over a device or a pipe: what is written whole is renamed into its place, which would
/// replace it.
pub(crate) fn check_output(name: &str, path: &Path) -> Result<()> {
    std::fs::metadata(path).map_or(Ok(()), |metadata| check_regular(name, path, &metadata))
}

fn check_regular(name: &str, path: &Path, metadata: &Metadata) -> Result<()> {
    match metadata.is_file() {
        true => Ok(()),
        false if metadata.is_dir() => Err(wrong(name, path, "a file", "a directory")),
        false => Err(wrong(name, path, "a file", NO_FILE)),
    }
}

/// Opens a regular file. A FIFO or a device would keep the command waiting, or reading, for ever.
pub(crate) fn open(name: &str, path: &Path) -> Result<File> {
    let nonblocking = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(nonblocking).open(path);
    let file = file.map_err(|source| unopened(name, path, "a file", source))?;
    let metadata = file.metadata().map_err(|source| Error::Io { path: path.to_owned(), source })?;
    check_regular(name, path, &metadata).map(|()| file)
}

/// A regular file of at most `max` bytes.
pub(crate) fn read(name: &str, path: &Path, max: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let read = open(name, path)?.take(max.saturating_add(1)).read_to_end(&mut bytes);
    read.map_err(|source| Error::Io { path: path.to_owned(), source })?;
    if bytes.len() as u64 > max {
        return Err(wrong(name, path, &format!("at most {max} bytes"), "more"));
    }
    Ok(bytes)
}

fn unopened(name: &str, path: &Path, expected: &str, source: std::io::Error) -> Error {
    match source.kind() {
        ErrorKind::NotFound | ErrorKind::NotADirectory => {
            let what = expected.split(' ').next_back().unwrap_or_default();
            wrong(name, path, expected, &format!("no such {what}"))
        }
        _ => Error::Io { path: PathBuf::from(path), source },
    }
}

fn wrong(name: &str, path: &Path, expected: &str, found: &str) -> Error {
    let path = path.display().to_string();
    // A URL where a path is wanted may hold a secret.
    let what = format!("{name} {}", if path.contains("://") { redact(&path) } else { path });
    Error::Usage { what, expected: expected.to_owned(), found: found.to_owned() }
}
