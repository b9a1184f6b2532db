//! The transfer without an engine.

use std::time::Instant;

use driftless_bridge::push::nccl::{Meeting, NcclOptions, NcclRoot, Rendezvous, RendezvousOptions, Root};
use driftless_bridge::push::{Bucket, plan};
use driftless_transport::Snapshot as _;

use crate::memory::{Arena, tensors};
use crate::python::{Python, nccl};
use crate::{TURNS, check_environment, median};

const BUCKET_BYTES: u64 = 512 << 20;
/// Sizes are rounded to this, as a row of a matrix is.
const ROW_BYTES: u64 = 1024;

pub(crate) fn run(python: &str, gpus: u32) {
    check_environment();
    let (library, version) = nccl(python);
    let mut options = NcclOptions::new(library);
    options.version = Some(version);
    let mut root = NcclRoot::open(&options).unwrap();
    println!(
        "NCCL {version:?}, {gpus} GPUs, buckets of {} MiB; medians of {TURNS} turns (least to most), GB/s",
        BUCKET_BYTES >> 20
    );
    let rendezvous = Rendezvous::start(([127, 0, 0, 1], 0).into(), RendezvousOptions::default()).unwrap();
    let mut peers = join(&mut root, &rendezvous, python, "alone", gpus);
    println!(
        "{:>6} {:>8} {:>12}  {:>24} {:>24}  ratio",
        "GiB", "tensors", "of", "buckets", "one raw broadcast"
    );
    for gib in [1u64, 8, 32] {
        for count in [8 * gib, 10_240] {
            row(&mut root, &mut peers, gib, count);
        }
    }
}

/// A group of torch processes, one on each of the other GPUs, with this one as rank 0.
pub(crate) fn join(
    root: &mut NcclRoot,
    rendezvous: &Rendezvous,
    python: &str,
    group: &str,
    gpus: u32,
) -> Vec<Python> {
    let (port, world) = (rendezvous.address().port().to_string(), gpus.to_string());
    let start = |rank: u32| {
        Python::start(python, "torch_peer.py", &["127.0.0.1", &port, group, &rank.to_string(), &world])
    };
    let mut peers: Vec<Python> = (1..gpus).map(start).collect();
    root.open(&Meeting { group, world: gpus, rendezvous }).unwrap();
    assert!(peers.iter_mut().all(|peer| peer.answer() == "in the group"));
    peers
}

fn row(root: &mut NcclRoot, peers: &mut [Python], gib: u64, count: u64) {
    let each = (gib << 30) / count / ROW_BYTES * ROW_BYTES;
    let total = each * count;
    let apart = Arena::new(tensors(count, each), true);
    let whole = Arena::new(tensors(1, total), false);
    let infos = apart.tensors();
    let even = plan(infos, BUCKET_BYTES).unwrap();
    let one = plan(whole.tensors(), u64::MAX).unwrap();
    let mut sides = [(&apart, even, Vec::new()), (&whole, one, Vec::new())];
    for turn in 0..=TURNS {
        for (arena, buckets, rates) in &mut sides {
            let seconds = push(root, peers, arena, buckets);
            // The first of each joins, connects and allocates.
            if turn > 0 {
                rates.push(total as f64 / seconds / 1e9);
            }
        }
    }
    let rates = sides.map(|(_, _, rates)| median(rates));
    let [even, raw] = rates.map(|(middle, least, most)| format!("{middle:6.1} ({least:.1} to {most:.1})"));
    println!("{gib:>6} {count:>8} {each:>12}  {even:>24} {raw:>24}  {:.3}", rates[0].0 / rates[1].0);
}

/// Seconds from the first byte to the last, once the peers wait for them.
pub(crate) fn push(root: &mut NcclRoot, peers: &mut [Python], arena: &Arena, buckets: &[Bucket]) -> f64 {
    let lengths: Vec<_> = buckets.iter().map(|bucket| bucket.bytes.to_string()).collect();
    peers.iter_mut().for_each(|peer| peer.tell(&lengths.join(" ")));
    assert!(peers.iter_mut().all(|peer| peer.answer() == "waiting"));
    while !root.joined().unwrap() {
        std::thread::yield_now();
    }
    let begin = Instant::now();
    for (n, bucket) in buckets.iter().enumerate() {
        wait(root, n % 2);
        root.gather(n % 2, arena, bucket).unwrap();
        root.broadcast(n % 2, &[bucket.bytes]).unwrap();
    }
    wait(root, 0);
    wait(root, 1);
    let seconds = begin.elapsed().as_secs_f64();
    assert!(peers.iter_mut().all(|peer| peer.answer() == "received"));
    seconds
}

fn wait(root: &mut NcclRoot, slot: usize) {
    while !root.sent(slot).unwrap() {
        std::hint::spin_loop();
    }
}
