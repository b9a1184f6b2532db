//! What a follower offers to plugins: exactly what changes, or nothing.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use driftless_store::wait::Stop;
use driftless_store::{ContentDigest, Memory, Store};
use driftless_transport::follow::FollowerOptions;
use driftless_transport::prepared::{PreparedDelta, checksum, offered};
use driftless_transport::publish::{Mode, Start};
use driftless_transport::{Dtype, Error, Follower, Publisher, Replica, Run, Version};

use driftless_testkit::publications::{MODEL, RUN, Weights, publisher, step};
use driftless_testkit::random::Random;

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

    fn files(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.plugins()).unwrap().map(|entry| entry.unwrap().path());
        entries.filter(|path| !path.ends_with("rank-30000-0.json")).collect()
    }

    /// The files that offer something.
    fn offered(&self) -> Vec<PathBuf> {
        self.files().into_iter().filter(|path| offered(path).unwrap().is_some()).collect()
    }

    /// The one offer, after it was seen to lead from one version to another.
    fn assert_offer(&self, from: usize, to: usize) -> PathBuf {
        let [path] = <[PathBuf; 1]>::try_from(self.offered()).unwrap();
        let delta = PreparedDelta::open(&path).unwrap().unwrap();
        assert_eq!(offered(&path).unwrap(), Some(delta.id()));
        assert!(delta.is_offered());
        let arrays = delta.read().unwrap();
        let manifest = |version: usize| self.run.get(MODEL, Version(version as u64)).unwrap();
        for (named, version) in [(delta.base(), from), (delta.target(), to)] {
            assert_eq!(named.label, self.run.id().label(Version(version as u64)));
            assert_eq!(named.manifest, manifest(version).identity().manifest_digest);
        }
        let (old, new) = (&self.versions[from], &self.versions[to]);
        assert_eq!(delta.tensors().len(), new.infos.len());
        for (index, (tensor, info)) in delta.tensors().iter().zip(&new.infos).enumerate() {
            assert_eq!((&tensor.name, tensor.dtype, &tensor.shape), (&info.name, info.dtype, &info.shape));
            let (mut bytes, size) = (old.bytes[index].clone(), info.dtype.size() as usize);
            let changes = arrays.changes(tensor);
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
    assert_eq!(fixture.files(), [] as [PathBuf; 0]);
    let mut inode = None;
    for (from, to) in [(0, 1), (1, 2), (2, 4)] {
        replica.advance(&fixture.run, MODEL, Version(to as u64), None).unwrap();
        let found = fs::metadata(fixture.assert_offer(from, to)).unwrap().ino();
        assert_eq!(*inode.get_or_insert(found), found, "plugins keep the file's pages locked");
    }
    drop(replica);
    assert_eq!(fixture.files(), [] as [PathBuf; 0], "it goes with the replica");
}

#[test]
fn follower_that_ends_removes_what_it_offered() {
    let mut fixture = Fixture::new();
    fixture.step(40);
    drop(fixture.replica(0));
    let mut options = FollowerOptions::new(RUN, fixture.dir.path().join("host"), "host");
    (options.plugin_dir, options.until) = (Some(fixture.plugins()), Some(Version(1)));
    let follower = Follower::open(fixture.run.store().clone(), options, vec![]).unwrap();
    follower.prepare(None).unwrap();
    fixture.assert_offer(0, 1);
    // The command's thread for signals has one more handle, to the end of the process.
    let handle = follower.clone();
    follower.run_until(&Stop::new(), false).unwrap();
    assert_eq!(fixture.files(), [] as [PathBuf; 0]);
    // And one that goes on offers again.
    fixture.step(40);
    handle.prepare(Some(Version(2))).unwrap();
    fixture.assert_offer(1, 2);
}

#[test]
fn start_removes_what_killed_followers_left_and_nothing_else() {
    let mut fixture = Fixture::new();
    fixture.step(40);
    let mut replica = fixture.replica(0);
    replica.advance(&fixture.run, MODEL, Version(1), None).unwrap();
    let live = fixture.assert_offer(0, 1);
    let left = fixture.plugins().join("delta-0123456789abcdef");
    fs::copy(&live, &left).unwrap();
    let mut other = Replica::open(fixture.dir.path().join("other")).unwrap();
    other.set_plugin_dir(fixture.plugins());
    assert_eq!(fixture.files(), std::slice::from_ref(&live));
    assert_eq!(fixture.assert_offer(0, 1), live);
    drop(replica);
    assert_eq!(fixture.files(), [] as [PathBuf; 0]);
    fixture.mode(0o755);
    fs::write(&left, "").unwrap();
    other.set_plugin_dir(fixture.plugins());
    assert_eq!(fixture.files(), [left], "others can write to the directory");
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
    let delta = PreparedDelta::open(&fixture.assert_offer(0, 2)).unwrap().unwrap();
    assert_eq!(delta.tensors().iter().map(|tensor| tensor.changed).sum::<u64>(), 1);
}

#[test]
fn offer_without_a_plugin_writes_nothing() {
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
    // Somebody tidies up.
    fs::remove_file(&fixture.files()[0]).unwrap();
    at(5);
    let path = fixture.assert_offer(4, 5);
    at(6);
    assert_eq!(fixture.offered(), [] as [PathBuf; 0], "a version in full says not what changes");
    drop(replica);
    fs::write(&path, stale).unwrap();
    let _replica = fixture.replica(6);
    assert_eq!(fixture.files(), [] as [PathBuf; 0], "what a process before left is removed");
}

/// What opening and reading a file of these bytes says.
fn refused(dir: &Path, bytes: &[u8]) -> Option<Error> {
    let path = dir.join("file");
    fs::write(&path, bytes).unwrap();
    match PreparedDelta::open(&path) {
        Ok(delta) => delta.and_then(|delta| delta.read().err()),
        Err(error) => Some(error),
    }
}

#[test]
fn a_torn_damaged_or_lying_file_is_refused() {
    let mut fixture = Fixture::new();
    fixture.step(400);
    let mut replica = fixture.replica(0);
    replica.advance(&fixture.run, MODEL, Version(1), None).unwrap();
    let bytes = fs::read(fixture.assert_offer(0, 1)).unwrap();
    let dir = fixture.dir.path();
    let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
    let (start, length) = (number(8), number(16));
    let end = start + length;
    for cut in (1..end).step_by(97).chain([end - 1]) {
        assert!(matches!(refused(dir, &bytes[..cut]), Some(Error::Corrupt { .. })), "cut at {cut}");
    }
    assert!(refused(dir, &bytes[..end]).is_none(), "what is behind the header does not count");
    for at in (0..end).step_by(89).chain(0..64) {
        let mut flipped = bytes.clone();
        flipped[at] ^= 4;
        assert!(matches!(refused(dir, &flipped), Some(Error::Corrupt { .. })), "byte {at}");
    }
    // Under digests that hold.
    let text = String::from_utf8(bytes[start..end].to_vec()).unwrap();
    let sealed = |text: &str, arrays: &[u8]| {
        let sum = |arrays: &[u8]| format!("\"checksum\":{}", checksum(arrays, 64));
        let text = text.replace(&sum(&bytes[64..start]), &sum(arrays));
        let mut file = [&bytes[..64], arrays, text.as_bytes()].concat();
        file[16..24].copy_from_slice(&(text.len() as u64).to_le_bytes());
        file[24..56].copy_from_slice(ContentDigest::of(text.as_bytes()).as_bytes());
        file
    };
    assert!(refused(dir, &sealed(&text, &bytes[64..start])).is_none());
    let mut lies = vec![sealed("{}", &[]), b"dftlpre2".to_vec(), b"dftlpre1".repeat(8)];
    for (word, lie) in [
        ("\"changed\":", "\"changed\":99999"),
        ("\"changed\":", "\"changed\":1844674407370955161"),
        ("\"new\":", "\"new\":99"),
        ("\"positions\":", "\"positions\":8888888"),
        ("\"shape\":[96,32]", "\"shape\":[1]"),
    ] {
        assert!(text.contains(word));
        lies.push(sealed(&text.replace(word, lie), &bytes[64..start]));
    }
    // Positions that do not ascend.
    let mut arrays = bytes[64..start].to_vec();
    arrays[..4].fill(0xff);
    lies.push(sealed(&text, &arrays));
    for (number, lie) in lies.iter().enumerate() {
        let error = refused(dir, lie).unwrap();
        assert!(matches!(error, Error::Corrupt { .. } | Error::Parse { .. }), "{number}: {error}");
    }
    assert!(refused(dir, &[0; 64]).is_none(), "nothing is offered");
    assert!(refused(dir, &[]).is_none(), "the follower has created it, and wrote nothing yet");
}
