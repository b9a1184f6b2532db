//! Output heads that a config ties to the word embeddings: left out where engines get them back, and published otherwise.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use driftless_store::{Memory, Store};
use driftless_testkit::publications::{RUN, Weights, assert_reader, orphans, step};
use driftless_transport::checkpoint::write_checkpoint;
use driftless_transport::publish::{FullBecause, LeftOut, Mode, Published, PublisherOptions, Start};
use driftless_transport::snapshot::{AuxFile, TensorInfo};
use driftless_transport::{Dtype, Error, Publisher, Snapshot};

const EMBED: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";
const TIED: &[u8] = br#"{"tie_word_embeddings": true}"#;
const UNTIED: &[u8] = br#"{"tie_word_embeddings": false}"#;

/// A model whose state dict has both, which are equal.
fn both(config: &[u8]) -> Weights {
    let mut weights = Weights::default();
    for name in [EMBED, HEAD] {
        weights.set(name, Dtype::Bf16, &[40, 8], |i| [(i * 37 % 251) as u8, 0x3c][i % 2]);
    }
    weights.set("model.other.weight", Dtype::Bf16, &[40, 8], |i| [i as u8, 0x3c][i % 2]);
    weights.file("config.json", config);
    weights
}

/// The next version of both.
fn train(weights: &mut Weights) {
    for name in [EMBED, HEAD] {
        weights.tensor_mut(name)[6] ^= 3;
    }
}

fn without_head(weights: &Weights) -> Weights {
    let mut weights = weights.clone();
    weights.remove(HEAD);
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

    fn publisher(&self, start: Start) -> Publisher {
        let options = PublisherOptions::new(RUN, start, self.dir.path().join("baseline"));
        Publisher::open(self.store.clone(), options).unwrap()
    }

    fn assert_reader(&self, version: u64, weights: &Weights) {
        assert_reader(&self.store, &self.dir.path().join("follower"), version, weights);
    }
}

fn publish(publisher: &mut Publisher, weights: &Weights) -> Result<Published, Error> {
    publisher.publish(weights, step(0), Mode::Delta)
}

fn assert_parted(published: Result<Published, Error>) {
    let error = published.unwrap_err();
    assert!(matches!(&error, Error::TensorMismatch { tensor, .. } if tensor == HEAD), "{error:?}");
    assert!(error.to_string().contains("tie_word_embeddings"), "{error}");
}

#[test]
fn tied_head_is_left_out_of_every_version_and_that_is_reported() {
    let (world, mut weights) = (World::new(), both(TIED));
    let mut publisher = world.publisher(Start::NewRun);
    let expected = [LeftOut { tensor: HEAD.into(), same_as: EMBED.into() }];
    for version in 0..3 {
        let published = publish(&mut publisher, &weights).unwrap();
        assert_eq!(
            (published.left_out.as_slice(), published.full_bytes),
            (expected.as_slice(), 2 * 40 * 8 * 2)
        );
        assert_eq!(published.full_because, (version == 0).then_some(FullBecause::FirstVersion));
        world.assert_reader(version, &without_head(&weights));
        train(&mut weights);
    }
    // What `hf_state_dict` gives is the same layout.
    assert_eq!(publish(&mut publisher, &without_head(&weights)).unwrap().left_out, []);
    world.assert_reader(3, &without_head(&weights));
}

/// Weights that have to be read each time, by how often that is done.
struct ReadWeights {
    weights: Weights,
    reads: RefCell<BTreeMap<String, u32>>,
}

impl Snapshot for ReadWeights {
    fn tensors(&self) -> &[TensorInfo] {
        self.weights.tensors()
    }

    fn bytes(&self, index: usize) -> Result<Cow<'_, [u8]>, Error> {
        *self.reads.borrow_mut().entry(self.tensors()[index].name.clone()).or_default() += 1;
        self.weights.bytes(index).map(|bytes| Cow::Owned(bytes.into_owned()))
    }

    fn files(&self) -> &[AuxFile] {
        self.weights.files()
    }
}

#[test]
fn tied_head_that_has_to_be_read_is_read_once() {
    let (world, mut weights) = (World::new(), both(TIED));
    let mut publisher = world.publisher(Start::NewRun);
    for (version, other) in [(0, 1), (1, 1)] {
        let read = ReadWeights { weights: weights.clone(), reads: RefCell::default() };
        let published = publisher.publish(&read, step(version), Mode::Delta).unwrap();
        assert_eq!(published.left_out.len(), 1);
        world.assert_reader(version, &without_head(&weights));
        let reads = read.reads.into_inner();
        // The embeddings are compared, and encoded.
        assert_eq!((reads[HEAD], reads[EMBED], reads["model.other.weight"]), (1, 2, other), "{reads:?}");
        train(&mut weights);
    }
}

#[test]
fn progress_counts_what_is_published() {
    let (world, weights) = (World::new(), both(TIED));
    let mut publisher = world.publisher(Start::NewRun);
    let told = Arc::new(Mutex::new(Vec::new()));
    let ear = told.clone();
    publisher.on_progress(Box::new(move |progress| {
        ear.lock().unwrap().push((progress.bytes_encoded, progress.bytes_total));
    }));
    publish(&mut publisher, &weights).unwrap();
    assert_eq!(*told.lock().unwrap(), [(640, 1280), (1280, 1280)]);
}

#[test]
fn head_that_no_config_ties_reaches_engines() {
    for config in [UNTIED, b"{}"] {
        let (world, mut weights) = (World::new(), both(config));
        let mut publisher = world.publisher(Start::NewRun);
        for version in 0..2 {
            let published = publish(&mut publisher, &weights).unwrap();
            // Its bytes are stored once all the same.
            assert_eq!((published.left_out.len(), published.full_bytes), (0, 2 * 40 * 8 * 2));
            world.assert_reader(version, &weights);
            train(&mut weights);
        }
        weights.tensor_mut(HEAD)[0] ^= 1;
        publish(&mut publisher, &weights).unwrap();
        world.assert_reader(2, &weights);
    }
}

#[test]
fn run_that_has_the_head_keeps_it() {
    let (world, mut weights) = (World::new(), both(UNTIED));
    publish(&mut world.publisher(Start::NewRun), &weights).unwrap();
    weights.file("config.json", TIED);
    train(&mut weights);
    let mut publisher = world.publisher(Start::Resume);
    let published = publish(&mut publisher, &weights).unwrap();
    assert_eq!((published.left_out.len(), published.full_because), (0, None));
    world.assert_reader(1, &weights);
    let shorter = publish(&mut publisher, &without_head(&weights));
    assert!(matches!(shorter, Err(Error::LayoutChanged { .. })), "{shorter:?}");
}

#[test]
fn tied_head_that_is_another_matrix_is_refused() {
    let (world, weights) = (World::new(), both(TIED));
    let mut parted = weights.clone();
    parted.tensor_mut(HEAD)[0] ^= 1;
    let mut publisher = world.publisher(Start::NewRun);
    assert_parted(publish(&mut publisher, &parted));
    let directory = world.dir.path().join("checkpoint");
    write_checkpoint(&directory, &parted, 1 << 20).unwrap();
    assert_parted(publisher.publish_reference(&directory, step(0)));
    assert_eq!(publisher.version(), None);
    publish(&mut publisher, &weights).unwrap();
    assert_eq!(orphans(publisher.run()), [] as [String; 0]);
    // It is new to the run then.
    assert!(matches!(publish(&mut publisher, &parted), Err(Error::LayoutChanged { .. })));
}
