//! What every learner does, as tests: libtorch and a child process run it in the tests of this workspace,
//! yours may too.
#![allow(clippy::unwrap_used, reason = "a suite for tests: a failed step is a failed test")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use driftless_buffer::{Identity, Log, Options, Position, Record, Scalars};
use driftless_store::{Store, open};
use driftless_transport::publish::{PublisherOptions, Start, Step};
use driftless_transport::{Checkpoint, Publisher, Run, RunId, Snapshot, Version};

use super::{Batch, Learner, Progress, Sample, Stepped, Weights, Workspace};
use crate::metrics::StepMetrics;

const MODEL: &str = "policy";
/// How far log-probs of the same weights may be apart.
const SAME: f32 = 1e-5;
/// Tokens of a prompt, and of the shortest response.
const PROMPT: usize = 3;

/// Runs the suite. `checkpoint` is a Hugging Face directory whose model has at least 8 tokens; `new` makes a
/// learner that has not been loaded, with a learning rate at which one step moves log-probs by more than
/// 1e-4.
///
/// # Panics
/// Where the learner does not do what the trait says.
pub fn suite(checkpoint: &Path, new: impl Fn() -> Box<dyn Learner>) {
    begins_with_the_checkpoint_and_learns(checkpoint, &new);
    what_was_saved_comes_back_and_what_was_not_is_lost(checkpoint, &new);
    weights_reach_the_engines(checkpoint, &new);
}

fn begins_with_the_checkpoint_and_learns(checkpoint: &Path, new: &impl Fn() -> Box<dyn Learner>) {
    let stage = Stage::new(checkpoint, new().publishes());
    let mut learner = new();
    assert_eq!(learner.load(&stage.place).unwrap(), None, "there is no training checkpoint");
    assert!(!learner.describe().is_empty());
    let records = stage.records();
    let before = log_probs(&mut *learner, &records);
    let again = log_probs(&mut *learner, &records);
    assert_eq!(before, again, "nothing moves the weights but a step");
    let batch = batch(&records, 0);
    assert!(matches!(learner.step(&batch).unwrap(), Stepped::Done(_)));
    tells_what_it_said_before(&mut *learner, &batch, &before);
    assert!(apart(&before, &log_probs(&mut *learner, &records)) > 1e-4, "a step moves the weights");
}

/// A learner need not tell the log-probs of a step. If it does, they are those before it, of the tokens that are trained on.
fn tells_what_it_said_before(learner: &mut dyn Learner, batch: &Batch<'_>, before: &[Vec<f32>]) {
    let Some(told) = learner.take_log_probs() else { return };
    assert_eq!(told.len(), before.iter().map(Vec::len).sum::<usize>());
    let trained =
        batch.samples.iter().flat_map(|sample| (0..sample.response_len()).map(|at| sample.is_trained(at)));
    for ((told, before), is_trained) in told.iter().zip(before.iter().flatten()).zip(trained) {
        assert!(if is_trained { (told - before).abs() <= SAME } else { told.is_nan() }, "{told} {before}");
    }
    assert_eq!(learner.take_log_probs(), None, "they are told once");
}

fn what_was_saved_comes_back_and_what_was_not_is_lost(
    checkpoint: &Path,
    new: &impl Fn() -> Box<dyn Learner>,
) {
    let stage = Stage::new(checkpoint, new().publishes());
    let records = stage.records();
    let step = |learner: &mut dyn Learner, rollout| {
        assert!(matches!(learner.step(&batch(&records, rollout)).unwrap(), Stepped::Done(_)));
        log_probs(learner, &records)
    };
    let mut first = new();
    first.load(&stage.place).unwrap();
    step(&mut *first, 0);
    first.save(&progress(1)).unwrap();
    let saved = step(&mut *first, 1);
    first.save(&progress(2)).unwrap();
    let lost = step(&mut *first, 2);
    drop(first);
    let mut second = new();
    assert_eq!(second.load(&stage.place).unwrap(), Some(progress(2)), "the newest checkpoint, whole");
    assert!(apart(&saved, &log_probs(&mut *second, &records)) <= SAME, "the weights of the checkpoint");
    assert!(apart(&lost, &step(&mut *second, 2)) <= SAME, "the same step from there has the same result");
    // Loaded once more, as after the loss of a process.
    assert_eq!(second.load(&stage.place).unwrap(), Some(progress(2)));
    assert!(apart(&saved, &log_probs(&mut *second, &records)) <= SAME);
}

fn weights_reach_the_engines(checkpoint: &Path, new: &impl Fn() -> Box<dyn Learner>) {
    let stage = Stage::new(checkpoint, new().publishes());
    let start = Checkpoint::open(checkpoint).unwrap();
    let mut learner = new();
    learner.load(&stage.place).unwrap();
    for step in 1..=2 {
        learner.step(&batch(&stage.records(), step - 1)).unwrap();
        match learner.snapshot(step).unwrap() {
            Weights::Tensors(snapshot) => {
                assert!(!learner.publishes());
                differs(&start, &*snapshot);
            }
            Weights::Published(version) => {
                assert!(learner.publishes());
                let run = Run::open(stage.store.clone(), &stage.place.run).unwrap();
                assert_eq!(run.newest_version(MODEL).unwrap(), Some(Version(version)));
                let manifest = run.get(MODEL, Version(version)).unwrap().manifest;
                assert_eq!((manifest.version.0, manifest.trainer_step), (step, step));
                assert!(manifest.changed > 0, "the weights moved");
            }
        }
    }
    let dir = stage.dir.path().join("hf");
    learner.save_hf(&dir).unwrap();
    differs(&start, &Checkpoint::open(&dir).unwrap());
}

/// The same tensors and files, with other values.
fn differs(start: &Checkpoint, other: &dyn Snapshot) {
    assert_eq!(start.tensors(), other.tensors());
    let names = |snapshot: &dyn Snapshot| -> Vec<String> {
        snapshot.files().iter().map(|file| file.name().to_owned()).collect()
    };
    assert_eq!(names(start), names(other));
    let moved = (0..start.tensors().len()).any(|at| start.bytes(at).unwrap() != other.bytes(at).unwrap());
    assert!(moved, "the weights moved");
}

fn log_probs(learner: &mut dyn Learner, records: &[Record]) -> Vec<Vec<f32>> {
    let batch = batch(records, 0);
    let found = learner.log_probs(&batch).unwrap();
    assert_eq!(found.len(), batch.samples.len());
    for (values, sample) in found.iter().zip(&batch.samples) {
        assert_eq!(values.len(), sample.response_len(), "one for each token of the response");
        assert!(values.iter().all(|value| value.is_finite() && *value <= 0.0), "{values:?}");
    }
    found
}

fn apart(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    a.iter().flatten().zip(b.iter().flatten()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// The records as a rollout, with advantages on both sides of 0.
fn batch(records: &[Record], rollout_id: u64) -> Batch<'_> {
    let advantage = |index: usize| if index.is_multiple_of(2) { 1.0 } else { -0.5 };
    let samples = records.iter().enumerate().map(|(at, record)| Sample::of(record, advantage(at)));
    Batch { rollout_id, samples: samples.collect() }
}

fn progress(step: u64) -> Progress {
    let metrics = StepMetrics { rollout_id: step - 1, reward: 0.1 + step as f64, ..StepMetrics::default() };
    let settings = [("lr".to_owned(), "0.001".to_owned())].into();
    Progress { step, seed: 7, metrics: Some(metrics), settings }
}

/// A run with a log of four samples.
struct Stage {
    dir: tempfile::TempDir,
    place: Workspace,
    store: Arc<dyn Store>,
    log: Log,
}

impl Stage {
    fn new(checkpoint: &Path, begin: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| -> PathBuf { dir.path().join(name) };
        let url = at("store").to_str().unwrap().to_owned();
        let store = open(&url).unwrap();
        let mut run_id = RunId::random();
        if begin {
            let options = PublisherOptions::new("suite", Start::NewRun, at("baseline"));
            let mut publisher = Publisher::open(store.clone(), options).unwrap();
            publisher.publish_reference(checkpoint, Step::default()).unwrap();
            publisher.wait().unwrap();
            run_id = publisher.run().id();
        }
        let identity =
            Identity { run_id: *run_id.as_bytes(), model: MODEL.into(), tokenizer_digest: [0; 32] };
        let log = Log::open(at("log"), Options::new(identity)).unwrap();
        for sample_id in 0..4 {
            append(&log, sample_id);
        }
        let place = Workspace {
            save: at("rl"),
            hf_checkpoint: checkpoint.to_owned(),
            log: at("log"),
            store: url,
            run: "suite".into(),
            run_id: run_id.to_string(),
            model: MODEL.into(),
            baseline: at("baseline"),
            keep: 2,
            anchor_every: None,
            anchor_share: None,
        };
        Stage { dir, place, store, log }
    }

    fn records(&self) -> Vec<Record> {
        self.log.reader().iter(Position(0)).map(|record| record.unwrap()).collect()
    }
}

/// A sample of its own length, of which the second token of the response is not trained on.
fn append(log: &Log, sample_id: u64) {
    let length = PROMPT + 3 + sample_id as usize;
    let tokens: Vec<i32> = (0..length).map(|at| ((at * 3 + sample_id as usize) % 7 + 1) as i32).collect();
    let response = length - PROMPT;
    let mut loss_mask = vec![1; response];
    loss_mask[1] = 0;
    let sample = driftless_buffer::Sample {
        scalars: Scalars { sample_id, group_id: sample_id / 2, ..Scalars::default() },
        prompt_len: PROMPT,
        tokens: &tokens,
        log_probs: &vec![-1.5; response],
        loss_mask: &loss_mask,
        ..driftless_buffer::Sample::default()
    };
    log.append(&sample).unwrap().wait().unwrap();
}
