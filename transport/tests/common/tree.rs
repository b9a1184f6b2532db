//! A directory as it is.
#![allow(clippy::expect_used, reason = "a failed step is a failed test")]

use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Every file and directory below `dir`, with its bytes and the time of its last change.
pub(crate) fn tree(dir: &Path) -> Vec<(PathBuf, SystemTime, Vec<u8>)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).expect("a directory") {
        let path = entry.expect("an entry").path();
        let modified = path.metadata().and_then(|metadata| metadata.modified()).expect("a time");
        if path.is_dir() {
            found.extend(tree(&path));
            found.push((path, modified, Vec::new()));
        } else {
            let bytes = std::fs::read(&path).expect("a file");
            found.push((path, modified, bytes));
        }
    }
    found.sort();
    found
}
