//! Files of JSON lines that only grow.

use std::fs::{File, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, Result, io};

/// Attempts at a file that another process keeps, and the time between two.
const KEEP_TIMES: u32 = 10;
const KEEP_AGAIN: Duration = Duration::from_millis(20);

/// A file of JSON lines, open to append.
#[derive(Debug)]
pub(crate) struct Lines {
    path: PathBuf,
    file: File,
}

impl Lines {
    /// Opens the file, or begins it, and returns what it says. A line that a crash tore is left out and ended.
    pub(crate) fn open<T: DeserializeOwned>(path: PathBuf) -> Result<Opened<T>> {
        let file = File::options().read(true).append(true).create(true).open(&path);
        let file = file.map_err(io("open", &path))?;
        let bytes = std::fs::read(&path).map_err(io("read", &path))?;
        let mut lines = Lines { path, file };
        if bytes.last().is_some_and(|last| *last != b'\n') {
            lines.write("\n")?;
        }
        Ok(Opened { lines, said: parsed(&bytes) })
    }

    /// Appends a line. A crash of the machine may lose it, until [`Lines::sync`].
    pub(crate) fn append(&mut self, line: &impl Serialize) -> Result<()> {
        let line =
            serde_json::to_string(line).map_err(|source| Error::Json { path: self.path.clone(), source })?;
        self.write(&format!("{line}\n"))
    }

    /// Keeps the file for this process, as long as it is open, if no other one has it.
    pub(crate) fn keep(&self) -> Result<bool> {
        for _ in 0..KEEP_TIMES {
            if lock(&self.file, &self.path)? {
                return Ok(true);
            }
            // It may be another's look at whether a process keeps it.
            std::thread::sleep(KEEP_AGAIN);
        }
        Ok(false)
    }

    /// Makes what was appended durable.
    pub(crate) fn sync(&self) -> Result<()> {
        self.file.sync_data().map_err(io("sync", &self.path))
    }

    fn write(&mut self, text: &str) -> Result<()> {
        self.file.write_all(text.as_bytes()).map_err(io("write", &self.path))
    }
}

fn lock(file: &File, path: &Path) -> Result<bool> {
    match file.try_lock() {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(source)) => Err(io("lock", path)(source)),
    }
}

/// Reads a file of JSON lines while another process appends to it.
#[derive(Debug)]
pub(crate) struct Tail {
    path: PathBuf,
    read: u64,
}

impl Tail {
    /// From the first line on. The file may come later.
    pub(crate) fn new(path: PathBuf) -> Self {
        Tail { path, read: 0 }
    }

    /// The file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// What was appended since the last call, up to the last whole line.
    pub(crate) fn next<T: DeserializeOwned>(&mut self) -> Result<Vec<T>> {
        let Some(mut file) = self.open()? else { return Ok(Vec::new()) };
        let mut bytes = Vec::new();
        file.seek(SeekFrom::Start(self.read))
            .and_then(|_| file.read_to_end(&mut bytes))
            .map_err(io("read", &self.path))?;
        let whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        self.read += whole as u64;
        Ok(parsed(&bytes[..whole]))
    }

    /// Whether a process keeps the file: it has called [`Lines::keep`], and lives.
    pub(crate) fn is_kept(&self) -> Result<bool> {
        Ok(match self.open()? {
            Some(file) => !lock(&file, &self.path)?,
            None => false,
        })
    }

    fn open(&self) -> Result<Option<File>> {
        match File::open(&self.path) {
            Ok(file) => Ok(Some(file)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(io("open", &self.path)(source)),
        }
    }
}

/// A file and what it said when it was opened.
pub(crate) struct Opened<T> {
    pub(crate) lines: Lines,
    pub(crate) said: Vec<T>,
}

/// What a file says; nothing if it is absent.
pub(crate) fn read<T: DeserializeOwned>(path: &Path) -> Result<Vec<T>> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(parsed(&bytes)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(source) => Err(io("read", path)(source)),
    }
}

fn parsed<T: DeserializeOwned>(bytes: &[u8]) -> Vec<T> {
    bytes.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tail_has_each_line_once_and_a_torn_one_never() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.jsonl");
        let mut tail = Tail::new(path.clone());
        assert_eq!(tail.next::<u64>().unwrap(), Vec::<u64>::new(), "there is no file yet");
        let mut lines = Lines::open::<u64>(path.clone()).unwrap().lines;
        lines.append(&1).unwrap();
        lines.append(&2).unwrap();
        lines.write("3").unwrap();
        assert_eq!(tail.next::<u64>().unwrap(), [1, 2]);
        lines.write("4\n").unwrap();
        assert_eq!(tail.next::<u64>().unwrap(), [34]);
        lines.write("{\"torn").unwrap();
        assert!(tail.next::<u64>().unwrap().is_empty());
        Lines::open::<u64>(path).unwrap().lines.append(&5).unwrap();
        assert_eq!(tail.next::<u64>().unwrap(), [5]);
    }

    #[test]
    fn file_is_kept_by_one_process_at_a_time_while_it_lives() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.jsonl");
        let tail = Tail::new(path.clone());
        assert!(!tail.is_kept().unwrap());
        let open = || Lines::open::<u64>(path.clone()).unwrap().lines;
        let (first, second) = (open(), open());
        assert!(first.keep().unwrap());
        assert!(!second.keep().unwrap());
        assert!(tail.is_kept().unwrap());
        drop(first);
        assert!(!tail.is_kept().unwrap());
        assert!(second.keep().unwrap());
    }
}
