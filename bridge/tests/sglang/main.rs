//! The bridge against a running engine. Set `DRIFTLESS_SGLANG` to its URL, and `DRIFTLESS_SGLANG_FIRST` and
//! `DRIFTLESS_SGLANG_SECOND` to two checkpoint directories of one shape, the first of them the one it was
//! started with; and `DRIFTLESS_SGLANG_PYTHON` to a Python with torch, for pushes into it.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]
#![cfg(feature = "conformance")]

mod colocate;
#[path = "../common/inline.rs"]
mod inline;
mod push;

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use driftless_bridge::activate::{DiskActivator, DiskOptions};
use driftless_bridge::engine::{Drawn, LiveWeights, PauseMode, Piece};
use driftless_bridge::fleet::FleetOptions;
use driftless_bridge::sglang::conformance::{self, Subject};
use driftless_bridge::sglang::{Client, Dialect};
use driftless_bridge::{
    ClientOptions, Error, Expected, Fleet, GenerateRequest, Keys, Label, Rid, SamplingParams,
};
use driftless_store::Memory;
use driftless_transport::activate::{Activate, Limit, Target};
use driftless_transport::manifest::Manifest;
use driftless_transport::publish::{Mode, PublisherOptions, Start, Step};
use driftless_transport::{Checkpoint, Publisher};
use tokio::runtime::Runtime;

/// The engine belongs to one test at a time.
static ENGINE: Mutex<()> = Mutex::new(());

/// The engine that the environment names; says so where there is none.
fn subject() -> Option<Subject> {
    let variable =
        |name: &str| std::env::var(name).inspect_err(|_| println!("skipped: {name} is not set")).ok();
    Some(Subject {
        client: Client::new(&variable("DRIFTLESS_SGLANG")?, ClientOptions::default()).unwrap(),
        first: PathBuf::from(variable("DRIFTLESS_SGLANG_FIRST")?),
        second: PathBuf::from(variable("DRIFTLESS_SGLANG_SECOND")?),
        dialect: Dialect::V0_5_23,
        long_tokens: 150,
    })
}

#[test]
fn the_conformance_suite() {
    let Some(subject) = subject() else { return };
    let _turn = ENGINE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    match Runtime::new().unwrap().block_on(conformance::run(&subject)) {
        Ok(report) => println!("{} checks passed", report.passed.len()),
        Err(failure) => panic!("{failure}"),
    }
}

/// A run of which the two checkpoints are versions 0 and 1.
fn manifests(checkpoints: &[Checkpoint; 2], directory: &std::path::Path) -> [Manifest; 2] {
    let options = PublisherOptions::new("test", Start::NewRun, directory.join("baseline"));
    let mut publisher = Publisher::open(Arc::new(Memory::new()), options).unwrap();
    let first = publisher.publish_reference(checkpoints[0].dir(), Step::default()).unwrap();
    let second = publisher.publish(&checkpoints[1], Step::default(), Mode::Delta).unwrap();
    [first, second].map(|published| publisher.run().get("policy", published.version).unwrap().manifest)
}

/// A fleet of the one engine.
fn fleet(runtime: &Runtime, subject: &Subject) -> Arc<Fleet> {
    let expected = Expected::from_checkpoint(&subject.first).unwrap();
    let (addresses, keys) = ([subject.client.url().to_owned()], Keys::default());
    Arc::new(runtime.block_on(Fleet::attach(&addresses, &keys, &expected, FleetOptions::default())).unwrap())
}

#[test]
fn activation_under_load() {
    let Some(subject) = subject() else { return };
    let _turn = ENGINE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let directory = tempfile::tempdir().unwrap();
    let checkpoints = [&subject.first, &subject.second].map(|path| Checkpoint::open(path).unwrap());
    let manifests = manifests(&checkpoints, directory.path());
    let runtime = Runtime::new().unwrap();
    let fleet = fleet(&runtime, &subject);

    for mode in [PauseMode::Retract, PauseMode::InPlace, PauseMode::Abort] {
        let options = DiskOptions::default().with_pause(mode);
        let mut activator = DiskActivator::new(subject.client.url(), options).unwrap();
        for (sample, (manifest, checkpoint)) in manifests.iter().zip(&checkpoints).enumerate() {
            let sampling =
                SamplingParams { max_new_tokens: 30, ignore_eos: true, ..SamplingParams::default() };
            let request = GenerateRequest::new(Rid::new(7, sample as u64), vec![1, 2, 3], sampling);
            let busy = runtime.spawn({
                let fleet = fleet.clone();
                async move { fleet.generate(request, None).await }
            });
            let label = manifest.label();
            let limit = Limit::within(Duration::from_secs(600));
            let target = Target { checkpoint, weights: checkpoint, label: &label, manifest, limit: &limit };
            let activated = activator.activate(&target).unwrap();
            println!("{mode:?}: {label} paused {:?}", activated.pause);
            assert_eq!(activator.serving().unwrap().as_deref(), Some(label.as_str()));

            let parsed: Label = label.parse().unwrap();
            let behind = runtime.block_on(fleet.wait_for_those_up(&parsed, Duration::from_secs(10))).unwrap();
            assert_eq!(behind, [] as [String; 0]);
            let engine = &fleet.engines()[0];
            let sums = engine.sums(checkpoint, checkpoint.dir()).unwrap();
            let live = runtime.block_on(engine.check_live(&sums)).unwrap();
            assert_eq!(live, LiveWeights::Equal);
            assert_eq!(runtime.block_on(busy).unwrap().unwrap().output_ids.len(), 30);
        }
    }
}

/// An answer that is aborted goes on behind the tokens that it has, as if the engine had read them.
#[test]
fn answer_that_is_aborted_goes_on_behind_its_tokens() {
    let Some(subject) = subject() else { return };
    let _turn = ENGINE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let runtime = Runtime::new().unwrap();
    let fleet = fleet(&runtime, &subject);
    let request = |sample, input_ids, max_new_tokens| {
        let greedy =
            SamplingParams { temperature: 0.0, max_new_tokens, ignore_eos: true, ..Default::default() };
        GenerateRequest::new(Rid::new(8, sample), input_ids, greedy)
    };
    let (long, mut kept) = (request(0, vec![1, 2, 3], subject.long_tokens), Drawn::default());
    let mut told = |piece: Piece<'_>| kept.push(piece);
    let abort = async {
        let begun = std::time::Instant::now();
        while subject.client.loads().await.unwrap().iter().all(|load| load.num_running_reqs == 0) {
            assert!(begun.elapsed() < Duration::from_secs(60), "the request never ran, or ended unseen");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        subject.client.abort(&long.rid).await.unwrap();
    };
    let both = async { tokio::join!(fleet.stream(long.clone(), None, &mut told), abort) };
    let whole = runtime.block_on(both).0.unwrap();
    assert_eq!(whole.output_ids.len(), subject.long_tokens as usize);
    assert_eq!(whole.rid, long.rid.next_attempt());
    let behind = whole.output_ids.strip_prefix(&kept.output_ids[..]).unwrap();
    let input_ids = [vec![1, 2, 3], kept.output_ids.clone()].concat();
    let again = runtime.block_on(subject.client.generate(&request(1, input_ids, 8))).unwrap();
    assert!(behind.starts_with(&again.output_ids), "{again:?} behind {} tokens: {behind:?}", kept.len());
}

#[test]
fn what_would_end_the_server_is_refused_and_it_lives_on() {
    let Some(subject) = subject() else { return };
    let _turn = ENGINE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let directory = tempfile::tempdir().unwrap();
    let checkpoints = [&subject.first, &subject.second].map(|path| Checkpoint::open(path).unwrap());
    let manifests = manifests(&checkpoints, directory.path());
    // The same tensors under a config that says otherwise, and a token that the embedding does not have.
    let lying = directory.path().join("lying");
    std::fs::create_dir(&lying).unwrap();
    std::fs::copy(subject.first.join("model.safetensors"), lying.join("model.safetensors")).unwrap();
    let config = std::fs::read_to_string(subject.first.join("config.json")).unwrap();
    let layers = "\"num_hidden_layers\": 2";
    assert!(config.contains(layers), "the test's checkpoints have two layers");
    std::fs::write(lying.join("config.json"), config.replace(layers, "\"num_hidden_layers\": 3")).unwrap();
    let lying = Checkpoint::open(&lying).unwrap();
    let mut activator = DiskActivator::new(subject.client.url(), DiskOptions::default()).unwrap();
    let label = manifests[0].label();
    let limit = Limit::within(Duration::from_secs(600));
    let target =
        Target { checkpoint: &lying, weights: &lying, label: &label, manifest: &manifests[0], limit: &limit };
    let refused = *activator.activate(&target).unwrap_err().downcast::<Error>().unwrap();
    assert!(matches!(&refused, Error::Refused { what, .. } if what == "num_hidden_layers"), "{refused}");

    let runtime = Runtime::new().unwrap();
    let fleet = fleet(&runtime, &subject);
    let expected = Expected::from_checkpoint(&subject.first).unwrap();
    let outside = i32::try_from(expected.config.vocabulary).unwrap();
    let request = GenerateRequest::new(Rid::new(8, 0), vec![outside], SamplingParams::default());
    assert!(matches!(runtime.block_on(fleet.generate(request, None)), Err(Error::Request { .. })));
    runtime.block_on(subject.client.health()).unwrap();
}

/// A checkpoint of the same tensors, every element of which is NaN.
fn broken(checkpoint: &std::path::Path, directory: &std::path::Path) -> Checkpoint {
    std::fs::create_dir(directory).unwrap();
    std::fs::copy(checkpoint.join("config.json"), directory.join("config.json")).unwrap();
    let mut bytes = std::fs::read(checkpoint.join("model.safetensors")).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    // In bf16, and two of it in f32.
    bytes[header..].chunks_mut(2).for_each(|element| element.copy_from_slice(&[0xc0, 0x7f]));
    std::fs::write(directory.join("model.safetensors"), bytes).unwrap();
    Checkpoint::open(directory).unwrap()
}

#[test]
fn a_version_of_nan_is_fenced_and_the_next_one_is_loaded() {
    let Some(subject) = subject() else { return };
    let _turn = ENGINE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let directory = tempfile::tempdir().unwrap();
    let checkpoints = [&subject.first, &subject.second].map(|path| Checkpoint::open(path).unwrap());
    let manifests = manifests(&checkpoints, directory.path());
    let broken = broken(&subject.first, &directory.path().join("broken"));
    let labels = manifests.each_ref().map(Manifest::label);
    let limit = Limit::within(Duration::from_secs(600));
    let target = |checkpoint, number: usize| Target {
        checkpoint,
        weights: checkpoint,
        label: &labels[number],
        manifest: &manifests[number],
        limit: &limit,
    };
    let runtime = Runtime::new().unwrap();
    let activator = || DiskActivator::new(subject.client.url(), DiskOptions::default()).unwrap();
    let mut first = activator();
    let refused = *first.activate(&target(&broken, 0)).unwrap_err().downcast::<Error>().unwrap();
    assert!(matches!(&refused, Error::Unsound { label, .. } if *label == labels[0]), "{refused}");
    assert_eq!((first.serving().unwrap(), first.is_paused()), (None, true));
    assert_eq!(runtime.block_on(subject.client.ready()).unwrap(), Some(false));

    // And by a follower that knows nothing of it, to which the engine is one that generates NaN.
    runtime.block_on(subject.client.set_weight_version("default")).unwrap();
    runtime.block_on(subject.client.resume()).unwrap();
    let mut second = activator();
    assert_eq!(second.serving().unwrap(), None);
    second.activate(&target(&checkpoints[1], 1)).unwrap();
    assert_eq!((second.serving().unwrap(), second.is_paused()), (Some(labels[1].clone()), false));
    let status = runtime.block_on(fleet(&runtime, &subject).look()).unwrap();
    assert_eq!(status[0].serving.as_ref(), Some(&labels[1]));
    let sampling = SamplingParams { max_new_tokens: 4, ignore_eos: true, ..SamplingParams::default() };
    let request = GenerateRequest::new(Rid::new(9, 0), vec![1, 2, 3], sampling);
    assert_eq!(runtime.block_on(subject.client.generate(&request)).unwrap().output_ids.len(), 4);
}
