//! The transfer without an engine.

use std::time::Instant;

use driftless_bridge::{Meeting, NcclOptions, NcclRoot, Rendezvous, RendezvousOptions, Root, plan};

use crate::memory::{Arena, tensors};
use crate::python::{Python, nccl};
use crate::{TURNS, check_environment, median};

/// Small, so that gathering the first one, which nothing hides, takes little of the whole.
const BUCKET_BYTES: u64 = 256 << 20;
/// Sizes are rounded to this, as a row of a matrix is.
const ROW_BYTES: u64 = 1024;

pub(crate) fn run(python: &str) {
    check_environment();
    let (library, version) = nccl(python);
    let mut options = NcclOptions::new(library);
    options.version = Some(version);
    let mut root = NcclRoot::open(&options).unwrap();
    println!(
        "NCCL {version:?}, 2 GPUs, buckets of {} MiB; medians of {TURNS} turns (least to most), GB/s",
        BUCKET_BYTES >> 20
    );
    let rendezvous = Rendezvous::start(([127, 0, 0, 1], 0).into(), RendezvousOptions::default()).unwrap();
    let port = rendezvous.address().port().to_string();
    let mut peer = Python::start(python, "torch_peer.py", &["127.0.0.1", &port, "alone"]);
    root.open(&Meeting { group: "alone", world: 2, rendezvous: &rendezvous }).unwrap();
    assert_eq!(peer.answer(), "in the group");
    println!(
        "{:>6} {:>8} {:>12}  {:>24} {:>24}  ratio",
        "GiB", "tensors", "of", "pushed in buckets", "one raw broadcast"
    );
    for gib in [1u64, 8, 32] {
        for count in [8 * gib, 10_240] {
            row(&mut root, &mut peer, gib, count);
        }
    }
}

fn row(root: &mut NcclRoot, peer: &mut Python, gib: u64, count: u64) {
    let each = (gib << 30) / count / ROW_BYTES * ROW_BYTES;
    let total = each * count;
    let apart = Arena::new(tensors(count, each), true);
    let whole = Arena::new(tensors(1, total), false);
    let (mut ours, mut raw) = (Vec::new(), Vec::new());
    for turn in 0..=TURNS {
        let (pushed, one) = (push(root, peer, &apart, BUCKET_BYTES), push(root, peer, &whole, u64::MAX));
        // The first of each joins, connects and allocates.
        if turn > 0 {
            ours.push(total as f64 / pushed / 1e9);
            raw.push(total as f64 / one / 1e9);
        }
    }
    let (ours, raw) = (median(ours), median(raw));
    let show = |(middle, least, most): (f64, f64, f64)| format!("{middle:6.1} ({least:.1} to {most:.1})");
    println!("{gib:>6} {count:>8} {:>12}  {:>24} {:>24}  {:.3}", each, show(ours), show(raw), ours.0 / raw.0);
}

/// Seconds from the first byte to the last, once the peer waits for them.
pub(crate) fn push(root: &mut NcclRoot, peer: &mut Python, arena: &Arena, budget: u64) -> f64 {
    use driftless_bridge::Weights;
    let buckets = plan(arena.weights.tensors(), budget).unwrap();
    let lengths: Vec<_> = buckets.iter().map(|bucket| bucket.bytes.to_string()).collect();
    assert_eq!(peer.ask(&lengths.join(" ")), "waiting");
    while !root.joined().unwrap() {
        std::thread::yield_now();
    }
    let begin = Instant::now();
    for (n, bucket) in buckets.iter().enumerate() {
        wait(root, n % 2);
        root.gather(n % 2, &arena.weights, bucket).unwrap();
        root.broadcast(n % 2, &[bucket.bytes]).unwrap();
    }
    wait(root, 0);
    wait(root, 1);
    let seconds = begin.elapsed().as_secs_f64();
    assert_eq!(peer.answer(), "received");
    seconds
}

fn wait(root: &mut NcclRoot, slot: usize) {
    while !root.sent(slot).unwrap() {
        std::hint::spin_loop();
    }
}
