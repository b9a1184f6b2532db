//! Pushes into engines that refuse, hang, die and come back: every wait ends, and no engine carries a
//! version's label that it does not hold.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use driftless_bridge::Error;
use driftless_bridge::engine::PauseMode;
use driftless_bridge::push::nccl::{Group, GroupOptions, UpdateMode};
use driftless_bridge::push::{PushActivator, PushOptions};
use driftless_transport::Checkpoint;
use driftless_transport::activate::{Activate, Limit, Target};

use crate::in_fp8;
use crate::scene::{self, Engines, Look};
use driftless_testkit::sglang::FakeRoot;
use driftless_testkit::sglang::{Fake, Fault, checkpoint, patient, version};

/// Two engines of one group, and what its root was asked to do.
struct Grouped {
    fakes: [Fake; 2],
    log: Arc<Mutex<Vec<String>>>,
}

impl Engines for Grouped {
    fn looks(&self, version: &Checkpoint) -> Vec<Look> {
        self.fakes.iter().flat_map(|fake| fake.looks(version)).collect()
    }
}

type Scene = scene::Scene<Grouped, PushActivator<Group<FakeRoot>>>;

impl Scene {
    fn new() -> Self {
        Self::with(|_, _| {})
    }

    fn with(change: impl FnOnce(&mut FakeRoot, &mut GroupOptions)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let first = checkpoint(&dir.path().join("a"), 1, 4);
        let fakes = [Fake::start(&first), Fake::start(&first)];
        let mut root = FakeRoot::new();
        let mut options = GroupOptions::new("127.0.0.1");
        options.listen = ([127, 0, 0, 1], 0).into();
        // Several buckets, of a checkpoint that has 13 tensors and 390 bytes.
        options.bucket_bytes = 100;
        change(&mut root, &mut options);
        for fake in &fakes {
            fake.engine().pushes.wire = Some(root.wire.clone());
        }
        let log = root.log.clone();
        let addresses = fakes.each_ref().map(|fake| fake.address.to_string());
        let client = PushOptions::default().with_client(patient());
        let group = Group::new(root, options).unwrap();
        let activator = PushActivator::new(&addresses, group, client).unwrap();
        Self::of(Grouped { fakes, log }, activator, version(dir.path()), dir)
    }

    /// Both engines hold the version, and go on.
    fn holds(&mut self) {
        self.serves();
        assert!(self.engine.fakes.iter().all(|fake| !fake.engine().pushes.session));
    }

    fn logged(&self, what: &str) -> usize {
        self.engine.log.lock().unwrap().iter().filter(|line| line.starts_with(what)).count()
    }
}

#[test]
fn a_push_reaches_every_engine_and_is_looked_at() {
    for mode in [UpdateMode::Flattened, UpdateMode::PerTensor] {
        let mut scene = Scene::with(|_, options| options.mode = mode);
        // The activator compares the checksums of what the fakes received.
        scene.activate().unwrap();
        scene.holds();
        let calls = scene.engine.fakes[0].changes();
        let begin = calls.iter().position(|path| path == "/pause_generation").unwrap();
        let before = &calls[..begin];
        assert!(
            before.ends_with(&["/destroy_weights_update_group".into(), "/init_weights_update_group".into()])
        );
        let updates = calls.iter().filter(|path| *path == "/update_weights_from_distributed").count();
        assert!(updates >= 4, "{calls:?}");
        let mut steps = calls[begin..].to_vec();
        steps.dedup();
        let order = [
            "/pause_generation",
            "/flush_cache",
            "/update_weight_version",
            "/begin_weight_update",
            "/update_weights_from_distributed",
            "/end_weight_update",
            "/update_weight_version",
            "/continue_generation",
        ];
        assert_eq!(steps, order);
        // Again, in the same group.
        scene.activate().unwrap();
        assert_eq!((scene.logged("open"), scene.logged("abort")), (1, 0));
    }
}

#[test]
fn the_next_bucket_is_gathered_while_one_is_under_way() {
    let mut scene = Scene::new();
    scene.activate().unwrap();
    let log = scene.engine.log.lock().unwrap().clone();
    assert_eq!(
        log[..5],
        ["open driftless 3", "gather 0", "broadcast 0 1", "gather 1", "broadcast 1 1"],
        "{log:?}"
    );
}

#[test]
fn the_label_comes_after_the_last_bucket() {
    let mut scene = Scene::new();
    scene.activate().unwrap();
    scene.engine.fakes[1].assert_labelled_after("/update_weights_from_distributed", &scene.label);
}

#[test]
fn a_refusal_in_the_middle_leaves_nobody_waiting_or_labelled() {
    let mut scene = Scene::new();
    let refusal = r#"{"success": false, "message": "Failed to receive weights: no memory"}"#;
    scene.engine.fakes[1].fault("POST /update_weights_from_distributed", Fault::Answer(400, refusal.into()));
    let error = scene.fails();
    assert!(
        matches!(&error, Error::Status { status: 400, body, .. } if body.contains("no memory")),
        "{error}"
    );
    scene.is_fenced();
    assert!(scene.logged("abort") >= 1);
    // And once more, with the group formed anew.
    scene.activate().unwrap();
    scene.holds();
    assert_eq!(scene.logged("open"), 2);
}

#[test]
fn engine_that_refuses_its_pause_leaves_the_others_as_they_were() {
    let mut scene = Scene::new();
    scene.engine.fakes[1].fault("POST /pause_generation", Fault::Answer(500, "no".into()));
    assert!(matches!(scene.fails(), Error::Status { status: 500, .. }));
    for fake in &scene.engine.fakes {
        let engine = fake.engine();
        assert!(!engine.is_paused() && engine.label() == "default", "{}", engine.label());
    }
}

#[test]
fn an_engine_that_dies_during_a_push_is_named() {
    let mut scene = Scene::new();
    scene.engine.fakes[0].fault("POST /update_weights_from_distributed", Fault::Die);
    let error = scene.fails();
    let url = format!("http://{}", scene.engine.fakes[0].address);
    assert!(matches!(&error, Error::Unreachable { engine, .. } if *engine == url), "{error}");
}

#[test]
fn an_engine_that_was_started_again_joins_anew() {
    let mut scene = Scene::new();
    scene.activate().unwrap();
    scene.engine.fakes[1].restart();
    assert_eq!(scene.activator.serving().unwrap(), None);
    scene.activate().unwrap();
    scene.holds();
    assert_eq!((scene.logged("open"), scene.logged("abort")), (2, 1));
}

#[test]
fn ranks_that_never_join_end_in_a_deadline_that_names_them() {
    let mut scene = Scene::with(|root, options| {
        root.joins = false;
        options.join = Duration::from_millis(50);
    });
    let error = scene.fails();
    assert!(matches!(&error, Error::Group { what: "joining", engines, .. } if engines.len() == 2), "{error}");
    scene.is_fenced();
}

#[test]
fn bytes_that_are_never_received_end_in_a_deadline() {
    let mut scene = Scene::with(|root, options| {
        root.delivers = false;
        options.transfer = Duration::from_millis(50);
    });
    let error = scene.fails();
    assert!(matches!(&error, Error::Group { what: "receiving a bucket", .. }), "{error}");
    scene.is_fenced();
}

#[test]
fn a_session_that_somebody_left_open_is_ended() {
    let mut scene = Scene::new();
    scene.engine.fakes[0].engine().pushes.session = true;
    scene.activate().unwrap();
    scene.holds();
}

#[test]
fn wrong_weights_are_seen() {
    let mut scene = Scene::new();
    scene.engine.fakes[1].fault("POST /weights_checker", Fault::WrongSum);
    assert!(matches!(scene.fails(), Error::LiveWeights { .. }));
    scene.is_fenced();
}

#[test]
fn memory_that_is_mapped_otherwise_is_refused_before_any_call() {
    let mut scene = Scene::with(|root, _| root.cumem = Some(true));
    let error = scene.fails();
    assert!(matches!(&error, Error::Refused { what, .. } if what.contains("NCCL_CUMEM_ENABLE")), "{error}");
    assert!(!scene.engine.fakes[0].changes().iter().any(|path| path != "/continue_generation"));
}

#[test]
fn push_of_quantised_weights_is_refused_before_any_call() {
    let mut scene = Scene::new();
    let started_with = scene.engine.fakes[0].engine().started_with.clone();
    drop(in_fp8(&started_with));
    scene.next = in_fp8(scene.next.dir());
    let error = scene.fails();
    assert!(matches!(&error, Error::Refused { what, .. } if what.starts_with("quantization")), "{error}");
    assert!(!scene.engine.fakes[0].changes().iter().any(|path| path != "/continue_generation"));
}

#[test]
fn pausing_in_place_keeps_the_requests() {
    let mut scene = Scene::new();
    let options = PushOptions::default().with_client(patient()).with_pause(PauseMode::InPlace);
    let mut root = FakeRoot::new();
    root.log = scene.engine.log.clone();
    scene.engine.fakes[0].engine().pushes.wire = Some(root.wire.clone());
    let group = Group::new(root, GroupOptions::new("127.0.0.1")).unwrap();
    let address = [scene.engine.fakes[0].address.to_string()];
    let mut activator = PushActivator::new(&address, group, options).unwrap();
    let limit = Limit::within(Duration::from_secs(60));
    let (checkpoint, manifest) = (&scene.next, &scene.manifest);
    let target = Target { checkpoint, weights: checkpoint, label: &scene.label, manifest, limit: &limit };
    activator.activate(&target).unwrap();
    let modes: Vec<_> = scene.engine.fakes[0]
        .engine()
        .calls
        .iter()
        .filter_map(|(_, body)| body.get("mode").cloned())
        .collect();
    assert_eq!(modes, ["in_place"]);
    assert_eq!(scene.logged("open driftless 2"), 1);
    drop(scene.activator.serving());
}

#[test]
fn engines_are_named_once() {
    let group = || Group::new(FakeRoot::new(), GroupOptions::new("127.0.0.1")).unwrap();
    for addresses in [vec![], vec!["a:1".to_owned(), "http://a:1".to_owned()]] {
        let refused = PushActivator::new(&addresses, group(), PushOptions::default());
        assert!(matches!(refused, Err(Error::Fleet { .. })), "{addresses:?}");
    }
}
