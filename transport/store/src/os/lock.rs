//! Locks between processes.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::Path;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::regular;
use crate::error::{Error, Result};

/// An exclusive lock on a file, for as long as the value lives.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

impl Lock {
    /// Takes the lock on `path`, and makes the file if it is not there.
    ///
    /// # Errors
    /// [`Error::Locked`] if another value, in this process or another, holds it; otherwise whatever the file
    /// system reports.
    pub fn take(path: &Path) -> Result<Self> {
        let mut options = File::options();
        let mut file = regular::open_with(options.create(true).truncate(false).read(true).write(true), path)
            .map_err(|source| Error::io("open", path, source))?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Err(Error::Locked { path: path.into(), holder: holder(&file) }),
            Err(errno) => return Err(Error::io("lock", path, errno.into())),
        }
        // For errors of others; a full disk is met elsewhere.
        let _ = file.set_len(0).and_then(|()| write!(file, "{}", std::process::id()));
        Ok(Self { _file: file })
    }
}

/// The process that the file names as the lock's holder.
fn holder(file: &File) -> Option<u32> {
    let mut text = String::new();
    file.take(16).read_to_string(&mut text).ok()?;
    text.parse().ok()
}
