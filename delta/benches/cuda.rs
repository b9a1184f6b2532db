//! Encoding and applying on a CUDA device, tensors in its memory, payloads in pinned memory of the host:
//! everything that a call does counts.
//!
//! `cargo bench -p driftless-delta --features cuda --bench cuda [-- MiB of base … densities such as 1%]`.
//! Bytes are those of base and new.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use driftless_delta::cuda::{Codec, Error, Tensor};
use driftless_delta::{DigestTable, Element, Encoder, Pool, Profile, Source};

const ELEMENT: Element = Element::Bf16;
const RUNS: usize = 11;

struct Threads(usize);

impl Pool for Threads {
    fn threads(&self) -> usize {
        self.0
    }

    fn run(&self, jobs: usize, job: &(dyn Fn(usize) + Sync)) {
        let next = AtomicUsize::new(0);
        let take = || next.fetch_add(1, Ordering::Relaxed);
        let work = || std::iter::repeat_with(take).take_while(|at| *at < jobs).for_each(job);
        std::thread::scope(|scope| (0..self.0).for_each(|_| drop(scope.spawn(work))));
    }
}

/// splitmix64 of `index`.
fn draw(index: u64) -> u64 {
    let z = index.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Weights of a normal kind, and what a step makes of them: small ones change more often; most by one ulp.
fn pair(bytes: usize, density: f64, threads: usize) -> (Vec<u8>, Vec<u8>) {
    let (mut base, mut new) = (vec![0; bytes], vec![0; bytes]);
    let part = bytes.div_ceil(threads).next_multiple_of(2);
    std::thread::scope(|scope| {
        for (at, (base, new)) in base.chunks_mut(part).zip(new.chunks_mut(part)).enumerate() {
            scope.spawn(move || {
                for (i, (base, new)) in base.chunks_exact_mut(2).zip(new.chunks_exact_mut(2)).enumerate() {
                    let index = ((at * part) / 2 + i) as u64;
                    let bits = draw(index);
                    // Six uniform numbers of ten bits are near enough to a normal one.
                    let sum: u64 = (0..6).map(|k| bits >> (10 * k) & 1023).sum();
                    let weight = (sum as f32 - 3069.0) * 2.8e-5;
                    let old = (weight.to_bits() >> 16) as u16;
                    let chance = draw(index ^ 0x5555_0000_0000_0000);
                    let small = 0.02 / (0.005 + weight.abs());
                    let hit = ((chance >> 40) as f64) < density * f64::from(small) * 0.8 * 16_777_216.0;
                    let step = if chance & 31 == 0 { 2 } else { 1 };
                    let moved =
                        if chance & 32 == 0 { old.wrapping_add(step) } else { old.wrapping_sub(step) };
                    base.copy_from_slice(&old.to_le_bytes());
                    new.copy_from_slice(&(if hit { moved } else { old }).to_le_bytes());
                }
            });
        }
    });
    (base, new)
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn timed<T>(work: impl FnOnce() -> Result<T, Error>) -> Result<(f64, T), Error> {
    let start = Instant::now();
    let done = work()?;
    Ok((start.elapsed().as_secs_f64(), done))
}

fn row(what: &str, bytes: usize, seconds: f64, payload: usize, target: Option<f64>) {
    let rate = 2.0 * bytes as f64 / seconds / 1e12;
    let verdict = match target {
        Some(target) if rate >= target => format!("at least {target}: pass"),
        Some(target) => format!("at least {target}: MISS"),
        None => String::new(),
    };
    println!("{what:34} {:9.3} ms {rate:8.3} TB/s {payload:11} B  {verdict}", seconds * 1e3);
}

fn main() -> Result<(), Error> {
    let mut codec = match Codec::open(0) {
        Ok(codec) => codec,
        Err(error) => {
            println!("skipped: {error}");
            return Ok(());
        }
    };
    let words: Vec<String> = std::env::args().skip(1).collect();
    let mut sizes: Vec<usize> = words.iter().filter_map(|word| word.parse().ok()).collect();
    let percents = words.iter().filter_map(|word| word.strip_suffix('%')?.parse::<f64>().ok());
    let mut densities: Vec<f64> = percents.map(|percent| percent / 100.0).collect();
    if sizes.is_empty() {
        sizes = vec![64, 1024];
    }
    if densities.is_empty() {
        densities = vec![0.001, 0.01, 0.05];
    }
    let (compiling, ()) = timed(|| codec.prepare(ELEMENT))?;
    println!("compiling the kernels: {compiling:.1} s");
    for mib in sizes {
        for &density in &densities {
            table(&mut codec, mib << 20, density)?;
        }
    }
    Ok(())
}

fn table(codec: &mut Codec, bytes: usize, density: f64) -> Result<(), Error> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let (base, new) = pair(bytes, density, threads);
    let (old, fresh) = (codec.upload(&base)?, codec.upload(&new)?);
    let mut digests = DigestTable::of(ELEMENT, &base[..0])?;
    for profile in [Profile::Fast, Profile::Wire] {
        if digests.blocks().is_empty() {
            digests = DigestTable::of(ELEMENT, &base)?;
        }
        let target =
            (bytes >= 1 << 30 && density == 0.01).then_some(if profile == Profile::Fast { 2.0 } else { 0.8 });
        let pair = Pair { base: &base, new: &new, old: &old, fresh: &fresh, digests: &digests };
        one(codec, pair, Case { profile, density, target, threads })?;
    }
    Ok(())
}

/// Two tensors, in host memory and on the device.
#[derive(Clone, Copy)]
struct Pair<'a> {
    base: &'a [u8],
    new: &'a [u8],
    old: &'a Tensor,
    fresh: &'a Tensor,
    /// Those of `base`.
    digests: &'a DigestTable,
}

#[derive(Clone, Copy)]
struct Case {
    profile: Profile,
    density: f64,
    target: Option<f64>,
    threads: usize,
}

fn one(codec: &mut Codec, pair: Pair<'_>, case: Case) -> Result<(), Error> {
    let Pair { base, new, old, fresh, digests } = pair;
    let Case { profile, density, target, threads } = case;
    let bytes = base.len();
    let name = |what: &str| format!("{what} {profile:?} {:.1} % {} MiB", density * 100.0, bytes >> 20);
    // What the processor makes of it, and how long that takes once the bytes are there.
    let (mut encoder, mut expected) = (Encoder::new(), Vec::new());
    let source = Source { element: ELEMENT, bytes: base, digests };
    let mut cpu = f64::INFINITY;
    for _ in 0..2 {
        expected.clear();
        let (seconds, _) =
            timed(|| Ok(encoder.encode(&Threads(threads), source, new, profile, &mut expected)?))?;
        cpu = cpu.min(seconds);
    }
    let mut times = Vec::new();
    let mut forth = codec.pinned(0)?;
    for run in 0..RUNS + 2 {
        let (seconds, encoded) = timed(|| codec.encode(ELEMENT, old, fresh, digests, profile))?;
        if run == 0 {
            assert!(encoded.payload == expected, "another payload than the processor's");
            let payload = encoded.payload.to_vec();
            forth = codec.pinned(payload.len())?;
            forth.copy_from_slice(&payload);
        } else if run > 1 {
            times.push(seconds);
        }
    }
    row(&name("encode"), bytes, median(times), forth.len(), target);
    // There and back again, so that each payload meets its base.
    let back = codec.encode(ELEMENT, fresh, old, encoder.digests(), profile)?.payload.to_vec();
    let mut pinned = codec.pinned(back.len())?;
    pinned.copy_from_slice(&back);
    let mut tensor = codec.upload(base)?;
    let mut table = digests.clone();
    let mut times = Vec::new();
    for run in 0..RUNS + 1 {
        for payload in [&forth, &pinned] {
            let (seconds, _) = timed(|| codec.apply(ELEMENT, &mut tensor, &mut table, payload))?;
            if run > 0 {
                times.push(seconds);
            }
        }
    }
    assert!(table == *digests, "other digests after the way back");
    row(&name("apply"), bytes, median(times), forth.len(), target);
    row(&name(&format!("  encode on {threads} threads")), bytes, cpu, expected.len(), None);
    if profile == Profile::Wire && density == 0.01 {
        host_baseline(codec, base, fresh, digests)?;
        let mut result = vec![0; bytes];
        let (seconds, ()) = timed(|| codec.download(&tensor, &mut result))?;
        assert!(result == base, "another tensor after the way back");
        row("  copy of one tensor to the host", bytes / 2, seconds, bytes, None);
    }
    Ok(())
}

/// The baseline stays in pinned memory of the host.
fn host_baseline(codec: &mut Codec, base: &[u8], fresh: &Tensor, digests: &DigestTable) -> Result<(), Error> {
    let mut pinned = codec.pinned(base.len())?;
    pinned.copy_from_slice(base);
    let pinned = codec.adopt(pinned);
    for profile in [Profile::Fast, Profile::Wire] {
        let mut times = Vec::new();
        let mut length = 0;
        for _ in 0..3 {
            let (seconds, encoded) = timed(|| codec.encode(ELEMENT, &pinned, fresh, digests, profile))?;
            times.push(seconds);
            length = encoded.payload.len();
        }
        row(&format!("  encode {profile:?}, base on the host"), base.len(), median(times), length, None);
    }
    Ok(())
}
