//! One writing process per log: an advisory lock that the kernel releases when its holder dies.
//!
//! The lock is on a file, and another process finds it by its name. So the lock protects the log only as long
//! as the name leads to that file: whoever removes it lets a second owner in.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::regular;

const NAME: &str = "lock";

/// The held lock.
#[derive(Debug)]
pub(crate) struct LockFile {
    /// Closing it releases the lock.
    _file: File,
    name: LockName,
}

/// The name of a lock, and the file that it led to when the lock was taken.
#[derive(Debug, Clone)]
pub(crate) struct LockName {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl LockName {
    fn of(path: PathBuf, file: &File) -> Result<Self> {
        let found = file.metadata().map_err(Error::io("look at", &path))?;
        // The process may change its working directory.
        let path = std::path::absolute(&path).unwrap_or(path);
        Ok(Self { path, device: found.dev(), inode: found.ino() })
    }

    /// Refuses a name that leads to another file by now, or to none.
    ///
    /// What was on stable storage before this succeeds is safe: a process that takes the log later recovers
    /// it.
    pub(crate) fn check(&self) -> Result<()> {
        match fs::metadata(&self.path) {
            Ok(found) if (found.dev(), found.ino()) == (self.device, self.inode) => Ok(()),
            Err(source) if source.kind() != ErrorKind::NotFound => {
                Err(Error::io("look at", &self.path)(source))
            }
            _ => Err(Error::LockLost { path: self.path.clone() }),
        }
    }
}

impl LockFile {
    /// Takes the lock of the log in `root`.
    pub(crate) fn take(root: &Path) -> Result<Self> {
        let path = root.join(NAME);
        let options = &mut OpenOptions::new();
        let open = regular::open_with(options.read(true).write(true).create(true).truncate(false), &path);
        let mut file = open.map_err(Error::io("open", &path))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut text = String::new();
                // The holder's number only helps: one that cannot be read is left out.
                let holder = file.read_to_string(&mut text).ok().and_then(|_| text.trim().parse().ok());
                return Err(Error::Locked { path, holder });
            }
            Err(TryLockError::Error(source)) => return Err(Error::Io { action: "lock", path, source }),
        }
        let note = |file: &mut File| {
            file.set_len(0)?;
            file.rewind()?;
            writeln!(file, "{}", std::process::id())
        };
        note(&mut file).map_err(Error::io("write", &path))?;
        let name = LockName::of(path, &file)?;
        // The file may have been replaced between its opening and the lock.
        name.check()?;
        Ok(Self { _file: file, name })
    }

    /// What to look at to know whether the lock still protects the log.
    pub(crate) fn name(&self) -> &LockName {
        &self.name
    }

    /// Is a process writing the log in `root` right now? Takes nothing.
    pub(crate) fn is_taken(root: &Path) -> Result<bool> {
        let path = root.join(NAME);
        let file = match regular::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::InvalidInput => {
                return Err(Error::io("open", &path)(error));
            }
            // Nothing was written here, or this user may not read it.
            Err(_) => return Ok(false),
        };
        // A shared lock lets other inspectors in; it is gone when `file` is closed.
        Ok(matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)))
    }
}
