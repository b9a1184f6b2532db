//! Checkpoints of many tensors, as mixtures of experts have them: ten times as many take about ten times the
//! work, not a hundred times. Work is the processor's time of the whole process, so a busy machine changes
//! little; both sizes are measured in the same run, and every result is compared bit by bit.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use driftless_store::{Disk, Memory, Store};
use driftless_testkit::publications::{MODEL, Weights, assert_same, options, step};
use driftless_transport::checkpoint::write_checkpoint;
use driftless_transport::follow::FollowerOptions;
use driftless_transport::gc::{GcOptions, collect};
use driftless_transport::manifest::Manifest;
use driftless_transport::publish::{Mode, Rank, Shard, Slice, Start};
use driftless_transport::snapshot::{AuxFile, TensorInfo};
use driftless_transport::{Checkpoint, Dtype, Publisher, Replica, Result, Run, Version};

/// Times as many tensors, and times as much work at most; it would be a hundred times for what is quadratic
/// and nothing else.
const TIMES: usize = 10;
const MOST: u64 = 16;
/// Ticks of 10 ms that a phase may take besides.
const SLACK: u64 = 40;
const TENSORS: usize = 20_000;

/// One after the other: the processor's time is the process's.
static TURN: Mutex<()> = Mutex::new(());

/// Tensors of three elements, which in version 0 are all the same.
fn weights(count: usize, version: u32) -> Weights {
    let info = |index| TensorInfo {
        name: format!("layers.{index:06}.experts.weight"),
        dtype: Dtype::Bf16,
        shape: vec![3],
    };
    let bytes = |index: usize| {
        let number = if version == 0 { 0 } else { (index as u32).wrapping_mul(8) + version };
        let [a, b, c, _] = number.to_le_bytes();
        vec![a, 0x3c, b, 0x3c, c, 0x3c]
    };
    let infos = (0..count).map(info).collect();
    let bytes = (0..count).map(bytes).collect();
    let mut weights = Weights { infos, bytes, files: Vec::new() };
    weights.file("config.json", b"{}");
    weights
}

/// Ticks of 10 ms that this process has had of any processor.
fn ticks() -> u64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields = text.rsplit_once(')').unwrap().1.split_whitespace();
    fields.skip(11).take(2).map(|field| field.parse::<u64>().unwrap()).sum()
}

/// What each phase of a life took, by name.
#[derive(Default)]
struct Work(Vec<(&'static str, u64)>);

impl Work {
    fn of<T>(&mut self, phase: &'static str, work: impl FnOnce() -> T) -> T {
        let before = ticks();
        let done = work();
        self.0.push((phase, ticks() - before));
        done
    }
}

/// Lives both lives and compares them. What other machines' work adds to a tick differs from life to life, so a phase
/// that is too long is lived again: what grows faster than the tensors does so each time.
fn compare(live: fn(usize) -> Work) {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let mut too_long = BTreeSet::new();
    for life in 0..3 {
        let (few, many) = (live(TENSORS / TIMES), live(TENSORS));
        let phases = few.0.iter().zip(&many.0).map(|((phase, few), (_, many))| (*phase, *few, *many));
        let mut longer = BTreeSet::new();
        for (phase, few, many) in phases {
            println!("life {life}, {phase}: {few} and {many} ticks");
            if many > MOST * few + SLACK {
                longer.insert(phase);
            }
        }
        too_long = if life == 0 { longer } else { too_long.intersection(&longer).copied().collect() };
        if too_long.is_empty() {
            return;
        }
    }
    panic!("more than {MOST} times the work for {TIMES} times the tensors, in three lives: {too_long:?}");
}

fn path(dir: &tempfile::TempDir, name: &str) -> PathBuf {
    dir.path().join(name)
}

fn advance(run: &Run, dir: &Path, reference: &Path, to: &[u64], expected: &Weights) {
    let mut replica = Replica::open(dir).unwrap();
    for version in to {
        replica.advance(run, MODEL, Version(*version), Some(reference)).unwrap();
    }
    replica.sync().unwrap();
    assert_same(replica.checkpoint().unwrap(), expected);
}

#[test]
fn work_grows_with_the_tensors_and_not_faster() {
    compare(|count| {
        let (mut work, dir) = (Work::default(), tempfile::tempdir().unwrap());
        let store: Arc<dyn Store> = Arc::new(Memory::new());
        let versions: Vec<Weights> = (0..5).map(|version| weights(count, version)).collect();
        let reference = path(&dir, "hf");
        work.of("writing a checkpoint", || write_checkpoint(&reference, &versions[0], u64::MAX).unwrap());
        let mut options = options(Start::NewRun, &path(&dir, "baseline"));
        options.anchor_every = Some(3);
        let mut publisher = Publisher::open(store.clone(), options).unwrap();
        work.of("publishing by reference", || {
            publisher.publish_reference(&reference, step(0)).unwrap();
            publisher.wait().unwrap();
        });
        for (version, phase) in [(1, "alike in the base"), (2, "a delta"), (3, "an anchor"), (4, "behind it")]
        {
            work.of(phase, || {
                publisher.publish(&versions[version], step(version as u64), Mode::Delta).unwrap();
                publisher.wait().unwrap();
            });
        }
        let run = publisher.run().clone();
        work.of("one version after the other", || {
            advance(&run, &path(&dir, "steps"), &reference, &[0, 1, 2], &versions[2]);
        });
        work.of("two versions in one apply", || {
            advance(&run, &path(&dir, "fold"), &reference, &[0, 2], &versions[2]);
        });
        work.of("an anchor and a delta in one apply", || {
            advance(&run, &path(&dir, "fresh"), &reference, &[4], &versions[4]);
        });
        work.of("planning", || {
            let plan = Replica::plan(&path(&dir, "steps"), &run, MODEL, Version(4)).unwrap();
            assert_eq!(plan.from, Some(Version(2)));
        });
        work.of("hashing", || Replica::open(path(&dir, "fresh")).unwrap().verify().unwrap());
        work.of("inspecting", || {
            let bytes = run.get(MODEL, Version(4)).unwrap().manifest.to_bytes().unwrap();
            let manifest = Manifest::parse(&bytes).unwrap();
            assert_eq!((manifest.full_piece_bytes(), manifest.tensors.len()), (0, count));
        });
        work.of("collecting", || {
            let collection = collect(&run, &GcOptions::new(MODEL)).unwrap();
            assert_eq!(collection.removed.len(), 3);
        });
        work
    });
}

/// One rank's part of some weights.
struct Part {
    slices: Vec<Slice>,
    bytes: Vec<Vec<u8>>,
    files: Vec<AuxFile>,
}

impl Shard for Part {
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

#[test]
fn work_of_ranks_grows_with_the_tensors_and_not_faster() {
    compare(|count| {
        let (mut work, dir) = (Work::default(), tempfile::tempdir().unwrap());
        let store: Arc<dyn Store> = Arc::new(Memory::new());
        let start = |rank| if rank == 0 { Start::NewRun } else { Start::Resume };
        let mut publishers: Vec<Publisher> = (0..2)
            .map(|rank| {
                let mut options = options(start(rank), &path(&dir, &format!("baseline-{rank}")));
                options.object_bytes_max = 1 << 20;
                Publisher::open(store.clone(), options).unwrap()
            })
            .collect();
        for (version, phase) in [(0, "a full version"), (1, "a delta")] {
            let weights = weights(count, version + 1);
            work.of(phase, || {
                let parts = publishers.iter_mut().zip(0..).map(|(publisher, number)| {
                    let mine = (0..count).filter(|index| index % 2 == number);
                    let shard = Part {
                        slices: mine
                            .clone()
                            .map(|at| Slice::whole(weights.infos[at].clone()).unwrap())
                            .collect(),
                        bytes: mine.map(|index| weights.bytes[index].clone()).collect(),
                        files: weights.files.clone(),
                    };
                    let rank = Rank { rank: number as u32, ranks: 2, attempt: format!("a{version}") };
                    let step = step(u64::from(version));
                    publisher.publish_part(&shard, step, Mode::Delta, &rank).unwrap()
                });
                let parts: Vec<_> = parts.collect();
                let rank = Rank { rank: 0, ranks: 2, attempt: format!("a{version}") };
                publishers[0].join(&rank, Duration::ZERO).unwrap();
                publishers[1].await_join(&parts[1], Duration::ZERO).unwrap();
                publishers.iter_mut().for_each(|publisher| publisher.wait().unwrap());
            });
            driftless_testkit::publications::assert_reader(
                &store,
                &path(&dir, &format!("host-{version}")),
                version.into(),
                &weights,
            );
        }
        work
    });
}

#[test]
fn work_of_slimes_layout_grows_with_the_tensors() {
    compare(|count| {
        let (mut work, dir) = (Work::default(), tempfile::tempdir().unwrap());
        let (base, next) = (weights(count, 0), weights(count, 1));
        write_checkpoint(path(&dir, "hf"), &base, u64::MAX).unwrap();
        let store: Arc<dyn Store> = Arc::new(Disk::new(path(&dir, "source")));
        let mut publishing = driftless_slime::PublisherOptions::new(Start::NewRun, path(&dir, "baseline"));
        publishing.hf_checkpoint = Some(path(&dir, "hf"));
        work.of("publishing", || {
            let mut publisher = driftless_slime::Publisher::open(store.clone(), publishing).unwrap();
            publisher.publish(&next).unwrap();
        });
        let mut following = FollowerOptions::new("slime", path(&dir, "host"), "host");
        following.hf_checkpoint = Some(path(&dir, "hf"));
        work.of("planning", || {
            let plan = driftless_slime::plan(store.clone(), &following).unwrap();
            assert_eq!(plan.to, Version(1));
        });
        work.of("following", || {
            let follower = driftless_slime::open(store.clone(), following, Vec::new()).unwrap();
            follower.prepare(None).unwrap();
            follower.sync().unwrap();
        });
        assert_same(&Checkpoint::open(path(&dir, "host")).unwrap(), &next);
        work
    });
}
