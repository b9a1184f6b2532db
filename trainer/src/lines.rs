//! Files of JSON lines that only grow.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, Result, io};

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

    /// Makes what was appended durable.
    pub(crate) fn sync(&self) -> Result<()> {
        self.file.sync_data().map_err(io("sync", &self.path))
    }

    fn write(&mut self, text: &str) -> Result<()> {
        self.file.write_all(text.as_bytes()).map_err(io("write", &self.path))
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
