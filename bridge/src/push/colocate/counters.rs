//! The counters by which torch's processes tell each other that CUDA memory is no longer in use.
//!
//! torch's `CudaIPCTypes.h` and `MapAllocator.cpp`: shared memory of 64 bytes, of which the first 4 count the
//! processes that have it open and the last of which removes it, and then 10,000 counters of 8 bytes. A rank
//! that lets go of memory waits for its copies, opens the shared memory by name and takes 1 from the counter
//! it was told.

#![allow(unsafe_code, reason = "memory that is shared with other processes")]

use std::fs::OpenOptions;
use std::path::PathBuf;
use std::sync::atomic::{AtomicI32, AtomicI64, AtomicU32, Ordering};

use memmap2::MmapMut;

use crate::error::{Error, Result};

const HEADER: usize = 64;
const COUNTERS: usize = 10_000;
/// Where `shm_open` of Linux's C libraries keeps its files.
const DIRECTORY: &str = "/dev/shm";

/// Shared memory with counters, removed when this is dropped.
#[derive(Debug)]
pub(super) struct Counters {
    path: PathBuf,
    /// As `shm_open` takes it.
    pub(super) name: String,
    memory: MmapMut,
}

impl Counters {
    /// New ones, all 0.
    pub(super) fn new() -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        // A process of this number may have been killed before: the time makes it another file.
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let name = format!("/driftless_{}_{}_{number}", std::process::id(), since.as_nanos());
        let path = PathBuf::from(format!("{DIRECTORY}{name}"));
        let fail = |source| Error::Read { path: path.clone(), source };
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).map_err(fail)?;
        file.set_len((HEADER + 8 * COUNTERS) as u64).map_err(fail)?;
        // SAFETY: the file is this process's, nobody makes it shorter, and what others write to is only read
        // as atomics.
        let memory = unsafe { MmapMut::map_mut(&file) }.map_err(fail)?;
        let counters = Self { path, name, memory };
        // One process that never closes it, so that no other is the last.
        counters.header().store(1, Ordering::Relaxed);
        Ok(counters)
    }

    /// Sets counters to 1: each stands for a rank that is about to be told.
    pub(super) fn arm(&self, range: std::ops::Range<usize>) {
        range.for_each(|index| self.counter(index).store(1, Ordering::Release));
    }

    /// Whether every rank has taken its 1.
    pub(super) fn released(&self, mut range: std::ops::Range<usize>) -> bool {
        range.all(|index| self.counter(index).load(Ordering::Acquire) <= 0)
    }

    fn header(&self) -> &AtomicI32 {
        // SAFETY: the first bytes of a page, which lives as long as the reference; only atomics touch them.
        unsafe { AtomicI32::from_ptr(self.memory.as_ptr().cast_mut().cast()) }
    }

    fn counter(&self, index: usize) -> &AtomicI64 {
        let at = HEADER + 8 * index.min(COUNTERS - 1);
        // SAFETY: within the mapping, a multiple of 8 from the beginning of a page; only atomics touch it.
        unsafe { AtomicI64::from_ptr(self.memory.as_ptr().add(at).cast_mut().cast()) }
    }
}

impl Drop for Counters {
    fn drop(&mut self) {
        // Nobody is told of it any more; a rank that still has it open keeps what it has.
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_process_takes_its_one_where_torch_would() {
        let counters = Counters::new().unwrap();
        let path = counters.path.clone();
        counters.arm(0..4);
        assert!(!counters.released(0..2) && counters.released(4..9));
        let mut bytes = std::fs::read(&path).unwrap();
        assert_eq!((bytes.len(), &bytes[..4]), (80_064, [1u8, 0, 0, 0].as_slice()));
        for index in [0, 1] {
            assert_eq!(bytes[64 + 8 * index..][..8], [1, 0, 0, 0, 0, 0, 0, 0]);
            bytes[64 + 8 * index] = 0;
        }
        use std::io::Write as _;
        let mut file = OpenOptions::new().write(true).open(&path).unwrap();
        file.write_all(&bytes).unwrap();
        assert!(counters.released(0..2) && !counters.released(0..4));
        drop(counters);
        assert!(!path.exists());
    }

    /// torch's own release, which needs no device.
    #[test]
    fn torch_releases_a_counter() {
        let Ok(python) = std::env::var("DRIFTLESS_SGLANG_PYTHON") else {
            println!("skipped: DRIFTLESS_SGLANG_PYTHON is not set");
            return;
        };
        let counters = Counters::new().unwrap();
        counters.arm(0..3);
        let script =
            "import sys, torch; torch.UntypedStorage._release_ipc_counter_cuda(sys.argv[1].encode(), 1)";
        let output =
            std::process::Command::new(python).args(["-c", script, &counters.name]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(counters.released(1..2) && !counters.released(0..1) && !counters.released(2..3));
        assert!(counters.path.exists(), "torch has removed it");
    }
}
