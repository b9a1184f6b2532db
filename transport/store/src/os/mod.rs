//! Files, directories and locks, for this crate and those above it. Each change and each sync is announced to
//! [`watch`], so that tests can record them and fail single ones.

mod files;
#[cfg(target_os = "linux")]
pub mod inotify;
mod lock;
pub mod map;
pub mod regular;
mod steady;
#[doc(hidden)]
pub mod watch;

pub use files::{
    create_dir_synced, remove_dir, remove_file, remove_if_there, rename, rename_if_there, sync_dir,
    sync_file, write_file,
};
pub use lock::Lock;
pub use steady::Steady;

use std::io;

use crate::error::Result;

/// Has the calling thread, and those that it starts from here on, give way to threads that want a processor too. On
/// Linux it then gets a tenth of what such a thread gets; elsewhere nothing changes.
pub fn give_way() {
    // Only of Linux does the call change one thread, and not its process. Without permission nothing changes.
    #[cfg(target_os = "linux")]
    let _ = rustix::process::nice(10);
}

/// The host's name; `follower` where it has none.
#[must_use]
pub fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let name = name.map(|name| name.trim().to_owned()).filter(|name| !name.is_empty());
    name.unwrap_or_else(|| "follower".to_owned())
}

/// `None` where there is no such file.
///
/// # Errors
/// Every other one of `done`.
pub fn if_there<T>(done: io::Result<T>) -> io::Result<Option<T>> {
    match done {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        done => done.map(Some),
    }
}

/// A named moment of the protocol at which tests stop or fail the process; nothing in builds without the
/// feature `failpoints`.
///
/// # Errors
/// [`Error::Io`](crate::Error::Io) where a test has the point fail.
pub fn crash_point(name: &'static str) -> Result<()> {
    // Builds without crash points have no other use for the name.
    let _ = name;
    fail::fail_point!(name, |_| Err(crate::Error::io(
        "pass crash point",
        name,
        io::Error::other("injected")
    )));
    Ok(())
}
