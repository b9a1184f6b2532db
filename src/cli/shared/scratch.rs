//! Directories that a command needs while it works.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// A place for a directory, which goes with this value. Whoever needs it makes it.
pub(crate) struct Scratch {
    pub(crate) dir: PathBuf,
}

impl Scratch {
    /// No other process has one of this name now, and none before had it at this time.
    pub(crate) fn new(command: &str) -> Self {
        let since = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_nanos();
        let name = format!("driftless-{command}-{}-{since}", std::process::id());
        Scratch { dir: std::env::temp_dir().join(name) }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        remove(&self.dir);
    }
}

/// Removes a directory of this command, if it was made.
pub(crate) fn remove(dir: &Path) {
    if let Err(error) = std::fs::remove_dir_all(dir)
        && error.kind() != ErrorKind::NotFound
    {
        tracing::warn!(dir = %dir.display(), %error, "a directory for the time of the command was not removed");
    }
}
