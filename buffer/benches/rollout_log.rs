//! How close is the log to the disk and to memory? Each figure is printed as a ratio to its ceiling, measured beside it in
//! the same run: raw append + fdatasync, a memcpy into the same kind of map, a bare scan of memory.
//!
//! `cargo bench -p driftless-buffer` (first argument: a directory on the disk to measure; default: the target directory).
#![expect(clippy::expect_used, reason = "a benchmark that cannot measure has nothing to say")]

use std::fs::{File, OpenOptions};
use std::hint::black_box;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use driftless_buffer::{
    GroupQuery, Identity, Log, Options, Position, Record, Result, Sample, Scalars, Shape, SyncPolicy,
};

/// 8,192 tokens: ids, log-probs and mask take 72 KiB.
const TOKENS: usize = 8192;
const GROUP: usize = 64;
const ROUNDS: usize = 5;

struct Data {
    tokens: Vec<i32>,
    log_probs: Vec<f32>,
    loss_mask: Vec<u8>,
}

impl Data {
    fn new() -> Self {
        let tokens = (0..TOKENS as i32).map(|at| at.wrapping_mul(2_654_435)).collect();
        Self { tokens, log_probs: vec![-0.5; TOKENS], loss_mask: vec![1; TOKENS] }
    }

    fn sample(&self, id: usize) -> Sample<'_> {
        let scalars = Scalars {
            sample_id: id as u64,
            group_id: (id / GROUP) as u64,
            rollout_id: 0,
            ..Scalars::default()
        };
        let Self { tokens, log_probs, loss_mask } = self;
        Sample { scalars, tokens, log_probs, loss_mask, ..Sample::default() }
    }
}

fn options(sync: SyncPolicy, segment_bytes: u64) -> Options {
    let identity = Identity { run_id: [1; 16], model: "policy".into(), tokenizer_digest: [0; 32] };
    Options { sync, segment_bytes, ..Options::new(identity) }
}

fn main() -> Result<()> {
    // Cargo passes `--bench`; anything else is the directory.
    let given = std::env::args().skip(1).find(|argument| !argument.starts_with('-'));
    let root = given.map_or_else(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")), PathBuf::from);
    let root = root.join(format!("rollout-log-bench-{}", std::process::id()));
    let data = Data::new();
    durable_append(&root.join("append"), &data)?;
    append_latency(&root.join("latency"), &data)?;
    batch_read(&root.join("read"), &data)?;
    reopen(&root.join("reopen"), &data)?;
    // What is left over is a directory of known name in a temporary place.
    let _ = std::fs::remove_dir_all(&root);
    Ok(())
}

fn mib(bytes: usize, elapsed: Duration) -> f64 {
    bytes as f64 / (1 << 20) as f64 / elapsed.as_secs_f64()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Groups of 64 records, each made durable, against the same bytes appended to a file with one fdatasync per group. The two
/// take turns, so that whatever else the disk does hits both.
fn durable_append(dir: &Path, data: &Data) -> Result<()> {
    let groups = 16 * ROUNDS;
    let log = Log::open(dir, options(SyncPolicy::Manual, 1 << 30))?;
    log.append(&data.sample(0))?.wait()?;
    let mut file = File::create(dir.join("raw")).expect("a file on the disk to measure");
    let (tokens, log_probs) = (bytes_of_i32(&data.tokens), bytes_of_f32(&data.log_probs));
    let columns = [&tokens[..], &log_probs, &data.loss_mask];
    let (mut ours, mut raw) = (Vec::new(), Vec::new());
    for group in 0..groups {
        let started = Instant::now();
        let samples: Vec<_> = (0..GROUP).map(|n| data.sample(group * GROUP + n)).collect();
        black_box(log.append_all(&samples)?);
        ours.push(mib(GROUP * TOKENS * 9, started.elapsed()));

        let started = Instant::now();
        for column in std::iter::repeat_n(columns, GROUP).flatten() {
            file.write_all(column).expect("room on the disk");
        }
        file.sync_data().expect("a disk that syncs");
        raw.push(mib(GROUP * TOKENS * 9, started.elapsed()));
    }
    let (ours, raw) = (median(ours), median(raw));
    println!(
        "durable append, groups of {GROUP} x 72 KiB: {ours:.0} MiB/s; raw append + fdatasync {raw:.0} MiB/s; ratio {:.2}",
        ours / raw
    );
    Ok(())
}

fn bytes_of_i32(values: &[i32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn bytes_of_f32(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Two producers that append without a sync, against a memcpy of the same size into a mapped file, both pre-faulted.
fn append_latency(dir: &Path, data: &Data) -> Result<()> {
    let count = 1000;
    let mut ratios = Vec::new();
    let (mut ours_p99, mut copy_p99) = (Duration::ZERO, Duration::ZERO);
    for round in 0..ROUNDS {
        let log = Log::open(dir.join(round.to_string()), options(SyncPolicy::Manual, 256 << 20))?;
        // The first record makes the segment.
        log.append(&data.sample(0))?.wait()?;
        ours_p99 = p99(two_producers(count, |n| {
            let mut space =
                log.reserve(&Shape { response: TOKENS, ..Shape::default() }).expect("room in the log");
            space.tokens_mut().copy_from_slice(&data.tokens);
            space.log_probs_mut().copy_from_slice(&data.log_probs);
            space.loss_mask_mut().copy_from_slice(&data.loss_mask);
            space.set_scalars(data.sample(n).scalars);
            drop(space.commit().expect("an open log"));
        }));
        copy_p99 = p99(memcpy_into_map(&dir.join(format!("map-{round}")), data, count));
        ratios.push(ours_p99.as_secs_f64() / copy_p99.as_secs_f64());
    }
    println!(
        "append without sync, 2 producers: p99 {ours_p99:.1?}; memcpy into a map {copy_p99:.1?}; ratio {:.2}",
        median(ratios)
    );
    Ok(())
}

/// Latencies of `count` calls by each of two threads.
fn two_producers(count: usize, append: impl Fn(usize) + Sync) -> Vec<Duration> {
    let work = |from: usize| -> Vec<Duration> {
        let timed = |n| {
            let started = Instant::now();
            append(from + n);
            started.elapsed()
        };
        (0..count).map(timed).collect()
    };
    std::thread::scope(|scope| {
        let handles = [0, count].map(|from| scope.spawn(move || work(from)));
        handles.into_iter().flat_map(|handle| handle.join().expect("a producer that ends")).collect()
    })
}

fn memcpy_into_map(path: &Path, data: &Data, count: usize) -> Vec<Duration> {
    use std::sync::Mutex;
    let record = TOKENS * 9;
    let file =
        OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path).expect("a file");
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, (2 * count * record) as u64)
        .expect("room");
    let map = memmap2::MmapOptions::new().map_raw(&file).expect("a map");
    let next = Mutex::new(0);
    let source: Vec<u8> =
        [bytes_of_i32(&data.tokens), bytes_of_f32(&data.log_probs), data.loss_mask.clone()].concat();
    two_producers(count, |_| {
        let at = {
            let mut next = next.lock().expect("a lock");
            *next += record;
            *next - record
        };
        copy_to(&map, at, &source);
    })
}

#[expect(unsafe_code, reason = "the bare memcpy that the log is compared with")]
fn copy_to(map: &memmap2::MmapRaw, at: usize, source: &[u8]) {
    assert!(at + source.len() <= map.len());
    // SAFETY: inside the map, and every caller was given its own range.
    unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), map.as_mut_ptr().add(at), source.len()) }
}

fn p99(mut latencies: Vec<Duration>) -> Duration {
    latencies.sort_unstable();
    latencies[latencies.len() * 99 / 100]
}

/// Sums of all columns of 512 records: what a trainer's first touch costs, against the same sums over plain memory.
fn batch_read(dir: &Path, data: &Data) -> Result<()> {
    let records = 512;
    let log = Log::open(dir, options(SyncPolicy::Manual, 64 << 20))?;
    for id in 0..records {
        drop(log.append(&data.sample(id))?);
    }
    log.close()?;
    let reader = driftless_buffer::Reader::open(dir)?;
    let first: Duration = timed(|| scan_groups(&reader));
    let (mut ours, mut bare) = (Vec::new(), Vec::new());
    let copy: Vec<Data> = (0..records).map(|_| Data::new()).collect();
    let bytes = records * TOKENS * 9;
    for _ in 0..ROUNDS {
        bare.push(mib(
            bytes,
            timed(|| copy.iter().map(|data| sum(&data.tokens, &data.log_probs, &data.loss_mask)).sum()),
        ));
        ours.push(mib(bytes, timed(|| scan_groups(&reader))));
    }
    let (ours, bare) = (median(ours), median(bare));
    println!(
        "batch of {records} x 8k tokens in place: {ours:.0} MiB/s; bare memory scan {bare:.0} MiB/s; ratio {:.2}",
        ours / bare
    );
    println!("    first read, checking every CRC: {:.0} MiB/s", mib(bytes, first));
    Ok(())
}

fn scan_groups(reader: &driftless_buffer::Reader) -> f64 {
    let groups = reader.find(&GroupQuery::complete(GROUP));
    let value = |record: &Record| sum(record.tokens(), record.log_probs(), record.loss_mask());
    groups.iter().flat_map(|group| &group.records).map(value).sum()
}

fn sum(tokens: &[i32], log_probs: &[f32], loss_mask: &[u8]) -> f64 {
    let tokens: i64 = tokens.iter().map(|&token| i64::from(token)).sum();
    let mask: u64 = loss_mask.iter().map(|&mask| u64::from(mask)).sum();
    // Eight partial sums, so that the additions need not wait for each other.
    let mut parts = [0f32; 8];
    for chunk in log_probs.chunks_exact(8) {
        parts.iter_mut().zip(chunk).for_each(|(part, value)| *part += value);
    }
    tokens as f64 + mask as f64 + f64::from(parts.iter().sum::<f32>())
}

fn timed(work: impl FnOnce() -> f64) -> Duration {
    let started = Instant::now();
    black_box(work());
    started.elapsed()
}

/// Opening a log whose last segment was left open by a crash, with few and with many sealed segments before it.
fn reopen(dir: &Path, data: &Data) -> Result<()> {
    let mut times = Vec::new();
    for segments in [1, 16] {
        let dir = dir.join(segments.to_string());
        for round in 0..=segments {
            let log = Log::open(&dir, options(SyncPolicy::Manual, 16 << 20))?;
            for id in 0..200 {
                drop(log.append(&data.sample(round * 200 + id))?);
            }
            log.sync()?;
            if round < segments {
                log.close()?;
            }
        }
        let bytes = driftless_buffer::stat(&dir)?.bytes;
        let started = Instant::now();
        let log = Log::open(&dir, options(SyncPolicy::Manual, 16 << 20))?;
        times.push(started.elapsed());
        assert_eq!(log.recovery().scanned, 1);
        assert!(log.reader().get(Position(0))?.is_some());
        println!(
            "reopen after a crash: {:?} for {} MiB, one segment of 16 MiB unsealed",
            times[times.len() - 1],
            bytes >> 20
        );
    }
    println!("    ratio {:.2} for 8x the log", times[1].as_secs_f64() / times[0].as_secs_f64());
    Ok(())
}
