//! How small and how fast is the codec, next to its peers and to the bound? One core; ceilings are the bound and a bare compare scan.
//!
//! `cargo bench --manifest-path benches/compare/Cargo.toml --bench codec [-- BASE_DIR NEW_DIR]`

use std::hint::black_box;
use std::path::Path;
use std::time::Instant;

use driftless_compare::bound::{Bound, bound};
use driftless_compare::data::{Pairs, Shape, checkpoints, synthetic};
use driftless_compare::peers::{gaps_zstd, xor_zstd};
use driftless_delta::{DigestTable, Element, Patch, Profile, decode, decode_full, encode, encode_full};

const ELEMENT: Element = Element::Bf16;

fn main() {
    let directories: Vec<_> =
        std::env::args().skip(1).filter(|argument| !argument.starts_with("--")).collect();
    println!("sizes, ratio to dense bf16 (everything in the payloads counted)");
    println!(
        "{:<24}{:>9}{:>9}{:>9}{:>9}{:>9}{:>9}{:>9}",
        "data", "density", "xor+zstd", "gaps+zst", "fast", "wire", "H", "H|exp"
    );
    match directories.as_slice() {
        [base, new] => match checkpoints(Path::new(base), Path::new(new)) {
            Ok(pairs) => {
                sizes("checkpoints", &pairs, None);
                full(&pairs);
                speeds(&pairs);
            }
            Err(error) => eprintln!("{error}"),
        },
        _ => {
            let small = Shape { tensors: 100, elements: 200_000 };
            for (density, targets) in [
                (0.0005, None),
                (0.003, Some([1.15, 2.7, 1.95])),
                (0.01, Some([1.08, 2.9, 2.1])),
                (0.05, Some([1.08, 2.9, 2.1])),
                (0.15, None),
                (0.5, None),
            ] {
                sizes("20 M in 100 tensors", &synthetic(small, density, 1), targets);
            }
            for (density, targets) in [(0.003, [1.15, 2.7, 1.95]), (0.01, [1.08, 2.9, 2.1])] {
                sizes(
                    "32 M in 2 tensors",
                    &synthetic(Shape { tensors: 2, elements: 16 << 20 }, density, 2),
                    Some(targets),
                );
            }
            let large = synthetic(Shape { tensors: 1, elements: 128 << 20 }, 0.003, 3);
            full(&large);
            speeds(&large);
            drop(large);
            speeds(&synthetic(Shape { tensors: 1, elements: 128 << 20 }, 0.012, 3));
        }
    }
}

fn verdict(ok: bool) -> &'static str {
    if ok { "pass" } else { "MISS" }
}

fn payloads(pairs: &Pairs, profile: Profile) -> (usize, u64) {
    pairs.iter().fold((0, 0), |(bytes, changed), (base, new)| {
        let digests = DigestTable::of(ELEMENT, base).expect("whole elements");
        let mut out = Vec::new();
        let encoded = encode(ELEMENT, base, new, &digests, profile, &mut out).expect("equal lengths");
        (bytes + out.len(), changed + encoded.changed)
    })
}

/// `targets`: wire at most so many times the bound, at least so many times smaller than xor, than gaps.
fn sizes(name: &str, pairs: &Pairs, targets: Option<[f64; 3]>) {
    let dense: usize = pairs.iter().map(|(base, _)| base.len()).sum();
    let xor: usize = pairs.iter().map(|(base, new)| xor_zstd::encode(base, new).0.len()).sum();
    let gaps: usize = pairs
        .iter()
        .map(|(base, new)| gaps_zstd::encode(base, new))
        .map(|(gaps, values, _)| gaps.len() + values.len())
        .sum();
    let bits = pairs.iter().map(|(base, new)| bound(base, new)).fold(Bound::default(), |sum, bound| Bound {
        plain: sum.plain + bound.plain,
        conditional: sum.conditional + bound.conditional,
    });
    let (fast, _) = payloads(pairs, Profile::Fast);
    let (wire, changed) = payloads(pairs, Profile::Wire);
    let ratio = |bytes: usize| dense as f64 / bytes as f64;
    let bound = dense as f64 * 8.0 / bits.conditional;
    println!(
        "{name:<24}{:>8.3}%{:>9.1}{:>9.1}{:>9.1}{:>9.1}{:>9.1}{bound:>9.1}",
        changed as f64 * 200.0 / dense as f64,
        ratio(xor),
        ratio(gaps),
        ratio(fast),
        ratio(wire),
        dense as f64 * 8.0 / bits.plain,
    );
    let Some([most, least_xor, least_gaps]) = targets else { return };
    let of_bound = bound / ratio(wire);
    println!("    wire {of_bound:.3}x the bound (at most {most}: {})", verdict(of_bound <= most));
    for (peer, theirs, least) in [("xor+zstd", xor, least_xor), ("gaps+zstd", gaps, least_gaps)] {
        let (ours, possible) = (ratio(wire) / ratio(theirs), bound / ratio(theirs));
        println!(
            "    wire {ours:.2}x smaller than {peer} (at least {least}: {}; the bound is {possible:.2}x)",
            verdict(ours >= least)
        );
    }
    let against = ratio(fast) / ratio(xor);
    println!("    fast {against:.2}x smaller than xor+zstd (at least 1.5: {})", verdict(against >= 1.5));
}

/// Best of five, in seconds.
fn seconds<T>(mut work: impl FnMut() -> T) -> f64 {
    (0..5)
        .map(|_| {
            let start = Instant::now();
            black_box(work());
            start.elapsed().as_secs_f64()
        })
        .fold(f64::INFINITY, f64::min)
}

fn full(pairs: &Pairs) {
    let dense: usize = pairs.iter().map(|(base, _)| base.len()).sum();
    let (mut payload, mut bytes) = (Vec::new(), 0);
    let encoding = seconds(|| {
        bytes = 0;
        for (_, new) in pairs {
            payload.clear();
            encode_full(ELEMENT, new, &mut payload).expect("whole elements");
            bytes += payload.len();
        }
    });
    let (_, last) = &pairs[pairs.len() - 1];
    let mut target = vec![0; last.len()];
    let decoding = seconds(|| decode_full(ELEMENT, &payload, &mut target).expect("own payload"));
    let ratio = bytes as f64 / dense as f64;
    println!(
        "full: {ratio:.4} of bf16 (at most 0.68: {}), encode {:.2} GB/s, decode {:.2} GB/s",
        verdict(ratio <= 0.68),
        dense as f64 / encoding / 1e9,
        last.len() as f64 / decoding / 1e9
    );
}

fn speeds(pairs: &Pairs) {
    let (base, new) = pairs.iter().max_by_key(|(base, _)| base.len()).expect("at least one tensor");
    let digests = DigestTable::of(ELEMENT, base).expect("whole elements");
    let gigabytes = base.len() as f64 / 1e9;
    let scan = seconds(|| compare_scan(base, new));
    println!("speed, GB/s of dense bf16, one core, {} MiB", base.len() >> 20);
    println!(
        "  compare scan {:.2}, digest table {:.2}",
        gigabytes / scan,
        gigabytes / seconds(|| DigestTable::of(ELEMENT, base))
    );
    let mut tensor = base.clone();
    let peer = xor_zstd::encode(base, new);
    let peer_seconds = seconds(|| xor_zstd::apply(&mut tensor, &peer));
    println!(
        "  xor+zstd: encode {:.2}, apply and hash {:.2}",
        gigabytes / seconds(|| xor_zstd::encode(base, new)),
        gigabytes / peer_seconds
    );
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
        let rates = [gigabytes / encoding, gigabytes / applying];
        match profile {
            Profile::Fast => println!(
                "  fast: encode {:.2} = {:.2}x scan (at least 0.6: {}), decode + apply {:.1} = {:.1}x xor+zstd (at least 5: {})",
                rates[0],
                scan / encoding,
                verdict(scan / encoding >= 0.6),
                rates[1],
                peer_seconds / applying,
                verdict(peer_seconds / applying >= 5.0)
            ),
            Profile::Wire => println!(
                "  wire: encode {:.2} (at least 2: {}), decode + apply {:.2} = {:.2}x encode time (at most 1.5: {})",
                rates[0],
                verdict(rates[0] >= 2.0),
                rates[1],
                applying / encoding,
                verdict(applying / encoding <= 1.5)
            ),
        }
    }
}

/// Counts 64-byte groups that differ: the least any encoder must do.
fn compare_scan(base: &[u8], new: &[u8]) -> usize {
    base.chunks_exact(64).zip(new.chunks_exact(64)).filter(|(a, b)| a != b).count()
}
