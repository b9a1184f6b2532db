//! What can lie in a file's place and is none.

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::Path;

use rustix::fs::{CWD, Mode, mkfifoat};

/// As errors call it.
pub const ODD: [&str; 4] = ["a FIFO", "a socket", "a device", "a directory"];

/// Puts one of [`ODD`] there.
pub fn put(odd: &str, path: &Path) {
    match odd {
        // Not by a command: until it runs, its process holds the locks that the tests beside it have let go of.
        "a FIFO" => mkfifoat(CWD, path, Mode::RUSR | Mode::WUSR).unwrap(),
        "a socket" => drop(UnixListener::bind(path).unwrap()),
        "a device" => symlink("/dev/zero", path).unwrap(),
        _ => fs::create_dir(path).unwrap(),
    }
}
