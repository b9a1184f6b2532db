//! Random operations on a rollout log, damage among them, against a plain map.
#![no_main]
#![allow(clippy::unwrap_used, reason = "in a test, a failed expectation is the answer")]

use driftless_testkit::log::model::Run;
use libfuzzer_sys::fuzz_target;

/// Most bytes of one input: an operation may sync a disk.
const BYTES_MAX: usize = 400;

fuzz_target!(|bytes: &[u8]| {
    // In memory where there is a place for it: a disk's syncs would be most of the time.
    let memory = std::path::Path::new("/dev/shm");
    let place = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
    let dir = tempfile::tempdir_in(place).unwrap();
    Run::new(dir.path()).all(bytes.iter().copied().take(BYTES_MAX));
});
