//! What can lie in a file's place and is none.

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;

/// As errors call it.
pub const ODD: [&str; 4] = ["a FIFO", "a socket", "a device", "a directory"];

/// Puts one of [`ODD`] there.
pub fn put(odd: &str, path: &Path) {
    match odd {
        "a FIFO" => assert!(Command::new("mkfifo").arg(path).status().unwrap().success()),
        "a socket" => drop(UnixListener::bind(path).unwrap()),
        "a device" => symlink("/dev/zero", path).unwrap(),
        _ => fs::create_dir(path).unwrap(),
    }
}
