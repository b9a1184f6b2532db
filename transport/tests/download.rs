//! Fetches that are stopped: by a store that ends, by a kill, by power that goes. What has arrived is not
//! fetched again, and nothing that is wrong on the disk or in the store gets into a checkpoint.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use driftless_store::download::DownloadOptions;
use driftless_store::os::watch::{self, Call};
use driftless_store::wrap::{Count, Fault, When};
use driftless_store::{Disk, Error as StoreError, Memory, Store};
use driftless_transport::publish::{Mode, Start};
use driftless_transport::{Dtype, Error, Publisher, Replica, Result, Run, Version};

use driftless_testkit::hook::Hook;
use driftless_testkit::publications::{MODEL, RUN, Weights, assert_same, options, step};
use driftless_testkit::random::Random;

const RANGE: u64 = 100_000;
const PAGE: usize = 4096;

/// Those that look at the calls of the whole process take turns, and those that start others, which hold its
/// locks for a moment.
static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn small_ranges() -> DownloadOptions {
    let mut options = DownloadOptions::default();
    (options.range_bytes, options.request_bytes_max, options.object_bytes_min) = (RANGE, RANGE, 1);
    options
}

/// Incompressible, in two objects of which the first has eleven ranges.
fn weights(seed: u64) -> Weights {
    let mut random = Random(seed);
    let mut weights = Weights::small(seed);
    weights.set("x.large", Dtype::Bf16, &[900, 900], |_| random.next() as u8);
    weights
}

fn publish(store: &Arc<dyn Store>, start: Start, baseline: &Path, weights: &Weights) {
    let mut options = options(start, baseline);
    options.object_bytes_max = 1 << 20;
    let mut publisher = Publisher::open(store.clone(), options).unwrap();
    publisher.publish(weights, step(0), Mode::Full).unwrap();
}

/// A replica that was just started, and moves to `to`.
fn advance(store: Arc<dyn Store>, dir: &Path, to: u64, options: DownloadOptions) -> Result<Replica> {
    let run = Run::open(store, RUN)?;
    let mut replica = Replica::open(dir)?;
    replica.set_download_options(options);
    replica.advance(&run, MODEL, Version(to), None)?;
    Ok(replica)
}

fn downloads(dir: &Path) -> PathBuf {
    dir.join(".driftless/spool")
}

fn kept_files(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(downloads(dir)) else { return Vec::new() };
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// Bytes of the version's objects, and bytes that are read besides whenever somebody sets out for them.
fn bytes(store: &Arc<dyn Store>, version: u64) -> (u64, u64) {
    let count = Arc::new(Count::new(store.clone()));
    let run = Run::open(count.clone(), RUN).unwrap();
    let chain = run.chain(MODEL, None, Version(version)).unwrap();
    (chain.versions.iter().map(|link| link.manifest.object_bytes()).sum(), count.counts().bytes_got)
}

/// The lengths of all ranges of version 0, the shortest first.
fn ranges(store: &Arc<dyn Store>) -> Vec<u64> {
    let manifest = Run::open(store.clone(), RUN).unwrap().get(MODEL, Version(0)).unwrap().manifest;
    let of = |size: u64| (0..size).step_by(RANGE as usize).map(move |start| RANGE.min(size - start));
    let mut ranges: Vec<u64> = manifest.objects.iter().flat_map(|object| of(object.size)).collect();
    ranges.sort_unstable();
    ranges
}

/// A directory in memory, where there is one: the tests sync it thousands of times.
fn scratch() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory).unwrap() } else { tempfile::tempdir().unwrap() }
}

/// Version 0 in a store: its weights, the bytes of its objects, and those that are read besides.
struct Published {
    weights: Weights,
    objects: u64,
    besides: u64,
}

fn published(store: &Arc<dyn Store>, dir: &Path) -> Published {
    let weights = weights(1);
    publish(store, Start::NewRun, &dir.join("baseline"), &weights);
    let (objects, besides) = bytes(store, 0);
    Published { weights, objects, besides }
}

/// Follows again and again, cut off one request later each time, and goes on with what is missing; returns
/// how many cuts there were.
fn cut_anywhere(store: &Arc<dyn Store>, dir: &Path, options: DownloadOptions, version: &Published) -> u64 {
    for cuts in 0.. {
        let replica = dir.join(format!("replica-{cuts}"));
        let fault = Arc::new(Fault::new(store.clone()));
        let count = Arc::new(Count::new(fault.clone()));
        // The run's record and the manifest pass; everything after so many requests is cut off.
        fault.arm(2 + cuts, u64::MAX, When::Before);
        let Err(error) = advance(count.clone(), &replica, 0, options) else { return cuts };
        assert!(matches!(error, Error::Store(StoreError::Injected { .. })), "{error:?}");
        fault.disarm();
        let mut moved = advance(count.clone(), &replica, 0, options).unwrap();
        assert_same(moved.checkpoint().unwrap(), &version.weights);
        moved.sync().unwrap();
        assert_eq!(
            count.counts().bytes_got,
            2 * version.besides + version.objects,
            "cut after {cuts} requests"
        );
        assert_eq!(kept_files(&replica), Vec::<PathBuf>::new(), "what is durable is not kept");
    }
    unreachable!("some follower gets through")
}

#[test]
fn a_fetch_that_was_cut_anywhere_goes_on_with_what_is_missing() {
    let _turn = turn();
    let dir = scratch();
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    let version = published(&store, dir.path());
    let cuts = cut_anywhere(&store, dir.path(), small_ranges(), &version);
    assert!(cuts >= 15, "{cuts} ranges");
}

#[test]
fn one_process_that_tries_again_does_not_refetch_either() {
    let _turn = turn();
    let dir = scratch();
    let inner: Arc<dyn Store> = Arc::new(Memory::new());
    publish(&inner, Start::NewRun, &dir.path().join("baseline"), &weights(1));
    let (objects, besides) = bytes(&inner, 0);
    let fault = Arc::new(Fault::new(inner));
    let count = Arc::new(Count::new(fault.clone()));
    let run = Run::open(count.clone(), RUN).unwrap();
    let opened = count.counts().bytes_got;
    let mut replica = Replica::open(dir.path().join("replica")).unwrap();
    replica.set_download_options(small_ranges());
    let mut tries = 0;
    loop {
        // The manifest and three ranges at a time.
        fault.arm(4, u64::MAX, When::Before);
        tries += 1;
        match replica.advance(&run, MODEL, Version(0), None) {
            Ok(_) => break,
            Err(error) => assert!(matches!(error, Error::Store(StoreError::Injected { .. })), "{error:?}"),
        }
    }
    assert!(tries > 4, "{tries}");
    // The run's record was read once, the manifest each time.
    assert_eq!(count.counts().bytes_got - opened, tries * (besides - opened) + objects);
}

#[test]
fn ranges_that_were_asked_for_together_are_kept_one_by_one() {
    let _turn = turn();
    let dir = scratch();
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    let version = published(&store, dir.path());
    let mut options = small_ranges();
    options.request_bytes_max = 4 * RANGE;
    let longest = Arc::new(AtomicU64::new(0));
    let seen = longest.clone();
    let watched = Hook::after(&store, move |object, range, _| {
        // The last one is asked for with a byte more.
        seen.fetch_max(range.end.min(object.size) - range.start, SeqCst);
    });
    // What is missing then begins and ends elsewhere.
    let cuts = cut_anywhere(&watched, dir.path(), options, &version);
    assert!(cuts >= 4 && longest.load(SeqCst) > 2 * RANGE, "{cuts} requests, up to {longest:?} bytes");
}

/// Tells the child where to work, and after how many ranges to die.
const DIR: &str = "DRIFTLESS_TEST_DIR";
const KILL: &str = "DRIFTLESS_TEST_KILL";

/// What the killed process runs. On its own, without a directory to work in, there is nothing to do.
#[test]
fn child() {
    let Some(dir) = std::env::var_os(DIR).map(PathBuf::from) else { return };
    let passes: u64 = std::env::var(KILL).unwrap().parse().unwrap();
    let passed = AtomicU64::new(0);
    let callback = move || {
        if passed.fetch_add(1, SeqCst) == passes {
            std::process::abort();
        }
    };
    fail::cfg_callback("follow.range", callback).unwrap();
    drop(advance(Arc::new(Disk::new(dir.join("store"))), &dir.join("replica"), 0, small_ranges()).unwrap());
}

#[test]
fn a_follower_killed_at_any_range_goes_on() {
    let _turn = turn();
    let dir = scratch();
    let store: Arc<dyn Store> = Arc::new(Disk::new(dir.path().join("store")));
    let expected = weights(1);
    publish(&store, Start::NewRun, &dir.path().join("baseline"), &expected);
    let (objects, besides) = bytes(&store, 0);
    let ranges = ranges(&store);
    let mut kills = 0;
    for passes in 0.. {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "child"]).env(DIR, dir.path()).env(KILL, passes.to_string());
        if command.output().unwrap().status.success() {
            break;
        }
        kills += 1;
        let count = Arc::new(Count::new(store.clone()));
        let replica = dir.path().join("replica");
        let moved = advance(count.clone(), &replica, 0, small_ranges()).unwrap();
        assert_same(moved.checkpoint().unwrap(), &expected);
        // Each range is kept before the kill that follows it; at worst they were the short ones.
        let missing = objects - ranges.iter().take(passes as usize + 1).sum::<u64>();
        let fetched = count.counts().bytes_got - besides;
        assert!(fetched <= missing, "{fetched} bytes after {passes} ranges, {missing} were missing");
        drop(moved);
        fs::remove_dir_all(replica).unwrap();
    }
    assert_eq!(kills, ranges.len());
}

/// Leaves a replica whose fetch was cut after `ranges` ranges.
fn cut(inner: &Arc<dyn Store>, dir: &Path, ranges: u64) {
    let fault = Arc::new(Fault::new(inner.clone()));
    fault.arm(2 + ranges, u64::MAX, When::Before);
    let error = advance(fault, dir, 0, small_ranges()).unwrap_err();
    assert!(matches!(error, Error::Store(StoreError::Injected { .. })), "{error:?}");
    assert!(!kept_files(dir).is_empty());
}

/// Bytes of the ranges that have a digest in the files that are kept.
fn bytes_kept(files: &[(PathBuf, Vec<u8>)]) -> u64 {
    let of = |bytes: &Vec<u8>| {
        let ranges = (bytes.len() as u64).div_ceil(RANGE + 32);
        let size = bytes.len() as u64 - 32 * ranges;
        let marks = bytes[size as usize..].chunks(32);
        let lengths = (0..size).step_by(RANGE as usize).map(move |start| RANGE.min(size - start));
        marks
            .zip(lengths)
            .filter(|(mark, _)| mark.iter().any(|byte| *byte != 0))
            .map(|(_, length)| length)
            .sum::<u64>()
    };
    files.iter().map(|(_, bytes)| of(bytes)).sum()
}

#[test]
fn pages_that_power_took_are_fetched_again_and_never_believed() {
    let _turn = turn();
    let dir = scratch();
    let inner: Arc<dyn Store> = Arc::new(Memory::new());
    let expected = weights(1);
    publish(&inner, Start::NewRun, &dir.path().join("baseline"), &expected);
    let (objects, besides) = bytes(&inner, 0);
    let replica = dir.path().join("replica");
    cut(&inner, &replica, 6);
    let files: Vec<(PathBuf, Vec<u8>)> =
        kept_files(&replica).into_iter().map(|path| (path.clone(), fs::read(path).unwrap())).collect();
    let kept = bytes_kept(&files);
    let (mut refetched, mut whole) = (0, 0);
    for seed in 0..1000 {
        let mut random = Random(seed);
        fs::create_dir_all(downloads(&replica)).unwrap();
        for (path, bytes) in &files {
            let mut bytes = bytes.clone();
            // One page in `rarity` never reached the disk, or holds what another file left there; now and
            // then the length, or the name, did not either.
            let rarity = 1 + random.next() % 300;
            for page in bytes.chunks_mut(PAGE) {
                match random.next() % (2 * rarity) {
                    0 => page.fill(0),
                    1 => page.iter_mut().for_each(|byte| *byte = random.next() as u8),
                    _ => {}
                }
            }
            match random.next() % 20 {
                0 => bytes.truncate(random.next() as usize % bytes.len()),
                1 => continue,
                _ => {}
            }
            fs::write(path, bytes).unwrap();
        }
        let count = Arc::new(Count::new(inner.clone()));
        let moved = advance(count.clone(), &replica, 0, small_ranges())
            .unwrap_or_else(|error| panic!("{error:?}, seed {seed}"));
        assert_same(moved.checkpoint().unwrap(), &expected);
        let fetched = count.counts().bytes_got - besides;
        assert!((objects - kept..=objects).contains(&fetched), "{fetched} bytes, seed {seed}");
        refetched += u64::from(fetched > objects - kept);
        whole += u64::from(fetched == objects - kept);
        drop(moved);
        for entry in fs::read_dir(&replica).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { fs::remove_dir_all(path).unwrap() } else { fs::remove_file(path).unwrap() }
        }
    }
    println!("{refetched} of 1000 images lost a range, {whole} lost nothing that counts");
    assert!(refetched > 300 && whole > 20, "{refetched}, {whole}");
}

#[test]
fn a_store_that_lies_is_told_so_and_its_lies_are_not_kept() {
    let _turn = turn();
    let dir = tempfile::tempdir().unwrap();
    let inner: Arc<dyn Store> = Arc::new(Memory::new());
    let expected = weights(1);
    publish(&inner, Start::NewRun, &dir.path().join("baseline"), &expected);
    let lies: [fn(&mut Vec<u8>); 3] =
        [|bytes| bytes[7] ^= 1, |bytes| bytes.truncate(bytes.len() - 1), |bytes| bytes.push(0)];
    for (number, lie) in lies.into_iter().enumerate() {
        let replica = dir.path().join(format!("replica-{number}"));
        let liar = Hook::after(&inner, move |_, range, bytes| {
            if range.start == 2 * RANGE {
                lie(bytes);
            }
        });
        for _ in 0..2 {
            let error = advance(liar.clone(), &replica, 0, small_ranges()).unwrap_err();
            assert!(
                matches!(
                    error,
                    Error::Store(StoreError::DigestMismatch { .. } | StoreError::WrongSize { .. })
                ),
                "{error:?}"
            );
        }
        let moved = advance(inner.clone(), &replica, 0, small_ranges()).unwrap();
        assert_same(moved.checkpoint().unwrap(), &expected);
    }
}

#[test]
fn a_lie_that_was_kept_before_the_restart_is_fetched_anew() {
    let _turn = turn();
    let dir = tempfile::tempdir().unwrap();
    let inner: Arc<dyn Store> = Arc::new(Memory::new());
    let expected = weights(1);
    publish(&inner, Start::NewRun, &dir.path().join("baseline"), &expected);
    let replica = dir.path().join("replica");
    // All ranges lie, and the fetch is cut before the object is whole.
    let fault = Arc::new(Fault::new(inner.clone()));
    fault.arm(2 + 6, u64::MAX, When::Before);
    let fault: Arc<dyn Store> = fault;
    let liar = Hook::after(&fault, |_, _, bytes| bytes[0] ^= 1);
    advance(liar, &replica, 0, small_ranges()).unwrap_err();
    let moved = advance(inner, &replica, 0, small_ranges()).unwrap();
    assert_same(moved.checkpoint().unwrap(), &expected);
}

#[test]
fn no_more_is_kept_than_allowed() {
    let _turn = turn();
    let dir = tempfile::tempdir().unwrap();
    let inner: Arc<dyn Store> = Arc::new(Memory::new());
    publish(&inner, Start::NewRun, &dir.path().join("baseline"), &weights(1));
    let (objects, _) = bytes(&inner, 0);
    for bytes_max in [0, 700_000, 1_200_000] {
        let replica = dir.path().join(format!("replica-{bytes_max}"));
        let (place, most) = (replica.clone(), Arc::new(AtomicU64::new(0)));
        let seen = most.clone();
        let store = Hook::after(&inner, move |_, _, _| {
            let kept =
                kept_files(&place).iter().map(|path| fs::metadata(path).map_or(0, |file| file.len())).sum();
            seen.fetch_max(kept, SeqCst);
        });
        let mut options = small_ranges();
        options.bytes_max = bytes_max;
        advance(store, &replica, 0, options).unwrap();
        // The digests of the ranges come on top.
        let most = most.load(SeqCst);
        assert!(most <= bytes_max + bytes_max / 1000, "{most} of {bytes_max}");
        assert!(objects > bytes_max && (most > 0) == (bytes_max > 600_000), "{most} of {bytes_max}");
    }
}

#[test]
fn download_cache_of_a_superseded_version_is_removed() {
    let _turn = turn();
    let dir = tempfile::tempdir().unwrap();
    let inner: Arc<dyn Store> = Arc::new(Memory::new());
    let (baseline, replica) = (dir.path().join("baseline"), dir.path().join("replica"));
    publish(&inner, Start::NewRun, &baseline, &weights(1));
    cut(&inner, &replica, 6);
    publish(&inner, Start::Resume, &baseline, &weights(2));
    let newer: Vec<String> = Run::open(inner.clone(), RUN)
        .unwrap()
        .get(MODEL, Version(1))
        .unwrap()
        .manifest
        .objects
        .iter()
        .map(|object| object.blake3.to_string())
        .collect();
    let place = replica.clone();
    let store = Hook::after(&inner, move |_, _, _| {
        for path in kept_files(&place) {
            assert!(newer.contains(&path.file_name().unwrap().to_str().unwrap().to_owned()), "{path:?}");
        }
    });
    let moved = advance(store, &replica, 1, small_ranges()).unwrap();
    assert_same(moved.checkpoint().unwrap(), &weights(2));
}

#[test]
fn a_disk_that_does_not_take_what_arrives_does_not_stop_it() {
    let _turn = turn();
    let dir = tempfile::tempdir().unwrap();
    let inner: Arc<dyn Store> = Arc::new(Memory::new());
    let expected = weights(1);
    publish(&inner, Start::NewRun, &dir.path().join("baseline"), &expected);
    for k in 0..40 {
        let replica = dir.path().join(format!("replica-{k}"));
        let (place, calls) = (downloads(&replica), AtomicU64::new(0));
        watch::set(Some(Box::new(move |call, path| {
            let ours = path.starts_with(&place) && matches!(call, Call::Create | Call::Write);
            let full = ours && calls.fetch_add(1, SeqCst) >= k;
            if full { Err(std::io::Error::from_raw_os_error(28)) } else { Ok(()) }
        })));
        let moved = advance(inner.clone(), &replica, 0, small_ranges());
        watch::set(None);
        assert_same(moved.unwrap().checkpoint().unwrap(), &expected);
    }
}
