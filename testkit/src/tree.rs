//! A directory as it is.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Every file and directory below `dir`, with its bytes and the time of its last change.
pub fn tree(dir: &Path) -> Vec<(PathBuf, SystemTime, Vec<u8>)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let modified = path.metadata().and_then(|metadata| metadata.modified()).unwrap();
        if path.is_dir() {
            found.extend(tree(&path));
            found.push((path, modified, Vec::new()));
        } else {
            let bytes = std::fs::read(&path).unwrap();
            found.push((path, modified, bytes));
        }
    }
    found.sort();
    found
}
