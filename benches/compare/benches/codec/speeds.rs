//! Bytes per second of one large tensor in every encoding.

use std::hint::black_box;
use std::time::Instant;

use driftless_compare::data::{Pair, Shape, synthetic};
use driftless_compare::peers::{overwrite_zstd, xor_zstd};
use driftless_delta::{Decoder, DigestTable, Element, Encoder, Patch, Pool, Profile, Serial, Source};
use rayon::iter::{IndexedParallelIterator, IntoParallelIterator, ParallelIterator};

use crate::Verdicts;
use crate::cores::Cores;

const ELEMENT: Element = Element::Bf16;
const ROUNDS: usize = 5;

/// Best of some rounds, in seconds: what the machine does when nobody else is on it.
fn seconds<T>(work: impl FnMut() -> T) -> f64 {
    best_of(ROUNDS, work)
}

fn best_of<T>(rounds: usize, mut work: impl FnMut() -> T) -> f64 {
    let round = |_| {
        let start = Instant::now();
        black_box(work());
        start.elapsed().as_secs_f64()
    };
    (0..rounds).map(round).fold(f64::INFINITY, f64::min)
}

pub(crate) fn print(mib: usize, verdicts: &mut Verdicts) {
    let shape = Shape { tensors: 1, elements: mib << 19 };
    let pair = only(synthetic(shape, 0.003, 3));
    full(&pair, verdicts);
    sparse(&pair, 0.003, verdicts);
    sparse(&only(synthetic(shape, 0.012, 3)), 0.012, verdicts);
}

/// Two cores against one, at both densities.
pub(crate) fn cores(mib: usize, verdicts: &mut Verdicts) {
    for density in [0.003, 0.012] {
        let Pair { base, new, .. } = only(synthetic(Shape { tensors: 1, elements: mib << 19 }, density, 3));
        let digests = DigestTable::of(ELEMENT, &base).expect("whole elements");
        println!("speed at {} %, tensor of {mib} MiB", 100.0 * density);
        two_cores(&base, &new, &digests, verdicts);
    }
}

/// What must hold over sizes, at one density.
pub(crate) fn sweep(verdicts: &mut Verdicts) {
    const DENSITY: f64 = 0.003;
    for mib in [64, 256, 1024, 4096] {
        let Pair { base, new, .. } = only(synthetic(Shape { tensors: 1, elements: mib << 19 }, DENSITY, 3));
        let digests = DigestTable::of(ELEMENT, &base).expect("whole elements");
        println!("speed at {} %, GB/s of dense bf16, one core, tensor of {mib} MiB", 100.0 * DENSITY);
        let scan = seconds(|| compare_scan(&base, &new));
        // The peer is slow, and three rounds tell enough of it.
        let mut tensor = base.clone();
        let peer = xor_zstd::encode(&base, &new);
        let peer_applying = best_of(3, || xor_zstd::apply(&mut tensor, &peer));
        drop((tensor, peer));
        let rate = |seconds: f64| base.len() as f64 / 1e9 / seconds;
        println!("  compare scan {:.2}, xor+zstd: apply and hash {:.2}", rate(scan), rate(peer_applying));
        for profile in [Profile::Fast, Profile::Wire] {
            let times = times(&Serial, profile, &base, &new, &digests);
            judge(profile, times, rate, scan, Some(peer_applying), verdicts);
        }
    }
}

fn only(pairs: Vec<Pair>) -> Pair {
    pairs.into_iter().next().expect("one tensor")
}

/// A pool as a caller would bring it, each thread on a processor of its own.
struct Rayon(rayon::ThreadPool);

impl Rayon {
    fn on(cpus: &[usize]) -> Rayon {
        let own = cpus.to_vec();
        let pin = move |thread: usize| Cores::pin(own[thread]).expect("a processor that the process may use");
        let threads = rayon::ThreadPoolBuilder::new().num_threads(cpus.len()).start_handler(pin);
        Rayon(threads.build().expect("threads"))
    }
}

impl Pool for Rayon {
    fn threads(&self) -> usize {
        self.0.current_num_threads()
    }

    fn run(&self, jobs: usize, job: &(dyn Fn(usize) + Sync)) {
        // One job at a time: jobs that stay together keep one thread busy while the other has none left.
        self.0.install(|| (0..jobs).into_par_iter().with_max_len(1).for_each(job));
    }
}

fn full(Pair { new, .. }: &Pair, verdicts: &mut Verdicts) {
    let (mut encoder, mut payload) = (Encoder::new(), Vec::new());
    let encoding = seconds(|| {
        payload.clear();
        encoder.encode_full(&Serial, ELEMENT, new, &mut payload).expect("whole elements")
    });
    let (mut decoder, mut target) = (Decoder::new(), vec![0; new.len()]);
    let decoding = seconds(|| {
        decoder.decode_full(&Serial, ELEMENT, &payload, &mut target).map(drop).expect("own payload")
    });
    assert!(target == *new, "decoded tensor differs");
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
    let peer_streaming = seconds(|| xor_zstd::apply_streamed(&mut tensor, &peer.0, peer.1));
    let peer_encoding = seconds(|| xor_zstd::encode(base, new));
    println!(
        "  xor+zstd: encode {:.2}, apply and hash {:.2}, in blocks of 2 MiB {:.2}",
        rate(peer_encoding),
        rate(peer_applying),
        rate(peer_streaming)
    );
    // Positions have 32 bits.
    if u32::try_from(base.len()).is_ok() {
        let peer = overwrite_zstd::encode(base, new);
        let overwriting = seconds(|| overwrite_zstd::apply(&mut tensor, &peer));
        println!("  overwrite+zstd: {} bytes, apply and hash {:.2}", peer.0.len(), rate(overwriting));
    }
    for profile in [Profile::Fast, Profile::Wire] {
        let times = times(&Serial, profile, base, new, &digests);
        // Its cost follows the changes, the peer's does not: the target is for 0.3 %.
        let target = Some(peer_applying).filter(|_| density <= 0.003);
        judge(profile, times, rate, scan, target, verdicts);
        if profile == Profile::Fast {
            println!(
                "  fast: decode + apply {:.1}x xor+zstd, {:.1}x in blocks",
                peer_applying / times.applying,
                peer_streaming / times.applying
            );
        }
    }
    two_cores(base, new, &digests, verdicts);
}

/// Prints the speeds of a profile, with what was to be reached.
fn judge(
    profile: Profile,
    Times { encoding, applying, .. }: Times,
    rate: impl Fn(f64) -> f64,
    scan: f64,
    peer_applying: Option<f64>,
    verdicts: &mut Verdicts,
) {
    match profile {
        Profile::Fast => {
            print!(
                "  fast: encode {:.2} = {:.2}x scan (at least 0.6: {}), decode + apply {:.1}",
                rate(encoding),
                scan / encoding,
                verdicts.of(scan / encoding >= 0.6),
                rate(applying)
            );
            match peer_applying.map(|peer| peer / applying) {
                Some(ratio) => {
                    println!(" = {ratio:.1}x xor+zstd (at least 5: {})", verdicts.of(ratio >= 5.0))
                }
                None => println!(),
            }
        }
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

/// Two cores against one of them.
fn two_cores(base: &[u8], new: &[u8], digests: &DigestTable, verdicts: &mut Verdicts) {
    let measure = |cores: &Cores| {
        let times = |cpus: &[usize]| times(&Rayon::on(cpus), Profile::Wire, base, new, digests);
        // The thread that asks works too: alone in the one case, between the pool's jobs in the other.
        cores.on_first(|| (times(&cores.cpus[..1]), times(&cores.cpus)))
    };
    match Cores::two().and_then(|cores| Ok((measure(&cores)?, cores))) {
        Ok(((one, two), Cores { cpus: [first, second], what })) => {
            let (encoding, decoding) = (one.encoding / two.encoding, one.decoding / two.decoding);
            println!(
                "  wire, two cores against one: encode {encoding:.2}x (at least 1.8: {}), decode {decoding:.2}x (at least 1.8: {}), decode + apply {:.2}x",
                verdicts.of(encoding >= 1.8),
                verdicts.of(decoding >= 1.8),
                one.applying / two.applying
            );
            println!("    processors {first} and {second}, {what}; a patch is applied by one");
        }
        Err(why) => println!("  wire, two cores against one: not measured, {why}"),
    }
}

/// Best seconds of a profile.
#[derive(Clone, Copy)]
struct Times {
    encoding: f64,
    decoding: f64,
    /// Decoding and applying.
    applying: f64,
}

/// Times the codec with memory that is used again.
fn times(pool: &dyn Pool, profile: Profile, base: &[u8], new: &[u8], digests: &DigestTable) -> Times {
    let source = Source { element: ELEMENT, bytes: base, digests };
    let (mut encoder, mut payload) = (Encoder::new(), Vec::new());
    let encoding = seconds(|| {
        payload.clear();
        encoder.encode(pool, source, new, profile, &mut payload).expect("equal lengths")
    });
    let mut tensor = base.to_vec();
    let (mut decoder, mut patch) = (Decoder::new(), Patch::new());
    let mut decoding = f64::INFINITY;
    let applying = seconds(|| {
        let start = Instant::now();
        decoder.decode(pool, source, &payload, &mut patch).expect("own payload");
        decoding = decoding.min(start.elapsed().as_secs_f64());
        patch.apply_to(&mut tensor).expect("same length");
    });
    assert!(tensor == new, "decoded tensor differs");
    Times { encoding, decoding, applying }
}

/// Counts 64-byte groups that differ: the least any encoder must do.
fn compare_scan(base: &[u8], new: &[u8]) -> usize {
    base.chunks_exact(64).zip(new.chunks_exact(64)).filter(|(a, b)| a != b).count()
}
