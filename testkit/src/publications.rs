//! Weights made of seeded random bits, their publication, and readers to compare them with.

use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;

use driftless_store::{ContentDigest, Key, PutMode, Store};
use driftless_transport::manifest::Object;
use driftless_transport::publish::{PublisherOptions, Start, Step};
use driftless_transport::snapshot::{AuxFile, TensorInfo};
use driftless_transport::{Checkpoint, Dtype, Publisher, Replica, Result, Run, Snapshot, Version};

use crate::random::Random;

/// The run that all tests publish.
pub const RUN: &str = "test";
/// The model.
pub const MODEL: &str = "policy";

/// A snapshot in memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Weights {
    /// The tensors, by name.
    pub infos: Vec<TensorInfo>,
    /// Their bytes.
    pub bytes: Vec<Vec<u8>>,
    /// The auxiliary files, by name.
    pub files: Vec<AuxFile>,
}

impl Snapshot for Weights {
    fn tensors(&self) -> &[TensorInfo] {
        &self.infos
    }
    fn bytes(&self, index: usize) -> Result<Cow<'_, [u8]>> {
        Ok(Cow::Borrowed(&self.bytes[index]))
    }
    fn files(&self) -> &[AuxFile] {
        &self.files
    }
}

impl Weights {
    /// A few tensors of several types: two norms that begin equal, a tied pair, an empty one.
    pub fn small(seed: u64) -> Self {
        let mut random = Random(seed);
        let mut weights = Self::default();
        let half = |i| if i % 2 == 0 { random.next() as u8 } else { 0x3c };
        weights.set("a.embed", Dtype::Bf16, &[96, 32], half);
        let tied = weights.bytes[0].clone();
        weights.set("b.head", Dtype::Bf16, &[96, 32], |i| tied[i]);
        weights.set("c.empty", Dtype::F32, &[0, 4], |_| 0);
        weights.set("d.norm", Dtype::Bf16, &[32], |i| [0x80, 0x3f][i % 2]);
        weights.set("e.norm", Dtype::Bf16, &[32], |i| [0x80, 0x3f][i % 2]);
        weights.set("f.ids", Dtype::I64, &[7], |i| i as u8);
        weights.set("g.up", Dtype::F32, &[64, 48], |_| random.next() as u8);
        weights.file("config.json", b"{\"hidden_size\": 32}");
        weights.file("tokenizer.json", b"{}");
        weights
    }

    /// Adds or replaces a tensor.
    pub fn set(&mut self, name: &str, dtype: Dtype, shape: &[u64], byte: impl FnMut(usize) -> u8) {
        let info = TensorInfo { name: name.to_owned(), dtype, shape: shape.to_vec() };
        let bytes: Vec<u8> = (0..info.byte_len().unwrap() as usize).map(byte).collect();
        match self.infos.binary_search_by(|known| known.name.as_str().cmp(name)) {
            Ok(index) => (self.infos[index], self.bytes[index]) = (info, bytes),
            Err(index) => {
                self.infos.insert(index, info);
                self.bytes.insert(index, bytes);
            }
        }
    }

    /// Takes a tensor out.
    pub fn remove(&mut self, name: &str) {
        let index = self.index(name).unwrap();
        self.infos.remove(index);
        self.bytes.remove(index);
    }

    /// A tensor's bytes.
    pub fn tensor_mut(&mut self, name: &str) -> &mut Vec<u8> {
        let index = self.index(name).unwrap();
        &mut self.bytes[index]
    }

    fn index(&self, name: &str) -> Option<usize> {
        self.infos.iter().position(|info| info.name == name)
    }

    /// Adds or replaces an auxiliary file.
    pub fn file(&mut self, name: &str, bytes: &[u8]) {
        self.files.retain(|file| file.name() != name);
        self.files.push(AuxFile::new(name, bytes.to_vec()).unwrap());
        self.files.sort_by(|a, b| a.name().cmp(b.name()));
    }

    /// One optimiser step: flips low bits of about one byte in `every`, and keeps the tied pair tied.
    pub fn step(&mut self, seed: u64, every: u64) {
        let mut random = Random(seed);
        for byte in self.bytes.iter_mut().flatten() {
            if random.next().is_multiple_of(every) {
                *byte ^= 1;
            }
        }
        if let (Some(embed), Some(head)) = (self.index("a.embed"), self.index("b.head")) {
            self.bytes[head] = self.bytes[embed].clone();
        }
    }
}

/// Refuses a checkpoint that is not `expected`, bit for bit.
pub fn assert_same(found: &Checkpoint, expected: &Weights) {
    assert_eq!(found.tensors(), expected.tensors());
    for (index, info) in expected.infos.iter().enumerate() {
        assert!(found.bytes(index).unwrap() == expected.bytes[index], "tensor {} differs", info.name);
    }
    assert_eq!(found.files(), expected.files());
}

/// Whether a checkpoint is these weights, files included.
pub fn is_same(found: &Checkpoint, expected: &Weights) -> bool {
    let same = |index: usize| found.tensor(index) == expected.bytes.get(index).map(Vec::as_slice);
    found.tensors() == expected.tensors()
        && found.files() == expected.files()
        && (0..expected.infos.len()).all(same)
}

/// What an engine gets that starts now in `dir`: one of `versions`, whole, or nothing, because there is no
/// config. Returns whether there is something.
pub fn assert_loads_whole_or_not(dir: &Path, versions: &[Option<&Weights>]) -> bool {
    if !dir.join("config.json").exists() {
        return false;
    }
    let found = Checkpoint::open(dir).unwrap();
    assert!(versions.iter().flatten().any(|version| is_same(&found, version)), "a mixture could be loaded");
    true
}

/// Weights are random bits here, and their tables change as tests like.
pub fn options(start: Start, baseline: &Path) -> PublisherOptions {
    let mut options = PublisherOptions::new(RUN, start, baseline);
    (options.allow_non_finite, options.allow_layout_change) = (true, true);
    options
}

/// A publisher with these options.
pub fn publisher(store: &Arc<dyn Store>, start: Start, baseline: &Path) -> Publisher {
    Publisher::open(store.clone(), options(start, baseline)).unwrap()
}

/// A trainer's step, without a checkpoint.
pub fn step(number: u64) -> Step {
    Step { trainer_step: number, checkpoint: None }
}

/// Puts an object of random bytes.
pub fn named(store: &Arc<dyn Store>, key: &str, size: u64) -> Object {
    let mut random = Random(size);
    let bytes: Vec<u8> = (0..size).map(|_| random.next() as u8).collect();
    let key = Key::new(key).unwrap();
    store.put(&key, &bytes, PutMode::Overwrite).unwrap();
    Object { key, size, blake3: ContentDigest::of(&bytes) }
}

/// Takes a replica in `dir` to the newest version and compares it with `expected`.
pub fn assert_reader(store: &Arc<dyn Store>, dir: &Path, version: u64, expected: &Weights) {
    let run = Run::open(store.clone(), RUN).unwrap();
    let newest = run.newest(MODEL).unwrap().unwrap();
    assert_eq!(newest.manifest.version, Version(version));
    let mut replica = Replica::open(dir).unwrap();
    replica.advance(&run, MODEL, newest.manifest.version, None).unwrap();
    assert_same(replica.checkpoint().unwrap(), expected);
    assert_eq!(replica.identity(), Some(newest.identity()));
}

/// Objects in the places of committed versions that no manifest names.
pub fn orphans(run: &Run) -> Vec<String> {
    let mut orphans = Vec::new();
    for version in run.versions(MODEL).unwrap() {
        let manifest = run.get(MODEL, version).unwrap().manifest;
        let manifest_key = run.manifest_key(MODEL, version).unwrap();
        let place = Key::new(manifest_key.as_str().trim_end_matches("/manifest")).unwrap();
        for entry in run.store().list(&place).unwrap() {
            if entry.key != manifest_key && !manifest.objects.iter().any(|object| object.key == entry.key) {
                orphans.push(entry.key.to_string());
            }
        }
    }
    orphans
}
