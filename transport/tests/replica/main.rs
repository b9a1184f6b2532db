//! What a replica promises: the newest version bit for bit, or the old one and a reason.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod own;

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use driftless_store::os::watch::{self, Call};
use driftless_store::{Error as StoreError, Key, Memory, PutMode, Store};
use driftless_transport::checkpoint::write_checkpoint;
use driftless_transport::publish::{Mode, Start};
use driftless_transport::{Checkpoint, Error, Publisher, Replica, Run, Snapshot as _, Version};

use driftless_testkit::publications::{MODEL, RUN, Weights, assert_same, publisher, step};

/// A run with some versions, and what each of them is.
struct Fixture {
    store: Arc<dyn Store>,
    run: Run,
    publisher: Publisher,
    versions: Vec<Weights>,
    dir: tempfile::TempDir,
}

impl Fixture {
    /// Version 0 in full and two deltas, the last of which changes files too.
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store: Arc<dyn Store> = Arc::new(Memory::new());
        let publisher = publisher(&store, Start::NewRun, &dir.path().join("baseline"));
        let run = Run::open(store.clone(), RUN).unwrap();
        let mut fixture = Self { store, run, publisher, versions: Vec::new(), dir };
        fixture.publish(Weights::small(1), Mode::Full);
        fixture.step();
        let mut next = fixture.versions[1].clone();
        next.step(9, 40);
        next.file("config.json", b"{\"hidden_size\": 33}");
        next.file("vocab.json", b"{\"a\": 1}");
        next.files.retain(|file| file.name() != "tokenizer.json");
        fixture.publish(next, Mode::Delta);
        fixture
    }

    fn publish(&mut self, weights: Weights, mode: Mode) {
        let number = self.versions.len() as u64;
        self.publisher.publish(&weights, step(number), mode).unwrap();
        self.versions.push(weights);
    }

    fn step(&mut self) {
        let mut next = self.versions.last().unwrap().clone();
        next.step(self.versions.len() as u64, 40);
        self.publish(next, Mode::Delta);
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.dir.path().join(name)
    }

    fn replica(&self, name: &str, to: u64) -> Replica {
        let mut replica = Replica::open(self.path(name)).unwrap();
        replica.advance(&self.run, MODEL, Version(to), None).unwrap();
        self.assert_at(&replica, to);
        replica
    }

    fn assert_at(&self, replica: &Replica, version: u64) {
        assert_eq!(replica.applied().unwrap().version, Version(version));
        assert_eq!(replica.applied().unwrap().label(), self.run.id().label(Version(version)));
        assert_same(replica.checkpoint().unwrap(), &self.versions[version as usize]);
        assert_same(&Checkpoint::open(replica.dir()).unwrap(), &self.versions[version as usize]);
        replica.verify().unwrap();
    }
}

#[test]
fn versions_are_walked_one_by_one_or_in_one_go() {
    let fixture = Fixture::new();
    let mut replica = Replica::open(fixture.path("r")).unwrap();
    assert!(matches!(replica.checkpoint(), Err(Error::NothingApplied { .. })));
    assert!(replica.applied().is_none());
    for version in 0..3 {
        let advanced = replica.advance(&fixture.run, MODEL, Version(version), None).unwrap();
        assert_eq!(advanced.versions, 1);
        assert!(advanced.bytes > 0);
        fixture.assert_at(&replica, version);
        let again = replica.advance(&fixture.run, MODEL, Version(version), None).unwrap();
        assert_eq!((again.versions, again.bytes), (0, 0));
    }
    let mut late = Replica::open(fixture.path("late")).unwrap();
    assert_eq!(late.advance(&fixture.run, MODEL, Version(2), None).unwrap().versions, 3);
    fixture.assert_at(&late, 2);
}

#[test]
fn a_reopened_replica_goes_on_where_it_was() {
    let mut fixture = Fixture::new();
    drop(fixture.replica("r", 1));
    let mut replica = Replica::open(fixture.path("r")).unwrap();
    fixture.assert_at(&replica, 1);
    fixture.step();
    replica.advance(&fixture.run, MODEL, Version(3), None).unwrap();
    fixture.assert_at(&replica, 3);
}

#[test]
fn delta_is_applied_in_place_and_a_full_version_beside() {
    use std::os::unix::fs::MetadataExt as _;
    let mut fixture = Fixture::new();
    let mut replica = fixture.replica("r", 1);
    let inode = |dir: &Path| fs::metadata(dir.join("model.safetensors")).unwrap().ino();
    let first = inode(replica.dir());
    replica.advance(&fixture.run, MODEL, Version(2), None).unwrap();
    assert_eq!(inode(replica.dir()), first);
    let mut reshaped = Weights::small(7);
    reshaped.remove("g.up");
    fixture.publish(reshaped, Mode::Full);
    replica.advance(&fixture.run, MODEL, Version(3), None).unwrap();
    fixture.assert_at(&replica, 3);
    assert_ne!(inode(replica.dir()), first);
    assert_eq!(fs::read_dir(replica.dir().join(".driftless/next")).map(Iterator::count).unwrap_or(0), 0);
}

#[test]
fn sharded_reference_keeps_its_files_and_takes_deltas() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    let mut weights = Weights::small(2);
    let source = dir.path().join("hf");
    write_checkpoint(&source, &weights, 7000).unwrap();
    // Nobody else may read these, and not even their owner writes them.
    for path in Checkpoint::open(&source).unwrap().weight_files() {
        fs::set_permissions(path, fs::Permissions::from_mode(0o400)).unwrap();
    }
    let mut publisher = publisher(&store, Start::NewRun, &dir.path().join("baseline"));
    publisher.publish_reference(&source, step(0)).unwrap();
    let run = Run::open(store, RUN).unwrap();

    let mut replica = Replica::open(dir.path().join("r")).unwrap();
    let error = replica.advance(&run, MODEL, Version(0), None).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    replica.advance(&run, MODEL, Version(0), Some(&source)).unwrap();
    assert_same(replica.checkpoint().unwrap(), &weights);
    let files = replica.checkpoint().unwrap().weight_files().count();
    assert!(files >= 3);
    for path in replica.checkpoint().unwrap().weight_files() {
        let mode = fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o600, "as private as the source, and writable: {}", path.display());
    }
    for number in 1..4 {
        weights.step(number, 30);
        publisher.publish(&weights, step(number), Mode::Delta).unwrap();
        replica.advance(&run, MODEL, Version(number), None).unwrap();
        assert_same(replica.checkpoint().unwrap(), &weights);
        assert_eq!(replica.checkpoint().unwrap().weight_files().count(), files);
    }
    drop(replica);
    assert_same(Replica::open(dir.path().join("r")).unwrap().checkpoint().unwrap(), &weights);
    assert_same(&Checkpoint::open(&source).unwrap(), &Weights::small(2));
}

#[test]
fn a_reference_is_checked_bit_by_bit_before_it_is_taken() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    let weights = Weights::small(2);
    let source = dir.path().join("hf");
    write_checkpoint(&source, &weights, u64::MAX).unwrap();
    let mut publisher = publisher(&store, Start::NewRun, &dir.path().join("baseline"));
    publisher.publish_reference(&source, step(0)).unwrap();
    let run = Run::open(store, RUN).unwrap();
    let link = run.get(MODEL, Version(0)).unwrap();

    let mut replica = Replica::open(dir.path().join("r")).unwrap();
    let wrong = dir.path().join("wrong");
    let mut other = weights.clone();
    other.tensor_mut("g.up")[5] ^= 1;
    write_checkpoint(&wrong, &other, u64::MAX).unwrap();
    let error = replica.adopt(&wrong, &link).unwrap_err();
    assert!(
        matches!(&error, Error::TensorMismatch { tensor, what: "digest", .. } if tensor == "g.up"),
        "{error}"
    );
    let mut other = weights.clone();
    other.file("config.json", b"{}");
    write_checkpoint(&wrong, &other, u64::MAX).unwrap();
    let error = replica.adopt(&wrong, &link).unwrap_err();
    assert!(error.to_string().contains("config.json"), "{error}");
    other = weights.clone();
    other.remove("g.up");
    write_checkpoint(&wrong, &other, u64::MAX).unwrap();
    assert!(matches!(replica.adopt(&wrong, &link), Err(Error::TensorMismatch { .. })));
    assert!(replica.applied().is_none());
    replica.adopt(&source, &link).unwrap();
    assert_same(replica.checkpoint().unwrap(), &weights);

    let mut in_place = Replica::open(&source).unwrap();
    in_place.adopt(&source, &link).unwrap();
    assert_same(in_place.checkpoint().unwrap(), &weights);
    drop(in_place);
    assert_same(Replica::open(&source).unwrap().checkpoint().unwrap(), &weights);
}

#[test]
fn quarantine_of_an_unreadable_manifest_leaves_no_file() {
    let fixture = Fixture::new();
    let mut replica = fixture.replica("r", 1);
    replica.sync().unwrap();
    fs::write(replica.dir().join("notes.txt"), b"theirs").unwrap();
    // Which files are the version's, the directory itself cannot say any more. The next version lacks one.
    fs::write(replica.dir().join(".driftless/manifest"), b"{").unwrap();
    replica.quarantine(Error::NothingApplied { path: fixture.path("r") }).unwrap();
    replica.advance(&fixture.run, MODEL, Version(2), None).unwrap();
    assert!(!replica.dir().join("tokenizer.json").exists(), "a file of the version before");
    assert_eq!(fs::read(replica.dir().join("notes.txt")).unwrap(), b"theirs");
}

#[test]
fn one_directory_has_one_writer() {
    let fixture = Fixture::new();
    let replica = fixture.replica("r", 0);
    assert!(matches!(Replica::open(fixture.path("r")), Err(Error::Store(StoreError::Locked { .. }))));
    drop(replica);
    Replica::open(fixture.path("r")).unwrap();
}

#[test]
fn rewinds_and_other_runs_are_refused_with_both_sides_named() {
    let fixture = Fixture::new();
    let mut replica = fixture.replica("r", 2);
    let error = replica.advance(&fixture.run, MODEL, Version(1), None).unwrap_err();
    assert!(matches!(error, Error::Rewind { have: Version(2), wanted: Version(1), .. }), "{error}");

    let other = Fixture::new();
    let error = replica.advance(&other.run, MODEL, Version(2), None).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::ForeignRun { .. }), "{text}");
    assert!(
        text.contains(&other.run.id().to_string()) && text.contains(&fixture.run.id().to_string()),
        "{text}"
    );
    let link = other.run.get(MODEL, Version(2)).unwrap();
    let error = replica.advance_with(&link, &|object| other.run.object(object)).unwrap_err();
    assert!(matches!(error, Error::ForeignRun { .. }), "{error}");
    let error = replica.advance(&fixture.run, "critic", Version(2), None).unwrap_err();
    assert!(matches!(error, Error::ForeignModel { .. }), "{error}");
    fixture.assert_at(&replica, 2);
}

#[test]
fn delta_from_another_base_is_refused_untouched() {
    let fixture = Fixture::new();
    let mut replica = fixture.replica("r", 0);
    let link = fixture.run.get(MODEL, Version(2)).unwrap();
    let error = replica.advance_with(&link, &|object| fixture.run.object(object)).unwrap_err();
    assert!(matches!(error, Error::Corrupt { .. }), "{error}");
    let mut forged = fixture.run.get(MODEL, Version(1)).unwrap();
    forged.manifest.base.as_mut().unwrap().manifest_digest = link.digest;
    let error = replica.advance_with(&forged, &|object| fixture.run.object(object)).unwrap_err();
    assert!(matches!(error, Error::BrokenChain { .. }), "{error}");
    fixture.assert_at(&replica, 0);
}

#[test]
fn lies_of_the_store_are_refused_and_the_old_version_stays() {
    let fixture = Fixture::new();
    let mut replica = fixture.replica("r", 0);
    let manifest = fixture.run.manifest_key(MODEL, Version(1)).unwrap();
    let mut keys = vec![manifest];
    keys.extend(
        fixture.run.get(MODEL, Version(1)).unwrap().manifest.objects.into_iter().map(|object| object.key),
    );
    let foreign = fixture.run.get(MODEL, Version(2)).unwrap().manifest.objects[0].key.clone();
    let foreign = fixture.store.get(&foreign, None).unwrap();
    for key in &keys {
        let honest = fixture.store.get(key, None).unwrap();
        let mut flipped = honest.clone();
        flipped[honest.len() / 2] ^= 0x10;
        let lies = [
            flipped,
            honest[..honest.len() / 2].to_vec(),
            vec![],
            foreign.clone(),
            [&honest[..], b"x"].concat(),
        ];
        for lie in lies {
            fixture.store.put(key, &lie, PutMode::Overwrite).unwrap();
            let error = replica.advance(&fixture.run, MODEL, Version(1), None).unwrap_err();
            // A manifest that is another valid document breaks the chain one version later, if not here.
            assert!(!matches!(error, Error::DamagedReplica { .. }), "{error:?}");
            fixture.assert_at(&replica, 0);
        }
        fixture.store.delete(key).unwrap();
        let error = replica.advance(&fixture.run, MODEL, Version(1), None).unwrap_err();
        assert!(
            matches!(error, Error::Store(StoreError::NotFound { .. }) | Error::NoSuchVersion { .. }),
            "{error:?}"
        );
        fixture.assert_at(&replica, 0);
        fixture.store.put(key, &honest, PutMode::Overwrite).unwrap();
    }
    replica.advance(&fixture.run, MODEL, Version(2), None).unwrap();
    fixture.assert_at(&replica, 2);
}

/// Writes a file as another program does a while later: within a tick of the clock, its date would stay what it was.
fn write_later(path: &Path, bytes: &[u8]) {
    fs::write(path, bytes).unwrap();
    let file = fs::File::options().write(true).open(path).unwrap();
    file.set_modified(SystemTime::now() + Duration::from_secs(1)).unwrap();
}

#[test]
fn weights_touched_by_others_are_noticed_at_open() {
    let fixture = Fixture::new();
    let path = fixture.replica("r", 1).dir().join("model.safetensors");
    let honest = fs::read(&path).unwrap();
    fs::write(&path, &honest).unwrap();
    fixture.assert_at(&Replica::open(fixture.path("r")).unwrap(), 1);
    let mut flipped = honest.clone();
    *flipped.last_mut().unwrap() ^= 1;
    for wrong in [&flipped[..], &honest[..honest.len() - 1], b""] {
        write_later(&path, wrong);
        let error = Replica::open(fixture.path("r")).unwrap_err();
        assert!(matches!(error, Error::DamagedReplica { .. }), "{error}");
    }
    fs::write(&path, &honest).unwrap();
    fs::write(fixture.path("r").join("config.json"), b"{}").unwrap();
    assert!(matches!(Replica::open(fixture.path("r")), Err(Error::DamagedReplica { .. })));
}

#[test]
fn weights_touched_by_others_are_noticed_before_the_next_delta() {
    let fixture = Fixture::new();
    let mut replica = fixture.replica("r", 1);
    let path = replica.dir().join("model.safetensors");
    let honest = fs::read(&path).unwrap();
    let mut flipped = honest.clone();
    *flipped.last_mut().unwrap() ^= 1;
    // Replaced by rename: an engine's map of the old file stays whole.
    let replace = |bytes: &[u8]| {
        write_later(&fixture.path("new"), bytes);
        fs::rename(fixture.path("new"), &path).unwrap();
    };
    replace(&flipped);
    let error = replica.advance(&fixture.run, MODEL, Version(2), None).unwrap_err();
    assert!(matches!(error, Error::DamagedReplica { .. }), "{error:?}");
    assert_eq!(fs::read(&path).unwrap(), flipped, "nothing was applied on top");
    assert!(matches!(replica.checkpoint(), Err(Error::NothingApplied { .. })));
    replace(&honest);
    replica.advance(&fixture.run, MODEL, Version(2), None).unwrap();
    fixture.assert_at(&replica, 2);
}

#[test]
fn base_that_rotted_under_its_date_is_blamed_for_the_codec() {
    let mut fixture = Fixture::new();
    let mut large = fixture.versions[2].clone();
    let mut random = driftless_testkit::random::Random(4);
    // Exponents of four kinds, of which one changes: where, is said by rank among its like.
    let exponents = |i: usize, random: &mut driftless_testkit::random::Random| {
        if i.is_multiple_of(2) { random.next() as u8 } else { 0x3a + (random.next() % 4) as u8 }
    };
    large.set("x.large", driftless_transport::Dtype::Bf16, &[300, 500], |i| exponents(i, &mut random));
    fixture.publish(large, Mode::Full);
    let mut replica = fixture.replica("r", 3);
    let mut next = fixture.versions[3].clone();
    for element in next.tensor_mut("x.large").chunks_mut(2).filter(|element| element[1] == 0x3a) {
        element[0] ^= u8::from(random.next().is_multiple_of(50));
    }
    fixture.publish(next, Mode::Delta);
    let path = replica.dir().join("model.safetensors");
    let checkpoint = replica.checkpoint().unwrap();
    let offset = checkpoint.place(checkpoint.position("x.large").unwrap()).unwrap().offset as usize;
    let date = fs::metadata(&path).unwrap().modified().unwrap();
    let mut bytes = fs::read(&path).unwrap();
    (0..100_000).for_each(|element| bytes[offset + 2 * element + 1] ^= 0x01);
    let file = fs::File::options().write(true).open(&path).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &bytes, 0).unwrap();
    file.set_modified(date).unwrap();
    let error = replica.advance(&fixture.run, MODEL, Version(4), None).unwrap_err();
    assert!(matches!(error, Error::DamagedReplica { .. }), "{error:?}");
    assert!(matches!(replica.checkpoint(), Err(Error::NothingApplied { .. })));
    replica.quarantine(error).unwrap();
    replica.advance(&fixture.run, MODEL, Version(4), None).unwrap();
    fixture.assert_at(&replica, 4);
}

#[test]
fn no_flipped_byte_of_the_state_goes_unnoticed() {
    let fixture = Fixture::new();
    drop(fixture.replica("r", 1));
    for name in ["state.json", "manifest", "digests"] {
        let path = fixture.path("r").join(".driftless").join(name);
        let honest = fs::read(&path).unwrap();
        let mut recovered = 0;
        // The manifest is long, and a BLAKE3 digest guards it as a whole.
        for index in (0..honest.len()).step_by(if name == "manifest" { 37 } else { 1 }) {
            let mut flipped = honest.clone();
            flipped[index] ^= 1 << (index % 8);
            fs::write(&path, &flipped).unwrap();
            match Replica::open(fixture.path("r")) {
                Ok(replica) => {
                    fixture.assert_at(&replica, 1);
                    recovered += 1;
                }
                Err(error) => {
                    assert!(matches!(error, Error::DamagedReplica { .. }), "{name} byte {index}: {error:?}")
                }
            }
            fs::write(&path, &honest).unwrap();
        }
        assert_eq!(
            recovered > 0,
            name != "manifest",
            "{name}: digests are made anew, and so are time stamps"
        );
        fs::remove_file(&path).unwrap();
        let opened = Replica::open(fixture.path("r"));
        match name {
            "state.json" => assert!(opened.unwrap().applied().is_none()),
            "digests" => fixture.assert_at(&opened.unwrap(), 1),
            _ => assert!(matches!(opened, Err(Error::DamagedReplica { .. }))),
        }
        fs::write(&path, &honest).unwrap();
    }
}

#[test]
fn maps_of_weights_stay_from_version_to_version() {
    let fixture = Fixture::new();
    let mut replica = fixture.replica("r", 0);
    let place = |replica: &Replica| replica.checkpoint().unwrap().tensor(0).unwrap().as_ptr().addr();
    let before = place(&replica);
    for version in [1, 2] {
        replica.advance(&fixture.run, MODEL, Version(version), None).unwrap();
        assert_eq!(place(&replica), before);
        fixture.assert_at(&replica, version);
    }
}

#[test]
fn a_full_disk_is_said_and_survived() {
    let fixture = Fixture::new();
    let state = |name: &str| fixture.path("r").join(".driftless").join(name);
    let mut replica = fixture.replica("r", 1);
    replica.sync().unwrap();
    let full = state("journal.spare");
    assert!(full.exists(), "kept from version 1");
    watch::set(Some(Box::new(move |call, path| match call {
        Call::Write if path == full => Err(ErrorKind::StorageFull.into()),
        _ => Ok(()),
    })));
    let failed = replica.advance(&fixture.run, MODEL, Version(2), None);
    watch::set(None);
    let error = failed.unwrap_err();
    assert!(matches!(error, Error::Store(StoreError::NoSpace { .. })), "{error:?}");
    fixture.assert_at(&replica, 1);
    assert!(!state("journal").exists() && !state("journal.spare").exists(), "their space is given back");

    let durably = |replica: &mut Replica| {
        replica.advance(&fixture.run, MODEL, Version(2), None)?;
        replica.sync()
    };
    for partial in ["config.json.partial", "digests.partial", "manifest.partial", "state.json.partial"] {
        let name = format!("for {partial}");
        let mut replica = fixture.replica(&name, 1);
        replica.sync().unwrap();
        let state = |file: &str| fixture.path(&name).join(".driftless").join(file);
        symlink("/dev/full", state(partial)).unwrap();
        let error = durably(&mut replica).unwrap_err();
        assert!(matches!(error, Error::Store(StoreError::NoSpace { .. })), "{partial}: {error:?}");
        assert!(
            matches!(replica.checkpoint(), Err(Error::NothingApplied { .. })),
            "neither version may be served"
        );
        // The state comes behind a version that could be loaded; the files in front of it.
        let before = partial == "config.json.partial";
        assert_eq!(replica.applied().unwrap().version, Version(if before { 1 } else { 2 }));
        let error = durably(&mut replica).unwrap_err();
        assert!(matches!(error, Error::Store(StoreError::NoSpace { .. })), "{partial}: {error:?}");
        fs::remove_file(state(partial)).unwrap();
        durably(&mut replica).unwrap();
        fixture.assert_at(&replica, 2);
    }
}

#[test]
fn a_journal_from_elsewhere_is_refused() {
    // Two runs of the same shape: a state directory is copied over, as a careless restore would.
    let fixture = Fixture::new();
    let other = Fixture::new();
    drop(fixture.replica("r", 1));
    drop(other.replica("r", 2));
    let marker = fixture.path("r").join(".driftless/state.json");
    fs::copy(other.path("r").join(".driftless/state.json"), &marker).unwrap();
    assert!(matches!(Replica::open(fixture.path("r")), Err(Error::DamagedReplica { .. })));
}

#[test]
fn auxiliary_file_name_of_255_bytes_is_installed_and_replaced() {
    let mut fixture = Fixture::new();
    let name = format!("{}.json", "n".repeat(250));
    for bytes in [&b"{}"[..], b"[]"] {
        let mut next = fixture.versions.last().unwrap().clone();
        next.file(&name, bytes);
        fixture.publish(next, Mode::Delta);
    }
    drop(fixture.replica("r", 3));
    fixture.replica("r", 4);
}

#[test]
fn tied_weights_are_written_under_every_name() {
    let fixture = Fixture::new();
    let replica = fixture.replica("r", 2);
    let manifest = replica.manifest().unwrap();
    let tied = manifest.tensors.iter().find(|tensor| tensor.name == "a.embed").unwrap();
    assert_eq!(tied.aliases, ["b.head"]);
    let checkpoint = replica.checkpoint().unwrap();
    let bytes = |name| checkpoint.bytes(checkpoint.position(name).unwrap()).unwrap().into_owned();
    assert_eq!(bytes("a.embed"), bytes("b.head"));
    assert_eq!(replica.digests("a.embed").unwrap().total(), tied.digest);
    assert!(replica.digests("b.head").is_none());
}

#[test]
fn an_unreachable_store_costs_nothing() {
    let fixture = Fixture::new();
    let fault = Arc::new(driftless_store::wrap::Fault::new(fixture.store.clone()));
    let run = Run::open(fault.clone(), RUN).unwrap();
    let mut replica = fixture.replica("r", 0);
    for skip in 0.. {
        fault.arm(skip, u64::MAX, driftless_store::wrap::When::Before);
        match replica.advance(&run, MODEL, Version(2), None) {
            Ok(_) => break,
            Err(error) => assert!(matches!(error, Error::Store(StoreError::Injected { .. })), "{error:?}"),
        }
        let version = replica.applied().unwrap().version.0;
        fixture.assert_at(&replica, version);
    }
    fault.disarm();
    fixture.assert_at(&replica, 2);
    assert!(fixture.store.get(&Key::new("absent").unwrap(), None).is_err());
}
