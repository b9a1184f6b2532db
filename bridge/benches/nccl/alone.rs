//! The transfer without an engine.

use std::time::Instant;

use driftless_bridge::{
    Bucket, Meeting, NcclOptions, NcclRoot, Rendezvous, RendezvousOptions, Root, Weights, plan,
};
use driftless_transport::TensorInfo;

use crate::memory::{Arena, tensors};
use crate::python::{Python, nccl};
use crate::{TURNS, check_environment, median};

const BUCKET_BYTES: u64 = 512 << 20;
/// The first buckets are smaller, because nothing hides the gathering of the first one, and the first broadcast must hide that of the next. Into
/// an engine there is no need: its HTTP call takes longer than gathering a bucket does.
const FIRST_BYTES: [u64; 3] = [BUCKET_BYTES / 16, BUCKET_BYTES / 4, BUCKET_BYTES / 4 * 3];
/// Sizes are rounded to this, as a row of a matrix is.
const ROW_BYTES: u64 = 1024;

pub(crate) fn run(python: &str) {
    check_environment();
    let (library, version) = nccl(python);
    let mut options = NcclOptions::new(library);
    options.version = Some(version);
    let mut root = NcclRoot::open(&options).unwrap();
    println!(
        "NCCL {version:?}, 2 GPUs, buckets of {} MiB (growing: after those of {:?} MiB); medians of {TURNS} turns (least to most), GB/s",
        BUCKET_BYTES >> 20,
        FIRST_BYTES.map(|bytes| bytes >> 20)
    );
    let rendezvous = Rendezvous::start(([127, 0, 0, 1], 0).into(), RendezvousOptions::default()).unwrap();
    let port = rendezvous.address().port().to_string();
    let mut peer = Python::start(python, "torch_peer.py", &["127.0.0.1", &port, "alone"]);
    root.open(&Meeting { group: "alone", world: 2, rendezvous: &rendezvous }).unwrap();
    assert_eq!(peer.answer(), "in the group");
    println!(
        "{:>6} {:>8} {:>12}  {:>24} {:>24} {:>24}  ratios",
        "GiB", "tensors", "of", "growing buckets", "even buckets", "one raw broadcast"
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
    let infos = apart.weights.tensors();
    let (growing, even) = (growing(infos), plan(infos, BUCKET_BYTES).unwrap());
    let one = plan(whole.weights.tensors(), u64::MAX).unwrap();
    let mut sides = [(&apart, growing, Vec::new()), (&apart, even, Vec::new()), (&whole, one, Vec::new())];
    for turn in 0..=TURNS {
        for (arena, buckets, rates) in &mut sides {
            let seconds = push(root, peer, arena, buckets);
            // The first of each joins, connects and allocates.
            if turn > 0 {
                rates.push(total as f64 / seconds / 1e9);
            }
        }
    }
    let rates = sides.map(|(_, _, rates)| median(rates));
    let [growing, even, raw] =
        rates.map(|(middle, least, most)| format!("{middle:6.1} ({least:.1} to {most:.1})"));
    println!(
        "{gib:>6} {count:>8} {each:>12}  {growing:>24} {even:>24} {raw:>24}  {:.3} {:.3}",
        rates[0].0 / rates[2].0,
        rates[1].0 / rates[2].0
    );
}

/// Buckets of which the first are smaller.
fn growing(infos: &[TensorInfo]) -> Vec<Bucket> {
    let (mut buckets, mut from) = (Vec::new(), 0);
    let budgets = FIRST_BYTES.map(|first| (first, first)).into_iter().chain([(BUCKET_BYTES, u64::MAX)]);
    for (budget, room) in budgets {
        let mut left = room;
        let fits = |info: &&TensorInfo| {
            let bytes = info.byte_len().unwrap();
            let fits = bytes <= left;
            left = left.saturating_sub(bytes);
            fits
        };
        // A tensor that is larger has a bucket to itself.
        let count = infos[from..].iter().take_while(fits).count().max(1).min(infos.len() - from);
        let mut part = plan(&infos[from..from + count], budget).unwrap();
        part.iter_mut().flat_map(|bucket| &mut bucket.tensors).for_each(|index| *index += from);
        buckets.extend(part);
        from += count;
    }
    buckets
}

/// Seconds from the first byte to the last, once the peer waits for them.
pub(crate) fn push(root: &mut NcclRoot, peer: &mut Python, arena: &Arena, buckets: &[Bucket]) -> f64 {
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
