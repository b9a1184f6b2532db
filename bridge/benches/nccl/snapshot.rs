//! A whole snapshot from a trainer's GPU to a receiver's: in full over NCCL, and as a delta through shared
//! memory, both from HBM to HBM.
//!
//! The model has the shapes of Qwen3-8B, or of its first layers. Every tensor is the beginning of one pattern
//! of weights of a normal kind, so tensors of one shape are alike; coding goes tensor by tensor and does not
//! see that. `full` leaves the deltas out: with NCCL_P2P_DISABLE=1 and NCCL_SHM_DISABLE=1 it shows what NCCL
//! does between hosts that have nothing but TCP.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::Instant;

use cudarc::driver::result;
use driftless_bridge::push::nccl::{NcclOptions, NcclRoot, Rendezvous, RendezvousOptions};
use driftless_bridge::push::plan;
use driftless_delta::cuda::{Codec, Tensor};
use driftless_delta::{DigestTable, Element, Profile};
use driftless_transport::snapshot::TensorInfo;
use driftless_transport::{Dtype, Snapshot as _};

use crate::memory::Arena;
use crate::python::nccl;
use crate::{check_environment, median};

const ELEMENT: Element = Element::Bf16;
const TURNS: usize = 7;
const SHM: &str = "/dev/shm/driftless-bench-snapshot";
/// More than the payloads of the densest snapshot.
const SHM_BYTES: usize = 2 << 30;

/// With so many layers; in full, and as deltas in which so many percent changed.
pub(crate) fn run(python: &str, layers: &[u64], percents: &[f64]) {
    check_environment();
    for &layers in layers {
        let infos = shapes(layers);
        let bytes: u64 = infos.iter().map(|info| info.byte_len().unwrap()).sum();
        println!(
            "\n{layers} layers, {} tensors, {bytes} bytes; medians of {TURNS} turns (least to most), ms",
            infos.len()
        );
        full(python, &infos);
        for &percent in percents {
            for profile in [Profile::Fast, Profile::Wire] {
                delta(&infos, layers, percent / 100.0, profile);
            }
        }
    }
}

/// The shapes of Qwen3-8B with this many layers.
fn shapes(layers: u64) -> Vec<TensorInfo> {
    let mut infos = Vec::new();
    let mut add = |name: String, shape: &[u64]| {
        infos.push(TensorInfo { name, dtype: Dtype::Bf16, shape: shape.to_vec() });
    };
    add("model.embed_tokens.weight".into(), &[151_936, 4096]);
    add("lm_head.weight".into(), &[151_936, 4096]);
    add("model.norm.weight".into(), &[4096]);
    for layer in 0..layers {
        let parts: [(&str, &[u64]); 11] = [
            ("input_layernorm", &[4096]),
            ("post_attention_layernorm", &[4096]),
            ("self_attn.q_norm", &[128]),
            ("self_attn.k_norm", &[128]),
            ("self_attn.q_proj", &[4096, 4096]),
            ("self_attn.k_proj", &[1024, 4096]),
            ("self_attn.v_proj", &[1024, 4096]),
            ("self_attn.o_proj", &[4096, 4096]),
            ("mlp.gate_proj", &[12_288, 4096]),
            ("mlp.up_proj", &[12_288, 4096]),
            ("mlp.down_proj", &[4096, 12_288]),
        ];
        for (part, shape) in parts {
            add(format!("model.layers.{layer}.{part}.weight"), shape);
        }
    }
    infos
}

fn full(python: &str, infos: &[TensorInfo]) {
    let (library, version) = nccl(python);
    let mut options = NcclOptions::new(library);
    options.version = Some(version);
    let mut root = NcclRoot::open(&options).unwrap();
    let rendezvous = Rendezvous::start(([127, 0, 0, 1], 0).into(), RendezvousOptions::default()).unwrap();
    let mut peers = crate::alone::join(&mut root, &rendezvous, python, "snapshot", 2);
    let arena = Arena::new(infos.to_vec(), true);
    let buckets = plan(infos, 1 << 30).unwrap();
    let times = (0..=TURNS).map(|_| crate::alone::push(&mut root, &mut peers, &arena, &buckets)).skip(1);
    let (middle, least, most) = median(times.map(|seconds| seconds * 1e3).collect());
    println!(
        "full over NCCL, {} buckets: moved and received in {middle:.1} ({least:.1} to {most:.1}), which is the pause",
        buckets.len()
    );
}

fn delta(infos: &[TensorInfo], layers: u64, density: f64, profile: Profile) {
    let (base, new) = pair(pattern_bytes(infos), density);
    let tensors = [upload(0, infos, &base), upload(0, infos, &new)];
    let digests = [digests(infos, &base), digests(infos, &new)];
    drop((base, new));
    let mut shared = shared();
    let program = std::env::current_exe().unwrap();
    let words = ["receiver".to_owned(), layers.to_string(), density.to_string()];
    let mut receiver =
        Command::new(program).args(words).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (mut commands, answers) = (receiver.stdin.take().unwrap(), receiver.stdout.take().unwrap());
    let mut answers = BufReader::new(answers).lines().map(Result::unwrap);
    assert_eq!(answers.next().unwrap(), "ready");
    let mut codec = Codec::open(0).unwrap();
    codec.prepare(ELEMENT).unwrap();
    let (mut encode, mut moved, mut apply, mut staged, mut piped) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut length = 0;
    for turn in 0..2 * TURNS + 2 {
        let (from, to) = (turn % 2, (turn + 1) % 2);
        let at_once = turn > TURNS;
        let begin = Instant::now();
        let (mut encoding, mut moving, mut at, mut told) = (0.0, 0.0, 0, String::new());
        for (index, digests) in digests[from].iter().enumerate() {
            let [old, fresh] = [from, to].map(|which| tensors[which].on_device(index).unwrap());
            let start = Instant::now();
            let encoded = codec.encode(ELEMENT, old, fresh, digests, profile).unwrap();
            encoding += start.elapsed().as_secs_f64();
            let start = Instant::now();
            shared[at..at + encoded.payload.len()].copy_from_slice(encoded.payload);
            let line = format!("{index} {at} {}\n", encoded.payload.len());
            at += encoded.payload.len();
            moving += start.elapsed().as_secs_f64();
            if at_once {
                commands.write_all(line.as_bytes()).unwrap();
            } else {
                told += &line;
            }
        }
        length = at;
        commands.write_all(format!("{told}end\n").as_bytes()).unwrap();
        let applying: f64 = answers.next().unwrap().parse().unwrap();
        let total = begin.elapsed().as_secs_f64();
        match (turn, at_once) {
            // The first of each allocates.
            (0, _) => {}
            (_, true) if turn == TURNS + 1 => {}
            (_, true) => piped.push(total * 1e3),
            (_, false) => {
                encode.push(encoding * 1e3);
                moved.push(moving * 1e3);
                apply.push(applying * 1e3);
                staged.push(total * 1e3);
            }
        }
    }
    drop(commands);
    assert_eq!(answers.next().unwrap(), "same", "the receiver's weights are not the trainer's");
    assert!(receiver.wait().unwrap().success());
    let show = |times: Vec<f64>| {
        let (middle, least, most) = median(times);
        format!("{middle:.1} ({least:.1} to {most:.1})")
    };
    println!(
        "delta {profile:?} {:.1} %, {length} bytes: encode {}, move {}, apply {} (the pause), together {}; tensor by tensor at once {}",
        density * 100.0,
        show(encode),
        show(moved),
        show(apply),
        show(staged),
        show(piped)
    );
    std::fs::remove_file(SHM).unwrap();
}

/// The other process: applies what it is told of, and says how long that took. At the end it looks whether it
/// has the trainer's weights.
pub(crate) fn receive(layers: &str, density: &str) {
    let infos = shapes(layers.parse().unwrap());
    let (base, new) = pair(pattern_bytes(&infos), density.parse().unwrap());
    let arena = upload(1, &infos, &base);
    let mut tables = digests(&infos, &base);
    let shared = shared();
    let mut codec = Codec::open(1).unwrap();
    codec.prepare(ELEMENT).unwrap();
    println!("ready");
    let (mut applying, mut turns) = (0.0, 0);
    for line in std::io::stdin().lines().map(Result::unwrap) {
        let words: Vec<usize> = line.split(' ').filter_map(|word| word.parse().ok()).collect();
        let [index, at, length] = words[..] else {
            println!("{applying}");
            (applying, turns) = (0.0, turns + 1);
            continue;
        };
        let place = arena.on_device(index).unwrap();
        // SAFETY: the arena's memory, which outlives the call; nothing else uses it meanwhile.
        let mut tensor = unsafe { Tensor::borrowed(1, place.address(), place.bytes()) };
        let begin = Instant::now();
        codec.apply(ELEMENT, &mut tensor, &mut tables[index], &shared[at..at + length]).unwrap();
        applying += begin.elapsed().as_secs_f64();
    }
    let expected = if turns % 2 == 0 { &base } else { &new };
    let same = infos.iter().enumerate().all(|(index, info)| {
        let mut found = vec![0; info.byte_len().unwrap() as usize];
        codec.download(arena.on_device(index).unwrap(), &mut found).unwrap();
        found == expected[..found.len()]
    });
    println!("{}", if same { "same" } else { "other" });
}

/// Tensors on a device, each the beginning of the pattern.
fn upload(device: usize, infos: &[TensorInfo], pattern: &[u8]) -> Arena {
    let arena = Arena::on(device, infos.to_vec(), true);
    let address = |index| arena.on_device(index).unwrap().address();
    let first = address(0);
    for (index, info) in infos.iter().enumerate() {
        let address = address(index);
        let length = info.byte_len().unwrap() as usize;
        // SAFETY: addresses of the arena; the first tensor is the largest. The copies have ended when the
        // context has.
        unsafe {
            if index == 0 {
                result::memcpy_htod_sync(address, &pattern[..length]).unwrap();
            } else {
                result::memcpy_dtod_sync(address, first, length).unwrap();
            }
        }
    }
    result::ctx::synchronize().unwrap();
    arena
}

/// The digests of each tensor; tensors of one size are alike.
fn digests(infos: &[TensorInfo], pattern: &[u8]) -> Vec<DigestTable> {
    let lengths: std::collections::BTreeSet<_> = infos.iter().map(|info| info.byte_len().unwrap()).collect();
    let tables: BTreeMap<_, _> = std::thread::scope(|scope| {
        let of = |length: u64| DigestTable::of(ELEMENT, &pattern[..length as usize]).unwrap();
        let threads: Vec<_> =
            lengths.into_iter().map(|length| (length, scope.spawn(move || of(length)))).collect();
        threads.into_iter().map(|(length, thread)| (length, thread.join().unwrap())).collect()
    });
    infos.iter().map(|info| tables[&info.byte_len().unwrap()].clone()).collect()
}

fn pattern_bytes(infos: &[TensorInfo]) -> usize {
    infos.iter().map(|info| info.byte_len().unwrap()).max().unwrap() as usize
}

fn shared() -> memmap2::MmapMut {
    let mut options = std::fs::OpenOptions::new();
    let file = options.read(true).write(true).create(true).truncate(false).open(SHM).unwrap();
    file.set_len(SHM_BYTES as u64).unwrap();
    // SAFETY: this bench's own file; one process writes a part before it tells the other of it.
    unsafe { memmap2::MmapMut::map_mut(&file) }.unwrap()
}

/// splitmix64 of `index`.
fn draw(index: u64) -> u64 {
    let z = index.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Weights of a normal kind, and what a step makes of them: small ones change more often; most by one ulp. As
/// the codec's bench has them.
fn pair(bytes: usize, density: f64) -> (Vec<u8>, Vec<u8>) {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let (mut base, mut new) = (vec![0; bytes], vec![0; bytes]);
    let part = bytes.div_ceil(threads).next_multiple_of(2);
    std::thread::scope(|scope| {
        for (at, (base, new)) in base.chunks_mut(part).zip(new.chunks_mut(part)).enumerate() {
            scope.spawn(move || {
                for (i, (base, new)) in base.chunks_exact_mut(2).zip(new.chunks_exact_mut(2)).enumerate() {
                    let (old, fresh) = element(((at * part) / 2 + i) as u64, density);
                    base.copy_from_slice(&old.to_le_bytes());
                    new.copy_from_slice(&fresh.to_le_bytes());
                }
            });
        }
    });
    (base, new)
}

fn element(index: u64, density: f64) -> (u16, u16) {
    let bits = draw(index);
    // Six uniform numbers of ten bits are near enough to a normal one.
    let sum: u64 = (0..6).map(|k| bits >> (10 * k) & 1023).sum();
    let weight = (sum as f32 - 3069.0) * 2.8e-5;
    let old = (weight.to_bits() >> 16) as u16;
    let chance = draw(index ^ 0x5555_0000_0000_0000);
    let small = 0.02 / (0.005 + weight.abs());
    let hit = ((chance >> 40) as f64) < density * f64::from(small) * 0.8 * 16_777_216.0;
    let step = if chance & 31 == 0 { 2 } else { 1 };
    let moved = if chance & 32 == 0 { old.wrapping_add(step) } else { old.wrapping_sub(step) };
    (old, if hit { moved } else { old })
}
