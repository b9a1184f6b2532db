//! The weight files of an apply, mapped for writing, and the prefaulting of their pages.
//!
//! Overwriting costs little more than its page faults: one for each page that is first written through a map.
//! While objects are decoded there is time for them. Pages are prefaulted as soon as it is known that they
//! will change. In a tensor that changes nearly everywhere, that is when its object is here. Their bytes stay
//! as they are. The files' times move, which [`WriteMaps::moved_times`] reports, and the kernel writes the
//! pages once more.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU8};
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread::{self, Scope};

use driftless_delta::Patch;
use driftless_store::os::{map, regular};
use driftless_store::wait::lock;
use memmap2::MmapMut;

use super::objects::ObjectNumber;
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::manifest::Tensor;
use driftless_store::pool::threads;

/// What pages are counted in. Where the kernel's are larger, it prefaults those that these lie in.
pub(super) const PAGE: usize = 4096;
/// Threads that prefault. They share a lock of each file's. Of a file of 4 GiB in folios of 2 MiB, one thread
/// prefaults all pages in 0.10 s, four in 0.04 s, eight in 0.03 s, sixteen in 0.06 s. Decoding is faster
/// beside few of them.
const THREADS_MAX: usize = 6;
/// Tensors that wait for those threads at most. Little is held if the kernel has the threads wait for the
/// disk.
const JOBS_MAX: usize = 64;
/// Bytes of a tensor that one thread prefaults at a time.
const JOB_BYTES: u64 = 16 << 20;

/// A weight file that is written to.
#[derive(Debug)]
pub(super) struct WriteMap {
    /// Opened before the first byte: a sync of it reports a write-back that failed meanwhile.
    pub(super) file: File,
    pub(super) map: MmapMut,
}

impl WriteMap {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let io = |source| Error::io("open for writing", path, source);
        let file = regular::open_own(File::options().read(true).write(true), path).map_err(io)?;
        let map = map::map_mut(path, &file)?;
        Ok(Self { file, map })
    }

    /// The file's bytes, to be touched by several threads.
    fn bytes(&mut self) -> &[AtomicU8] {
        let (begin, length) = (self.map.as_mut_ptr().cast::<AtomicU8>(), self.map.len());
        #[expect(unsafe_code, reason = "see below")]
        // SAFETY: an AtomicU8 lies in memory as a u8 does, and as long as the slice lives the map's bytes are
        // not reached through it in another way: it borrows the map mutably. Readers of the file through
        // another map see what they saw before, as only bytes are stored that are there already.
        unsafe {
            std::slice::from_raw_parts(begin, length)
        }
    }
}

/// Ranges of bytes of a tensor that will change.
struct Job<'a> {
    /// The tensor in its file, mapped for writing.
    tensor: &'a [AtomicU8],
    /// The same bytes, mapped for reading.
    bytes: &'a [u8],
    /// Where in a page the tensor begins.
    phase: usize,
    ranges: Vec<Range<u64>>,
}

impl Job<'_> {
    /// Writes one byte of each page that the ranges lie in, with the value that it has.
    ///
    /// `MADV_POPULATE_WRITE` takes one call for many pages, but holds the process's list of maps. Threads
    /// that allocate much memory wait for that list, and all others that prefault wait behind them, 4 ms and
    /// more each time. The byte comes from the other map: a page that is read first is mapped for reading,
    /// and is far slower to map for writing then.
    fn prefault(&self, over: &AtomicBool) {
        for range in &self.ranges {
            let mut at = range.start as usize;
            while (at as u64) < range.end
                && !over.load(Relaxed)
                && let Some((place, byte)) = self.tensor.get(at).zip(self.bytes.get(at))
            {
                place.store(*byte, Relaxed);
                at = (at + self.phase + 1).next_multiple_of(PAGE) - self.phase;
            }
        }
    }
}

/// The weight files of the checkpoint that an apply starts from; none if it writes others.
#[derive(Debug, Default)]
pub(super) struct WriteMaps {
    files: BTreeMap<PathBuf, WriteMap>,
    moved_times: AtomicBool,
}

impl WriteMaps {
    /// Files that cannot be opened are left out: the overwriting opens them again, and reports why.
    pub(super) fn open(checkpoint: &Checkpoint) -> Self {
        let open = |path: &Path| Some((path.to_owned(), WriteMap::open(path).ok()?));
        Self { files: checkpoint.weight_files().filter_map(open).collect(), ..Self::default() }
    }

    /// For what will change in `checkpoint`, whose files these are. Of the `mostly_changed` tensors all pages are
    /// prefaulted, once something was decoded from the object beside each.
    pub(super) fn prefault<'a>(
        &'a mut self,
        checkpoint: &'a Checkpoint,
        mostly_changed: &[(ObjectNumber, &'a Tensor)],
    ) -> Prefault<'a> {
        let files: BTreeMap<&Path, &[AtomicU8]> =
            self.files.iter_mut().map(|(path, target)| (path.as_path(), target.bytes())).collect();
        Prefault::new(files, checkpoint, mostly_changed, &self.moved_times)
    }

    /// Whether the files may have other times than before, while no byte of them is another one.
    pub(super) fn moved_times(&self) -> bool {
        self.moved_times.load(Relaxed)
    }

    /// The file at `path`.
    pub(super) fn take(&mut self, path: &Path) -> Result<WriteMap> {
        self.files.remove(path).map_or_else(|| WriteMap::open(path), Ok)
    }
}

/// What will change, for the threads that prefault.
pub(super) struct Prefault<'a> {
    files: BTreeMap<&'a Path, &'a [AtomicU8]>,
    checkpoint: &'a Checkpoint,
    moved_times: &'a AtomicBool,
    queue: Queue<'a>,
    /// Names of the tensors of which all pages are prefaulted.
    mostly_changed: BTreeSet<&'a str>,
    /// Their pages, by the object that has to be here first.
    waiting: Mutex<BTreeMap<ObjectNumber, Vec<Job<'a>>>>,
}

impl<'a> Prefault<'a> {
    fn new(
        files: BTreeMap<&'a Path, &'a [AtomicU8]>,
        checkpoint: &'a Checkpoint,
        mostly_changed: &[(ObjectNumber, &'a Tensor)],
        moved_times: &'a AtomicBool,
    ) -> Self {
        let names = mostly_changed.iter().map(|(_, tensor)| tensor.name.as_str()).collect();
        let (queue, waiting) = (Queue::default(), Mutex::default());
        let prefault = Self { files, checkpoint, moved_times, queue, mostly_changed: names, waiting };
        for (place, tensor) in mostly_changed {
            lock(&prefault.waiting).entry(*place).or_default().append(&mut prefault.whole(tensor));
        }
        prefault
    }

    /// Has a few threads prefault pages until what is returned is dropped. Pages that are left then cost their fault in
    /// the overwriting.
    pub(super) fn start<'s>(&'s self, scope: &'s Scope<'s, '_>) -> Over<'s, 'a> {
        let count = if self.files.is_empty() { 0 } else { threads(THREADS_MAX) };
        for _ in 0..count {
            let serve = move || {
                while let Some(job) = self.queue.next() {
                    job.prefault(&self.queue.over);
                }
            };
            // Fewer threads leave more faults to the overwriting.
            if thread::Builder::new().spawn_scoped(scope, serve).is_ok() {
                lock(&self.queue.state).threads += 1;
            }
        }
        Over(&self.queue)
    }

    /// A tensor will change by these patches, each with the byte of the tensor at which it begins. They were
    /// decoded from its pieces in the publication `number`. Where nothing of an object arrives, its pages are
    /// not prefaulted in vain.
    pub(super) fn will_change(&self, number: usize, tensor: &Tensor, patches: &[(u64, Patch)]) {
        for piece in &tensor.pieces {
            if let Some(jobs) = lock(&self.waiting).remove(&(number, piece.object)) {
                self.moved_times.store(true, Relaxed);
                self.queue.add(jobs);
            }
        }
        if self.mostly_changed.contains(tensor.name.as_str()) {
            return;
        }
        for (tensor, bytes, phase) in self.places(tensor) {
            self.moved_times.store(true, Relaxed);
            for (offset, patch) in patches {
                // No page lies between changes that are less than a page apart.
                let ranges = patch.byte_ranges(PAGE as u64).into_iter();
                let ranges = ranges.map(|range| offset + range.start..offset + range.end).collect();
                self.queue.push(Job { tensor, bytes, phase, ranges });
            }
        }
    }

    /// All of a tensor, some bytes at a time.
    fn whole(&self, tensor: &Tensor) -> Vec<Job<'a>> {
        let jobs = |(tensor, bytes, phase): (&'a [AtomicU8], &'a [u8], usize)| {
            let length = tensor.len() as u64;
            let starts = (0..length).step_by(JOB_BYTES as usize);
            let range = move |start: u64| start..length.min(start + JOB_BYTES);
            starts.map(move |start| Job { tensor, bytes, phase, ranges: vec![range(start)] })
        };
        self.places(tensor).flat_map(jobs).collect()
    }

    /// Where the bytes of a tensor's names are.
    fn places(&self, tensor: &Tensor) -> impl Iterator<Item = (&'a [AtomicU8], &'a [u8], usize)> {
        std::iter::once(&tensor.name).chain(&tensor.aliases).filter_map(|name| self.place(name))
    }

    /// A tensor mapped for writing and for reading, and where in a page it begins.
    fn place(&self, name: &str) -> Option<(&'a [AtomicU8], &'a [u8], usize)> {
        let index = self.checkpoint.position(name)?;
        let place = self.checkpoint.place(index)?;
        let start = usize::try_from(place.offset).ok()?;
        let end = start.checked_add(usize::try_from(place.length).ok()?)?;
        let tensor = self.files.get(place.path)?.get(start..end)?;
        Some((tensor, self.checkpoint.tensor(index)?, start % PAGE))
    }
}

/// What is to be prefaulted, and by how many threads.
#[derive(Default)]
struct Queue<'a> {
    state: Mutex<Waiting<'a>>,
    changed: Condvar,
    over: AtomicBool,
}

#[derive(Default)]
struct Waiting<'a> {
    /// Parts of whole tensors, which are first: a range each.
    whole: VecDeque<Job<'a>>,
    ranges: VecDeque<Job<'a>>,
    threads: usize,
}

impl<'a> Queue<'a> {
    /// Waits for something to do; `None` once the work is over.
    fn next(&self) -> Option<Job<'a>> {
        let mut state = lock(&self.state);
        while !self.over.load(Relaxed) {
            if let Some(job) = state.whole.pop_front() {
                return Some(job);
            }
            if let Some(job) = state.ranges.pop_front() {
                self.changed.notify_all();
                return Some(job);
            }
            // Ends with more to do, or with the work.
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        None
    }

    fn add(&self, jobs: Vec<Job<'a>>) {
        lock(&self.state).whole.extend(jobs);
        self.changed.notify_all();
    }

    /// Waits until there is room. Without threads the job is dropped.
    fn push(&self, job: Job<'a>) {
        let mut state = lock(&self.state);
        while state.threads > 0 && state.ranges.len() >= JOBS_MAX {
            // Each thread ends with the memory that it has begun, and takes another.
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.threads > 0 {
            state.ranges.push_back(job);
            self.changed.notify_all();
        }
    }
}

/// Ends the threads when the work ends, whichever way it does.
pub(super) struct Over<'q, 'a>(&'q Queue<'a>);

impl Drop for Over<'_, '_> {
    fn drop(&mut self) {
        // Under the lock, so that no thread is about to wait.
        let _state = lock(&self.0.state);
        self.0.over.store(true, Relaxed);
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use driftless_delta::{DigestTable, Element, Profile, decode, encode};

    use super::*;
    use crate::checkpoint::write_weights;
    use crate::dtype::Dtype;
    use crate::manifest::Piece;
    use crate::snapshot::TensorInfo;

    /// Of the map that begins at `begin`: KiB that are mapped, and KiB of them that this process has written
    /// to.
    #[cfg(target_os = "linux")]
    fn mapped_and_dirty(begin: *const u8) -> (u64, u64) {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let head = format!("{:x}-", begin.addr());
        let of = |name: &str| -> u64 {
            let mut own = maps.lines().skip_while(|line| !line.starts_with(&head));
            let line = own.find_map(|line| line.strip_prefix(name)).unwrap();
            line.trim().trim_end_matches(" kB").parse().unwrap()
        };
        (of("Rss:"), of("Shared_Dirty:") + of("Private_Dirty:"))
    }

    /// Waits until so many KiB of the map are mapped and written to, for a minute.
    #[cfg(target_os = "linux")]
    fn wait_until_prefaulted(begin: *const u8, kib: u64) {
        let patience = Instant::now() + Duration::from_secs(60);
        while !matches!(mapped_and_dirty(begin), (mapped, dirty) if mapped >= kib && dirty >= kib) {
            assert!(Instant::now() < patience, "{:?} KiB of {kib} are prefaulted", mapped_and_dirty(begin));
            thread::yield_now();
        }
    }

    /// A checkpoint of two tensors of 2 MiB, and a patch that changes the first and the last element of one.
    fn checkpoint_and_patch(dir: &Path) -> (Checkpoint, Patch) {
        let base: Vec<u8> = (0..2 << 20).map(|i: u32| (i / 4096 + i) as u8).collect();
        let infos =
            ["a", "b"].map(|name| TensorInfo { name: name.into(), dtype: Dtype::Bf16, shape: vec![1 << 20] });
        write_weights(dir, &infos, u64::MAX, &mut |order, sink| order.iter().try_for_each(|_| sink(&base)))
            .unwrap();
        let mut new = base.clone();
        new[0] ^= 1;
        new[(2 << 20) - 1] ^= 1;
        let digests = DigestTable::of(Element::Bf16, &base).unwrap();
        let (mut payload, mut patch) = (Vec::new(), Patch::new());
        encode(Element::Bf16, &base, &new, &digests, Profile::Fast, &mut payload).unwrap();
        decode(Element::Bf16, &base, &digests, &payload, &mut patch).unwrap();
        (Checkpoint::open(dir).unwrap(), patch)
    }

    /// Does `work` while threads prefault.
    #[cfg(target_os = "linux")]
    fn prefault_while(
        maps: &mut WriteMaps,
        checkpoint: &Checkpoint,
        mostly_changed: &[(ObjectNumber, &Tensor)],
        work: impl FnOnce(&Prefault<'_>),
    ) {
        let prefault = maps.prefault(checkpoint, mostly_changed);
        thread::scope(|scope| {
            let _prefaulting = prefault.start(scope);
            work(&prefault);
        });
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn prefault_takes_named_tensors_and_those_tied_to_them() {
        let dir = tempfile::tempdir().unwrap();
        let (checkpoint, patch) = checkpoint_and_patch(dir.path());
        let path = checkpoint.weight_files().next().unwrap().to_owned();
        let before = std::fs::read(&path).unwrap();
        let mut maps = WriteMaps::open(&checkpoint);
        let begin = maps.files[&path].map.as_ptr();
        let tensor = |name: &str, alias: Option<&str>| Tensor {
            name: name.into(),
            dtype: Dtype::Bf16,
            shape: vec![1 << 20],
            digest: patch.digests().total(),
            aliases: alias.into_iter().map(str::to_owned).collect(),
            pieces: Vec::new(),
            anchor: Vec::new(),
        };
        let patches = [(0, patch.clone())];
        // More of them than may wait, and then, until so many KiB are prefaulted, nothing.
        let tell = |prefault: &Prefault<'_>, tensor: &Tensor, kib: u64| {
            (0..3 * JOBS_MAX).for_each(|_| prefault.will_change(0, tensor, &patches));
            wait_until_prefaulted(begin, kib);
        };
        let stranger = tensor("c", None);
        prefault_while(&mut maps, &checkpoint, &[], |prefault| tell(prefault, &stranger, 0));
        assert!(!maps.moved_times() && mapped_and_dirty(begin) == (0, 0), "no tensor of this name");
        prefault_while(&mut maps, &checkpoint, &[], |prefault| tell(prefault, &tensor("a", Some("b")), 12));
        assert!(maps.moved_times());
        assert!(maps.take(&path).unwrap().map[..] == before[..]);
        // Of what is mostly_changed all pages, but none before something of its object has come.
        let (mut maps, mostly_changed) = (WriteMaps::open(&checkpoint), tensor("a", Some("b")));
        let begin = maps.files[&path].map.as_ptr();
        let piece = Piece { start: 0, elements: 1, object: 7, offset: 0, length: 1 };
        let neighbour = Tensor { pieces: vec![piece], ..stranger.clone() };
        let other_version = |prefault: &Prefault<'_>| {
            prefault.will_change(0, &neighbour, &patches);
        };
        prefault_while(&mut maps, &checkpoint, &[((1, 7), &mostly_changed)], other_version);
        assert!(!maps.moved_times() && mapped_and_dirty(begin) == (0, 0), "another version's object");
        let its_version = |prefault: &Prefault<'_>| {
            prefault.will_change(1, &neighbour, &patches);
            wait_until_prefaulted(begin, 4 << 10);
        };
        prefault_while(&mut maps, &checkpoint, &[((1, 7), &mostly_changed)], its_version);
        assert!(maps.moved_times() && maps.take(&path).unwrap().map[..] == before[..]);
        // Without files no call waits.
        prefault_while(&mut WriteMaps::default(), &checkpoint, &[((0, 7), &mostly_changed)], |prefault| {
            (0..3 * JOBS_MAX).for_each(|_| prefault.will_change(0, &tensor("b", None), &patches));
        });
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn job_prefault_maps_pages_for_writing_and_keeps_their_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weights");
        let content: Vec<u8> = (0..(8 << 20) + 100_u32).map(|i| (i / 4096 + i) as u8).collect();
        std::fs::write(&path, &content).unwrap();
        File::open(&path).unwrap().sync_all().unwrap();
        let mut target = WriteMap::open(&path).unwrap();
        let begin = target.map.as_ptr();
        assert_eq!(mapped_and_dirty(begin), (0, 0));
        // A tensor that begins within a page and ends with the file.
        let phase = 1000;
        let length = (content.len() - phase) as u64;
        let in_tensor = |at: u64| at - phase as u64;
        let mut prefault = |range: Range<u64>| {
            let (bytes, ranges) = (&content[phase..], Vec::from([range]));
            let job = Job { tensor: &target.bytes()[phase..], bytes, phase, ranges };
            job.prefault(&AtomicBool::new(false));
            mapped_and_dirty(begin)
        };
        // A folio is prefaulted as a whole, so more may be mapped than was asked for.
        let at_least = |pages: u64, (mapped, dirty): (u64, u64)| {
            assert!(mapped >= 4 * pages && dirty >= 4 * pages, "{mapped} and {dirty} KiB of {pages} pages");
        };
        at_least(1, prefault(in_tensor(4095)..in_tensor(4096)));
        at_least(3, prefault(in_tensor(4095)..in_tensor(8193)));
        at_least(2049, prefault(0..length));
        assert!(target.map[..] == content[..]);
    }
}
