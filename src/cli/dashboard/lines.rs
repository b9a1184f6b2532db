//! Files of JSON lines that grow while they are read.

use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::paths;
use std::fs::File;
use std::io::{ErrorKind, Read as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

/// Longest line; a longer one counts as damaged.
const LINE_BYTES_MAX: usize = 4 << 20;
/// Bytes that are read at once.
const CHUNK: usize = 256 << 10;
/// Bytes that are remembered of a file's begin, and of the end of what was read.
const KNOWN: usize = 256;

/// What a look at a file came upon.
#[derive(Clone, Copy)]
pub(super) enum Came<'a> {
    /// A whole line and where it begins; the answer is whether it was understood.
    Line(&'a [u8], u64),
    /// The file is another one, or shorter than it was.
    Anew,
}

/// Which of two files that follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Which {
    Before,
    Now,
}

/// A file that is read from where the last look ended. A line without its end is left for a later look.
pub(super) struct Lines {
    path: PathBuf,
    /// With its number on the disk. It is read to its end even where another file has its name by then.
    file: Option<(File, u64)>,
    /// The one before it.
    before: Option<File>,
    read: u64,
    /// The first bytes, and the last ones that were read.
    first: Vec<u8>,
    last: Vec<u8>,
    /// Where the line begins that is looked at.
    begun: u64,
    partial: Vec<u8>,
    /// Within a line that is too long.
    skips: bool,
    /// Lines that were not understood.
    pub(super) damaged: u64,
}

impl Lines {
    pub(super) fn new(path: PathBuf) -> Self {
        Lines {
            path,
            file: None,
            before: None,
            read: 0,
            first: Vec::new(),
            last: Vec::new(),
            begun: 0,
            partial: Vec::new(),
            skips: false,
            damaged: 0,
        }
    }

    /// Goes on with the file at `path`, behind the one that it had.
    pub(super) fn then(&mut self, path: PathBuf) {
        self.path = path;
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
        let before = self.file.take().map(|(file, _)| file);
        *self = Lines { damaged: self.damaged, before, ..fresh };
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
            self.know(&chunk[..count]);
            self.split(&chunk[..count], take);
        }
        Ok(())
    }

    fn know(&mut self, bytes: &[u8]) {
        let missing = KNOWN - self.first.len();
        self.first.extend_from_slice(&bytes[..missing.min(bytes.len())]);
        self.last.extend_from_slice(&bytes[bytes.len().saturating_sub(KNOWN)..]);
        self.last.drain(..self.last.len().saturating_sub(KNOWN));
    }

    /// Whether the file has other bytes now where it was read: it was written anew in its place.
    pub(super) fn is_written_over(&self) -> bool {
        let Some((file, _)) = &self.file else { return false };
        let is_other = |known: &[u8], at: u64| {
            let mut found = vec![0; known.len()];
            // A shorter file is seen by its length.
            file.read_exact_at(&mut found, at).is_ok() && found != known
        };
        is_other(&self.first, 0) || is_other(&self.last, self.read - self.last.len() as u64)
    }

    /// Hands over the lines again that begin at `from`, of the file before this one or of this, as far as they were read.
    /// It ends where `take` says no, at the latest behind the chunk in which it did.
    pub(super) fn again(&self, of: Which, from: u64, take: &mut dyn FnMut(&[u8]) -> bool) -> Result<bool> {
        let file = match of {
            Which::Before => self.before.as_ref(),
            Which::Now => self.file.as_ref().map(|(file, _)| file),
        };
        let Some(file) = file else { return Ok(true) };
        let (mut lines, mut chunk, mut goes_on) = (Lines::new(PathBuf::new()), vec![0; CHUNK], true);
        while goes_on {
            let count = match file.read_at(&mut chunk, from + lines.read) {
                Ok(0) => break,
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(source) => return Err(Error::Io { path: self.path.clone(), source }),
            };
            lines.read += count as u64;
            lines.split(&chunk[..count], &mut |came| {
                if let Came::Line(line, _) = came {
                    goes_on = goes_on && take(line);
                }
                true
            });
        }
        Ok(goes_on)
    }

    fn split(&mut self, mut bytes: &[u8], take: &mut dyn FnMut(Came<'_>) -> bool) {
        while let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
            self.hold(&bytes[..end]);
            let line = Came::Line(&self.partial, self.begun);
            let is_good = !self.skips && (self.partial.is_empty() || take(line));
            self.damaged += u64::from(!is_good);
            self.partial.clear();
            self.skips = false;
            bytes = &bytes[end + 1..];
            self.begun = self.read - bytes.len() as u64;
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
