//! Host memory into buckets on the device, as `follow --colocate` and NCCL pushes lay them, against one plain
//! copy of as many bytes from pinned memory.

use std::borrow::Cow;
use std::time::Instant;

use cudarc::driver::{CudaContext, result};
use driftless_bridge::push::colocate::{CudaShare, Share};
use driftless_bridge::push::plan;
use driftless_transport::Snapshot;
use driftless_transport::snapshot::{AuxFile, TensorInfo};

use crate::memory::tensors;
use crate::{TURNS, median};

const BYTES: u64 = 8 << 30;
/// What `ColocationOptions` has by default.
const BUCKET_BYTES: u64 = 1 << 30;

/// Tensors in pageable memory.
struct Pageable(Vec<TensorInfo>, Vec<u8>);

impl Snapshot for Pageable {
    fn tensors(&self) -> &[TensorInfo] {
        &self.0
    }
    fn bytes(&self, index: usize) -> driftless_transport::Result<Cow<'_, [u8]>> {
        let each = self.0[index].byte_len()? as usize;
        Ok(Cow::Borrowed(&self.1[index * each..(index + 1) * each]))
    }
    fn files(&self) -> &[AuxFile] {
        &[]
    }
}

pub(crate) fn run() {
    let bytes: Vec<u8> =
        (0..BYTES / 8).flat_map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()).collect();
    println!(
        "{} GiB in buckets of {} MiB; medians of {TURNS} turns (least to most), GB/s",
        BYTES >> 30,
        BUCKET_BYTES >> 20
    );
    println!("{:>8}  {:>24} {:>24}  ratio", "tensors", "from host memory", "one pinned copy");
    let mut snapshot = Pageable(Vec::new(), bytes);
    for count in [64, 512, 16_384] {
        snapshot.0 = tensors(count, BYTES / count);
        row(&snapshot);
    }
}

fn row(snapshot: &Pageable) {
    let buckets = plan(&snapshot.0, BUCKET_BYTES).unwrap();
    let mut share = CudaShare::open(0).unwrap();
    let context = CudaContext::new(0).unwrap();
    context.bind_to_thread().unwrap();
    // SAFETY: the bytes are written before they are read.
    let mut pinned = unsafe { context.alloc_pinned::<u8>(BUCKET_BYTES as usize) }.unwrap();
    pinned.as_mut_slice().unwrap().copy_from_slice(&snapshot.1[..BUCKET_BYTES as usize]);
    // SAFETY: the context is current, and the length is not 0.
    let target = unsafe { result::malloc_sync(BUCKET_BYTES as usize) }.unwrap();
    let (mut ours, mut plain) = (Vec::new(), Vec::new());
    for turn in 0..=TURNS {
        let begin = Instant::now();
        for (n, bucket) in buckets.iter().enumerate() {
            share.place(n % 2, snapshot, bucket, 1).unwrap();
        }
        let seconds = begin.elapsed().as_secs_f64();
        let begin = Instant::now();
        for _ in 0..BYTES / BUCKET_BYTES {
            // SAFETY: the target has room, and the copy has ended when the call returns.
            unsafe { result::memcpy_htod_sync(target, pinned.as_slice().unwrap()) }.unwrap();
        }
        // The first of each allocates.
        if turn > 0 {
            ours.push(BYTES as f64 / seconds / 1e9);
            plain.push(BYTES as f64 / begin.elapsed().as_secs_f64() / 1e9);
        }
    }
    // SAFETY: it came from malloc_sync, and is freed once.
    unsafe { result::free_sync(target) }.unwrap();
    let rates = [median(ours), median(plain)];
    let [ours, plain] = rates.map(|(middle, least, most)| format!("{middle:6.1} ({least:.1} to {most:.1})"));
    println!("{:>8}  {ours:>24} {plain:>24}  {:.3}", snapshot.0.len(), rates[0].0 / rates[1].0);
}
