//! Files of JSON lines that grow while they are read.

use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::paths;
use std::fs::File;
use std::io::{ErrorKind, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// Longest line; a longer one counts as damaged.
const LINE_BYTES_MAX: usize = 4 << 20;
/// Bytes that are read at once.
const CHUNK: usize = 256 << 10;

/// What a look at a file came upon.
pub(super) enum Came<'a> {
    /// A whole line; the answer is whether it was understood.
    Line(&'a [u8]),
    /// The file is another one, or shorter than it was.
    Anew,
}

/// A file that is read from where the last look ended. A line without its end is left for a later look.
pub(super) struct Lines {
    path: PathBuf,
    /// With its number on the disk. It is read to its end even where another file has its name by then.
    file: Option<(File, u64)>,
    read: u64,
    partial: Vec<u8>,
    /// Within a line that is too long.
    skips: bool,
    /// Lines that were not understood.
    pub(super) damaged: u64,
}

impl Lines {
    pub(super) fn new(path: PathBuf) -> Self {
        Lines { path, file: None, read: 0, partial: Vec::new(), skips: false, damaged: 0 }
    }

    /// Hands over what has been added. A file that is not there has nothing.
    pub(super) fn look(&mut self, take: &mut dyn FnMut(Came<'_>) -> bool) -> Result<()> {
        self.rest(take)?;
        let Ok(found) = std::fs::metadata(&self.path) else { return Ok(()) };
        let is_known = self.file.as_ref().is_some_and(|(_, number)| *number == found.ino());
        if is_known && found.len() >= self.read {
            return Ok(());
        }
        if self.file.is_some() {
            take(Came::Anew);
        }
        let fresh = Lines::new(std::mem::take(&mut self.path));
        *self = Lines { damaged: self.damaged, ..fresh };
        let file = paths::open("file of a run", &self.path)?;
        self.file = Some((file, found.ino()));
        self.rest(take)
    }

    /// Reads the open file to its end.
    fn rest(&mut self, take: &mut dyn FnMut(Came<'_>) -> bool) -> Result<()> {
        let mut chunk = vec![0; CHUNK];
        while let Some((file, _)) = &mut self.file {
            let count = match file.read(&mut chunk) {
                Ok(0) => break,
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(source) => return Err(Error::Io { path: self.path.clone(), source }),
            };
            self.read += count as u64;
            self.split(&chunk[..count], take);
        }
        Ok(())
    }

    fn split(&mut self, mut bytes: &[u8], take: &mut dyn FnMut(Came<'_>) -> bool) {
        while let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
            self.hold(&bytes[..end]);
            let is_good = !self.skips && (self.partial.is_empty() || take(Came::Line(&self.partial)));
            self.damaged += u64::from(!is_good);
            self.partial.clear();
            self.skips = false;
            bytes = &bytes[end + 1..];
        }
        self.hold(bytes);
    }

    fn hold(&mut self, bytes: &[u8]) {
        self.skips |= self.partial.len() + bytes.len() > LINE_BYTES_MAX;
        if self.skips {
            self.partial = Vec::new();
        } else {
            self.partial.extend_from_slice(bytes);
        }
    }
}

/// The text of a small file that may be absent, or half of which another process may have written.
pub(super) fn text(path: &Path, max: u64) -> Option<String> {
    let bytes = paths::read("file of a run", path, max).ok()?;
    String::from_utf8(bytes).ok()
}
