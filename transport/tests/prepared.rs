//! What a follower offers to plugins: exactly what changes, or nothing.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use driftless_store::{ContentDigest, Memory, Store};
use driftless_transport::prepared::PreparedDelta;
use driftless_transport::publish::{Mode, Start};
use driftless_transport::{Dtype, Error, Publisher, Replica, Run, Version};

use common::{MODEL, RUN, Random, Weights, publisher, step};

/// Versions of a small model, and a directory of plugins with a rank in it.
struct Fixture {
    run: Run,
    publisher: Publisher,
    versions: Vec<Weights>,
    dir: tempfile::TempDir,
}

impl Fixture {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store: Arc<dyn Store> = Arc::new(Memory::new());
        let publisher = publisher(&store, Start::NewRun, &dir.path().join("baseline"));
        let run = Run::open(store, RUN).unwrap();
        let mut fixture = Self { run, publisher, versions: Vec::new(), dir };
        fs::create_dir(fixture.plugins()).unwrap();
        fixture.mode(0o700);
        fs::write(fixture.plugins().join("rank-30000-0.json"), "{}").unwrap();
        let mut first = Weights::small(1);
        first.remove("f.ids");
        fixture.publish(first, Mode::Full);
        fixture
    }

    fn plugins(&self) -> PathBuf {
        self.dir.path().join("plugins")
    }

    fn mode(&self, mode: u32) {
        fs::set_permissions(self.plugins(), fs::Permissions::from_mode(mode)).unwrap();
    }

    fn publish(&mut self, weights: Weights, mode: Mode) {
        self.publisher.publish(&weights, step(self.versions.len() as u64), mode).unwrap();
        self.versions.push(weights);
    }

    /// Publishes the next version, of which about one byte in `every` differs.
    fn step(&mut self, every: u64) {
        let mut next = self.versions.last().unwrap().clone();
        next.step(self.versions.len() as u64, every);
        self.publish(next, Mode::Delta);
    }

    /// A replica at a version, which offers from then on.
    fn replica(&self, at: u64) -> Replica {
        let mut replica = Replica::open(self.dir.path().join("host")).unwrap();
        replica.advance(&self.run, MODEL, Version(at), None).unwrap();
        replica.set_plugin_dir(self.plugins());
        replica
    }

    fn offered(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.plugins()).unwrap().map(|entry| entry.unwrap().path());
        entries.filter(|path| !path.ends_with("rank-30000-0.json")).collect()
    }

    /// The one offer, after it was seen to lead from one version to another.
    fn assert_offer(&self, from: usize, to: usize) -> PathBuf {
        let [path] = <[PathBuf; 1]>::try_from(self.offered()).unwrap();
        let delta = PreparedDelta::open(&path).unwrap();
        let manifest = |version: usize| self.run.get(MODEL, Version(version as u64)).unwrap();
        for (named, version) in [(delta.base(), from), (delta.target(), to)] {
            assert_eq!(named.label, self.run.id().label(Version(version as u64)));
            assert_eq!(named.manifest, manifest(version).identity().manifest_digest);
        }
        let (old, new) = (&self.versions[from], &self.versions[to]);
        assert_eq!(delta.tensors(), new.infos);
        for (index, info) in new.infos.iter().enumerate() {
            let (mut bytes, size) = (old.bytes[index].clone(), info.dtype.size() as usize);
            let changes = delta.changes(index);
            let values = changes.new.chunks(size).zip(changes.old.chunks(size));
            for (at, (new, old)) in changes.positions.iter().zip(values) {
                let at = u32::from_le_bytes(*at) as usize * size;
                assert_eq!(&bytes[at..at + size], old, "{}", info.name);
                assert_ne!(new, old, "{}", info.name);
                bytes[at..at + size].copy_from_slice(new);
            }
            assert_eq!(bytes, new.bytes[index], "{}", info.name);
        }
        path
    }
}

#[test]
fn each_delta_is_offered_instead_of_the_one_before() {
    let mut fixture = Fixture::new();
    (0..4).for_each(|_| fixture.step(40));
    let mut replica = fixture.replica(0);
    assert_eq!(fixture.offered(), [] as [PathBuf; 0]);
    for (from, to) in [(0, 1), (1, 2), (2, 4)] {
        replica.advance(&fixture.run, MODEL, Version(to as u64), None).unwrap();
        fixture.assert_offer(from, to);
    }
    drop(replica);
    assert_eq!(fixture.offered(), [] as [PathBuf; 0], "it goes with the replica");
}

#[test]
fn a_value_that_comes_back_over_two_versions_is_no_change() {
    let mut fixture = Fixture::new();
    fixture.step(40);
    let mut back = fixture.versions[0].clone();
    back.tensor_mut("g.up")[0] ^= 1;
    fixture.publish(back, Mode::Delta);
    let mut replica = fixture.replica(0);
    replica.advance(&fixture.run, MODEL, Version(2), None).unwrap();
    let delta = PreparedDelta::open(&fixture.assert_offer(0, 2)).unwrap();
    let changed: usize = (0..delta.tensors().len()).map(|index| delta.changes(index).positions.len()).sum();
    assert_eq!(changed, 1);
}

#[test]
fn nothing_is_offered_where_no_plugin_could_use_it() {
    let mut fixture = Fixture::new();
    (0..3).for_each(|_| fixture.step(40));
    let dense = Weights::small(77);
    let mut next = fixture.versions[3].clone();
    for name in ["a.embed", "b.head", "d.norm", "e.norm", "g.up"] {
        next.tensor_mut(name)
            .copy_from_slice(&dense.bytes[dense.infos.iter().position(|i| i.name == name).unwrap()]);
    }
    let mut random = Random(5);
    next.set("g.up", Dtype::F32, &[64, 48], |i| if i % 4 == 3 { 0x3f } else { random.next() as u8 });
    fixture.publish(next, Mode::Delta);
    fixture.step(40);
    let last = fixture.versions[5].clone();
    fixture.publish(last, Mode::Full);

    let mut replica = fixture.replica(0);
    let mut at = |version| replica.advance(&fixture.run, MODEL, Version(version), None).map(drop).unwrap();
    fs::remove_file(fixture.plugins().join("rank-30000-0.json")).unwrap();
    at(1);
    assert_eq!(fixture.offered(), [] as [PathBuf; 0], "no plugin was ever there");
    fs::write(fixture.plugins().join("rank-30000-0.json"), "{}").unwrap();
    fixture.mode(0o755);
    at(2);
    assert_eq!(fixture.offered(), [] as [PathBuf; 0], "others could write to the directory");
    fixture.mode(0o700);
    at(3);
    let stale = fs::read(fixture.assert_offer(2, 3)).unwrap();
    at(4);
    assert_eq!(fixture.offered(), [] as [PathBuf; 0], "it would be larger than the weights");
    at(5);
    let path = fixture.assert_offer(4, 5);
    drop(replica);
    fs::write(&path, stale).unwrap();
    let _replica = fixture.replica(6);
    assert_eq!(fixture.offered(), [] as [PathBuf; 0], "what a process before left is removed");
}

/// A file of the offer's that holds these bytes.
fn refused(dir: &Path, bytes: &[u8]) -> Error {
    let path = dir.join("file");
    fs::write(&path, bytes).unwrap();
    PreparedDelta::open(&path).unwrap_err()
}

#[test]
fn a_torn_damaged_or_lying_file_is_refused() {
    let mut fixture = Fixture::new();
    fixture.step(400);
    let mut replica = fixture.replica(0);
    replica.advance(&fixture.run, MODEL, Version(1), None).unwrap();
    let bytes = fs::read(fixture.assert_offer(0, 1)).unwrap();
    let dir = fixture.dir.path();
    for cut in (0..bytes.len()).step_by(97).chain([bytes.len() - 1]) {
        assert!(matches!(refused(dir, &bytes[..cut]), Error::Corrupt { .. }), "cut at {cut}");
    }
    for at in (0..bytes.len()).step_by(89) {
        let mut flipped = bytes.clone();
        flipped[at] ^= 4;
        assert!(matches!(refused(dir, &flipped), Error::Corrupt { .. }), "byte {at}");
    }
    // Under a digest that holds.
    let end = bytes.len() - 40;
    let length = u64::from_le_bytes(bytes[end..end + 8].try_into().unwrap()) as usize;
    let text = String::from_utf8(bytes[end - length..end].to_vec()).unwrap();
    let sealed = |text: &str| {
        let mut file = bytes[..end - length].to_vec();
        file.extend_from_slice(text.as_bytes());
        file.extend_from_slice(&(text.len() as u64).to_le_bytes());
        file.extend_from_slice(ContentDigest::of(&file.clone()).as_bytes());
        file
    };
    assert!(
        PreparedDelta::open(&{
            fs::write(dir.join("file"), sealed(&text)).unwrap();
            dir.join("file")
        })
        .is_ok()
    );
    let mut lies = vec![sealed("{}"), b"dftlpre1".to_vec()];
    for (word, lie) in [
        ("\"changed\":", "\"changed\":99999"),
        ("\"changed\":", "\"changed\":1844674407370955161"),
        ("\"new\":", "\"new\":99"),
        ("\"shape\":[96,32]", "\"shape\":[1]"),
    ] {
        assert!(text.contains(word));
        lies.push(sealed(&text.replace(word, lie)));
    }
    for (number, lie) in lies.iter().enumerate() {
        let error = refused(dir, lie);
        assert!(matches!(error, Error::Corrupt { .. } | Error::Parse { .. }), "{number}: {error}");
    }
}
