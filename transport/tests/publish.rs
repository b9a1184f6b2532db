//! What a publisher promises about versions, baselines and readers.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

use std::sync::{Arc, Barrier, Mutex};
use std::thread;

use driftless_store::wrap::Count;
use driftless_store::{Disk, Memory, Store};
use driftless_testkit::publications::{
    MODEL, RUN, Weights, assert_reader, assert_same, options, publisher, step,
};
use driftless_transport::checkpoint::write_checkpoint;
use driftless_transport::manifest::Kind;
use driftless_transport::publish::{Mode, Start};
use driftless_transport::snapshot::{AUX_FILE_BYTES_MAX, AUX_FILES_BYTES_MAX};
use driftless_transport::{Checkpoint, Dtype, Error, Publisher, Replica, Run, Version};

fn store() -> Arc<dyn Store> {
    Arc::new(Memory::new())
}

#[test]
fn deltas_follow_a_full_version_and_readers_get_every_bit() {
    let (store, dir) = (store(), tempfile::tempdir().unwrap());
    let mut publisher = publisher(&store, Start::NewRun, &dir.path().join("baseline"));
    let mut weights = Weights::small(1);
    let first = publisher.publish(&weights, step(0), Mode::Delta).unwrap();
    assert_eq!(
        (first.version, first.kind, first.anchor),
        (Version(0), Kind::Full, true),
        "nothing to differ from"
    );
    assert_eq!(first.changed, first.elements);
    assert_eq!(first.label, publisher.run().id().label(Version(0)));
    assert_reader(&store, &dir.path().join("follower"), 0, &weights);
    for version in 1..=4 {
        weights.step(version, 50);
        let published = publisher.publish(&weights, step(version), Mode::Delta).unwrap();
        assert_eq!((published.version, published.kind), (Version(version), Kind::Delta));
        assert!(published.changed > 0 && published.density() < 0.1, "{published:?}");
        if version != 3 {
            assert_reader(&store, &dir.path().join("follower"), version, &weights);
        }
    }
    assert_reader(&store, &dir.path().join("late"), 4, &weights);
    let run = Run::open(store, RUN).unwrap();
    assert_eq!(run.models().unwrap(), [MODEL]);
    assert_eq!(run.versions(MODEL).unwrap(), (0..=4).map(Version).collect::<Vec<_>>());
    let newest = run.newest(MODEL).unwrap().unwrap().manifest;
    assert_eq!((newest.trainer_step, newest.representation.scheme.as_str()), (4, "bf16"));
}

#[test]
fn a_version_without_changes_has_no_objects() {
    let (store, dir) = (store(), tempfile::tempdir().unwrap());
    let mut publisher = publisher(&store, Start::NewRun, dir.path());
    let weights = Weights::small(1);
    publisher.publish(&weights, step(0), Mode::Full).unwrap();
    let same = publisher.publish(&weights, step(0), Mode::Delta).unwrap();
    assert_eq!((same.version, same.kind, same.changed), (Version(1), Kind::Delta, 0));
    assert!(publisher.run().get(MODEL, Version(1)).unwrap().manifest.objects.is_empty());
}

#[test]
fn equal_tensors_are_published_once_while_they_are_equal() {
    let (store, dir) = (store(), tempfile::tempdir().unwrap());
    let mut publisher = publisher(&store, Start::NewRun, &dir.path().join("baseline"));
    let mut weights = Weights::small(1);
    let aliases = |publisher: &Publisher, version| -> Vec<(String, Vec<String>)> {
        let tensors = publisher.run().get(MODEL, Version(version)).unwrap().manifest.tensors;
        let tied = tensors.into_iter().filter(|tensor| !tensor.aliases.is_empty());
        tied.map(|tensor| (tensor.name, tensor.aliases)).collect()
    };
    let pair = |a: &str, b: &str| (a.to_owned(), vec![b.to_owned()]);
    publisher.publish(&weights, step(0), Mode::Full).unwrap();
    assert_eq!(aliases(&publisher, 0), [pair("a.embed", "b.head"), pair("d.norm", "e.norm")]);

    // The norms part, the tied pair stays.
    weights.tensor_mut("e.norm")[0] ^= 1;
    weights.step(7, 100);
    publisher.publish(&weights, step(1), Mode::Delta).unwrap();
    assert_eq!(aliases(&publisher, 1), [pair("a.embed", "b.head")]);
    assert_reader(&store, &dir.path().join("follower"), 1, &weights);

    // The norms meet again: their bases differ, so one delta cannot serve both.
    let norm = weights.tensor_mut("d.norm").clone();
    *weights.tensor_mut("e.norm") = norm;
    publisher.publish(&weights, step(2), Mode::Delta).unwrap();
    assert_eq!(aliases(&publisher, 2), [pair("a.embed", "b.head")]);
    assert_reader(&store, &dir.path().join("follower"), 2, &weights);

    // Now their bases are equal too.
    weights.step(8, 3);
    let norm = weights.tensor_mut("d.norm").clone();
    *weights.tensor_mut("e.norm") = norm;
    publisher.publish(&weights, step(3), Mode::Delta).unwrap();
    assert_eq!(aliases(&publisher, 3), [pair("a.embed", "b.head"), pair("d.norm", "e.norm")]);
    assert_reader(&store, &dir.path().join("follower"), 3, &weights);

    // And the tied pair parts.
    weights.tensor_mut("b.head")[5] ^= 1;
    weights.tensor_mut("d.norm")[5] ^= 1;
    publisher.publish(&weights, step(4), Mode::Delta).unwrap();
    assert_eq!(aliases(&publisher, 4), []);
    assert_reader(&store, &dir.path().join("follower"), 4, &weights);
    assert_reader(&store, &dir.path().join("late"), 4, &weights);
}

#[test]
fn a_changed_table_is_published_in_full() {
    let (store, dir) = (store(), tempfile::tempdir().unwrap());
    let mut publisher = publisher(&store, Start::NewRun, &dir.path().join("baseline"));
    let mut weights = Weights::small(1);
    publisher.publish(&weights, step(0), Mode::Delta).unwrap();
    type Change = fn(&mut Weights);
    let changes: [(&str, Change); 4] = [
        ("added", |weights| weights.set("h.new", Dtype::F16, &[3], |i| i as u8)),
        ("removed", |weights| weights.remove("f.ids")),
        ("reshaped", |weights| weights.set("g.up", Dtype::F32, &[48, 64], |i| i as u8)),
        ("retyped", |weights| weights.set("h.new", Dtype::Bf16, &[3], |i| i as u8)),
    ];
    for (version, (what, change)) in (1..).zip(changes) {
        change(&mut weights);
        let published = publisher.publish(&weights, step(version), Mode::Delta).unwrap();
        assert_eq!(published.kind, Kind::Full, "{what}");
        assert_reader(&store, &dir.path().join("follower"), version, &weights);
    }
    weights.step(9, 50);
    assert_eq!(publisher.publish(&weights, step(5), Mode::Delta).unwrap().kind, Kind::Delta);
    assert_reader(&store, &dir.path().join("follower"), 5, &weights);
}

#[test]
fn a_tokenizer_of_70_mib_arrives_bit_for_bit() {
    let (store, dir) = (store(), tempfile::tempdir().unwrap());
    let (source, weights) = (dir.path().join("source"), Weights::small(1));
    write_checkpoint(&source, &weights, u64::MAX).unwrap();
    // Sparse, and not the same everywhere: what is put together in another order is noticed.
    let tokenizer = std::fs::File::create(source.join("tokenizer.json")).unwrap();
    tokenizer.set_len(70 << 20).unwrap();
    for part in 0..70u64 {
        std::os::unix::fs::FileExt::write_all_at(&tokenizer, &part.to_le_bytes(), part << 20).unwrap();
    }
    let mut publisher = publisher(&store, Start::NewRun, &dir.path().join("baseline"));
    publisher.publish(&Checkpoint::open(&source).unwrap(), step(0), Mode::Full).unwrap();
    let (run, host) = (publisher.run(), dir.path().join("host"));
    Replica::open(&host).unwrap().advance(run, MODEL, Version(0), None).unwrap();
    let read = |dir: &std::path::Path| std::fs::read(dir.join("tokenizer.json")).unwrap();
    assert!(read(&host) == read(&source));
    assert!(run.get(MODEL, Version(0)).unwrap().manifest.object_bytes() > 70 << 20);
    // A replica with such a file is opened, and compared, like any other.
    Replica::open(&host).unwrap().verify().unwrap();
}

#[test]
fn auxiliary_files_over_the_limits_are_refused_and_not_left_out() {
    let dir = tempfile::tempdir().unwrap();
    write_checkpoint(dir.path(), &Weights::small(1), u64::MAX).unwrap();
    let sparse = |name: &str, bytes| {
        std::fs::File::create(dir.path().join(name)).unwrap().set_len(bytes).unwrap();
    };
    sparse("one.json", AUX_FILE_BYTES_MAX + 1);
    let error = Checkpoint::open(dir.path()).unwrap_err();
    assert!(
        matches!(&error, Error::TooLarge { what, max: AUX_FILE_BYTES_MAX } if what.contains("one.json")),
        "{error:?}"
    );
    assert!(error.to_string().contains("move it elsewhere"), "{error}");
    std::fs::remove_file(dir.path().join("one.json")).unwrap();
    // Sizes are added up before any of the files is read.
    for name in ["a.json", "b.json", "c.json"] {
        sparse(name, AUX_FILE_BYTES_MAX);
    }
    let error = Checkpoint::open(dir.path()).unwrap_err();
    assert!(matches!(&error, Error::TooLarge { max: AUX_FILES_BYTES_MAX, .. }), "{error:?}");
}

#[test]
fn large_tensors_and_files_are_cut_into_objects_of_bounded_size() {
    let (store, dir) = (store(), tempfile::tempdir().unwrap());
    let mut options = options(Start::NewRun, &dir.path().join("baseline"));
    options.object_bytes_max = 1 << 20;
    options.anchor_every = Some(2);
    let mut publisher = Publisher::open(store.clone(), options).unwrap();
    let mut weights = Weights::small(1);
    let mut random = driftless_testkit::random::Random(3);
    weights.set("x.large", Dtype::Bf16, &[1000, 777], |_| random.next() as u8);
    weights.set("y.opaque", Dtype::I64, &[200_001], |_| random.next() as u8);
    weights.file("tokenizer.json", &(0..2_500_000).map(|_| random.next() as u8).collect::<Vec<_>>());
    for version in 0..4u64 {
        // Dense enough for deltas that have to be cut as well.
        weights.step(version, if version == 3 { 1 } else { 3 });
        if version == 3 {
            weights.set("x.large", Dtype::Bf16, &[1000, 777], |_| random.next() as u8);
        }
        publisher.publish(&weights, step(version), Mode::Delta).unwrap();
        let manifest = publisher.run().get(MODEL, Version(version)).unwrap().manifest;
        assert!(manifest.objects.iter().all(|object| object.size <= 1 << 20), "{:?}", manifest.objects);
        assert_eq!(manifest.is_anchor(), version % 2 == 0, "version {version}");
        assert_reader(&store, &dir.path().join("follower"), version, &weights);
    }
    assert_reader(&store, &dir.path().join("late"), 3, &weights);
}

#[test]
fn a_chain_that_outweighs_a_share_of_the_model_gets_an_anchor() {
    let (store, dir) = (store(), tempfile::tempdir().unwrap());
    let baseline = dir.path().join("baseline");
    let mut options = options(Start::NewRun, &baseline);
    options.anchor_share = Some(0.05);
    let mut weights = Weights::small(1);
    let mut publisher = Publisher::open(store.clone(), options.clone()).unwrap();
    let (mut chain, mut anchors) = (0, 0);
    for version in 0..24 {
        weights.step(version, 100);
        let published = publisher.publish(&weights, step(version), Mode::Delta).unwrap();
        let manifest = publisher.run().get(MODEL, published.version).unwrap().manifest;
        let due = version == 0 || chain as f64 >= 0.05 * manifest.tensor_bytes() as f64;
        assert_eq!(published.anchor, due, "version {version}, {chain} bytes since the last one");
        chain = if due { 0 } else { chain + manifest.delta_piece_bytes() };
        anchors += u64::from(due);
        if version % 5 == 4 {
            // A restarted publisher counts again.
            drop(publisher);
            options.start = Start::Resume;
            publisher = Publisher::open(store.clone(), options.clone()).unwrap();
        }
    }
    assert!((3..12).contains(&anchors), "{anchors}");
    assert_reader(&store, &dir.path().join("late"), 23, &weights);
}

#[test]
fn late_joiner_starts_at_the_newest_anchor() {
    let (store, dir) = (store(), tempfile::tempdir().unwrap());
    let mut options = options(Start::NewRun, &dir.path().join("baseline"));
    options.anchor_every = Some(3);
    let mut publisher = Publisher::open(store.clone(), options).unwrap();
    let mut weights = Weights::small(1);
    for version in 0..=7 {
        weights.step(version, 1000);
        publisher.publish(&weights, step(version), Mode::Delta).unwrap();
    }
    let run = publisher.run();
    let versions = |from: Option<u64>| {
        let from = from.map(|version| run.get(MODEL, Version(version)).unwrap().identity());
        let chain = run.chain(MODEL, from, Version(7)).unwrap();
        let versions: Vec<u64> = chain.versions.iter().map(|link| link.manifest.version.0).collect();
        (chain.restart, versions)
    };
    assert_eq!(versions(None), (true, vec![6, 7]));
    assert_eq!(versions(Some(7)), (false, vec![]));
    assert_eq!(versions(Some(6)), (false, vec![7]));
    assert_eq!(versions(Some(4)), (false, vec![5, 6, 7]));
    assert_eq!(versions(Some(0)), (false, vec![1, 2, 3, 4, 5, 6, 7]));
    assert_reader(&store, &dir.path().join("late"), 7, &weights);
    let rewind =
        run.chain(MODEL, Some(run.get(MODEL, Version(7)).unwrap().identity()), Version(6)).unwrap_err();
    assert!(matches!(rewind, Error::Rewind { have: Version(7), wanted: Version(6), .. }), "{rewind:?}");
}

#[test]
fn version_0_by_reference_carries_no_bytes() {
    let (store, dir) = (store(), tempfile::tempdir().unwrap());
    let (reference, baseline) = (dir.path().join("hf"), dir.path().join("baseline"));
    let mut weights = Weights::small(1);
    write_checkpoint(&reference, &weights, 1 << 30).unwrap();
    let mut publisher = publisher(&store, Start::NewRun, &baseline);
    let published = publisher.publish_reference(&reference, step(0)).unwrap();
    assert_eq!((published.kind, published.version, published.anchor), (Kind::Reference, Version(0), false));
    assert!(publisher.run().get(MODEL, Version(0)).unwrap().manifest.objects.is_empty());
    publisher.wait().unwrap();
    assert_same(&Checkpoint::open(&baseline).unwrap(), &weights);
    let again = publisher.publish_reference(&reference, step(0)).unwrap_err();
    assert!(matches!(again, Error::Unsupported { .. }), "{again:?}");

    weights.step(1, 20);
    let delta = publisher.publish(&weights, step(1), Mode::Delta).unwrap();
    assert_eq!(delta.kind, Kind::Delta);
    drop(publisher);

    // A baseline that is lost is rebuilt from the directory and the store; without the directory that is
    // refused.
    std::fs::remove_dir_all(&baseline).unwrap();
    let error = Publisher::open(store.clone(), options(Start::Resume, &baseline)).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
    let mut with_reference = options(Start::Resume, &baseline);
    with_reference.reference_dir = Some(reference);
    let publisher = Publisher::open(store, with_reference).unwrap();
    assert_eq!(publisher.version(), Some(Version(1)));
    assert_same(&Checkpoint::open(&baseline).unwrap(), &weights);
}

#[test]
fn a_restarted_trainer_goes_on_behind_the_newest_version() {
    let (store, dir) = (store(), tempfile::tempdir().unwrap());
    let baseline = dir.path().join("baseline");
    let mut weights = Weights::small(1);
    let mut first = publisher(&store, Start::NewRun, &baseline);
    first.publish(&weights, step(0), Mode::Delta).unwrap();
    let checkpointed = weights.clone();
    weights.step(1, 10);
    first.publish(&weights, step(10), Mode::Delta).unwrap();
    drop(first);

    let taken =
        Publisher::open(store.clone(), options(Start::NewRun, &dir.path().join("other"))).unwrap_err();
    assert!(matches!(&taken, Error::RunExists { name, .. } if name == RUN), "{taken:?}");

    // The trainer fell back to an older step; its version is the next number all the same.
    let mut second = publisher(&store, Start::Resume, &baseline);
    assert_eq!(second.version(), Some(Version(1)));
    let published = second.publish(&checkpointed, step(0), Mode::Delta).unwrap();
    assert_eq!((published.version, published.kind), (Version(2), Kind::Delta));
    assert_reader(&store, &dir.path().join("follower"), 2, &checkpointed);
    drop(second);

    // A lost baseline is rebuilt from the store.
    std::fs::remove_dir_all(&baseline).unwrap();
    let mut third = publisher(&store, Start::Resume, &baseline);
    third.publish(&weights, step(10), Mode::Delta).unwrap();
    assert_reader(&store, &dir.path().join("follower"), 3, &weights);
}

#[test]
fn the_loser_of_two_publishers_is_told_and_fenced() {
    let (store, dir) = (store(), tempfile::tempdir().unwrap());
    let mut weights = Weights::small(1);
    let mut winner = publisher(&store, Start::NewRun, &dir.path().join("winner"));
    winner.publish(&weights, step(0), Mode::Delta).unwrap();
    let mut loser = publisher(&store, Start::Resume, &dir.path().join("loser"));
    weights.step(1, 10);
    let won = winner.publish(&weights, step(1), Mode::Delta).unwrap();
    let mut others = weights.clone();
    others.step(2, 10);
    for _ in 0..2 {
        let error = loser.publish(&others, step(1), Mode::Delta).unwrap_err();
        let Error::LostRace { version, winner, run_id, .. } = error else { panic!("{error:?}") };
        assert_eq!((version, winner, run_id), (Version(1), won.manifest_digest, loser.run().id()));
    }
    assert_reader(&store, &dir.path().join("follower"), 1, &weights);
    // What the loser had stored is gone, what the winner stored is not.
    let run = Run::open(store.clone(), RUN).unwrap();
    assert_eq!(driftless_testkit::publications::orphans(&run), Vec::<String>::new());

    drop(loser);
    let mut resumed = publisher(&store, Start::Resume, &dir.path().join("loser"));
    resumed.publish(&others, step(2), Mode::Delta).unwrap();
    assert_reader(&store, &dir.path().join("follower"), 2, &others);
}

#[test]
fn of_publishers_at_the_same_moment_one_commits() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Disk::new(dir.path().join("store")));
    publisher(&store, Start::NewRun, &dir.path().join("first"))
        .publish(&Weights::small(1), step(0), Mode::Delta)
        .unwrap();
    for version in 1..4 {
        let start = Barrier::new(3);
        let outcomes: Vec<_> = thread::scope(|scope| {
            let open = |racer: u64| publisher(&store, Start::Resume, &dir.path().join(racer.to_string()));
            let opening: Vec<_> = (0..3).map(|racer| scope.spawn(move || open(racer))).collect();
            // All are there before one stands at the barrier: who fails to open leaves nobody waiting.
            let opened: Vec<_> = opening.into_iter().map(|racer| racer.join().unwrap()).collect();
            let race = |racer: u64, mut publisher: Publisher| {
                let mut weights = Weights::small(1);
                weights.step(10 * version + racer, 20);
                start.wait();
                let published = publisher.publish(&weights, step(version), Mode::Delta);
                (weights, published)
            };
            let racers: Vec<_> =
                (0..).zip(opened).map(|(racer, opened)| scope.spawn(move || race(racer, opened))).collect();
            racers.into_iter().map(|racer| racer.join().unwrap()).collect()
        });
        let (won, lost): (Vec<_>, Vec<_>) =
            outcomes.into_iter().partition(|(_, published)| published.is_ok());
        assert_eq!((won.len(), lost.len()), (1, 2), "version {version}");
        let identity = won[0].1.as_ref().unwrap().manifest_digest;
        for (_, error) in lost {
            let error = error.unwrap_err();
            assert!(matches!(error, Error::LostRace { winner, .. } if winner == identity), "{error:?}");
        }
        assert_reader(&store, &dir.path().join("follower"), version, &won[0].0);
    }
    assert_eq!(
        driftless_testkit::publications::orphans(&Run::open(store, RUN).unwrap()),
        Vec::<String>::new()
    );
}

#[test]
fn a_baseline_of_something_else_is_refused_with_both_identities() {
    let (one, other, dir) = (store(), store(), tempfile::tempdir().unwrap());
    let baseline = dir.path().join("baseline");
    let mut first = publisher(&one, Start::NewRun, &baseline);
    first.publish(&Weights::small(1), step(0), Mode::Delta).unwrap();
    let first_id = first.run().id();
    drop(first);
    let second_id = publisher(&other, Start::NewRun, &dir.path().join("second")).run().id();

    let error = Publisher::open(other.clone(), options(Start::Resume, &baseline)).unwrap_err();
    let Error::ForeignRun { expected, found, .. } = error else { panic!("{error:?}") };
    assert_eq!((expected, found), (second_id, first_id));
    let mut other_model = options(Start::Resume, &baseline);
    other_model.model = "critic".to_owned();
    let error = Publisher::open(one.clone(), other_model).unwrap_err();
    assert!(matches!(error, Error::ForeignModel { .. }), "{error:?}");

    // Nor does a new run begin on it, or claim its name first.
    let third = store();
    let error = Publisher::open(third.clone(), options(Start::NewRun, &baseline)).unwrap_err();
    assert!(matches!(error, Error::BadSetting { name: "baseline_dir", .. }), "{error:?}");
    assert!(matches!(Run::open(third, RUN), Err(Error::NoSuchRun { .. })));
}

#[test]
fn a_store_that_went_back_is_refused() {
    let (store, dir) = (store(), tempfile::tempdir().unwrap());
    let mut first = publisher(&store, Start::NewRun, dir.path());
    let mut weights = Weights::small(1);
    first.publish(&weights, step(0), Mode::Delta).unwrap();
    weights.step(1, 10);
    first.publish(&weights, step(1), Mode::Delta).unwrap();
    let lost = first.run().manifest_key(MODEL, Version(1)).unwrap();
    drop(first);
    store.delete(&lost).unwrap();
    let error = Publisher::open(store.clone(), options(Start::Resume, dir.path())).unwrap_err();
    assert!(matches!(error, Error::Rewind { have: Version(1), wanted: Version(0), .. }), "{error:?}");
}

#[test]
fn only_changed_files_travel_and_missing_ones_go() {
    let (store, dir) = (store(), tempfile::tempdir().unwrap());
    let mut publisher = publisher(&store, Start::NewRun, &dir.path().join("baseline"));
    let mut weights = Weights::small(1);
    weights.file("empty.txt", b"");
    publisher.publish(&weights, step(0), Mode::Delta).unwrap();
    assert_reader(&store, &dir.path().join("follower"), 0, &weights);
    weights.file("chat_template.jinja", b"{{ messages }}");
    weights.file("config.json", b"{\"hidden_size\": 33}");
    weights.files.retain(|file| file.name() != "tokenizer.json");
    publisher.publish(&weights, step(1), Mode::Delta).unwrap();
    let manifest = publisher.run().get(MODEL, Version(1)).unwrap().manifest;
    let carried: Vec<_> =
        manifest.files.iter().map(|file| (file.name.as_str(), !file.parts.is_empty())).collect();
    assert_eq!(carried, [("chat_template.jinja", true), ("config.json", true), ("empty.txt", false)]);
    assert_reader(&store, &dir.path().join("follower"), 1, &weights);
}

#[test]
fn snapshot_that_contradicts_itself_alone_is_refused() {
    let (store, dir) = (store(), tempfile::tempdir().unwrap());
    let mut publisher = publisher(&store, Start::NewRun, &dir.path().join("baseline"));
    let weights = Weights::small(1);
    publisher.publish(&weights, step(0), Mode::Delta).unwrap();

    let mut twice = weights.clone();
    twice.infos.insert(1, twice.infos[0].clone());
    twice.bytes.insert(1, twice.bytes[0].clone());
    publisher.publish(&twice, step(1), Mode::Delta).unwrap();
    assert_reader(&store, &dir.path().join("follower"), 1, &weights);
    twice.bytes[1][0] ^= 1;
    let error = publisher.publish(&twice, step(2), Mode::Delta).unwrap_err();
    assert!(matches!(&error, Error::DuplicateTensor { tensor } if tensor == "a.embed"), "{error:?}");

    let mut unsorted = weights.clone();
    unsorted.infos.swap(0, 1);
    let error = publisher.publish(&unsorted, step(2), Mode::Delta).unwrap_err();
    assert!(matches!(&error, Error::TensorMismatch { tensor, .. } if tensor == "a.embed"), "{error:?}");
    let mut short = weights.clone();
    short.bytes[6].pop();
    let error = publisher.publish(&short, step(2), Mode::Delta).unwrap_err();
    let Error::TensorMismatch { tensor, expected, found, .. } = &error else { panic!("{error:?}") };
    assert_eq!((tensor.as_str(), expected.as_str(), found.as_str()), ("g.up", "12288", "12287"));

    let mut unnamed = weights.clone();
    unnamed.infos[6].name = "g.\n".to_owned();
    let error = publisher.publish(&unnamed, step(2), Mode::Full).unwrap_err();
    assert!(matches!(error, Error::BadName { what: "tensor", .. }), "{error:?}");

    publisher.publish(&weights, step(2), Mode::Delta).unwrap();
    assert_eq!(driftless_testkit::publications::orphans(publisher.run()), Vec::<String>::new());
    assert_reader(&store, &dir.path().join("follower"), 2, &weights);
}

#[test]
fn settings_that_cannot_work_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (name, change) in [
        (
            "object_bytes_max",
            (|options| options.object_bytes_max = 1000)
                as fn(&mut driftless_transport::publish::PublisherOptions),
        ),
        ("object_bytes_max", |options| options.object_bytes_max = u64::MAX),
        ("uploads", |options| options.uploads = 0),
        ("anchor_every", |options| options.anchor_every = Some(0)),
        ("anchor_share", |options| options.anchor_share = Some(0.0)),
        ("anchor_share", |options| options.anchor_share = Some(f64::NAN)),
    ] {
        let mut options = options(Start::NewRun, dir.path());
        change(&mut options);
        let error = Publisher::open(store(), options).unwrap_err();
        assert!(matches!(error, Error::BadSetting { name: found, .. } if found == name), "{error:?}");
    }
    let mut followers = options(Start::NewRun, dir.path());
    followers.model = "followers".to_owned();
    assert!(matches!(Publisher::open(store(), followers), Err(Error::BadName { .. })));
}

#[test]
fn progress_is_told_tensor_by_tensor() {
    let (store, dir) = (store(), tempfile::tempdir().unwrap());
    let mut publisher = publisher(&store, Start::NewRun, dir.path());
    let told = Arc::new(Mutex::new(Vec::new()));
    let ear = told.clone();
    publisher.on_progress(Box::new(move |progress| {
        ear.lock().unwrap().push((progress.tensors, progress.tensors_total))
    }));
    publisher.publish(&Weights::small(1), step(0), Mode::Delta).unwrap();
    assert_eq!(*told.lock().unwrap(), (1..=7).map(|tensor| (tensor, 7)).collect::<Vec<_>>());
}

#[test]
fn polling_for_the_newest_version_is_cheap() {
    let (inner, dir) = (store(), tempfile::tempdir().unwrap());
    let mut publisher = publisher(&inner, Start::NewRun, dir.path());
    let mut weights = Weights::small(1);
    for version in 0..30 {
        weights.step(version, 100);
        publisher.publish(&weights, step(version), Mode::Delta).unwrap();
    }
    let count = Arc::new(Count::new(inner));
    let run = Run::open(count.clone(), RUN).unwrap();
    let before = count.counts();
    assert_eq!(run.newest_version(MODEL).unwrap(), Some(Version(29)));
    let after = count.counts();
    assert_eq!((after.gets - before.gets, after.heads - before.heads, after.lists - before.lists), (1, 2, 1));
}

#[test]
fn a_replica_cannot_be_shared() {
    let (store, dir) = (store(), tempfile::tempdir().unwrap());
    let _publisher = publisher(&store, Start::NewRun, dir.path());
    assert!(Replica::open(dir.path()).is_err(), "the baseline belongs to the publisher");
}
