//! Files of a log are opened here: a FIFO, a device, a socket or a directory may lie in a file's place.
//! Opening one must neither wait nor go on as if it were a file.

use std::fs::{self, File, FileType, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;

/// Opens a regular file for reading.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    open_with(File::options().read(true), path)
}

/// Opens a regular file in the way that `options` say.
pub(crate) fn open_with(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    // Neither the other end of a FIFO nor a device is waited for.
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed();
    match options.custom_flags(flags).open(path) {
        Ok(file) => check(file.metadata()?.file_type()).map(|()| file),
        // Sockets refuse to be opened, and directories and FIFOs to be opened for writing.
        Err(error) => match fs::metadata(path) {
            Ok(found) => Err(check(found.file_type()).err().unwrap_or(error)),
            Err(_) => Err(error),
        },
    }
}

/// Refuses everything but a regular file.
fn check(found: FileType) -> io::Result<()> {
    let found = match found {
        found if found.is_file() => return Ok(()),
        found if found.is_dir() => "a directory",
        found if found.is_fifo() => "a FIFO",
        found if found.is_socket() => "a socket",
        _ => "a device",
    };
    let message = format!("expected a regular file, found {found}; remove it, or put the file in its place");
    Err(io::Error::new(io::ErrorKind::InvalidInput, message))
}

/// Every call on the file system passes here: the tests make the k-th one fail.
pub(crate) fn call<T>(work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    #[cfg(all(test, not(loom)))]
    crate::tests::syscalls::called()?;
    work()
}
