//! Announces each change and each sync that a replica or a disk store asks of the operating system. Tests
//! record them and fail single calls.
//!
//! Without the feature `failpoints` this compiles to nothing.

#[cfg(feature = "failpoints")]
use crate::wait::lock;
use std::io;
use std::path::Path;

/// What is about to be asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// Making a file or directory.
    Create,
    /// Writing to a file.
    Write,
    /// Syncing a file, or a map of it.
    Sync,
    /// Syncing a directory.
    SyncDir,
    /// Renaming a file; the path is the new name.
    Rename,
    /// Removing a file or a directory with all that is in it.
    Remove,
}

/// Called with each call before it is made. An error is taken for the call's own.
#[cfg(feature = "failpoints")]
pub type Watcher = Box<dyn FnMut(Call, &Path) -> io::Result<()> + Send>;

#[cfg(feature = "failpoints")]
static WATCHER: std::sync::Mutex<Option<Watcher>> = std::sync::Mutex::new(None);

/// Sets or removes the watcher of this process. Tests that set one take turns.
#[cfg(feature = "failpoints")]
pub fn set(watcher: Option<Watcher>) {
    *lock(&WATCHER) = watcher;
}

/// Announces a call on `path`.
///
/// # Errors
/// The one that the watcher answers with.
pub fn before(call: Call, path: &Path) -> io::Result<()> {
    #[cfg(feature = "failpoints")]
    if let Some(watcher) = &mut *lock(&WATCHER) {
        return watcher(call, path);
    }
    // Builds without crash points have no other use for them.
    let _ = (call, path);
    Ok(())
}
