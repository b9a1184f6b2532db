//! Publications from device 0, or where there is none from one that is this processor: what hosts get is what
//! lies there, and payloads are those of the host.
#![allow(unsafe_code, reason = "tensors that share memory")]

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use driftless_delta::DigestTable;
use driftless_store::wrap::{Fault, When};
use driftless_store::{Memory, Store};
use driftless_testkit::compiler;
use fail::FailScenario;

use super::super::{Mode, Profile, Publisher, PublisherOptions, Rank, Shard, Slice, Start, Step};
use super::{BaseMemory, Codec, Tensor};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::ids::Version;
use crate::manifest::Manifest;
use crate::replica::Replica;
use crate::run::Run;
use crate::snapshot::{AuxFile, Snapshot, TensorInfo};

mod first;

const RUN: &str = "test";
const MODEL: &str = "policy";
const ROOMY: usize = 1 << 30;

/// Whether there are kernels; says why not.
fn compiled() -> bool {
    let prepared = codec(0).prepare(driftless_delta::Element::Bf16);
    prepared.inspect_err(|error| compiler::missing(error)).is_ok()
}

fn codec(device: usize) -> Codec {
    Codec::open(device).unwrap_or_else(|_| Codec::twin(device, ROOMY))
}

/// Flips a bit of an element of two bytes.
fn flip_bit(codec: &Codec, tensor: &mut Tensor, element: usize, bit: usize) {
    let mut bytes = vec![0; tensor.bytes()];
    codec.download(tensor, &mut bytes).unwrap();
    bytes[2 * element + bit / 8] ^= 1 << (bit % 8);
    codec.copy(&codec.upload(&bytes).unwrap(), tensor).unwrap();
}

/// splitmix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// Tensors by name, in order, as bytes of the host.
#[derive(Clone)]
struct Weights(Vec<(TensorInfo, Vec<u8>)>);

impl Weights {
    /// More than a block of bf16, a pair that is tied, two norms that begin equal, integers, a scalar,
    /// nothing.
    fn new() -> Self {
        let mut random = Random(5);
        let mut weights = Self(Vec::new());
        let mut bf16 = |at: usize| if at.is_multiple_of(2) { random.next() as u8 } else { 0x3c };
        weights.add("a.embed", Dtype::Bf16, &[96, 40], &mut bf16);
        let tied = weights.0[0].1.clone();
        weights.add("b.head", Dtype::Bf16, &[96, 40], |at| tied[at]);
        weights.add("c.empty", Dtype::Bf16, &[0, 4], |_| 0);
        weights.add("d.norm", Dtype::Bf16, &[32], |at| [0x80, 0x3f][at % 2]);
        weights.add("e.norm", Dtype::Bf16, &[32], |at| [0x80, 0x3f][at % 2]);
        weights.add("f.ids", Dtype::I64, &[7], |at| at as u8);
        weights.add("g.scale", Dtype::Bf16, &[], |at| [0x80, 0x3f][at]);
        weights.add("x.large", Dtype::Bf16, &[300, 231], &mut bf16);
        weights
    }

    fn add(&mut self, name: &str, dtype: Dtype, shape: &[u64], byte: impl FnMut(usize) -> u8) {
        let info = TensorInfo { name: name.to_owned(), dtype, shape: shape.to_vec() };
        let bytes = (0..info.byte_len().unwrap() as usize).map(byte).collect();
        self.0.push((info, bytes));
    }

    fn bytes_mut(&mut self, name: &str) -> &mut Vec<u8> {
        &mut self.0.iter_mut().find(|(info, _)| info.name == name).unwrap().1
    }

    /// Moves one element in thirty of the large tensor by one place, and one of each that is tied or a norm.
    fn step(&mut self) {
        self.bytes_mut("x.large").chunks_mut(2).step_by(30).for_each(|element| element[0] ^= 1);
        ["a.embed", "b.head"].into_iter().for_each(|name| self.bytes_mut(name)[64] ^= 1);
        self.bytes_mut("e.norm")[2] ^= 1;
        self.bytes_mut("f.ids")[9] ^= 1;
    }
}

/// The weights on a device. Those with equal bytes and names that begin with `a` and `b` are one tensor.
struct OnDevice {
    infos: Vec<TensorInfo>,
    tensors: Vec<Tensor>,
    codec: Codec,
    copied: AtomicUsize,
}

impl OnDevice {
    fn new(weights: &Weights, codec: Codec) -> Self {
        let mut tensors: Vec<Tensor> = Vec::new();
        for (info, bytes) in &weights.0 {
            tensors.push(match info.name.as_str() {
                // SAFETY: the memory is that of a tensor that lives as long.
                "b.head" if *bytes == weights.0[0].1 => unsafe {
                    Tensor::borrowed(codec.device(), tensors[0].address(), bytes.len())
                },
                _ => codec.upload(bytes).unwrap(),
            });
        }
        let infos = weights.0.iter().map(|(info, _)| info.clone()).collect();
        Self { infos, tensors, codec, copied: AtomicUsize::new(0) }
    }

    fn bytes(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.bytes() as u64).sum()
    }
}

impl Snapshot for OnDevice {
    fn tensors(&self) -> &[TensorInfo] {
        &self.infos
    }
    fn bytes(&self, index: usize) -> Result<Cow<'_, [u8]>> {
        let mut bytes = vec![0; self.tensors[index].bytes()];
        self.copied.fetch_add(bytes.len(), SeqCst);
        self.codec.download(&self.tensors[index], &mut bytes).unwrap();
        Ok(Cow::Owned(bytes))
    }
    fn on_device(&self, index: usize) -> Option<&Tensor> {
        Some(&self.tensors[index])
    }
    fn files(&self) -> &[AuxFile] {
        &[]
    }
}

fn step(version: u64) -> Step {
    Step { trainer_step: version, checkpoint: None }
}

fn options(start: Start, dir: &Path, profile: Profile) -> PublisherOptions {
    let mut options = PublisherOptions::new(RUN, start, dir);
    options.profile = profile;
    options.threads = 3;
    options
}

/// What a host makes of a version in `dir`.
fn assert_host_has(store: &Arc<dyn Store>, dir: &Path, version: u64, weights: &Weights) {
    let run = Run::open(store.clone(), RUN).unwrap();
    let mut replica = Replica::open(dir).unwrap();
    replica.advance(&run, MODEL, Version(version), None).unwrap();
    let checkpoint = replica.checkpoint().unwrap();
    for (index, (info, bytes)) in weights.0.iter().enumerate() {
        assert_eq!(checkpoint.tensors()[index], *info);
        assert!(checkpoint.bytes(index).unwrap() == *bytes, "version {version}: {} differs", info.name);
    }
}

struct World {
    store: Arc<dyn Store>,
    faults: Arc<Fault>,
    dir: tempfile::TempDir,
    publisher: Publisher,
    codec: Codec,
    weights: Weights,
    version: u64,
}

impl World {
    /// A publisher that encodes on a device, at version 1: the first that was a delta.
    fn new(profile: Profile, memory: BaseMemory) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let faults = Arc::new(Fault::new(Arc::new(Memory::new())));
        let store: Arc<dyn Store> = faults.clone();
        let options = options(Start::NewRun, &dir.path().join("baseline"), profile);
        let mut publisher = Publisher::open(store.clone(), options).unwrap();
        let codec = codec(0);
        publisher.encode_on(codec.fork().unwrap(), memory).unwrap();
        let mut world = Self { store, faults, dir, publisher, codec, weights: Weights::new(), version: 0 };
        let model = world.on_device();
        world.publisher.publish(&model, step(0), Mode::Delta).unwrap();
        world.publish("first delta", None);
        world
    }

    fn on_device(&self) -> OnDevice {
        OnDevice::new(&self.weights, self.codec.fork().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Publishes the next step, and compares what hosts make of it. Everything is encoded on the device, or
    /// for this reason the large tensor is not.
    fn publish(&mut self, what: &str, because: Option<&str>) {
        self.weights.step();
        self.version += 1;
        let model = self.on_device();
        let published = self.publisher.publish(&model, step(self.version), Mode::Delta);
        assert_eq!(published.unwrap_or_else(|error| panic!("{what}: {error:?}")).version.0, self.version);
        let used = self.publisher.device_use();
        println!("{what}: version {}, {used:?}", self.version);
        assert_eq!(used.device_bytes + used.host_bytes, model.bytes());
        assert_eq!(model.copied.load(SeqCst) as u64, used.host_bytes, "{what}");
        match because {
            None => assert_eq!((used.host_bytes, &used.host_because), (0, &None), "{what}"),
            Some(because) => {
                let found = used.host_because.as_deref().unwrap_or_default();
                assert!(found.contains(because) && used.host_bytes > 100_000, "{what}: {used:?}");
            }
        }
        assert_host_has(&self.store, &self.path("old"), self.version, &self.weights);
        assert_host_has(
            &self.store,
            &self.path(&format!("new-{}", self.version)),
            self.version,
            &self.weights,
        );
    }

    /// Flips a bit of an element of the large tensor's base.
    fn flip_base(&mut self, element: usize, bit: usize) {
        let kept = self.publisher.devices.bases.get_mut(&("x.large".to_owned(), 0)).unwrap();
        flip_bit(&self.codec, &mut Arc::get_mut(kept).unwrap().tensor, element, bit);
    }
}

fn manifests(store: &Arc<dyn Store>, newest: u64) -> Vec<Manifest> {
    let run = Run::open(store.clone(), RUN).unwrap();
    (0..=newest).map(|version| run.get(MODEL, Version(version)).unwrap().manifest).collect()
}

#[test]
fn publications_from_a_device_are_those_of_the_host() {
    let _turn = FailScenario::setup();
    if !compiled() {
        return;
    }
    for (profile, memory) in [(Profile::Wire, BaseMemory::Device), (Profile::Fast, BaseMemory::Host)] {
        let mut world = World::new(profile, memory);
        world.publish("second", None);
        // Norms that were equal are not any more, and the tied pair is untied.
        world.weights.bytes_mut("b.head")[4] ^= 1;
        world.publish("untied", None);
        let dir = tempfile::tempdir().unwrap();
        let store: Arc<dyn Store> = Arc::new(Memory::new());
        let mut host = Publisher::open(store.clone(), options(Start::NewRun, dir.path(), profile)).unwrap();
        let mut weights = Weights::new();
        for version in 0..=world.version {
            if version > 0 {
                weights.step();
            }
            if version == 3 {
                weights.bytes_mut("b.head")[4] ^= 1;
            }
            struct Host<'a>(&'a Weights, Vec<TensorInfo>);
            impl Snapshot for Host<'_> {
                fn tensors(&self) -> &[TensorInfo] {
                    &self.1
                }
                fn bytes(&self, index: usize) -> Result<Cow<'_, [u8]>> {
                    Ok(Cow::Borrowed(&self.0.0[index].1))
                }
                fn files(&self) -> &[AuxFile] {
                    &[]
                }
            }
            let infos = weights.0.iter().map(|(info, _)| info.clone()).collect();
            host.publish(&Host(&weights, infos), step(version), Mode::Delta).unwrap();
        }
        for (found, expected) in manifests(&world.store, 3).iter().zip(manifests(&store, 3)) {
            assert_eq!(found.tensors, expected.tensors);
            let digests = |manifest: &Manifest| manifest.objects.iter().map(|o| o.blake3).collect::<Vec<_>>();
            assert_eq!(digests(found), digests(&expected), "version {:?}", found.version);
        }
    }
}

#[test]
fn a_bit_that_flips_in_a_base_on_the_device_reaches_no_host() {
    let _turn = FailScenario::setup();
    if !compiled() {
        return;
    }
    for memory in [BaseMemory::Device, BaseMemory::Host] {
        let mut world = World::new(Profile::Wire, memory);
        for (name, bit) in [("sign", 15), ("exponent", 13), ("mantissa", 6), ("last place", 0)] {
            // One that changes, and one in the last block that does not.
            for element in [60, 69_001] {
                world.flip_base(element, bit);
                world.publish(
                    &format!("{memory:?}, {name} of element {element}"),
                    Some("a bit flipped in the base"),
                );
            }
        }
        world.publish("sound again", None);
        // What the trainer means to change is what the base rotted to.
        world.flip_base(61, 3);
        world.weights.bytes_mut("x.large")[122] ^= 1 << 3;
        world.publish("shared", Some("a bit flipped in the base"));
        // The digests, of a block that the tensor has and of another's.
        for block in [0, 1] {
            let kept = world.publisher.devices.bases.get_mut(&("x.large".to_owned(), 0)).unwrap();
            let kept = Arc::get_mut(kept).unwrap();
            let mut bytes = kept.digests.to_bytes();
            bytes[16 * block + 5] ^= 4;
            kept.digests = DigestTable::from_bytes(&bytes).unwrap();
            world.publish("digests", Some("a bit flipped in the digests"));
        }
        world.publish("sound again", None);
    }
}

#[test]
fn a_publication_that_fails_leaves_the_base() {
    let _turn = FailScenario::setup();
    if !compiled() {
        return;
    }
    let mut world = World::new(Profile::Wire, BaseMemory::Device);
    let mut failed = 0;
    for call in 0..8 {
        let before = world.weights.clone();
        world.weights.step();
        world.faults.arm(call, 1, When::Before);
        let published = world.publisher.publish(&world.on_device(), step(9), Mode::Delta);
        world.faults.disarm();
        if published.is_ok() {
            world.version += 1;
        } else {
            failed += 1;
            world.weights = before;
        }
        world.publish(&format!("behind a failure of call {call}"), None);
    }
    assert!(failed > 1, "{failed}");
}

#[test]
fn an_element_that_is_not_finite_is_refused_and_named() {
    let _turn = FailScenario::setup();
    if !compiled() {
        return;
    }
    let mut world = World::new(Profile::Wire, BaseMemory::Device);
    world.weights.bytes_mut("x.large")[2 * 66_001..][..2].copy_from_slice(&[0x80, 0x7f]);
    let refused = world.publisher.publish(&world.on_device(), step(2), Mode::Delta).unwrap_err();
    assert!(matches!(&refused, Error::NotFinite { first: 66_001, count: 1, .. }), "{refused:?}");
    world.weights.bytes_mut("x.large")[2 * 66_001..][..2].copy_from_slice(&[0, 0]);
    world.publish("finite", None);
    world.publisher.options.allow_non_finite = true;
    world.weights.bytes_mut("x.large")[2 * 66_001..][..2].copy_from_slice(&[0x80, 0x7f]);
    world.weights.step();
    let model = world.on_device();
    world.publisher.publish(&model, step(3), Mode::Delta).unwrap();
    assert_eq!(world.publisher.device_use().device_bytes, model.bytes());
}

#[test]
fn a_tensor_that_is_written_to_before_the_end_has_no_base() {
    let _turn = FailScenario::setup();
    if !compiled() {
        return;
    }
    let mut world = World::new(Profile::Wire, BaseMemory::Device);
    world.weights.step();
    world.version += 1;
    let model = world.on_device();
    let last = model.tensors.last().unwrap();
    // SAFETY: the tensor lives until the publication has ended.
    let mut last = unsafe { Tensor::borrowed(0, last.address(), last.bytes()) };
    let writer = world.codec.fork().unwrap();
    let writes = Box::new(move |progress: super::super::Progress| {
        if progress.tensors == progress.tensors_total {
            flip_bit(&writer, &mut last, 5, 3);
        }
    });
    world.publisher.on_progress(writes);
    world.publisher.publish(&model, step(world.version), Mode::Delta).unwrap();
    let because = world.publisher.device_use().host_because.clone().unwrap();
    assert!(because.contains("`x.large` was written to"), "{because}");
    assert!(!world.publisher.devices.bases.contains_key(&("x.large".to_owned(), 0)));
    world.publisher.on_progress(Box::new(|_| ()));
    assert_host_has(&world.store, &world.path("old"), world.version, &world.weights);
    // Of the tensor as it was, from the baseline.
    world.publish("again", None);
}

#[test]
fn what_the_device_cannot_take_is_encoded_on_the_host() {
    let _turn = FailScenario::setup();
    if !compiled() {
        return;
    }
    // Room for the tensors alone: the base is in the host's memory, and there is none to encode in.
    let tensors =
        Weights::new().0.iter().map(|(_, bytes)| bytes.len().next_multiple_of(16) + 16).sum::<usize>();
    let (store, dir): (Arc<dyn Store>, _) = (Arc::new(Memory::new()), tempfile::tempdir().unwrap());
    let mut publisher =
        Publisher::open(store.clone(), options(Start::NewRun, &dir.path().join("base"), Profile::Wire))
            .unwrap();
    let codec = Codec::twin(0, tensors + (40 << 10));
    publisher.encode_on(codec.fork().unwrap(), BaseMemory::Device).unwrap();
    let mut weights = Weights::new();
    for version in 0..3 {
        let model = OnDevice::new(&weights, codec.fork().unwrap());
        publisher.publish(&model, step(version), Mode::Delta).unwrap();
        let used = publisher.device_use();
        println!("{used:?}");
        assert!(used.host_bytes > 100_000, "{used:?}");
        drop(model);
        assert_host_has(&store, &dir.path().join("host"), version, &weights);
        weights.step();
    }
    let because = publisher.device_use().host_because.clone().unwrap();
    assert!(because.contains("out of memory"), "{because}");

    // A version in full and an anchor are the host's, and the device goes on behind them.
    let mut world = World::new(Profile::Wire, BaseMemory::Device);
    world.publisher.options.anchor_every = Some(2);
    world.weights.step();
    world.version += 1;
    let model = world.on_device();
    assert!(world.publisher.publish(&model, step(2), Mode::Delta).unwrap().anchor);
    assert_eq!(world.publisher.device_use().device_bytes, 0);
    world.publish("behind an anchor", None);

    // A type, a device that was not added, and an address that kernels cannot read from.
    world.weights.step();
    world.version += 1;
    let mut model = world.on_device();
    let last = model.tensors.len() - 1;
    let moved = [&[0; 2][..], &world.weights.0[last].1].concat();
    let moved = model.codec.upload(&moved).unwrap();
    // SAFETY: the memory is that of `moved`, which lives as long.
    model.tensors[last] = unsafe { Tensor::borrowed(0, moved.address() + 2, moved.bytes() - 2) };
    world.publisher.publish(&model, step(world.version), Mode::Delta).unwrap();
    let used = world.publisher.device_use();
    assert!(used.host_bytes > 100_000, "{used:?}");
    assert_host_has(&world.store, &world.path("old"), world.version, &world.weights);
    let because = |world: &World| world.publisher.device_use().host_because.clone().unwrap();
    assert!(because(&world).contains("multiple of 16"), "{}", because(&world));
    let elsewhere = OnDevice::new(&world.weights, Codec::twin(97, ROOMY));
    world.publisher.publish(&elsewhere, step(9), Mode::Delta).unwrap();
    assert!(because(&world).contains("device 97 was not added"), "{}", because(&world));
    world.publisher.options.allow_layout_change = true;
    world.weights.add("y.double", Dtype::F64, &[3], |at| at as u8);
    let doubles = OnDevice::new(&world.weights, world.codec.fork().unwrap());
    world.publisher.publish(&doubles, step(10), Mode::Delta).unwrap();
    assert!(because(&world).contains("`y.double` is F64"), "{}", because(&world));
}

/// A rank's half of the large tensor on a device of its own, and on rank 0 all of the rest.
struct Half {
    whole: OnDevice,
    slices: Vec<Slice>,
    places: Vec<Tensor>,
}

impl Half {
    fn new(weights: &Weights, codec: Codec, rank: u32, cut: u64) -> Self {
        let whole = OnDevice::new(weights, codec);
        let (mut slices, mut places) = (Vec::new(), Vec::new());
        for (index, info) in whole.infos.iter().enumerate() {
            let elements = info.elements().unwrap();
            let range = match (info.name.as_str(), rank) {
                ("x.large", 0) => 0..cut,
                ("x.large", _) => cut..elements,
                (_, 0) => 0..elements,
                _ => continue,
            };
            let size = info.dtype.size();
            let bytes = &weights.0[index].1[(range.start * size) as usize..(range.end * size) as usize];
            places.push(whole.codec.upload(bytes).unwrap());
            slices.push(Slice {
                tensor: info.clone(),
                start: range.start,
                elements: range.end - range.start,
            });
        }
        Self { whole, slices, places }
    }
}

impl Shard for Half {
    fn slices(&self) -> &[Slice] {
        &self.slices
    }
    fn bytes(&self, index: usize) -> Result<Cow<'_, [u8]>> {
        let mut bytes = vec![0; self.places[index].bytes()];
        self.whole.codec.download(&self.places[index], &mut bytes).unwrap();
        Ok(Cow::Owned(bytes))
    }
    fn on_device(&self, index: usize) -> Option<&Tensor> {
        Some(&self.places[index])
    }
    fn files(&self) -> &[AuxFile] {
        &[]
    }
}

#[test]
fn ranks_publish_from_their_devices_and_notice_flipped_bits() {
    let _turn = FailScenario::setup();
    if !compiled() {
        return;
    }
    // A slice may begin where digests can be made of it on the device, or not.
    for (cut, on_device) in [(66_002, true), (66_001, false)] {
        let (store, dir): (Arc<dyn Store>, _) = (Arc::new(Memory::new()), tempfile::tempdir().unwrap());
        let mut publishers: Vec<Publisher> = (0..2)
            .map(|rank| {
                let start = if rank == 0 { Start::NewRun } else { Start::Resume };
                let path = dir.path().join(format!("rank-{rank}"));
                let mut publisher =
                    Publisher::open(store.clone(), options(start, &path, Profile::Wire)).unwrap();
                publisher.encode_on(codec(rank), BaseMemory::Device).unwrap();
                publisher
            })
            .collect();
        let mut weights = Weights::new();
        // The bit of an element of a rank's slice.
        for (version, flip) in
            (0..).zip([None, None, Some((0, 60, 15)), Some((1, 3001, 6)), Some((1, 28, 0)), None])
        {
            if let Some((rank, element, bit)) = flip {
                let start = if rank == 0 { 0 } else { cut };
                let bases = &mut publishers[rank].devices.bases;
                if let Some(kept) = bases.get_mut(&("x.large".to_owned(), start)) {
                    flip_bit(&codec(rank), &mut Arc::get_mut(kept).unwrap().tensor, element, bit);
                }
            }
            std::thread::scope(|scope| {
                for (rank, publisher) in (0..).zip(&mut publishers) {
                    let weights = &weights;
                    scope.spawn(move || {
                        let half = Half::new(weights, codec(rank as usize), rank, cut);
                        let name = Rank { rank, ranks: 2, attempt: format!("job.{version}") };
                        let long = Duration::from_secs(120);
                        publisher.publish_with_ranks(&half, step(version), Mode::Delta, &name, long).unwrap();
                    });
                }
            });
            let [first, second] = [0, 1].map(|rank| publishers[rank].device_use().clone());
            println!("cut at {cut}, version {version}, {flip:?}: {first:?}, {second:?}");
            assert_host_has(&store, &dir.path().join("host"), version, &weights);
            assert_host_has(&store, &dir.path().join(format!("new-{version}")), version, &weights);
            let expected = version > 0 && on_device && !matches!(flip, Some((1, ..)));
            assert_eq!(second.device_bytes > 0, expected, "{second:?}");
            let expected = version > 0 && !matches!(flip, Some((0, ..)));
            assert_eq!(first.device_bytes > 100_000, expected, "{first:?}");
            weights.step();
        }
    }
}
