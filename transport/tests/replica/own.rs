//! A replica replaces its own files, and nothing else.

use std::fs;
use std::os::unix::fs::symlink;

use driftless_transport::publish::PublisherOptions;

use super::*;

#[test]
fn foreign_weights_are_not_overwritten() {
    let fixture = Fixture::new();
    let theirs = Weights::small(8);
    write_checkpoint(fixture.path("theirs"), &theirs, u64::MAX).unwrap();
    let mut replica = Replica::open(fixture.path("theirs")).unwrap();
    let error = replica.advance(&fixture.run, MODEL, Version(1), None).unwrap_err();
    assert!(matches!(error, Error::BadSetting { .. }), "{error}");
    assert_same(&Checkpoint::open(fixture.path("theirs")).unwrap(), &theirs);
}

#[test]
fn foreign_file_of_the_versions_name_is_not_overwritten() {
    let fixture = Fixture::new();
    let theirs = fixture.path("theirs");
    fs::create_dir(&theirs).unwrap();
    let name = fixture.run.get(MODEL, Version(1)).unwrap().manifest.files[0].name.clone();
    fs::write(theirs.join(&name), b"precious").unwrap();
    fs::write(theirs.join("notes.txt"), b"mine").unwrap();
    let mut replica = Replica::open(&theirs).unwrap();
    let error = replica.advance(&fixture.run, MODEL, Version(1), None).unwrap_err();
    assert!(matches!(&error, Error::BadSetting { found, .. } if found.contains(&name)), "{error}");
    assert_eq!(fs::read(theirs.join(&name)).unwrap(), b"precious");
    fs::remove_file(theirs.join(&name)).unwrap();
    replica.advance(&fixture.run, MODEL, Version(1), None).unwrap();
    assert_eq!(fs::read(theirs.join("notes.txt")).unwrap(), b"mine");
}

#[test]
fn open_with_other_weights_for_engines_is_refused_by_name() {
    let fixture = Fixture::new();
    drop(fixture.replica("r", 1));
    let stray = fixture.path("r").join("adapter.safetensors");
    fs::copy(fixture.path("r").join("model.safetensors"), &stray).unwrap();
    let error = Replica::open(fixture.path("r")).unwrap_err();
    assert!(
        matches!(&error, Error::BadSetting { found, .. } if found.contains("adapter.safetensors")),
        "{error}"
    );
    fs::remove_file(stray).unwrap();
    Replica::open(fixture.path("r")).unwrap();
}

#[test]
fn replica_weight_file_that_is_a_link_is_refused() {
    let fixture = Fixture::new();
    let mut replica = fixture.replica("r", 1);
    replica.sync().unwrap();
    let (path, target) = (replica.dir().join("model.safetensors"), fixture.path("elsewhere"));
    // With the bytes and the date that the replica left.
    fs::rename(&path, &target).unwrap();
    symlink(&target, &path).unwrap();
    let before = fs::read(&target).unwrap();
    let assert_named = |error: &Error| {
        assert!(matches!(error, Error::DamagedReplica { .. }), "{error:?}");
        let (words, path) = (driftless_store::chain_text(error), path.display().to_string());
        assert!(words.contains("found a symbolic link") && words.contains(&path), "{words}");
    };
    let error = replica.advance(&fixture.run, MODEL, Version(2), None).unwrap_err();
    assert_named(&error);
    drop(replica);
    assert_named(&Replica::open(fixture.path("r")).unwrap_err());
    // As a follower builds it anew.
    let mut replica = Replica::open(fixture.path("other")).unwrap();
    replica.advance(&fixture.run, MODEL, Version(1), None).unwrap();
    replica.sync().unwrap();
    let path = replica.dir().join("model.safetensors");
    fs::remove_file(&path).unwrap();
    symlink(&target, &path).unwrap();
    replica.quarantine(error).unwrap();
    replica.advance(&fixture.run, MODEL, Version(2), None).unwrap();
    fixture.assert_at(&replica, 2);
    assert!(!path.is_symlink() && fs::read(&target).unwrap() == before);
}

#[test]
fn adopt_directory_of_links_copies_and_leaves_the_targets() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    let mut weights = Weights::small(2);
    let [blobs, snapshot] = ["blobs", "snapshot"].map(|name| dir.path().join(name));
    write_checkpoint(&blobs, &weights, 7000).unwrap();
    // As the Hugging Face cache has it.
    fs::create_dir(&snapshot).unwrap();
    for entry in fs::read_dir(&blobs).unwrap() {
        let name = entry.unwrap().file_name();
        symlink(Path::new("../blobs").join(&name), snapshot.join(&name)).unwrap();
    }
    let mut publisher = publisher(&store, Start::NewRun, &dir.path().join("baseline"));
    publisher.publish_reference(&snapshot, step(0)).unwrap();
    let run = Run::open(store, RUN).unwrap();
    let mut replica = Replica::open(&snapshot).unwrap();
    replica.advance(&run, MODEL, Version(0), Some(&snapshot)).unwrap();
    weights.step(1, 30);
    publisher.publish(&weights, step(1), Mode::Delta).unwrap();
    replica.advance(&run, MODEL, Version(1), None).unwrap();
    assert_same(replica.checkpoint().unwrap(), &weights);
    assert_same(&Checkpoint::open(&blobs).unwrap(), &Weights::small(2));
}

#[test]
fn publisher_baseline_dir_with_a_foreign_file_is_refused() {
    for name in ["model.safetensors", "config.json"] {
        let fixture = Fixture::new();
        let theirs = fixture.path("theirs");
        fs::create_dir(&theirs).unwrap();
        fs::write(theirs.join(name), b"precious").unwrap();
        let settings = PublisherOptions::new(RUN, Start::Resume, &theirs);
        let error = Publisher::open(fixture.store.clone(), settings).unwrap_err();
        assert!(matches!(&error, Error::BadSetting { found, .. } if found.contains(name)), "{error}");
        let files: Vec<_> = fs::read_dir(&theirs).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(files, [name]);
    }
}
