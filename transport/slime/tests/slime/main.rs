//! slime's delta directories in both directions: golden ones and those of an independent writer are followed,
//! and an independent receiver takes ours.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod hostile;
mod plan;
mod reference;
mod runs;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use driftless_slime::{Checksum, Encoding, Publisher, PublisherOptions};
use driftless_store::{Disk, Store};
use driftless_testkit::publications::{Weights, assert_same};
use driftless_transport::checkpoint::write_checkpoint;
use driftless_transport::follow::FollowerOptions;
use driftless_transport::publish::Start;
use driftless_transport::replica::Plan;
use driftless_transport::{Checkpoint, Dtype, Error, Follower, Result, Version};
use reference::{Delta, FORMS, Tensors, read_checkpoint, receive};

/// A trainer's directory, the checkpoint it starts from, and a host that follows.
pub(crate) struct World {
    dir: tempfile::TempDir,
}

impl World {
    /// With `base` as version 0.
    pub(crate) fn new(base: &Weights) -> Self {
        let world = Self { dir: tempfile::tempdir().unwrap() };
        write_checkpoint(world.path("hf"), base, 7000).unwrap();
        world
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Where the trainer writes.
    pub(crate) fn source(&self) -> PathBuf {
        self.path("source")
    }

    pub(crate) fn store(&self) -> Arc<dyn Store> {
        Arc::new(Disk::new(self.source()))
    }

    pub(crate) fn follower(&self) -> Follower {
        follower(self.store(), &self.path("hf"), &self.path("host"))
    }

    /// What the host would do now, as somebody sees it who may only look.
    pub(crate) fn plan(&self, until: Option<u64>) -> Result<Plan> {
        let mut options = options(&self.path("hf"), &self.path("host"));
        options.until = until.map(Version);
        driftless_slime::plan(self.store(), &options)
    }

    pub(crate) fn publisher(&self, start: Start, form: (Encoding, Checksum)) -> Result<Publisher> {
        let mut options = PublisherOptions::new(start, self.path("baseline"));
        options.hf_checkpoint = Some(self.path("hf"));
        (options.encoding, options.checksum) = form;
        options.file_bytes = 3000;
        // Weights here are any bytes.
        options.allow_non_finite = true;
        Publisher::open(self.store(), options)
    }

    /// What the host has on disk, read by somebody else.
    pub(crate) fn host(&self) -> Tensors {
        read_checkpoint(&self.path("host"))
    }
}

pub(crate) fn follower(store: Arc<dyn Store>, hf: &Path, host: &Path) -> Follower {
    driftless_slime::open(store, options(hf, host), Vec::new()).unwrap()
}

pub(crate) fn options(hf: &Path, host: &Path) -> FollowerOptions {
    let mut options = FollowerOptions::new("slime", host, "host");
    options.hf_checkpoint = Some(hf.to_path_buf());
    options
}

/// The bytes of `weights`.
pub(crate) fn tensors(weights: &Weights) -> Tensors {
    weights.infos.iter().map(|info| info.name.clone()).zip(weights.bytes.iter().cloned()).collect()
}

#[test]
fn golden_directories_are_followed() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let expected = read_checkpoint(&golden.join("version-2"));
    for form in ["xor-xxh3-128", "xor-adler32", "overwrite-blake3"] {
        let host = tempfile::tempdir().unwrap();
        let store = Arc::new(Disk::new(golden.join(form)));
        let follower = follower(store, &golden.join("base"), host.path());
        let prepared = follower.prepare(None).unwrap();
        assert_eq!((prepared.version, prepared.advanced.versions), (Version(2), 3), "{form}");
        assert!(read_checkpoint(host.path()) == expected, "{form}");
        let config = fs::read(host.path().join("config.json")).unwrap();
        assert_eq!(config, fs::read(golden.join("base/config.json")).unwrap());
        // Nothing is left in somebody else's directory.
        assert_eq!(fs::read_dir(golden.join(form)).unwrap().count(), 2, "{form}");
    }
}

#[test]
fn every_form_of_versions_is_followed_by_step_and_at_once() {
    for form in FORMS {
        let mut weights = Weights::small(3);
        let world = World::new(&weights);
        let follower = world.follower();
        assert_eq!(follower.prepare(None).unwrap().version, Version(0), "before the first version");
        for version in 1..=4 {
            let old = tensors(&weights);
            if version != 3 {
                weights.step(version, 11);
            }
            Delta::new(version, form, &old, &tensors(&weights), 1 + version as usize % 3)
                .write(&world.source());
            let prepared = follower.prepare(None).unwrap();
            assert_eq!((prepared.version, prepared.advanced.versions), (Version(version), 1), "{form:?}");
            assert_same(&Checkpoint::open(world.path("host")).unwrap(), &weights);
            assert_eq!(follower.prepare(None).unwrap().advanced.versions, 0, "nothing more to do");
        }
        let late = self::follower(world.store(), &world.path("hf"), &world.path("late"));
        let prepared = late.prepare(None).unwrap();
        assert_same(&Checkpoint::open(world.path("late")).unwrap(), &weights);
        assert_eq!(
            prepared.label,
            follower.status().applied.unwrap().label,
            "hosts derive the same identities"
        );
    }
}

#[test]
fn an_independent_receiver_takes_what_we_publish() {
    let forms = [Encoding::Xor, Encoding::Overwrite].into_iter().flat_map(|encoding| {
        [Checksum::Xxh3, Checksum::Blake3, Checksum::Adler32].map(|sum| (encoding, sum))
    });
    for form in forms {
        let mut weights = Weights::small(3);
        let world = World::new(&weights);
        let mut local = read_checkpoint(&world.path("hf"));
        let mut publisher = world.publisher(Start::NewRun, form).unwrap();
        for version in 1..=3 {
            // Version 2 changes nothing: an index alone.
            if version != 2 {
                weights.step(version, 11);
            }
            let published = publisher.publish(&weights).unwrap();
            assert_eq!(published.version, Version(version));
            receive(&mut local, &world.source(), version);
            assert!(local == tensors(&weights), "{form:?}");
        }
        let files = fs::read_dir(world.source().join("weight_v000001")).unwrap().count();
        assert!(files > 2, "several files are written, {files}");
        world.follower().prepare(None).unwrap();
        assert!(world.host() == local);
    }
}

#[test]
fn tensors_larger_than_a_slice_change_at_its_edges() {
    let elements = 5 << 20;
    for form in [("xor", "xxh3-128"), ("overwrite", "xxh3-128")] {
        let mut weights = Weights::default();
        weights.set("a", Dtype::Bf16, &[elements], |at| (at % 251) as u8);
        weights.set("b", Dtype::U8, &[(4 << 20) + 1], |at| (at % 13) as u8);
        let world = World::new(&weights);
        let old = tensors(&weights);
        for at in [0, (4 << 20) - 1, 4 << 20, (8 << 20) - 1, 8 << 20, 2 * elements as usize - 1] {
            weights.tensor_mut("a")[at] ^= 0x55;
        }
        *weights.tensor_mut("b").last_mut().unwrap() ^= 1;
        Delta::new(1, form, &old, &tensors(&weights), 2).write(&world.source());
        world.follower().prepare(None).unwrap();
        assert!(world.host() == tensors(&weights), "{form:?}");

        // And written by us.
        let world = World::new(&{
            let mut base = weights.clone();
            base.bytes = old.values().cloned().collect();
            base
        });
        let encoding = if form.0 == "xor" { Encoding::Xor } else { Encoding::Overwrite };
        let mut publisher = world.publisher(Start::NewRun, (encoding, Checksum::Xxh3)).unwrap();
        publisher.publish(&weights).unwrap();
        let mut local = old;
        receive(&mut local, &world.source(), 1);
        assert!(local == tensors(&weights));
    }
}

#[test]
fn element_that_turned_nan_is_refused_by_name() {
    let mut weights = Weights::small(1);
    let world = World::new(&weights);
    let mut options = PublisherOptions::new(Start::NewRun, world.path("baseline"));
    options.hf_checkpoint = Some(world.path("hf"));
    let mut publisher = Publisher::open(world.store(), options).unwrap();
    weights.tensor_mut("d.norm")[6..8].copy_from_slice(&[0xc0, 0x7f]);
    let error = publisher.publish(&weights).unwrap_err();
    assert!(
        matches!(&error, Error::NotFinite { tensor, first: 3, count: 1 } if tensor == "d.norm"),
        "{error:?}"
    );
    assert!(!world.source().join("weight_v000001/model.safetensors.index.json").exists());
    weights.tensor_mut("d.norm")[6..8].copy_from_slice(&[0x81, 0x3f]);
    assert_eq!(publisher.publish(&weights).unwrap().version, Version(1));
}

/// The index as slime writes it, and names that count from 0.
#[test]
fn the_index_is_slimes() {
    let mut weights = Weights::small(1);
    let world = World::new(&weights);
    let mut publisher = world.publisher(Start::NewRun, (Encoding::Xor, Checksum::Xxh3)).unwrap();
    *weights.tensor_mut("d.norm").last_mut().unwrap() ^= 1;
    publisher.publish(&weights).unwrap();
    let dir = world.source().join("weight_v000001");
    let index: serde_json::Value =
        serde_json::from_slice(&fs::read(dir.join("model.safetensors.index.json")).unwrap()).unwrap();
    let expected = serde_json::json!({
        "metadata": {
            "version": "000001", "base_version": "000000", "delta_encoding": "xor",
            "compression_format": "zstd", "checksum_format": "xxh3-128",
        },
        "weight_map": { "d.norm": "model-00000-of-00001.safetensors" },
    });
    assert_eq!(index, expected);
    let mut names: Vec<_> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["model-00000-of-00001.safetensors", "model.safetensors.index.json"]);
}
