//! Bits that rot under an unchanged size and date: a host holds what was given to the publisher, bit for bit,
//! or is told why not.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use driftless_store::{Memory, Store};
use driftless_testkit::publications::{MODEL, RUN, Weights, assert_reader, assert_same, options, step};
use driftless_testkit::random::Random;
use driftless_transport::publish::{Mode, Profile, PublisherOptions, Rank, Shard, Slice, Start};
use driftless_transport::{
    Checkpoint, Dtype, Error, Publisher, Replica, Result, Run, Snapshot as _, Version,
};
use fail::FailScenario;

/// Where a bit of a bfloat16 is, and what it says.
const BITS: [(&str, u8); 4] = [("sign", 15), ("exponent", 13), ("mantissa", 6), ("last place", 0)];
const PROFILES: [Profile; 2] = [Profile::Wire, Profile::Fast];

/// Three blocks of a tensor and small ones; every element is finite.
fn weights() -> Weights {
    let mut random = Random(23);
    let mut weights = Weights::small(1);
    weights.set("x.large", Dtype::Bf16, &[300, 451], |i| if i % 2 == 0 { random.next() as u8 } else { 0x3c });
    weights
}

/// Moves one element in thirty by one place, among them those that divide by 60.
fn stepped(weights: &Weights) -> Weights {
    let mut next = weights.clone();
    next.tensor_mut("x.large").chunks_mut(2).step_by(30).for_each(|element| element[0] ^= 1);
    next.tensor_mut("g.up")[4] ^= 1;
    next
}

/// Flips a bit of a file; its size and dates stay.
fn flip(path: &Path, byte: u64, bit: u8) {
    let date = fs::metadata(path).unwrap().modified().unwrap();
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mut read = [0];
    file.read_exact_at(&mut read, byte).unwrap();
    file.write_all_at(&[read[0] ^ 1 << bit], byte).unwrap();
    file.set_modified(date).unwrap();
}

/// Flips a bit of an element of `x.large` in a checkpoint directory.
fn flip_weight(dir: &Path, element: u64, bit: u8) {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let place = checkpoint.place(checkpoint.position("x.large").unwrap()).unwrap();
    flip(place.path, place.offset + 2 * element + u64::from(bit / 8), bit % 8);
}

struct World {
    store: Arc<dyn Store>,
    dir: tempfile::TempDir,
    options: PublisherOptions,
    weights: Weights,
    version: u64,
}

impl World {
    fn new(profile: Profile, anchor_every: Option<u64>) -> (Self, Publisher) {
        let dir = tempfile::tempdir().unwrap();
        let mut options = options(Start::NewRun, &dir.path().join("baseline"));
        (options.profile, options.anchor_every) = (profile, anchor_every);
        let store: Arc<dyn Store> = Arc::new(Memory::new());
        let mut publisher = Publisher::open(store.clone(), options.clone()).unwrap();
        options.start = Start::Resume;
        let weights = weights();
        publisher.publish(&weights, step(0), Mode::Delta).unwrap();
        publisher.wait().unwrap();
        (Self { store, dir, options, weights, version: 0 }, publisher)
    }

    fn publisher(&self) -> Publisher {
        Publisher::open(self.store.clone(), self.options.clone()).unwrap()
    }

    fn baseline(&self) -> PathBuf {
        self.options.baseline_dir.clone()
    }

    /// Publishes the next step and compares what hosts make of it.
    fn publish(&mut self, publisher: &mut Publisher, what: &str) {
        self.weights = stepped(&self.weights);
        self.version += 1;
        let published = publisher.publish(&self.weights, step(self.version), Mode::Delta);
        assert_eq!(published.unwrap_or_else(|error| panic!("{what}: {error:?}")).version.0, self.version);
        publisher.wait().unwrap();
        println!("{what}: version {}", self.version);
        assert_reader(&self.store, &self.dir.path().join("old"), self.version, &self.weights);
        assert_reader(
            &self.store,
            &self.dir.path().join(format!("new-{}", self.version)),
            self.version,
            &self.weights,
        );
        assert_same(&Checkpoint::open(self.baseline()).unwrap(), &self.weights);
    }
}

#[test]
fn a_bit_that_rots_in_the_publishers_weights_reaches_no_host() {
    let _turn = FailScenario::setup();
    for profile in PROFILES {
        for anchor_every in [None, Some(1)] {
            let (mut world, mut publisher) = World::new(profile, anchor_every);
            world.publish(&mut publisher, "sound");
            // Elements that change, and that do not, in the first block and the last.
            for ((name, bit), element) in BITS.iter().flat_map(|bit| [(bit, 60), (bit, 61), (bit, 135_000)]) {
                flip_weight(&world.baseline(), element, *bit);
                let what = format!("{profile:?}, anchors {anchor_every:?}, {name} of element {element}");
                world.publish(&mut publisher, &what);
                if element == 60 {
                    // The same for a publisher that starts with it.
                    drop(publisher);
                    flip_weight(&world.baseline(), element, *bit);
                    publisher = world.publisher();
                    world.publish(&mut publisher, &format!("{what}, restarted"));
                }
            }
        }
    }
}

#[test]
fn rotten_element_that_the_new_checkpoint_shares_is_noticed() {
    let _turn = FailScenario::setup();
    let (mut world, mut publisher) = World::new(Profile::Wire, None);
    world.publish(&mut publisher, "sound");
    flip_weight(&world.baseline(), 61, 3);
    // What the trainer means to change is what the baseline rotted to: there seems to be nothing to send.
    world.weights.tensor_mut("x.large")[2 * 61] ^= 1 << 3;
    let published = publisher.publish(&world.weights, step(2), Mode::Delta).unwrap();
    assert_eq!(published.changed, 1);
    assert_reader(&world.store, &world.dir.path().join("old"), 2, &world.weights);
}

#[test]
fn a_bit_that_rots_in_the_publishers_state_reaches_no_host() {
    let _turn = FailScenario::setup();
    for profile in PROFILES {
        let (mut world, mut publisher) = World::new(profile, Some(2));
        for name in ["digests", "state.json", "manifest"] {
            let path = world.baseline().join(".driftless").join(name);
            for quarter in 0..=4 {
                drop(publisher);
                let at = (fs::metadata(&path).unwrap().len() - 1) * quarter / 4;
                flip(&path, at, (at % 7) as u8);
                // The weights as well, so that the digests are all there is to go by.
                flip_weight(&world.baseline(), 61, 9);
                publisher = world.publisher();
                world.publish(&mut publisher, &format!("{profile:?}, {name}, byte {at}"));
            }
        }
    }
}

#[test]
fn a_bit_that_rots_in_the_publishers_journal_reaches_no_host() {
    let _turn = FailScenario::setup();
    for profile in PROFILES {
        let (mut world, mut publisher) = World::new(profile, None);
        for eighth in 0..=8 {
            // The version is committed; its journal is sealed and not yet carried out to the end.
            fail::cfg("follow.apply", "1*return->off").unwrap();
            world.weights = stepped(&world.weights);
            world.version += 1;
            publisher.publish(&world.weights, step(world.version), Mode::Delta).unwrap();
            publisher.wait().unwrap_err();
            fail::remove("follow.apply");
            drop(publisher);
            let path = world.baseline().join(".driftless/journal");
            let length = fs::metadata(&path).unwrap().len();
            flip(&path, (length - 1) * eighth / 8, 5);
            publisher = world.publisher();
            world.publish(&mut publisher, &format!("{profile:?}, journal, {eighth} eighths"));
        }
    }
}

#[test]
fn a_host_whose_own_bytes_rotted_says_so_or_holds_the_version() {
    let _turn = FailScenario::setup();
    for profile in PROFILES {
        for (name, bit) in BITS {
            for element in [60, 61] {
                let (mut world, mut publisher) = World::new(profile, None);
                world.publish(&mut publisher, "sound");
                let host = world.dir.path().join("host");
                assert_reader(&world.store, &host, 1, &world.weights);
                flip_weight(&host, element, bit);
                world.publish(&mut publisher, "next");
                let run = Run::open(world.store.clone(), RUN).unwrap();
                let mut replica = Replica::open(&host).unwrap();
                let advanced = replica.advance(&run, MODEL, Version(2), None).map(drop);
                let Err(damage) = advanced.and_then(|()| replica.verify()) else {
                    panic!("{profile:?}, {name} of element {element}: a rotten host is told that it is sound")
                };
                replica.quarantine(damage).unwrap();
                replica.advance(&run, MODEL, Version(2), None).unwrap();
                assert_same(replica.checkpoint().unwrap(), &world.weights);
            }
        }
    }
}

#[test]
fn rotten_baseline_not_to_be_built_anew_publishes_nothing() {
    let _turn = FailScenario::setup();
    let dir = tempfile::tempdir().unwrap();
    let (start, baseline) = (dir.path().join("start"), dir.path().join("baseline"));
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    let weights = weights();
    driftless_transport::checkpoint::write_checkpoint(&start, &weights, 1 << 20).unwrap();
    let mut publisher = Publisher::open(store.clone(), options(Start::NewRun, &baseline)).unwrap();
    publisher.publish_reference(&start, step(0)).unwrap();
    publisher.wait().unwrap();
    drop(publisher);
    // This publisher is not told where the reference is.
    let mut publisher = Publisher::open(store.clone(), options(Start::Resume, &baseline)).unwrap();
    flip_weight(&baseline, 61, 15);
    let next = stepped(&weights);
    for _ in 0..2 {
        let error = publisher.publish(&next, step(1), Mode::Delta).unwrap_err();
        assert!(matches!(&error, Error::Unsupported { hint, .. } if hint.contains("directory")), "{error:?}");
    }
    let run = Run::open(store.clone(), RUN).unwrap();
    assert_eq!(run.newest_version(MODEL).unwrap(), Some(Version(0)));
    drop(publisher);
    let mut resumed = options(Start::Resume, &baseline);
    resumed.reference_dir = Some(start);
    let mut publisher = Publisher::open(store.clone(), resumed).unwrap();
    publisher.publish(&next, step(1), Mode::Delta).unwrap();
}

#[test]
fn foreign_file_in_a_rotten_baseline_is_named() {
    let _turn = FailScenario::setup();
    let (mut world, mut publisher) = World::new(Profile::Wire, None);
    world.publish(&mut publisher, "sound");
    fs::write(world.baseline().join("mine.safetensors"), b"precious").unwrap();
    flip_weight(&world.baseline(), 61, 2);
    let next = stepped(&world.weights);
    let error = publisher.publish(&next, step(2), Mode::Delta).unwrap_err();
    assert!(error.to_string().contains(world.baseline().to_str().unwrap()), "{error}");
    let run = Run::open(world.store.clone(), RUN).unwrap();
    assert_eq!(run.newest_version(MODEL).unwrap(), Some(Version(1)));
    assert_eq!(driftless_testkit::publications::orphans(&run), [] as [String; 0]);
    fs::remove_file(world.baseline().join("mine.safetensors")).unwrap();
    world.publish(&mut publisher, "without the foreign file");
}

/// All of `x.large` that a rank has, and on rank 0 all of the rest.
struct Part<'a> {
    weights: &'a Weights,
    slices: Vec<Slice>,
}

impl<'a> Part<'a> {
    fn new(weights: &'a Weights, rank: u32) -> Self {
        let mut slices = Vec::new();
        for info in weights.tensors() {
            let (elements, cut) = (info.elements().unwrap(), 70_001);
            match (info.name.as_str(), rank) {
                ("x.large", 0) => slices.push(Slice { tensor: info.clone(), start: 0, elements: cut }),
                ("x.large", _) => {
                    slices.push(Slice { tensor: info.clone(), start: cut, elements: elements - cut });
                }
                (_, 0) => slices.push(Slice::whole(info.clone()).unwrap()),
                _ => {}
            }
        }
        Self { weights, slices }
    }
}

impl Shard for Part<'_> {
    fn slices(&self) -> &[Slice] {
        &self.slices
    }
    fn bytes(&self, index: usize) -> Result<std::borrow::Cow<'_, [u8]>> {
        let Slice { tensor, start, elements } = &self.slices[index];
        let at = self.weights.infos.iter().position(|info| info.name == tensor.name).unwrap();
        let size = tensor.dtype.size();
        let range = (start * size) as usize..((start + elements) * size) as usize;
        Ok(self.weights.bytes[at][range].into())
    }
    fn files(&self) -> &[driftless_transport::snapshot::AuxFile] {
        &self.weights.files
    }
}

#[test]
fn a_bit_that_rots_in_a_ranks_baseline_reaches_no_host() {
    let _turn = FailScenario::setup();
    for profile in PROFILES {
        let dir = tempfile::tempdir().unwrap();
        let store: Arc<dyn Store> = Arc::new(Memory::new());
        let baseline = |rank: u32| dir.path().join(format!("rank-{rank}"));
        let mut publishers: Vec<Publisher> = (0..2)
            .map(|rank| {
                let start = if rank == 0 { Start::NewRun } else { Start::Resume };
                let mut options = options(start, &baseline(rank));
                options.profile = profile;
                Publisher::open(store.clone(), options).unwrap()
            })
            .collect();
        let mut weights = weights();
        // Whole and cut tensors, elements that change and do not, inside the rank's slice and beside it in
        // its block.
        let flips = [None, Some((0, 60, 15)), Some((0, 61, 3)), Some((1, 100_001, 14)), Some((1, 69_999, 0))];
        for (version, rot) in (0..).zip(flips) {
            if let Some((rank, element, bit)) = rot {
                publishers[rank].wait().unwrap();
                flip_weight(&baseline(rank as u32), element, bit);
                weights = stepped(&weights);
            }
            let attempt = format!("job.{version}");
            let rank = |rank| Rank { rank, ranks: 2, attempt: attempt.clone() };
            let long = std::time::Duration::from_secs(60);
            let other = publishers[1]
                .publish_part(&Part::new(&weights, 1), step(version), Mode::Delta, &rank(1))
                .unwrap();
            publishers[0]
                .publish_part(&Part::new(&weights, 0), step(version), Mode::Delta, &rank(0))
                .unwrap();
            assert_eq!(publishers[0].join(&rank(0), long).unwrap().version, Version(version));
            publishers[1].await_join(&other, long).unwrap();
            println!("{profile:?}, {rot:?}");
            assert_reader(&store, &dir.path().join("old"), version, &weights);
            assert_reader(&store, &dir.path().join(format!("new-{version}")), version, &weights);
        }
    }
}
