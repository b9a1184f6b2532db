#![expect(unsafe_code, reason = "hands out the memory of a simulated file as a map does")]
//! A simulated medium: files with a live state (what a process sees) and a durable one (what survives a power cut).

use std::io;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes that reach the medium together.
pub(crate) const PAGE: usize = 4096;

#[repr(C, align(4096))]
#[derive(Debug)]
struct Page([AtomicU64; PAGE / 8]);

/// One simulated file.
#[derive(Debug)]
pub(crate) struct Image {
    live: Vec<Page>,
    durable: Mutex<Vec<u8>>,
}

impl Image {
    pub(crate) fn len(&self) -> usize {
        self.live.len() * PAGE
    }
    pub(crate) fn base(&self) -> *mut u8 {
        self.live.as_ptr().cast_mut().cast()
    }
    pub(crate) fn flush(&self, range: Range<usize>) -> io::Result<()> {
        let mut durable = self.durable.lock().unwrap();
        for page in range.start / PAGE..range.end.div_ceil(PAGE) {
            for (index, word) in self.live[page].0.iter().enumerate() {
                let at = page * PAGE + index * 8;
                durable[at..at + 8].copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
            }
        }
        Ok(())
    }
}
