//! Bytes per second of one large tensor in every encoding.

use std::hint::black_box;
use std::time::Instant;

use driftless_compare::data::{Pair, Shape, synthetic};
use driftless_compare::peers::xor_zstd;
use driftless_delta::{DigestTable, Element, Patch, Profile, decode, decode_full, encode, encode_full};

use crate::Verdicts;

const ELEMENT: Element = Element::Bf16;
const ROUNDS: usize = 5;

/// Best of some rounds, in seconds: what the machine does when nobody else is on it.
fn seconds<T>(mut work: impl FnMut() -> T) -> f64 {
    let round = |_| {
        let start = Instant::now();
        black_box(work());
        start.elapsed().as_secs_f64()
    };
    (0..ROUNDS).map(round).fold(f64::INFINITY, f64::min)
}

pub(crate) fn print(mib: usize, verdicts: &mut Verdicts) {
    let shape = Shape { tensors: 1, elements: mib << 19 };
    let pair = only(synthetic(shape, 0.003, 3));
    full(&pair, verdicts);
    sparse(&pair, 0.003, verdicts);
    sparse(&only(synthetic(shape, 0.012, 3)), 0.012, verdicts);
}

/// The same over sizes, at one density.
pub(crate) fn sweep(verdicts: &mut Verdicts) {
    for mib in [64, 256, 1024, 4096] {
        sparse(&only(synthetic(Shape { tensors: 1, elements: mib << 19 }, 0.003, 3)), 0.003, verdicts);
    }
}

fn only(pairs: Vec<Pair>) -> Pair {
    pairs.into_iter().next().expect("one tensor")
}

fn full(Pair { new, .. }: &Pair, verdicts: &mut Verdicts) {
    let mut payload = Vec::new();
    let encoding = seconds(|| {
        payload.clear();
        encode_full(ELEMENT, new, &mut payload).expect("whole elements")
    });
    let mut target = vec![0; new.len()];
    let decoding = seconds(|| decode_full(ELEMENT, &payload, &mut target).expect("own payload"));
    let ratio = payload.len() as f64 / new.len() as f64;
    let gigabytes = new.len() as f64 / 1e9;
    println!(
        "\nfull: {ratio:.4} of bf16 (at most 0.68: {}), encode {:.2} GB/s, decode {:.2} GB/s",
        verdicts.of(ratio <= 0.68),
        gigabytes / encoding,
        gigabytes / decoding
    );
}

fn sparse(Pair { base, new, .. }: &Pair, density: f64, verdicts: &mut Verdicts) {
    let digests = DigestTable::of(ELEMENT, base).expect("whole elements");
    let rate = |seconds: f64| base.len() as f64 / 1e9 / seconds;
    println!(
        "speed at {} %, GB/s of dense bf16, one core, tensor of {} MiB",
        100.0 * density,
        base.len() >> 20
    );
    let scan = seconds(|| compare_scan(base, new));
    let table = seconds(|| DigestTable::of(ELEMENT, base));
    println!("  compare scan {:.2}, digest table {:.2}", rate(scan), rate(table));
    let mut tensor = base.clone();
    let peer = xor_zstd::encode(base, new);
    let peer_applying = seconds(|| xor_zstd::apply(&mut tensor, &peer));
    let peer_encoding = seconds(|| xor_zstd::encode(base, new));
    println!("  xor+zstd: encode {:.2}, apply and hash {:.2}", rate(peer_encoding), rate(peer_applying));
    for profile in [Profile::Fast, Profile::Wire] {
        let mut payload = Vec::new();
        let encoding = seconds(|| {
            payload.clear();
            encode(ELEMENT, base, new, &digests, profile, &mut payload).expect("equal lengths")
        });
        tensor.copy_from_slice(base);
        let mut patch = Patch::new();
        let applying = seconds(|| {
            decode(ELEMENT, base, &digests, &payload, &mut patch).expect("own payload");
            patch.apply_to(&mut tensor).expect("same length");
        });
        assert!(tensor == *new, "decoded tensor differs");
        match profile {
            Profile::Fast => println!(
                "  fast: encode {:.2} = {:.2}x scan (at least 0.6: {}), decode + apply {:.1} = {:.1}x xor+zstd (at least 5: {})",
                rate(encoding),
                scan / encoding,
                verdicts.of(scan / encoding >= 0.6),
                rate(applying),
                peer_applying / applying,
                verdicts.of(peer_applying / applying >= 5.0)
            ),
            Profile::Wire => println!(
                "  wire: encode {:.2} (at least 2: {}), decode + apply {:.2} = {:.2}x encode time (at most 1.5: {})",
                rate(encoding),
                verdicts.of(rate(encoding) >= 2.0),
                rate(applying),
                applying / encoding,
                verdicts.of(applying / encoding <= 1.5)
            ),
        }
    }
}

/// Counts 64-byte groups that differ: the least any encoder must do.
fn compare_scan(base: &[u8], new: &[u8]) -> usize {
    base.chunks_exact(64).zip(new.chunks_exact(64)).filter(|(a, b)| a != b).count()
}
