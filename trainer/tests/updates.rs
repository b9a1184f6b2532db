//! Weights on their way from a learner in this process: encoded on its device, and pushed into engines that nothing
//! follows the store beside. Engines, their network and the device are played in memory.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use driftless_bridge::Label;
use driftless_bridge::push::nccl::{Group, GroupOptions};
use driftless_bridge::push::{PushActivator, PushOptions};
use driftless_delta::Element;
use driftless_delta::cuda::{self, Codec};
use driftless_store::{Memory, Store};
use driftless_testkit::compiler;
use driftless_testkit::sglang::{Fake, FakeRoot, Fault, Wire, checkpoint, patient};
use driftless_trainer::data::{Place, Tokenizer};
use driftless_trainer::events::{Event, Fact, Observer};
use driftless_trainer::learner::{Batch, Learner, Progress, Stepped, Weights, Workspace};
use driftless_trainer::metrics::StepStats;
use driftless_trainer::push::Pushes;
use driftless_trainer::reward::{Given, Reward};
use driftless_trainer::sample::{Answer, Prompt};
use driftless_trainer::tasks::{DataSource, Task, tiny};
use driftless_trainer::{Error, Outcome, Result, TrainOptions, train};
use driftless_transport::checkpoint::write_checkpoint;
use driftless_transport::snapshot::{AuxFile, TensorInfo};
use driftless_transport::{Checkpoint, Run, Snapshot, Version};

const STEPS: u64 = 3;
const NAME: &str = "test";
const UPDATE: &str = "POST /update_weights_from_distributed";

/// Weights on the host and, with a device, there too.
struct Lent {
    infos: Vec<TensorInfo>,
    bytes: Vec<Vec<u8>>,
    on_device: Vec<cuda::Tensor>,
    files: Vec<AuxFile>,
}

impl Snapshot for Lent {
    fn tensors(&self) -> &[TensorInfo] {
        &self.infos
    }
    fn bytes(&self, index: usize) -> driftless_transport::Result<Cow<'_, [u8]>> {
        Ok(Cow::Borrowed(&self.bytes[index]))
    }
    fn on_device(&self, index: usize) -> Option<&cuda::Tensor> {
        self.on_device.get(index)
    }
    fn files(&self) -> &[AuxFile] {
        &self.files
    }
}

/// Moves some weights by a place in each step.
struct Mover {
    device: Option<Codec>,
    weights: Vec<Vec<u8>>,
    place: Option<Workspace>,
}

impl Mover {
    fn start(&self) -> Checkpoint {
        Checkpoint::open(&self.place.as_ref().unwrap().hf_checkpoint).unwrap()
    }

    fn lent(&self) -> Lent {
        let start = self.start();
        let upload = |codec: &Codec| self.weights.iter().map(|bytes| codec.upload(bytes).unwrap()).collect();
        Lent {
            infos: start.tensors().to_vec(),
            bytes: self.weights.clone(),
            on_device: self.device.as_ref().map_or_else(Vec::new, upload),
            files: start.files().to_vec(),
        }
    }
}

impl Learner for Mover {
    fn describe(&self) -> String {
        "a mover of weights".into()
    }

    fn load(&mut self, place: &Workspace) -> Result<Option<Progress>> {
        self.place = Some(place.clone());
        let (saved, progress) = (place.save.join("weights"), place.save.join("progress"));
        let (from, progress) = match std::fs::read(progress) {
            Ok(bytes) => (Checkpoint::open(saved)?, Some(serde_json::from_slice(&bytes).unwrap())),
            Err(_) => (self.start(), None),
        };
        let bytes = (0..from.tensors().len()).map(|index| from.bytes(index).unwrap().to_vec());
        self.weights = bytes.collect();
        Ok(progress)
    }

    fn codec(&mut self) -> Option<Codec> {
        self.device.as_ref().map(|codec| codec.fork().unwrap())
    }

    fn log_probs(&mut self, _batch: &Batch<'_>) -> Result<Vec<Vec<f32>>> {
        unreachable!("the loop asks for none")
    }

    fn step(&mut self, batch: &Batch<'_>) -> Result<Stepped> {
        assert_eq!(batch.samples.len(), 4);
        for (nth, bytes) in self.weights.iter_mut().enumerate() {
            bytes.iter_mut().step_by(2 + 2 * nth).for_each(|byte| *byte = byte.wrapping_add(1) & 0x3f);
        }
        Ok(Stepped::Done(StepStats::default()))
    }

    fn snapshot(&mut self, _step: u64) -> Result<Weights> {
        Ok(Weights::Tensors(Box::new(self.lent())))
    }

    fn save(&mut self, progress: &Progress) -> Result<()> {
        let save = self.place.as_ref().unwrap().save.clone();
        self.save_hf(&save.join("weights"))?;
        std::fs::write(save.join("progress"), serde_json::to_vec(progress).unwrap()).unwrap();
        Ok(())
    }

    fn save_hf(&mut self, dir: &Path) -> Result<()> {
        let _ = std::fs::remove_dir_all(dir);
        Ok(write_checkpoint(dir, &self.lent(), 1 << 20)?)
    }
}

/// One prompt, again and again.
#[derive(Debug)]
struct One(Tokenizer);

impl One {
    fn new() -> Self {
        One(Tokenizer::from_bytes("tokenizer.json", tiny::tokenizer().to_string().as_bytes()).unwrap())
    }
}

#[async_trait]
impl DataSource for One {
    fn check(&self, _checkpoint: &Path) -> Result<()> {
        Ok(())
    }
    async fn prompt(&self, number: u64) -> Result<Prompt> {
        let (tokens, place) = (vec![1, 2], Place { path: Path::new("one").into(), line: number });
        Ok(Prompt {
            tokens,
            text: "ab".into(),
            label: None,
            metadata: None,
            messages: None,
            tools: None,
            place,
        })
    }
    fn tokenizer(&self) -> &Tokenizer {
        &self.0
    }
}

/// Of two samples the second has the better answer.
#[derive(Debug)]
struct Second;

#[async_trait]
impl Reward for Second {
    async fn score(&self, group: &[Answer]) -> Result<Vec<Result<Given>>> {
        Ok(group.iter().map(|answer| Ok(((answer.sample % 2) as f32).into())).collect())
    }
}

/// Engines that serve a checkpoint, and what pushes into them.
struct Stage {
    dir: tempfile::TempDir,
    start: PathBuf,
    fakes: Arc<Vec<Fake>>,
    wire: Arc<Wire>,
    log: Arc<Mutex<Vec<String>>>,
    store: Arc<dyn Store>,
    update_deadline: Duration,
}

impl Stage {
    fn new(engines: usize) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let start = checkpoint(&dir.path().join("start"), 1, 4);
        let wire = Arc::<Wire>::default();
        let fakes: Vec<_> = (0..engines).map(|_| Fake::start(&start)).collect();
        for fake in &fakes {
            fake.engine().pushes.wire = Some(wire.clone());
        }
        Stage {
            dir,
            start,
            fakes: Arc::new(fakes),
            wire,
            log: Arc::default(),
            store: Arc::new(Memory::new()),
            update_deadline: Duration::from_secs(120),
        }
    }

    fn pushes(&self) -> Pushes {
        let (wire, log) = (self.wire.clone(), self.log.clone());
        Pushes::new(move |engines| {
            let mut root = FakeRoot::new();
            (root.wire, root.log) = (wire.clone(), log.clone());
            let mut options = GroupOptions::new("127.0.0.1").with_bucket_bytes(100);
            options.listen = ([127, 0, 0, 1], 0).into();
            let push = PushOptions::default().with_client(patient());
            Ok(Box::new(PushActivator::new(engines, Group::new(root, options)?, push)?))
        })
    }

    fn options(&self) -> TrainOptions {
        let (save, store) = (self.dir.path().join("rl"), self.store.clone());
        let task = Task::new(Arc::new(One::new()), Arc::new(Second));
        TrainOptions::new(&self.start, save, store, "memory:", NAME, task)
            .with_save_hf(Some(self.dir.path().join("final")))
            .with_rollout_external_engine_addrs(
                self.fakes.iter().map(|fake| fake.address.to_string()).collect(),
            )
            .with_push(Some(self.pushes()))
            .with_num_rollout(STEPS)
            .with_rollout_batch_size(2)
            .with_n_samples_per_prompt(2)
            .with_server_concurrency(4)
            .with_check_weight_update_equal(true)
            .with_eval_interval(0)
            .with_save_interval(1)
            .with_rollout_log_bytes_max(1 << 30)
            .with_max_skipped_steps(0)
            .with_update_deadline(self.update_deadline)
            .with_generate_deadline(Duration::from_secs(120))
    }

    fn train_with(&self, device: Option<Codec>, observer: Observer) -> Result<Outcome> {
        let mover = Mover { device, weights: Vec::new(), place: None };
        train(&self.options(), Box::new(mover), observer)
    }

    /// Trains; `after` is told of every step that is complete.
    fn train(&self, after: impl Fn(u64, &[Fake]) + Send + Sync + 'static) -> Result<Outcome> {
        let fakes = self.fakes.clone();
        let observer = move |fact: Fact| {
            if let Event::Step(step) = fact.event {
                after(step.rollout_id, &fakes);
            }
        };
        self.train_with(None, Arc::new(observer))
    }

    /// What the store has of a version: its objects, and where each tensor is in them.
    fn version(&self, version: u64) -> (Vec<Vec<u8>>, String) {
        let run = Run::open(self.store.clone(), NAME).unwrap();
        let manifest = run.get("policy", Version(version)).unwrap().manifest;
        let objects = manifest.objects.iter().map(|object| self.store.get(&object.key, None).unwrap());
        (objects.collect(), format!("{:?}", manifest.tensors))
    }

    /// The engine holds the last version, by its label and by its bytes, and goes on.
    fn assert_there(&self, fake: &Fake) {
        let run = Run::open(self.store.clone(), NAME).unwrap();
        let newest = run.newest("policy").unwrap().unwrap().manifest;
        assert_eq!(newest.trainer_step, STEPS);
        let last = self.dir.path().join("final");
        fake.engine().truths.insert(newest.label(), last);
        fake.engine().audit();
        let engine = fake.engine();
        assert_eq!((&engine.label(), engine.is_paused()), (&newest.label(), false));
        assert!(engine.lies.is_empty(), "{:?}", engine.lies);
    }
}

/// A device that is this processor; `None` without a compiler for its kernels.
fn device() -> Option<Codec> {
    let codec = Codec::twin(0, 1 << 30);
    let prepared = codec.prepare(Element::Bf16).inspect_err(|error| compiler::missing(error));
    prepared.ok().map(|()| codec)
}

#[test]
fn versions_encoded_on_a_device_equal_the_hosts() {
    let Some(device) = device() else { return };
    let [on_device, on_host] = [(), ()].map(|()| Stage::new(1));
    let steps = on_device.train_with(Some(device), Arc::new(|_| {})).unwrap().steps;
    on_host.train(|_, _| {}).unwrap();
    for (step, version) in steps.iter().zip(1..) {
        let publication = step.publication.as_ref().unwrap();
        // The first delta too, whose base is made of the version by reference.
        assert!(publication.device_bytes >= publication.full_bytes, "{publication:?}");
        let [a, b] = [&on_device, &on_host].map(|stage| stage.version(version));
        assert!(!a.0.is_empty() && a == b, "version {version}");
    }
    on_device.assert_there(&on_device.fakes[0]);
}

#[test]
fn every_version_is_pushed_into_all_engines_and_compared() {
    let stage = Stage::new(2);
    let steps = stage.train(|_, _| {}).unwrap().steps;
    assert_eq!(steps.len() as u64, STEPS);
    for step in &steps {
        let publication = step.publication.as_ref().unwrap();
        assert_eq!((publication.engines_checked, publication.engines_behind), (2, 0));
        assert!(publication.pause_ms > Some(0.0));
    }
    // Version 0 too: the engines did not say what they had.
    let opened = stage.log.lock().unwrap().iter().filter(|line| line.starts_with("open")).count();
    assert_eq!(opened, 1, "one group for all versions");
    stage.fakes.iter().for_each(|fake| stage.assert_there(fake));
}

#[test]
fn an_engine_that_is_down_is_left_until_it_answers_again() {
    let stage = Stage::new(2);
    let outcome = stage.train(|rollout, fakes| match rollout {
        0 => fakes[1].kill(),
        1 => fakes[1].restart(),
        _ => {}
    });
    let behind = outcome.unwrap().steps.into_iter().map(|step| step.publication.unwrap().engines_behind);
    assert_eq!(behind.collect::<Vec<_>>(), [0, 1, 0]);
    stage.fakes.iter().for_each(|fake| stage.assert_there(fake));
}

#[test]
fn run_begins_without_an_engine_that_is_down_and_takes_it_later() {
    let stage = Stage::new(2);
    stage.fakes[1].kill();
    let outcome = stage.train(|rollout, fakes| {
        if rollout == 0 {
            fakes[1].restart();
        }
    });
    let behind = outcome.unwrap().steps.into_iter().map(|step| step.publication.unwrap().engines_behind);
    assert_eq!(behind.collect::<Vec<_>>(), [1, 0, 0]);
    stage.fakes.iter().for_each(|fake| stage.assert_there(fake));
}

#[test]
fn engines_that_are_too_few_end_the_run_and_are_named() {
    let mut stage = Stage::new(2);
    stage.update_deadline = Duration::from_secs(1);
    stage.fakes[1].kill();
    let options = stage.options().with_engines_min(2);
    let waits = Arc::new(Mutex::new(String::new()));
    let told = waits.clone();
    let observer = move |fact: Fact| {
        if let Event::Waiting { on, .. } = fact.event {
            told.lock().unwrap().push_str(&on);
        }
    };
    let mover = Mover { device: None, weights: Vec::new(), place: None };
    let error = train(&options, Box::new(mover), Arc::new(observer)).unwrap_err().to_string();
    let address = stage.fakes[1].address.to_string();
    for part in ["1 of 2 engines", "at least 2", address.as_str()] {
        assert!(error.contains(part), "{part}: {error}");
    }
    assert!(waits.lock().unwrap().contains(&address));
}

#[test]
fn refusing_engine_keeps_no_version_from_others() {
    let stage = Stage::new(2);
    stage
        .train(|rollout, fakes| {
            if rollout == 0 {
                // With the other, and by itself.
                (0..2).for_each(|_| fakes[1].fault(UPDATE, Fault::Answer(400, "no memory".into())));
            }
        })
        .unwrap();
    stage.fakes.iter().for_each(|fake| stage.assert_there(fake));
}

#[test]
fn the_only_engine_started_again_amid_a_rollout_is_brought_back() {
    let stage = Stage::new(1);
    let outcome = stage.train(|rollout, fakes| {
        if rollout == 0 {
            fakes[0].restart();
        }
    });
    assert_eq!(outcome.unwrap().steps.len() as u64, STEPS);
    stage.assert_there(&stage.fakes[0]);
}

#[test]
fn reply_labelled_with_an_unpublished_version_is_asked_again() {
    let stage = Stage::new(1);
    let store = stage.store.clone();
    let outcome = stage.train(move |rollout, fakes| {
        if rollout == 0 {
            let run = Run::open(store.clone(), NAME).unwrap().id().to_string();
            for version in ["6", "18446744073709551615"] {
                let label = format!("{}:{version}", &run[..Label::RUN_DIGITS]);
                fakes[0].fault("POST /generate", Fault::Label(label.leak()));
            }
        }
    });
    let steps = outcome.unwrap().steps;
    assert_eq!(steps.iter().map(|step| step.staleness_max).collect::<Vec<_>>(), [0; STEPS as usize]);
    stage.assert_there(&stage.fakes[0]);
}

#[test]
fn version_no_engine_took_is_pushed_before_going_on() {
    let mut stage = Stage::new(1);
    stage.update_deadline = Duration::from_secs(2);
    let error = stage
        .train(|rollout, fakes| {
            if rollout == 0 {
                (0..100).for_each(|_| fakes[0].fault(UPDATE, Fault::Answer(400, "no memory".into())));
            }
        })
        .unwrap_err();
    assert!(matches!(&error, Error::Push { label, .. } if label.ends_with(":2")), "{error}");
    {
        let mut engine = stage.fakes[0].engine();
        assert!(engine.is_paused() && engine.label().ends_with("?partial"), "{}", engine.label());
        engine.faults.clear();
    }
    stage.update_deadline = Duration::from_secs(120);
    let steps = stage.train(|_, _| {}).unwrap().steps;
    assert_eq!(steps.iter().map(|step| step.rollout_id).collect::<Vec<_>>(), [0, 1, 2]);
    stage.assert_there(&stage.fakes[0]);
}

#[test]
fn push_without_its_driver_is_refused_first() {
    let stage = Stage::new(1);
    let options = stage.options().with_push(Some(Pushes::new(|_| Err("no CUDA driver".into()))));
    let mover = Mover { device: None, weights: Vec::new(), place: None };
    let error = train(&options, Box::new(mover), Arc::new(|_| {})).unwrap_err();
    assert!(matches!(error, Error::PushSetUp { .. }), "{error}");
    assert!(!options.save.exists() && Run::open(stage.store.clone(), NAME).is_err());
}
