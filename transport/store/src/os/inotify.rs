//! Names that are put into a directory, as the kernel tells of them.

use std::ffi::CString;
use std::io;
use std::mem::MaybeUninit;
use std::path::Path;
use std::sync::Arc;
use std::thread;

use rustix::fd::OwnedFd;
use rustix::fs::inotify::{CreateFlags, ReadFlags, Reader, WatchFlags, add_watch, init, remove_watch};
use rustix::fs::statfs;
use rustix::io::Errno;

/// Kinds of file systems of which the kernel hears each change, by the magic numbers of `linux/magic.h` and of ZFS:
/// ext4, XFS, Btrfs, tmpfs, overlayfs, F2FS, bcachefs, ZFS. Of a network's it hears those of this host alone.
const LOCAL: [u32; 8] =
    [0xef53, 0x5846_5342, 0x9123_683e, 0x0102_1994, 0x794c_7630, 0xf2f5_2010, 0xca45_1a4e, 0x2fc1_2fc1];
/// Bytes of events that are read at once.
const EVENTS_BYTES: usize = 4096;

/// Tells of a name until it is dropped, or its directory goes.
#[derive(Debug)]
pub struct Watch {
    inotify: Arc<OwnedFd>,
    directory: i32,
    thread: thread::JoinHandle<()>,
}

impl Watch {
    /// Has `put` called from a thread whenever a file gets the name `name` in `directory`; `None` where that would not be
    /// heard of.
    ///
    /// # Errors
    /// The system's: there is no such directory, it has no more watches or threads.
    pub fn of(directory: &Path, name: &str, put: impl Fn() + Send + 'static) -> io::Result<Option<Self>> {
        // The numbers have 32 bits, and their type differs from machine to machine.
        if !LOCAL.contains(&(statfs(directory)?.f_type as u32)) {
            return Ok(None);
        }
        let name = CString::new(name)?;
        let inotify = Arc::new(init(CreateFlags::CLOEXEC)?);
        let directory = add_watch(&inotify, directory, WatchFlags::MOVED_TO | WatchFlags::ONLYDIR)?;
        let listen = {
            let inotify = inotify.clone();
            move || listen(&inotify, &name, put)
        };
        let thread = thread::Builder::new().name("inotify".to_owned()).spawn(listen)?;
        Ok(Some(Self { inotify, directory, thread }))
    }

    /// Whether nothing more will be told, because the directory is gone.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.thread.is_finished()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // Which the thread hears of, and ends.
        let _ = remove_watch(&self.inotify, self.directory);
    }
}

/// Calls `put` for each event of the name, until the watch ends.
fn listen(inotify: &OwnedFd, name: &CString, put: impl Fn()) {
    let mut events = [MaybeUninit::uninit(); EVENTS_BYTES];
    let mut reader = Reader::new(inotify, &mut events);
    loop {
        match reader.next() {
            Ok(event) if event.events().contains(ReadFlags::IGNORED) => return,
            // Too many came at once, and this may have been among them.
            Ok(event) if event.events().contains(ReadFlags::QUEUE_OVERFLOW) => put(),
            Ok(event) if event.file_name() == Some(name.as_c_str()) => put(),
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::fs;
    use std::sync::mpsc::{RecvTimeoutError, channel};
    use std::time::Duration;

    use super::*;

    #[test]
    fn only_the_name_is_told_and_nothing_after_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let (put, heard) = channel();
        let watch = Watch::of(dir.path(), "head", move || put.send(()).unwrap()).unwrap();
        let Some(watch) = watch else { return eprintln!("skipped: {} is not local", dir.path().display()) };
        let give = |name: &str| {
            fs::write(dir.path().join("staged"), "").unwrap();
            fs::rename(dir.path().join("staged"), dir.path().join(name)).unwrap();
        };
        give("other");
        give("head");
        heard.recv_timeout(Duration::from_secs(60)).unwrap();
        give("head");
        heard.recv_timeout(Duration::from_secs(60)).unwrap();
        assert!(!watch.is_over());
        drop(watch);
        // The thread, and with it the sender, goes.
        assert_eq!(heard.recv_timeout(Duration::from_secs(60)), Err(RecvTimeoutError::Disconnected));
    }

    #[test]
    fn watch_of_a_directory_that_goes_is_over() {
        let dir = tempfile::tempdir().unwrap();
        assert!(Watch::of(&dir.path().join("absent"), "head", || ()).is_err());
        let (put, heard) = channel::<()>();
        let watch = Watch::of(dir.path(), "head", move || put.send(()).unwrap()).unwrap();
        let Some(watch) = watch else { return eprintln!("skipped: {} is not local", dir.path().display()) };
        fs::remove_dir(dir.path()).unwrap();
        assert_eq!(heard.recv_timeout(Duration::from_secs(60)), Err(RecvTimeoutError::Disconnected));
        while !watch.is_over() {
            thread::yield_now();
        }
    }
}
