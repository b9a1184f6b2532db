//! slime's receiver, restated: one file of zstd frames, applied in place to a mapped checkpoint on many
//! threads, each tensor hashed whole afterwards. Its container, its index and its lock are left out in its
//! favour.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::path::Path;

use memmap2::MmapMut;
use rayon::prelude::*;

use crate::data::Pair;
use crate::peers::xor_zstd;

/// Most threads that it uses.
const THREADS_MAX: usize = 32;

/// Where a tensor lies in the mapped file, where its frame lies in the delta, and what it hashes to.
#[derive(Debug, Clone, Copy)]
struct Entry {
    start: usize,
    length: usize,
    frame: (usize, usize),
    digest: u128,
}

/// A version as slime publishes it.
#[derive(Debug, Clone)]
pub struct Delta {
    entries: Vec<Entry>,
}

impl Delta {
    /// Encodes the step of every pair as slime does and writes the frames, one after the other, to `path`.
    /// The checkpoint it is for has the tensors' bytes in the same order, one after the other.
    ///
    /// # Errors
    /// The file system's.
    pub fn write(pairs: &[Pair], path: &Path) -> io::Result<Self> {
        let frames: Vec<(Vec<u8>, u128)> =
            pairs.par_iter().map(|pair| xor_zstd::encode(&pair.base, &pair.new)).collect();
        let mut file = File::create(path)?;
        let (mut start, mut at) = (0, 0);
        let mut entries = Vec::with_capacity(pairs.len());
        for (pair, (frame, digest)) in pairs.iter().zip(&frames) {
            file.write_all(frame)?;
            entries.push(Entry { start, length: pair.base.len(), frame: (at, frame.len()), digest: *digest });
            (start, at) = (start + pair.base.len(), at + frame.len());
        }
        file.sync_all()?;
        Ok(Self { entries })
    }

    /// The table of entries as text, for another process.
    #[must_use]
    pub fn to_text(&self) -> String {
        let line = |entry: &Entry| {
            let (at, length) = entry.frame;
            format!("{} {} {at} {length} {}\n", entry.start, entry.length, entry.digest)
        };
        self.entries.iter().map(line).collect()
    }

    /// Reads [`Delta::to_text`]; `None` for anything else.
    #[must_use]
    pub fn from_text(text: &str) -> Option<Self> {
        let entry = |line: &str| {
            let mut numbers = line.split(' ');
            let mut next = || numbers.next()?.parse().ok();
            let (start, length, frame) = (next()?, next()?, (next()?, next()?));
            Some(Entry { start, length, frame, digest: numbers.next()?.parse().ok()? })
        };
        Some(Self { entries: text.lines().map(entry).collect::<Option<_>>()? })
    }

    /// Bytes of all frames.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.entries.iter().map(|entry| entry.frame.1).sum()
    }

    /// Applies the delta at `path` to the mapped file, up to the point where an engine can load it: changed
    /// and checked, in the page cache. Nothing is durable then.
    ///
    /// # Errors
    /// The file system's; [`io::ErrorKind::InvalidData`] where a tensor is not what it should be afterwards.
    pub fn apply(&self, checkpoint: &mut MmapMut, path: &Path) -> io::Result<()> {
        // Whole, as the receiver reads it.
        let delta = std::fs::read(path)?;
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().map_err(io::Error::other)?;
        let mut rest: &mut [u8] = checkpoint;
        let mut tensors = Vec::with_capacity(self.entries.len());
        for entry in &self.entries {
            let (tensor, tail) = rest.split_at_mut(entry.length);
            tensors.push((entry, tensor));
            rest = tail;
        }
        pool.install(|| {
            tensors.into_par_iter().try_for_each(|(entry, tensor)| {
                let frame = &delta[entry.frame.0..entry.frame.0 + entry.frame.1];
                let wrong =
                    || io::Error::new(io::ErrorKind::InvalidData, "a tensor is not what it should be");
                xor_zstd::apply_streamed(tensor, frame, entry.digest).then_some(()).ok_or_else(wrong)
            })
        })
    }
}

/// Maps a file for [`Delta::apply`].
///
/// # Errors
/// The file system's.
#[allow(unsafe_code, reason = "memory maps")]
pub fn map(path: &Path) -> io::Result<MmapMut> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    // SAFETY: the file is the bench's own; nobody shortens it or writes to it otherwise while it is mapped.
    unsafe { MmapMut::map_mut(&file) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Shape, synthetic};

    #[test]
    fn the_receiver_ends_at_the_new_state_and_notices_a_wrong_base() {
        let pairs = synthetic(Shape { tensors: 3, elements: 1_500_000 }, 0.01, 1);
        let dir = std::env::temp_dir().join(format!("driftless-receiver-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let (checkpoint, delta) = (dir.join("checkpoint"), dir.join("delta"));
        let whole = |of: fn(&Pair) -> &Vec<u8>| pairs.iter().map(of).cloned().collect::<Vec<_>>().concat();
        std::fs::write(&checkpoint, whole(|pair| &pair.base)).unwrap();
        let written = Delta::write(&pairs, &delta).unwrap();
        assert_eq!(written.bytes() as u64, delta.metadata().unwrap().len());
        let written = Delta::from_text(&written.to_text()).unwrap();
        let mut mapped = map(&checkpoint).unwrap();
        written.apply(&mut mapped, &delta).unwrap();
        assert!(mapped[..] == whole(|pair| &pair.new)[..]);
        assert!(written.apply(&mut mapped, &delta).is_err(), "xored twice");
        std::fs::remove_dir_all(dir).unwrap();
    }
}
