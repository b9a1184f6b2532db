//! Checkpoints that nobody can mean: another table of tensors, and elements that are no numbers.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

use std::sync::Arc;
use std::time::Duration;

use driftless_store::{Memory, Store};
use driftless_testkit::publications::{MODEL, RUN, Weights, assert_reader, step};
use driftless_transport::checkpoint::write_checkpoint;
use driftless_transport::manifest::Kind;
use driftless_transport::publish::{FullBecause, Mode, PublisherOptions, Rank, Slice, Sliced, Start};
use driftless_transport::{Dtype, Error, Publisher, Result, Run, Version};

/// Finite weights of several types.
fn weights() -> Weights {
    let mut weights = Weights::default();
    let half = |i: usize| [(i * 37 % 251) as u8, 0x3c][i % 2];
    weights.set("a.bf16", Dtype::Bf16, &[300, 256], half);
    weights.set("b.f16", Dtype::F16, &[64, 3], half);
    weights.set("c.f32", Dtype::F32, &[65], half);
    weights.set("d.f64", Dtype::F64, &[9], half);
    weights.set("e.e4m3", Dtype::F8E4M3, &[77], |i| (i % 100) as u8);
    weights.set("f.e5m2", Dtype::F8E5M2, &[77], |i| (i % 100) as u8);
    // Whatever its bytes are.
    weights.set("g.packed", Dtype::U8, &[100], |_| 0xff);
    weights.file("config.json", b"{}");
    weights
}

struct World {
    store: Arc<dyn Store>,
    dir: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        Self { store: Arc::new(Memory::new()), dir: tempfile::tempdir().unwrap() }
    }

    fn publisher(&self, start: Start, change: impl FnOnce(&mut PublisherOptions)) -> Publisher {
        let mut options = PublisherOptions::new(RUN, start, self.dir.path().join("baseline"));
        change(&mut options);
        Publisher::open(self.store.clone(), options).unwrap()
    }

    fn newest(&self) -> Option<Version> {
        Run::open(self.store.clone(), RUN).unwrap().newest_version(MODEL).unwrap()
    }

    fn assert_reader(&self, version: u64, weights: &Weights) {
        assert_reader(&self.store, &self.dir.path().join("follower"), version, weights);
    }
}

/// An element that is no number, of each type; where it is, and its bytes.
const BAD: [(&str, u64, &[u8]); 8] = [
    ("a.bf16", 70_000, &[0x80, 0x7f]),
    ("a.bf16", 3, &[0xc1, 0xff]),
    ("b.f16", 5, &[0x01, 0x7e]),
    ("c.f32", 64, &[0, 0, 0x80, 0xff]),
    ("c.f32", 0, &[1, 0, 0x80, 0x7f]),
    ("d.f64", 8, &[0, 0, 0, 0, 0, 0, 0xf8, 0x7f]),
    ("e.e4m3", 76, &[0x7f]),
    ("f.e5m2", 0, &[0xfc]),
];

fn put(weights: &mut Weights, bad: (&str, u64, &[u8])) {
    let (name, at, bytes) = bad;
    let start = at as usize * bytes.len();
    weights.tensor_mut(name)[start..start + bytes.len()].copy_from_slice(bytes);
}

fn assert_refused(published: Result<driftless_transport::publish::Published>, bad: (&str, u64, &[u8])) {
    let (name, at, _) = bad;
    let error = published.unwrap_err();
    assert!(
        matches!(&error, Error::NotFinite { tensor, first, count: 1 } if tensor == name && *first == at),
        "{error:?}"
    );
    let text = error.to_string();
    assert!(
        text.contains(name) && text.contains(&at.to_string()) && text.contains("allow_non_finite"),
        "{text}"
    );
}

#[test]
fn element_that_is_no_number_is_refused_by_name_in_every_kind() {
    for anchor_every in [None, Some(1)] {
        let world = World::new();
        let mut publisher = world.publisher(Start::NewRun, |options| options.anchor_every = anchor_every);
        let sound = weights();
        for bad in BAD {
            let mut wrong = sound.clone();
            put(&mut wrong, bad);
            assert_refused(publisher.publish(&wrong, step(0), Mode::Delta), bad);
        }
        assert_eq!(world.newest(), None);
        publisher.publish(&sound, step(0), Mode::Delta).unwrap();
        for bad in BAD {
            for mode in [Mode::Delta, Mode::Full] {
                let mut wrong = sound.clone();
                put(&mut wrong, bad);
                assert_refused(publisher.publish(&wrong, step(1), mode), bad);
            }
        }
        assert_eq!(world.newest(), Some(Version(0)));
        assert_eq!(driftless_testkit::publications::orphans(publisher.run()), [] as [String; 0]);
        let mut next = sound.clone();
        next.tensor_mut("a.bf16")[0] ^= 1;
        publisher.publish(&next, step(1), Mode::Delta).unwrap();
        world.assert_reader(1, &next);
    }
}

#[test]
fn elements_that_were_allowed_once_do_not_stop_the_run() {
    let world = World::new();
    let mut masked = weights();
    BAD.into_iter().for_each(|bad| put(&mut masked, bad));
    let mut publisher = world.publisher(Start::NewRun, |options| options.allow_non_finite = true);
    publisher.publish(&masked, step(0), Mode::Delta).unwrap();
    drop(publisher);
    let mut publisher = world.publisher(Start::Resume, |options| options.anchor_every = Some(2));
    for version in 1..=2 {
        for name in ["a.bf16", "c.f32", "d.f64"] {
            masked.tensor_mut(name)[8 * version as usize] ^= 1;
        }
        publisher.publish(&masked, step(version), Mode::Delta).unwrap();
        world.assert_reader(version, &masked);
    }
    // One more is one too many, and the only one that is counted.
    let mut wrong = masked.clone();
    let bad = ("d.f64", 2, &[0, 0, 0, 0, 0, 0, 0xf0, 0x7f][..]);
    put(&mut wrong, bad);
    assert_refused(publisher.publish(&wrong, step(3), Mode::Delta), bad);
}

#[test]
fn a_reference_with_an_element_that_is_no_number_is_refused() {
    let world = World::new();
    let mut wrong = weights();
    put(&mut wrong, BAD[0]);
    let start = world.dir.path().join("start");
    write_checkpoint(&start, &wrong, 1 << 20).unwrap();
    let mut publisher = world.publisher(Start::NewRun, |_| ());
    assert_refused(publisher.publish_reference(&start, step(0)), BAD[0]);
    drop(publisher);
    let mut publisher = world.publisher(Start::Resume, |options| options.allow_non_finite = true);
    publisher.publish_reference(&start, step(0)).unwrap();
}

type Change = (&'static str, fn(&mut Weights));

const CHANGES: [Change; 4] = [
    ("`b.f16` is missing, it was F16 [64, 3]", |weights| weights.remove("b.f16")),
    ("`h.new` is new, BF16 [2]", |weights| weights.set("h.new", Dtype::Bf16, &[2], |_| 0)),
    ("`c.f32` is F32 [5, 13], it was F32 [65]", |weights| weights.set("c.f32", Dtype::F32, &[5, 13], |_| 0)),
    ("`a.bf16` is F32 [300, 256], it was BF16 [300, 256]", |weights| {
        weights.set("a.bf16", Dtype::F32, &[300, 256], |_| 0);
    }),
];

#[test]
fn another_layout_is_refused_until_allowed_and_says_why() {
    let world = World::new();
    let mut publisher = world.publisher(Start::NewRun, |_| ());
    let first = publisher.publish(&weights(), step(0), Mode::Delta).unwrap();
    assert_eq!(first.full_because, Some(FullBecause::FirstVersion));
    for (expected, change) in CHANGES {
        let mut wrong = weights();
        change(&mut wrong);
        for mode in [Mode::Delta, Mode::Full] {
            let error = publisher.publish(&wrong, step(1), mode).unwrap_err();
            assert!(
                matches!(&error, Error::LayoutChanged { version: Version(0), differences } if differences == expected),
                "{error:?}"
            );
            assert!(error.to_string().contains("allow_layout_change"), "{error}");
        }
    }
    let mut all = weights();
    CHANGES.iter().for_each(|(_, change)| change(&mut all));
    let error = publisher.publish(&all, step(1), Mode::Delta).unwrap_err();
    assert!(error.to_string().contains("; and 1 more"), "{error}");
    assert_eq!(world.newest(), Some(Version(0)));
    drop(publisher);

    let mut publisher = world.publisher(Start::Resume, |options| options.allow_layout_change = true);
    let published = publisher.publish(&all, step(1), Mode::Delta).unwrap();
    assert_eq!(published.kind, Kind::Full);
    let Some(FullBecause::LayoutChanged(why)) = published.full_because else { panic!("{published:?}") };
    assert!(why.contains("`b.f16` is missing"), "{why}");
    world.assert_reader(1, &all);
    all.tensor_mut("c.f32")[0] ^= 1;
    let published = publisher.publish(&all, step(2), Mode::Delta).unwrap();
    assert_eq!((published.kind, published.full_because), (Kind::Delta, None));
    let asked = publisher.publish(&all, step(3), Mode::Full).unwrap();
    assert_eq!(asked.full_because, Some(FullBecause::Asked));
}

/// Weights as one rank of one publishes them.
fn only(weights: &Weights) -> Sliced<'_> {
    let slices = weights.infos.iter().cloned().map(|info| Slice::whole(info).unwrap()).collect();
    Sliced::new(weights, slices).unwrap()
}

#[test]
fn slices_are_as_many_as_tensors() {
    let weights = weights();
    let refused = Sliced::new(&weights, Vec::new()).map(drop);
    assert!(matches!(&refused, Err(Error::BadSetting { found, .. }) if found == "0"), "{refused:?}");
}

fn rank(attempt: &str) -> Rank {
    Rank { rank: 0, ranks: 1, attempt: attempt.to_owned() }
}

#[test]
fn tied_head_that_parted_is_refused_when_ranks_are_joined() {
    let world = World::new();
    let mut publisher = world.publisher(Start::NewRun, |_| ());
    let mut weights = weights();
    for name in ["embed_tokens.weight", "lm_head.weight"] {
        weights.set(name, Dtype::Bf16, &[40, 8], |_| 0x3c);
    }
    weights.file("config.json", br#"{"tie_word_embeddings": true}"#);
    let mut parted = weights.clone();
    parted.tensor_mut("lm_head.weight")[0] ^= 1;
    let mut publish = |weights: Weights, attempt: &str| {
        publisher.publish_with_ranks(
            &only(&weights),
            step(0),
            Mode::Full,
            &rank(attempt),
            Duration::from_secs(60),
        )
    };
    let error = publish(parted, "a").unwrap_err();
    assert!(
        matches!(&error, Error::TensorMismatch { tensor, .. } if tensor == "lm_head.weight"),
        "{error:?}"
    );
    assert_eq!(world.newest(), None, "nothing was committed");
    publish(weights.clone(), "b").unwrap();
    world.assert_reader(0, &weights);
}

#[test]
fn ranks_are_refused_the_same() {
    let world = World::new();
    let mut publisher = world.publisher(Start::NewRun, |_| ());
    publisher.publish(&weights(), step(0), Mode::Delta).unwrap();
    let mut wrong = weights();
    put(&mut wrong, BAD[0]);
    let error = publisher.publish_part(&only(&wrong), step(1), Mode::Delta, &rank("a")).unwrap_err();
    assert!(matches!(&error, Error::NotFinite { first: 70_000, .. }), "{error:?}");
    let mut wrong = weights();
    wrong.remove("b.f16");
    publisher.publish_part(&only(&wrong), step(1), Mode::Full, &rank("b")).unwrap();
    let error = publisher.join(&rank("b"), Duration::ZERO).unwrap_err();
    assert!(matches!(&error, Error::LayoutChanged { .. }), "{error:?}");
    drop(publisher);
    let mut publisher = world.publisher(Start::Resume, |options| options.allow_layout_change = true);
    publisher.publish_part(&only(&wrong), step(1), Mode::Full, &rank("c")).unwrap();
    publisher.join(&rank("c"), Duration::ZERO).unwrap();
    world.assert_reader(1, &wrong);
}

#[test]
fn a_new_run_under_a_taken_name_says_that_it_is_taken() {
    let world = World::new();
    let mut publisher = world.publisher(Start::NewRun, |_| ());
    publisher.publish(&weights(), step(0), Mode::Delta).unwrap();
    let run_id = publisher.run().id();
    drop(publisher);
    let options = || PublisherOptions::new(RUN, Start::NewRun, world.dir.path().join("baseline"));
    let error = Publisher::open(world.store.clone(), options()).unwrap_err();
    assert!(
        matches!(&error, Error::RunExists { name, run_id: found } if name == RUN && *found == run_id),
        "{error:?}"
    );
    // Where the store is gone, the directory that is in the way is named.
    let error = Publisher::open(Arc::new(Memory::new()), options()).unwrap_err();
    let text = error.to_string();
    assert!(text.contains(world.dir.path().to_str().unwrap()) && text.contains("remove"), "{text}");
}

#[test]
fn tensor_named_as_the_header_of_safetensors_is_refused() {
    let world = World::new();
    let mut publisher = world.publisher(Start::NewRun, |_| {});
    let mut bad = weights();
    bad.set("__metadata__", Dtype::F32, &[4], |_| 0);
    let error = publisher.publish(&bad, step(0), Mode::Delta).unwrap_err();
    assert!(matches!(&error, Error::BadName { text, .. } if text == "__metadata__"), "{error:?}");
    assert_eq!(world.newest(), None, "nothing was published");
    publisher.publish(&weights(), step(0), Mode::Delta).unwrap();
    world.assert_reader(0, &weights());
}
