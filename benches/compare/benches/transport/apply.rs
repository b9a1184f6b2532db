//! Applying a version next to slime's receiver, each in a process of its own, with the page cache warm.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use driftless_compare::data::Pair;
use driftless_compare::receiver::{Delta, map};
use driftless_store::{Disk, Store};
use driftless_transport::publish::Profile;
use driftless_transport::{Replica, Run, Version};

use crate::model::{self, RUN, begin, directory, pairs, publish};
use crate::{Options, judge, median};

const DENSITY: f64 = 0.003;

/// Who applies, and what it is called.
const SIDES: [(&str, &str); 3] =
    [("fast", "ours, profile fast"), ("wire", "ours, profile wire"), ("slime", "slime's receiver")];

/// Up to the point where an engine can load the version: ours with its journal durable, all with the bytes in
/// the page cache. The targets are for `fast`, the profile for deltas that are to be applied quickly.
///
/// Every side is staged once; its versions then lead from the base to the new state and back again.
pub(crate) fn run(options: &Options) {
    let mut pairs = pairs(options.mib, DENSITY);
    println!("apply of {} % to {} MiB, until an engine can load it", 100.0 * DENSITY, options.mib);
    let dir = directory(options);
    for (side, _) in SIDES {
        let place = dir.path().join(side);
        std::fs::create_dir(&place).expect("space");
        match side {
            "fast" => stage_ours(&pairs, &place, Profile::Fast, options),
            "wire" => stage_ours(&pairs, &place, Profile::Wire, options),
            _ => stage_slime(&mut pairs, &place),
        }
    }
    drop(pairs);
    let mut times: [Vec<Timed>; 3] = Default::default();
    for version in 1..=options.repeat {
        for ((side, _), times) in SIDES.iter().zip(&mut times) {
            times.push(timed(side, &dir.path().join(side), version));
        }
    }
    let of = |side: usize, value: fn(&Timed) -> f64| median(times[side].iter().map(value).collect());
    for (side, (_, name)) in SIDES.iter().enumerate() {
        println!(
            "  {name}: loadable after {:.3} s, data file durable {:.3} s later, {:.0} MiB of anonymous memory",
            of(side, |timed| timed.loadable),
            of(side, |timed| timed.sync),
            of(side, |timed| timed.anonymous_mib),
        );
    }
    let ratio = |side| of(2, |timed| timed.loadable) / of(side, |timed| timed.loadable);
    judge("slime's time over ours", ratio(0), 5.0, true);
    println!("       with profile wire: {:.2}", ratio(1));
    let most = of(0, |timed| timed.anonymous_mib).max(of(1, |timed| timed.anonymous_mib));
    judge("anonymous memory, MiB", most, 512.0, false);
}

/// A store with the versions, and a host at the one before them.
fn stage_ours(pairs: &[Pair], dir: &Path, profile: Profile, options: &Options) {
    let store: Arc<dyn Store> = Arc::new(Disk::new(dir.join("store")));
    let mut publisher = begin(pairs, &store, dir, profile, options.shard_mib);
    for version in 1..=options.repeat {
        publish(&mut publisher, &if version % 2 == 1 { model::new(pairs) } else { model::base(pairs) });
    }
    let run = publisher.run().clone();
    drop(publisher);
    std::fs::remove_dir_all(dir.join("baseline")).expect("the publisher is gone");
    let mut replica = Replica::open(dir.join("host")).expect("a replica");
    replica.advance(&run, "policy", Version(0), Some(&dir.join("base"))).expect("version 0");
    drop(replica);
    std::fs::remove_dir_all(dir.join("base")).expect("the host has it");
}

/// A checkpoint's data, the frames that change it there and back, and the tables of what lies where.
fn stage_slime(pairs: &mut [Pair], dir: &Path) {
    let mut file = std::fs::File::create(dir.join("slime")).expect("a file");
    for pair in &*pairs {
        std::io::Write::write_all(&mut file, &pair.base).expect("space");
    }
    file.sync_all().expect("a disk");
    for way in ["there", "back"] {
        let delta = Delta::write(pairs, &dir.join(way)).expect("space");
        std::fs::write(dir.join(way).with_extension("table"), delta.to_text()).expect("space");
        for pair in &mut *pairs {
            std::mem::swap(&mut pair.base, &mut pair.new);
        }
    }
}

struct Timed {
    loadable: f64,
    sync: f64,
    anonymous_mib: f64,
}

/// Runs one side in another process and reads the three numbers that it prints.
fn timed(side: &str, place: &Path, version: usize) -> Timed {
    let program = std::env::current_exe().expect("this program");
    let mut command = Command::new(program);
    command.arg("--child").arg(side).arg(place).arg(version.to_string());
    let output = command.output().expect("it starts");
    assert!(output.status.success(), "{side}: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let numbers: Vec<f64> = text.split_whitespace().map(|word| word.parse().expect("a number")).collect();
    Timed { loadable: numbers[0], sync: numbers[1], anonymous_mib: numbers[2] }
}

/// One side: prints seconds until loadable, seconds of the sync behind it, and the most anonymous memory in
/// MiB.
pub(crate) fn child(side: &str, dir: &Path, version: u64) {
    let peak = Peak::watch();
    let (loadable, sync) = if side == "slime" { slime(dir, version) } else { ours(dir, version) };
    println!("{} {} {}", loadable.as_secs_f64(), sync.as_secs_f64(), peak.mib());
}

fn ours(dir: &Path, version: u64) -> (Duration, Duration) {
    let files =
        std::fs::read_dir(dir.join("host")).expect("a host").map(|entry| entry.expect("a file").path());
    files
        .filter(|path| path.extension().is_some_and(|end| end == "safetensors"))
        .for_each(|path| warm(&path));
    let run = Run::open(Arc::new(Disk::new(dir.join("store"))), RUN).expect("a run");
    let mut replica = Replica::open(dir.join("host")).expect("a replica");
    let begin = Instant::now();
    replica.advance(&run, "policy", Version(version), None).expect("an advance");
    let loadable = begin.elapsed();
    (loadable, replica.sync().expect("a disk"))
}

fn slime(dir: &Path, version: u64) -> (Duration, Duration) {
    let checkpoint = dir.join("slime");
    warm(&checkpoint);
    let way = dir.join(if version % 2 == 1 { "there" } else { "back" });
    let table = std::fs::read_to_string(way.with_extension("table")).expect("a table");
    let delta = Delta::from_text(&table).expect("a table of ours");
    let mut mapped = map(&checkpoint).expect("a map");
    let begin = Instant::now();
    delta.apply(&mut mapped, &way).expect("the right base");
    let loadable = begin.elapsed();
    mapped.flush().expect("a disk");
    (loadable, begin.elapsed() - loadable)
}

/// Brings a file into the page cache.
fn warm(path: &Path) {
    let mut file = std::fs::File::open(path).expect("a file");
    std::io::copy(&mut file, &mut std::io::sink()).expect("readable");
}

/// Watches how much anonymous memory the process has, from `/proc/self/status`.
struct Peak {
    most: Arc<AtomicU64>,
    over: Arc<AtomicBool>,
}

impl Peak {
    fn watch() -> Self {
        let peak = Self { most: Arc::default(), over: Arc::default() };
        let (most, over) = (peak.most.clone(), peak.over.clone());
        std::thread::spawn(move || {
            while !over.load(Relaxed) {
                most.fetch_max(anonymous_kib(), Relaxed);
                std::thread::sleep(Duration::from_millis(2));
            }
        });
        peak
    }

    fn mib(self) -> f64 {
        self.over.store(true, Relaxed);
        self.most.load(Relaxed) as f64 / 1024.0
    }
}

fn anonymous_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}
