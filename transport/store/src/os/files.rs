//! Changes of files and directories that a loss of power does not undo once they were synced.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write as _};
use std::path::Path;

use super::if_there;
use super::watch::{self, Call};
use crate::error::{Error, Result};

/// Makes a directory and those above it, durably.
///
/// # Errors
/// Whatever the file system reports, as [`Error::io`] tells it apart.
pub fn create_dir_synced(dir: &Path) -> Result<()> {
    let parent = dir.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !parent.is_dir() {
        create_dir_synced(parent)?;
    }
    match watch::before(Call::Create, dir).and_then(|()| fs::create_dir(dir)) {
        Err(source) if source.kind() != ErrorKind::AlreadyExists => {
            return Err(Error::io("create", dir, source));
        }
        _ => {}
    }
    sync_dir(parent)
}

/// Makes a directory's entries durable.
///
/// # Errors
/// Whatever the file system reports, as [`Error::io`] tells it apart.
pub fn sync_dir(dir: &Path) -> Result<()> {
    watch::before(Call::SyncDir, dir)
        .and_then(|()| File::open(dir))
        .and_then(|file| file.sync_all())
        .map_err(|source| Error::io("sync", dir, source))
}

/// Creates and syncs one file.
///
/// # Errors
/// Whatever the file system reports, as [`Error::io`] tells it apart.
pub fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let write = || {
        watch::before(Call::Create, path)?;
        let mut file = File::create(path)?;
        watch::before(Call::Write, path)?;
        file.write_all(bytes)?;
        sync_file(&file, path)
    };
    write().map_err(|source| Error::io("write", path, source))
}

/// Makes a file's content durable; `path` is its name.
///
/// # Errors
/// The operating system's.
pub fn sync_file(file: &File, path: &Path) -> io::Result<()> {
    watch::before(Call::Sync, path)?;
    file.sync_all()
}

/// Renames a file.
///
/// # Errors
/// The operating system's.
pub fn rename(from: &Path, to: &Path) -> io::Result<()> {
    watch::before(Call::Rename, to)?;
    fs::rename(from, to)
}

/// Removes a file.
///
/// # Errors
/// The operating system's.
pub fn remove_file(path: &Path) -> io::Result<()> {
    watch::before(Call::Remove, path)?;
    fs::remove_file(path)
}

/// Renames a file if it exists.
///
/// # Errors
/// Whatever the file system reports, as [`Error::io`] tells it apart.
pub fn rename_if_there(from: &Path, to: &Path) -> Result<()> {
    if_there(rename(from, to)).map(drop).map_err(|source| Error::io("move", from, source))
}

/// Removes a file if it exists.
///
/// # Errors
/// Whatever the file system reports, as [`Error::io`] tells it apart.
pub fn remove_if_there(path: &Path) -> Result<()> {
    if_there(remove_file(path)).map(drop).map_err(|source| Error::io("remove", path, source))
}

/// Removes a directory tree if it exists.
///
/// # Errors
/// Whatever the file system reports, as [`Error::io`] tells it apart.
pub fn remove_dir(dir: &Path) -> Result<()> {
    if !dir.exists() {
        return Ok(());
    }
    if_there(watch::before(Call::Remove, dir).and_then(|()| fs::remove_dir_all(dir)))
        .map(drop)
        .map_err(|source| Error::io("remove", dir, source))
}
