//! One writing process per log: an advisory lock that the kernel releases when its holder dies.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Read, Seek, Write};
use std::path::Path;

use crate::{Error, Result, regular};

const NAME: &str = "lock";

/// The held lock.
#[derive(Debug)]
pub(crate) struct LockFile {
    /// Closing it releases the lock.
    _file: File,
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
        Ok(Self { _file: file })
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
