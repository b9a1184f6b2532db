//! Two producers that append without a sync, against a memcpy of the same bytes into the same kind of map.
//! Both segments are pre-faulted: the file is filled and its pages are in memory before anything is timed.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use driftless_buffer::reservation::Pending;
use driftless_buffer::sample::Shape;
use driftless_buffer::{Log, SyncPolicy};
use memmap2::{MmapOptions, MmapRaw};

use crate::Row;
use crate::data::{Data, RECORD, TOKENS, median, options};

const ROUNDS: usize = 15;
/// Records of one producer in a round.
const COUNT: usize = 700;
const PAGE: usize = 4096;

pub(crate) fn run(dir: &Path) -> Vec<Row> {
    let data = Data::new();
    let bytes = data.bytes();
    let (mut ours, mut copies) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        let dir = dir.join(round.to_string());
        ours.push(log(&dir.join("log"), &data).as_secs_f64() * 1e6);
        copies.push(memcpy(&dir.join("map"), &bytes).as_secs_f64() * 1e6);
        std::fs::remove_dir_all(dir).expect("what was written here");
    }
    let ratio = crate::data::ratio(&ours, &copies);
    println!(
        "append without sync, 2 producers, p99: log {:.1} µs, memcpy {:.1} µs",
        median(ours),
        median(copies)
    );
    vec![Row::at_most("p99 of an append without sync, to a memcpy", ratio, 3.0)]
}

fn log(dir: &Path, data: &Data) -> Duration {
    let log = Log::open(dir, options(SyncPolicy::Manual, 256 << 20)).expect("a log");
    // The first record makes the segment; its sync gives it its name.
    log.append(&data.sample(0)).and_then(Pending::wait).expect("room in the log");
    let name = dir.join("segment-00000000000000000000.log");
    // Another map of the same file: the pages are the file's, and their first write is over.
    let segment = std::fs::OpenOptions::new().read(true).write(true).open(name).expect("the segment");
    let map = MmapOptions::new().map_raw(&segment).expect("a map");
    fault(&map, 2 * COUNT * (RECORD + 8 * PAGE) / PAGE * PAGE / 8 * 8);
    p99(|n| {
        let mut space =
            log.reserve(&Shape { response: TOKENS, ..Shape::default() }).expect("room in the log");
        space.tokens_mut().copy_from_slice(&data.tokens);
        space.log_probs_mut().copy_from_slice(&data.log_probs);
        space.loss_mask_mut().copy_from_slice(&data.loss_mask);
        space.set_scalars(data.sample(n).scalars);
        drop(space.commit().expect("an open log"));
    })
}

fn memcpy(path: &Path, source: &[u8]) -> Duration {
    let file =
        std::fs::OpenOptions::new().read(true).write(true).create_new(true).open(path).expect("a file");
    let bytes = 256 << 20;
    let all = rustix::fs::FallocateFlags::empty();
    rustix::fs::fallocate(&file, all, 0, bytes).expect("room on the disk");
    let (own, other) = (MmapOptions::new().map_raw(&file), MmapOptions::new().map_raw(&file));
    let (own, other) = (own.expect("a map"), other.expect("a map"));
    fault(&other, 2 * COUNT * (RECORD + PAGE));
    let next = AtomicUsize::new(0);
    p99(|_| {
        let at = next.fetch_add(source.len(), Ordering::Relaxed);
        assert!(at + source.len() <= own.len());
        #[expect(unsafe_code, reason = "the bare memcpy that the log is compared with")]
        // SAFETY: inside the map, and every call has its own range.
        unsafe {
            std::ptr::copy_nonoverlapping(source.as_ptr(), own.as_mut_ptr().add(at), source.len());
        }
    })
}

/// Makes the kernel bring the first `bytes` of a file into memory, for writing.
#[expect(unsafe_code, reason = "writing bytes back as they are")]
fn fault(map: &MmapRaw, bytes: usize) {
    for at in (0..bytes.min(map.len())).step_by(PAGE) {
        // SAFETY: inside the map. Nobody else writes yet, and the byte keeps its value.
        unsafe {
            let byte = map.as_mut_ptr().add(at);
            byte.write_volatile(byte.read_volatile());
        }
    }
}

/// Of the calls of two threads.
fn p99(append: impl Fn(usize) + Sync) -> Duration {
    let one = |from: usize| -> Vec<Duration> {
        let timed = |n| {
            let started = Instant::now();
            append(from + n);
            started.elapsed()
        };
        (0..COUNT).map(timed).collect()
    };
    let mut all = std::thread::scope(|scope| {
        let other = scope.spawn(|| one(COUNT));
        let mut all = one(0);
        all.extend(other.join().expect("the other producer"));
        all
    });
    all.sort_unstable();
    all[all.len() * 99 / 100]
}
