//! Locks between processes.

use std::fs::File;
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
        let file = regular::open_with(File::options().create(true).truncate(false).write(true), path)
            .map_err(|source| Error::io("open", path, source))?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Self { _file: file }),
            Err(Errno::WOULDBLOCK) => Err(Error::Locked { path: path.into() }),
            Err(errno) => Err(Error::io("lock", path, errno.into())),
        }
    }
}
