//! The weight files of an apply, mapped for writing before there is anything to write.
//!
//! Overwriting costs little more than the faults of its pages, one for each page that is written to for the first time through a map.
//! While objects arrive there is time for them: pages are made ready as soon as it is known that they will change. That leaves their
//! bytes as they are. It moves the files' times, which [`Targets::moved_times`] tells, and the kernel writes the pages once more.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use driftless_delta::Patch;
use memmap2::{Advice, MmapMut};

use crate::checkpoint::{Checkpoint, map};
use crate::error::{Error, Result};
use crate::manifest::Tensor;

/// What pages are counted in; where the kernel's are larger, it makes those ready that these lie in.
const PAGE: u64 = 4096;

/// A weight file that is written to.
#[derive(Debug)]
pub(super) struct Target {
    /// Opened before the first byte: a write-back that failed meanwhile is told by a sync of it.
    pub(super) file: File,
    pub(super) map: MmapMut,
}

impl Target {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let io = |source| Error::io("open for writing", path, source);
        let file = File::options().read(true).write(true).open(path).map_err(io)?;
        let map = map::map_mut(path, &file)?;
        Ok(Self { file, map })
    }
}

/// The weight files of the checkpoint that an apply starts from; none if it writes others.
#[derive(Debug, Default)]
pub(super) struct Targets {
    files: BTreeMap<PathBuf, Target>,
    moved_times: AtomicBool,
}

impl Targets {
    /// Files that cannot be opened are left out: whoever has to write to them hears why.
    pub(super) fn open(checkpoint: &Checkpoint) -> Self {
        let open = |path: &Path| Some((path.to_owned(), Target::open(path).ok()?));
        Self { files: checkpoint.weight_files().filter_map(open).collect(), ..Self::default() }
    }

    /// Makes the pages ready that the patches of a tensor will change, each with the byte of the tensor at which it begins.
    ///
    /// A kernel that does not do so (Linux before 5.14) lets the pages be faulted in when they are written to.
    pub(super) fn make_ready(&self, checkpoint: &Checkpoint, tensor: &Tensor, patches: &[(u64, Patch)]) {
        for name in std::iter::once(&tensor.name).chain(&tensor.aliases) {
            let place = checkpoint.position(name).and_then(|index| checkpoint.place(index));
            let Some((place, target)) = place.and_then(|place| Some((place, self.files.get(place.path)?)))
            else {
                continue;
            };
            for (offset, patch) in patches {
                let begin = place.offset.saturating_add(*offset);
                for pages in page_runs(patch.byte_runs().map(|(at, bytes)| (begin + at, bytes.len() as u64)))
                {
                    self.moved_times.store(true, Relaxed);
                    let length = pages.end.min(target.map.len() as u64).saturating_sub(pages.start);
                    let advised =
                        target.map.advise_range(Advice::PopulateWrite, pages.start as usize, length as usize);
                    if advised.is_err() {
                        return;
                    }
                }
            }
        }
    }

    /// Whether the files may have other times than before, while no byte of them is another one.
    pub(super) fn moved_times(&self) -> bool {
        self.moved_times.load(Relaxed)
    }

    /// The file at `path`.
    pub(super) fn take(&mut self, path: &Path) -> Result<Target> {
        self.files.remove(path).map_or_else(|| Target::open(path), Ok)
    }
}

/// The pages, in runs, that ranges of bytes (first byte and length, ascending) lie in.
fn page_runs(ranges: impl Iterator<Item = (u64, u64)>) -> impl Iterator<Item = std::ops::Range<u64>> {
    let mut pages =
        ranges.map(|(at, length)| at / PAGE * PAGE..(at + length).next_multiple_of(PAGE)).peekable();
    std::iter::from_fn(move || {
        let mut run = pages.next()?;
        while let Some(next) = pages.next_if(|next| next.start <= run.end) {
            run.end = run.end.max(next.end);
        }
        Some(run)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_hold_the_pages_of_all_bytes_and_no_others() {
        let ranges = [(0, 2), (10, 2), (4094, 4), (8190, 2), (8192 + 4096, 1), (40_960, 8192), (53_247, 1)];
        let runs: Vec<_> = page_runs(ranges.into_iter()).collect();
        assert_eq!(runs, [0..8192, 12_288..16_384, 40_960..53_248]);
        assert_eq!(page_runs(std::iter::empty()).count(), 0);
    }
}
