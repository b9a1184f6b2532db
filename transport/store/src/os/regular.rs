//! Files are opened here: a FIFO, a device, a socket or a directory may lie in a file's place. Opening one
//! must neither wait nor go on as if it were a file.

use std::fs::{self, File, FileType, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::Path;

use rustix::fs::OFlags;
use rustix::io::Errno;

/// What a directory is called.
pub(crate) const DIRECTORY: &str = "a directory";

/// What was found instead of a file: the source of the [`io::Error`] that says so.
#[derive(Debug, thiserror::Error)]
#[error("expected a regular file, found {0}")]
pub struct NotRegular(pub(crate) &'static str);

/// Opens a regular file for reading.
///
/// # Errors
/// The operating system's; [`NotRegular`] inside it for what is no regular file.
pub fn open(path: &Path) -> io::Result<File> {
    open_with(File::options().read(true), path)
}

/// Opens a regular file in the way that `options` say.
///
/// # Errors
/// The operating system's; [`NotRegular`] inside it for what is no regular file.
pub fn open_with(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    open_flags(options, OFlags::empty(), path)
}

/// As [`open_with`], and refuses a symbolic link: what a program writes to, or serves, in a directory of its
/// own must not be a file elsewhere.
///
/// # Errors
/// The operating system's; [`NotRegular`] inside it for what is no regular file, and for a link to one.
pub fn open_own(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    open_flags(options, OFlags::NOFOLLOW, path).map_err(|error| match Errno::from_io_error(&error) {
        Some(Errno::LOOP) => not_regular("a symbolic link"),
        _ => error,
    })
}

fn open_flags(options: &mut OpenOptions, more: OFlags, path: &Path) -> io::Result<File> {
    // Neither the other end of a FIFO nor a device is waited for.
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY | more).bits().cast_signed();
    match options.custom_flags(flags).open(path) {
        Ok(file) => check(file.metadata()?.file_type()).map(|()| file),
        // Sockets refuse to be opened, and directories and FIFOs to be opened for writing.
        Err(error) => match fs::metadata(path) {
            Ok(found) => Err(check(found.file_type()).err().unwrap_or(error)),
            Err(_) => Err(error),
        },
    }
}

/// All bytes of a regular file.
///
/// # Errors
/// The operating system's; [`NotRegular`] inside it for what is no regular file.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Opens a regular file or what a shell makes of `<(command)`: a pipe that no name leads to, whose writer is
/// there.
///
/// # Errors
/// The operating system's; [`NotRegular`] inside it for what is no regular file.
pub fn open_or_pipe(path: &Path) -> io::Result<File> {
    if path.canonicalize().is_ok() { open(path) } else { File::open(path) }
}

/// Refuses everything but a regular file.
///
/// # Errors
/// The operating system's; [`NotRegular`] inside it for what is no regular file.
pub fn check(found: FileType) -> io::Result<()> {
    let found = match found {
        found if found.is_file() => return Ok(()),
        found if found.is_dir() => DIRECTORY,
        found if found.is_fifo() => "a FIFO",
        found if found.is_socket() => "a socket",
        _ => "a device",
    };
    Err(not_regular(found))
}

fn not_regular(found: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, NotRegular(found))
}
