//! Several ranks publish one version together: what they make is what one publisher would have made, or a
//! named error.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use driftless_store::{Key, Memory, PutMode, Store};
use driftless_testkit::publications::{MODEL, Weights, assert_reader, options, orphans, step};
use driftless_testkit::random::Random;
use driftless_transport::gc::{GcOptions, collect};
use driftless_transport::manifest::Kind;
use driftless_transport::publish::{Mode, Rank, Shard, Slice, Start};
use driftless_transport::snapshot::{AuxFile, TensorInfo};
use driftless_transport::{Dtype, Error, Publisher, Result, Run, Snapshot as _, Version};

const RANKS: u32 = 3;
const NOW: Duration = Duration::ZERO;
const LONG: Duration = Duration::from_secs(60);

/// What one rank has of some weights.
#[derive(Clone)]
struct Held {
    slices: Vec<Slice>,
    bytes: Vec<Vec<u8>>,
    files: Vec<AuxFile>,
}

impl Shard for Held {
    fn slices(&self) -> &[Slice] {
        &self.slices
    }
    fn bytes(&self, index: usize) -> Result<Cow<'_, [u8]>> {
        Ok(Cow::Borrowed(&self.bytes[index]))
    }
    fn files(&self) -> &[AuxFile] {
        &self.files
    }
}

/// Deals tensors out: those with enough elements in slices cut anywhere, the others whole, one rank after the
/// other.
fn deal(weights: &Weights) -> Vec<Held> {
    let empty = || Held { slices: vec![], bytes: vec![], files: weights.files.clone() };
    let mut ranks: Vec<Held> = (0..RANKS).map(|_| empty()).collect();
    for (index, info) in weights.tensors().iter().enumerate() {
        let (elements, size) = (info.elements().unwrap(), info.dtype.size());
        let cuts = match elements {
            ..50 => None,
            _ => Some([0, elements / 3 + 1, elements - elements / 5, elements]),
        };
        let mut give = |rank: usize, from: u64, to: u64| {
            ranks[rank].slices.push(Slice { tensor: info.clone(), start: from, elements: to - from });
            let bytes = &weights.bytes[index][(from * size) as usize..(to * size) as usize];
            ranks[rank].bytes.push(bytes.to_vec());
        };
        match cuts {
            None => give(index % RANKS as usize, 0, elements),
            Some(cuts) => (0..3).for_each(|rank| give(rank, cuts[rank], cuts[rank + 1])),
        }
    }
    ranks
}

fn rank(rank: u32, attempt: &str) -> Rank {
    Rank { rank, ranks: RANKS, attempt: attempt.to_owned() }
}

fn publishers(store: &Arc<dyn Store>, dir: &Path, anchor_every: Option<u64>) -> Vec<Publisher> {
    let open = |rank: u32| {
        let start = if rank == 0 { Start::NewRun } else { Start::Resume };
        let mut options = options(start, &dir.join(format!("rank-{rank}")));
        options.object_bytes_max = 1 << 20;
        options.anchor_every = anchor_every;
        Publisher::open(store.clone(), options).unwrap()
    };
    (0..RANKS).map(open).collect()
}

fn weights() -> Weights {
    let mut random = Random(17);
    let mut weights = Weights::small(1);
    weights.set("x.large", Dtype::Bf16, &[900, 1001], |_| random.next() as u8);
    weights
}

/// All ranks publish at once, rank 0 joins; every rank hears of the same version.
fn publish_all(publishers: &mut [Publisher], shards: &[Held], number: u64, mode: Mode) -> Version {
    let attempt = format!("job-7.{number}");
    let versions: Vec<Version> = thread::scope(|scope| {
        let threads: Vec<_> = (0..)
            .zip(publishers.iter_mut().zip(shards))
            .map(|(number_of, (publisher, shard))| {
                let rank = rank(number_of, &attempt);
                scope.spawn(move || {
                    let part = publisher.publish_part(shard, step(number), mode, &rank).unwrap();
                    if rank.rank == 0 {
                        publisher.join(&rank, LONG).unwrap().version
                    } else {
                        publisher.await_join(&part, LONG).unwrap()
                    }
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(versions.iter().all(|version| *version == versions[0]));
    versions[0]
}

#[test]
fn slices_of_ranks_make_the_versions_of_one_publisher() {
    let (store, dir): (Arc<dyn Store>, _) = (Arc::new(Memory::new()), tempfile::tempdir().unwrap());
    let mut publishers = publishers(&store, dir.path(), Some(3));
    let mut weights = weights();
    for version in 0..5 {
        if version > 0 {
            weights.step(version, 40);
        }
        if version == 2 {
            // One rank's slices stay as they are.
            let unchanged = weights.clone();
            weights.step(99, 30);
            for (index, info) in unchanged.infos.iter().enumerate() {
                let end = (info.elements().unwrap() / 3 * info.dtype.size()) as usize;
                weights.bytes[index][..end].copy_from_slice(&unchanged.bytes[index][..end]);
            }
            weights.file("config.json", b"{\"hidden_size\": 33}");
        }
        let mode = if version == 4 { Mode::Full } else { Mode::Delta };
        assert_eq!(publish_all(&mut publishers, &deal(&weights), version, mode), Version(version));
        assert_reader(&store, &dir.path().join("follower"), version, &weights);
        let manifest = publishers[0].run().get(MODEL, Version(version)).unwrap().manifest;
        assert_eq!(manifest.kind, if version % 4 == 0 { Kind::Full } else { Kind::Delta });
        assert_eq!(manifest.is_anchor(), version == 0 || version >= 3, "version {version}");
        let large = manifest.tensors.iter().find(|tensor| tensor.name == "x.large").unwrap();
        assert!(large.pieces.len() >= 3);
        // The digest is the one that a publisher which is alone would give.
        let bytes = &weights.bytes[weights.infos.iter().position(|info| info.name == "x.large").unwrap()];
        let alone = driftless_delta::DigestTable::of(Dtype::Bf16.element(), bytes).unwrap().total();
        assert_eq!(large.digest, alone);
    }
    assert_reader(&store, &dir.path().join("late"), 4, &weights);
    assert_eq!(orphans(publishers[0].run()), Vec::<String>::new(), "parts are gone once they are joined");
    // A publisher that is alone goes on where they were.
    let mut alone =
        Publisher::open(store.clone(), options(Start::Resume, &dir.path().join("alone"))).unwrap();
    weights.step(5, 40);
    alone.publish(&weights, step(5), Mode::Delta).unwrap();
    assert_reader(&store, &dir.path().join("follower"), 5, &weights);
}

#[test]
fn dead_rank_is_named_and_its_leftovers_are_left_out() {
    let (store, dir): (Arc<dyn Store>, _) = (Arc::new(Memory::new()), tempfile::tempdir().unwrap());
    let mut publishers = publishers(&store, dir.path(), None);
    let mut weights = weights();
    publish_all(&mut publishers, &deal(&weights), 0, Mode::Delta);
    weights.step(1, 40);
    let shards = deal(&weights);
    let mut parts = Vec::new();
    for number in [0, 2] {
        let publisher = &mut publishers[number as usize];
        let part =
            publisher.publish_part(&shards[number as usize], step(1), Mode::Delta, &rank(number, "one"));
        parts.push(part.unwrap());
    }
    let error = publishers[0].join(&rank(0, "one"), NOW).unwrap_err();
    assert!(
        matches!(&error, Error::PartsMissing { version: Version(1), ranks, .. } if *ranks == [1]),
        "{error:?}"
    );
    assert!(error.to_string().contains("ranks [1]"), "{error}");
    let error = publishers[2].await_join(&parts[1], NOW).unwrap_err();
    assert!(matches!(error, Error::NotJoined { version: Version(1), .. }), "{error:?}");

    // The trainer starts again from another step: what is left of the first attempt does not get in.
    weights.step(2, 40);
    publish_all(&mut publishers, &deal(&weights), 2, Mode::Delta);
    assert_reader(&store, &dir.path().join("follower"), 1, &weights);
    assert!(!orphans(publishers[0].run()).is_empty());
    collect(publishers[0].run(), &GcOptions::new(MODEL)).unwrap();
    assert_eq!(orphans(publishers[0].run()), Vec::<String>::new());
    // Whoever waits for the first attempt is told that it has lost.
    let error = publishers[2].await_join(&parts[1], NOW).unwrap_err();
    assert!(matches!(error, Error::LostRace { version: Version(1), .. }), "{error:?}");
}

/// Joins parts of which one was changed.
fn join_changed(change: impl FnOnce(&mut Vec<Held>)) -> Error {
    let (store, dir): (Arc<dyn Store>, _) = (Arc::new(Memory::new()), tempfile::tempdir().unwrap());
    let mut publishers = publishers(&store, dir.path(), None);
    let mut weights = Weights::small(1);
    publish_all(&mut publishers, &deal(&weights), 0, Mode::Delta);
    weights.step(1, 40);
    let mut shards = deal(&weights);
    change(&mut shards);
    for (number, (publisher, shard)) in (0..).zip(publishers.iter_mut().zip(&shards)) {
        publisher.publish_part(shard, step(1), Mode::Full, &rank(number, "a")).unwrap();
    }
    let error = publishers[0].join(&rank(0, "a"), NOW).unwrap_err();
    assert_eq!(publishers[0].run().newest_version(MODEL).unwrap(), Some(Version(0)), "nothing was committed");
    error
}

fn position(shard: &Held, name: &str) -> usize {
    shard.slices.iter().position(|slice| slice.tensor.name == name).unwrap()
}

#[test]
fn elements_from_nobody_or_from_two_ranks_are_refused_by_name() {
    let pieces = |error: Error| match error {
        Error::Pieces { tensor, start, end, found, .. } => (tensor, start, end, found),
        error => panic!("{error:?}"),
    };
    // `g.up` has 64 x 48 = 3072 elements, cut at 1025 and 2458.
    let missing = join_changed(|shards| {
        let index = position(&shards[1], "g.up");
        shards[1].slices.remove(index);
        shards[1].bytes.remove(index);
    });
    assert_eq!(pieces(missing), ("g.up".to_owned(), 1025, 2458, "no rank".to_owned()));
    let end = join_changed(|shards| {
        let index = position(&shards[2], "g.up");
        shards[2].slices.remove(index);
        shards[2].bytes.remove(index);
    });
    assert_eq!(pieces(end), ("g.up".to_owned(), 2458, 3072, "no rank".to_owned()));
    let overlap = join_changed(|shards| {
        let index = position(&shards[1], "g.up");
        shards[1].slices[index].start -= 5;
    });
    assert_eq!(pieces(overlap), ("g.up".to_owned(), 1020, 1025, "ranks 0 and 1".to_owned()));
    let twice = join_changed(|shards| {
        let index = position(&shards[1], "g.up");
        let (slice, bytes) = (shards[1].slices[index].clone(), shards[1].bytes[index].clone());
        let at = position(&shards[2], "g.up");
        shards[2].slices.insert(at, slice);
        shards[2].bytes.insert(at, bytes);
    });
    assert_eq!(pieces(twice), ("g.up".to_owned(), 1025, 2458, "ranks 1 and 2".to_owned()));
    let reshaped = join_changed(|shards| {
        let index = position(&shards[1], "g.up");
        shards[1].slices[index].tensor.shape = vec![48, 64];
    });
    assert!(matches!(reshaped, Error::PartConflict { rank: 1, .. }), "{reshaped:?}");
}

#[test]
fn a_rank_of_another_base_step_or_attempt_is_named() {
    type Change = fn(&str) -> String;
    let digest = "\"manifest_digest\":\"";
    let changes: [(&str, Change); 6] = [
        ("base", |text| {
            let at = text.find("\"manifest_digest\":\"").unwrap() + 19;
            let flipped = if &text[at..=at] == "0" { "1" } else { "0" };
            format!("{}{flipped}{}", &text[..at], &text[at + 1..])
        }),
        ("trainer step", |text| text.replace("\"trainer_step\":1", "\"trainer_step\":2")),
        ("number of ranks", |text| text.replace("\"ranks\":3", "\"ranks\":4")),
        ("rank", |text| text.replace("\"rank\":1", "\"rank\":2")),
        ("attempt", |text| text.replace("\"attempt\":\"a\"", "\"attempt\":\"b\"")),
        ("kind", |text| text.replace("\"kind\":\"delta\"", "\"kind\":\"full\"")),
    ];
    let (store, dir): (Arc<dyn Store>, _) = (Arc::new(Memory::new()), tempfile::tempdir().unwrap());
    let mut publishers = publishers(&store, dir.path(), None);
    let mut weights = Weights::small(1);
    publish_all(&mut publishers, &deal(&weights), 0, Mode::Delta);
    weights.step(1, 40);
    for (number, (publisher, shard)) in (0..).zip(publishers.iter_mut().zip(&deal(&weights))) {
        publisher.publish_part(shard, step(1), Mode::Delta, &rank(number, "a")).unwrap();
    }
    let run = publishers[0].run().clone();
    let place = run.manifest_key(MODEL, Version(1)).unwrap();
    let key = Key::new(place.as_str().replace("manifest", "part-a-00001")).unwrap();
    let honest = String::from_utf8(store.get(&key, None).unwrap()).unwrap();
    assert!(honest.contains(digest));
    for (expected, change) in changes {
        let changed = change(&honest);
        assert_ne!(changed, honest, "{expected}");
        store.put(&key, changed.as_bytes(), PutMode::Overwrite).unwrap();
        let error = publishers[0].join(&rank(0, "a"), NOW).unwrap_err();
        let Error::PartConflict { rank, what, version, .. } = &error else { panic!("{expected}: {error:?}") };
        assert_eq!((*rank, *what, *version), (1, expected, Version(1)), "{error}");
    }
    store.put(&key, &honest.as_bytes()[..honest.len() / 2], PutMode::Overwrite).unwrap();
    assert!(matches!(publishers[0].join(&rank(0, "a"), NOW), Err(Error::Parse { .. })));
    assert_eq!(run.newest_version(MODEL).unwrap(), Some(Version(0)));
    store.put(&key, honest.as_bytes(), PutMode::Overwrite).unwrap();

    // Any number of ranks may join: they commit the same.
    let (first, second) = thread::scope(|scope| {
        let [zero, one, _] = &mut publishers[..] else { panic!() };
        let other = scope.spawn(move || one.join(&rank(1, "a"), NOW));
        (zero.join(&rank(0, "a"), NOW), other.join().unwrap())
    });
    let committed = run.get(MODEL, Version(1)).unwrap().digest;
    assert!(first.is_ok() || second.is_ok());
    for outcome in [first, second] {
        match outcome {
            Ok(published) => assert_eq!(published.manifest_digest, committed),
            // The parts were tidied away by the one that was quicker.
            Err(Error::PartsMissing { .. }) => {}
            Err(error) => panic!("{error:?}"),
        }
    }
    assert_reader(&store, &dir.path().join("follower"), 1, &weights);
}

#[test]
fn a_rank_that_is_behind_has_published_no_part_of_this_version() {
    let (store, dir): (Arc<dyn Store>, _) = (Arc::new(Memory::new()), tempfile::tempdir().unwrap());
    let mut publishers = publishers(&store, dir.path(), None);
    let mut weights = Weights::small(1);
    publish_all(&mut publishers, &deal(&weights), 0, Mode::Delta);
    let mut behind = options(Start::Resume, &dir.path().join("behind"));
    behind.model = MODEL.to_owned();
    let mut behind = Publisher::open(store.clone(), behind).unwrap();
    weights.step(1, 40);
    publish_all(&mut publishers, &deal(&weights), 1, Mode::Delta);
    weights.step(2, 40);
    let shards = deal(&weights);
    let late = behind.publish_part(&shards[1], step(2), Mode::Delta, &rank(1, "b")).unwrap();
    assert_eq!(late.version(), Version(1), "it takes version 1 for the next one");
    for number in [0, 2] {
        let shard = &shards[number as usize];
        publishers[number as usize].publish_part(shard, step(2), Mode::Delta, &rank(number, "b")).unwrap();
    }
    let error = publishers[0].join(&rank(0, "b"), NOW).unwrap_err();
    assert!(
        matches!(&error, Error::PartsMissing { version: Version(2), ranks, .. } if *ranks == [1]),
        "{error:?}"
    );
    let error = behind.await_join(&late, NOW).unwrap_err();
    assert!(matches!(error, Error::LostRace { version: Version(1), .. }), "{error:?}");
}

#[test]
fn a_delta_of_other_tensors_than_the_bases_is_refused() {
    let (store, dir): (Arc<dyn Store>, _) = (Arc::new(Memory::new()), tempfile::tempdir().unwrap());
    let mut publishers = publishers(&store, dir.path(), None);
    let weights = Weights::small(1);
    publish_all(&mut publishers, &deal(&weights), 0, Mode::Delta);
    let mut shards = deal(&weights);
    // A tensor that the base does not have, or has in another shape, is noticed by its rank.
    let tensor = TensorInfo { name: "z.new".into(), dtype: Dtype::Bf16, shape: vec![2] };
    shards[0].slices.push(Slice::whole(tensor).unwrap());
    shards[0].bytes.push(vec![0; 4]);
    let error = publishers[0].publish_part(&shards[0], step(1), Mode::Delta, &rank(0, "a")).unwrap_err();
    assert!(matches!(&error, Error::TensorMismatch { tensor, .. } if tensor == "z.new"), "{error:?}");
    // One that is missing everywhere can only be noticed when the parts are joined.
    let without = |mut shard: Held| {
        let keep = |slice: &Slice| slice.tensor.name != "g.up" && slice.tensor.name != "z.new";
        let kept: Vec<usize> = (0..shard.slices.len()).filter(|&i| keep(&shard.slices[i])).collect();
        shard.bytes = kept.iter().map(|&i| shard.bytes[i].clone()).collect();
        shard.slices = kept.iter().map(|&i| shard.slices[i].clone()).collect();
        shard
    };
    for (number, (publisher, shard)) in (0..).zip(publishers.iter_mut().zip(shards)) {
        publisher.publish_part(&without(shard), step(1), Mode::Delta, &rank(number, "a")).unwrap();
    }
    let error = publishers[0].join(&rank(0, "a"), NOW).unwrap_err();
    assert!(matches!(&error, Error::TensorMismatch { tensor, .. } if tensor == "g.up"), "{error:?}");
    assert_eq!(
        Run::open(store, driftless_testkit::publications::RUN).unwrap().newest_version(MODEL).unwrap(),
        Some(Version(0))
    );
}

#[test]
fn ranks_and_slices_that_cannot_be_are_refused() {
    let (store, dir): (Arc<dyn Store>, _) = (Arc::new(Memory::new()), tempfile::tempdir().unwrap());
    let mut publishers = publishers(&store, dir.path(), None);
    let shard = deal(&Weights::small(1)).remove(0);
    for bad in
        [Rank { rank: 3, ranks: 3, attempt: "a".into() }, Rank { rank: 0, ranks: 0, attempt: "a".into() }]
    {
        let error = publishers[0].publish_part(&shard, step(0), Mode::Full, &bad).unwrap_err();
        assert!(matches!(error, Error::BadSetting { name: "rank", .. }), "{error:?}");
    }
    for attempt in ["", "a/b", &"x".repeat(200)] {
        let error = publishers[0].publish_part(&shard, step(0), Mode::Full, &rank(0, attempt)).unwrap_err();
        assert!(matches!(error, Error::BadName { what: "attempt", .. }), "{error:?}");
    }
    let mut outside = shard.clone();
    outside.slices[0].start += 1_000_000;
    let error = publishers[0].publish_part(&outside, step(0), Mode::Full, &rank(0, "a")).unwrap_err();
    assert!(matches!(error, Error::TensorMismatch { .. }), "{error:?}");
    let mut unsorted = shard;
    unsorted.slices.swap(0, 1);
    unsorted.bytes.swap(0, 1);
    let error = publishers[0].publish_part(&unsorted, step(0), Mode::Full, &rank(0, "a")).unwrap_err();
    assert!(matches!(error, Error::TensorMismatch { .. }), "{error:?}");
    let root = Key::new(format!("{}/{MODEL}", publishers[0].run().id())).unwrap();
    assert!(store.list(&root).unwrap().is_empty(), "nothing is left of what was refused");
}
