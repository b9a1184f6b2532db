//! Activation on an engine that misbehaves: it is never left paused, and never serves under our label what is not ours.

use driftless_bridge::{DiskActivator, DiskOptions, Error, PauseMode};
use driftless_transport::{Activate, BoxError, Checkpoint, Manifest, Target};

use crate::fake::{Fake, Fault, checkpoint, patient, short, version, write};

const ORDER: [&str; 4] =
    ["/pause_generation", "/flush_cache", "/update_weights_from_disk", "/continue_generation"];

/// An engine that serves one checkpoint, and another one to activate.
struct Scene {
    fake: Fake,
    activator: DiskActivator,
    next: Checkpoint,
    manifest: Manifest,
    label: String,
    dir: tempfile::TempDir,
}

impl Scene {
    fn new() -> Self {
        Self::with(DiskOptions { client: patient(), ..DiskOptions::default() })
    }

    fn with(options: DiskOptions) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let fake = Fake::start(&checkpoint(&dir.path().join("a"), 1, 4));
        let (next, manifest) = version(dir.path());
        let activator = DiskActivator::new(&fake.address.to_string(), options).unwrap();
        Self { label: manifest.label(), fake, activator, next, manifest, dir }
    }

    fn activate(&mut self) -> Result<(), BoxError> {
        let target = Target { checkpoint: &self.next, label: &self.label, manifest: &self.manifest };
        self.activator.activate(&target).map(|activated| assert!(activated.pause.as_nanos() > 0))
    }

    fn fails(&mut self) -> Error {
        *self.activate().unwrap_err().downcast::<Error>().unwrap()
    }

    /// The calls of the last transaction, without the precautionary continue in front of it.
    fn transaction(&self) -> Vec<String> {
        let calls = self.fake.changes();
        let begin = calls.iter().position(|path| path == "/pause_generation").unwrap_or(calls.len());
        calls[begin..].to_vec()
    }
}

#[test]
fn the_order_of_calls() {
    let mut scene = Scene::new();
    assert_eq!(scene.activator.serving().unwrap(), None, "`default` is no label of ours");
    scene.activate().unwrap();
    assert_eq!(scene.transaction(), ORDER);
    assert_eq!(scene.activator.serving().unwrap(), Some(scene.label.clone()));
    let body = scene
        .fake
        .engine()
        .calls
        .iter()
        .find(|(path, _)| path == "/update_weights_from_disk")
        .unwrap()
        .1
        .clone();
    assert_eq!(body["flush_cache"], false);
    assert_eq!(body["weight_version"], scene.label);
    assert_eq!(body["model_path"], scene.next.dir().to_str().unwrap());
    assert_eq!(body.get("load_format"), None);
}

#[test]
fn an_engine_started_with_dummy_is_told_how_to_load() {
    let mut scene = Scene::new();
    scene.fake.engine().load_format = "dummy".into();
    scene.activate().unwrap();
    let body = scene
        .fake
        .engine()
        .calls
        .iter()
        .find(|(path, _)| path == "/update_weights_from_disk")
        .unwrap()
        .1
        .clone();
    assert_eq!(body["load_format"], "auto");
}

#[test]
fn a_fresh_activator_ends_the_pause_that_a_dead_one_left() {
    let mut scene = Scene::new();
    scene.fake.engine().paused = true;
    scene.activator.serving().unwrap();
    assert!(!scene.fake.engine().paused);
}

#[test]
fn a_failed_update_leaves_the_old_version_serving() {
    for (fault, transient) in [
        (Fault::Answer(500, "no".into()), true),
        (Fault::Answer(400, r#"{"success":false,"message":"no"}"#.into()), false),
        (Fault::Hang, true),
    ] {
        let client = if matches!(fault, Fault::Hang) { short(|calls| &mut calls.load) } else { patient() };
        let mut scene = Scene::with(DiskOptions { client, ..DiskOptions::default() });
        scene.fake.fault("POST /update_weights_from_disk", fault.clone());
        let error = scene.fails();
        assert_eq!(error.is_transient(), transient, "{fault:?}: {error}");
        assert!(error.to_string().contains("/update_weights_from_disk"), "{error}");
        assert!(!scene.fake.engine().paused, "{fault:?}");
        assert_eq!(scene.activator.serving().unwrap(), None);
        scene.activate().unwrap();
        assert_eq!(scene.activator.serving().unwrap(), Some(scene.label.clone()));
    }
}

#[test]
fn a_failure_before_the_update_is_continued_all_the_same() {
    let client = short(|calls| &mut calls.control);
    let mut scene = Scene::with(DiskOptions { client, ..DiskOptions::default() });
    scene.fake.fault("POST /flush_cache", Fault::Hang);
    assert!(matches!(scene.fails(), Error::Deadline { call, .. } if call == "POST /flush_cache"));
    assert_eq!(scene.transaction(), ["/pause_generation", "/flush_cache", "/continue_generation"]);
}

#[test]
fn an_engine_that_keeps_its_label_is_not_ours() {
    let mut scene = Scene::new();
    scene.fake.fault("POST /update_weights_from_disk", Fault::KeepLabel);
    assert!(matches!(scene.fails(), Error::LabelMismatch { found, .. } if found == "default"));
    assert!(!scene.fake.engine().paused);
}

#[test]
fn wrong_live_weights_lose_our_label_before_anybody_is_served() {
    let mut scene = Scene::new();
    scene.fake.fault("POST /weights_checker", Fault::WrongSum);
    match scene.fails() {
        Error::LiveWeights { count: 1, tensor, found, .. } => {
            assert_eq!((tensor.as_str(), found.as_str()), ("model.norm.weight", "0000000000000000"))
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(
        scene.transaction(),
        [&ORDER[..3], &["/update_weight_version", "/continue_generation"]].concat()
    );
    assert_eq!(scene.activator.serving().unwrap(), None);
    scene.activate().unwrap();
}

#[test]
fn a_refused_flush_aborts_what_waits() {
    let mut scene = Scene::new();
    scene.fake.fault("POST /flush_cache", Fault::Answer(400, "Flush cache failed.".into()));
    scene.activate().unwrap();
    let modes: Vec<_> = scene
        .fake
        .engine()
        .calls
        .iter()
        .filter(|(path, _)| path == "/pause_generation")
        .map(|(_, body)| body["mode"].clone())
        .collect();
    assert_eq!(modes, ["retract", "abort"]);
    assert_eq!(
        scene.transaction(),
        [
            "/pause_generation",
            "/flush_cache",
            "/pause_generation",
            "/flush_cache",
            "/update_weights_from_disk",
            "/continue_generation"
        ]
    );
}

#[test]
fn in_place_keeps_what_runs() {
    let mut scene =
        Scene::with(DiskOptions { client: patient(), pause: PauseMode::InPlace, ..DiskOptions::default() });
    scene.fake.fault("POST /flush_cache", Fault::Answer(400, "Flush cache failed.".into()));
    scene.activate().unwrap();
    assert_eq!(scene.transaction(), ORDER);
}

#[test]
fn applied_but_not_flushed_counts_as_applied() {
    let mut scene = Scene::new();
    scene.fake.fault("POST /update_weights_from_disk", Fault::Unflushed);
    scene.activate().unwrap();
    assert_eq!(
        scene.transaction(),
        [&ORDER[..3], &["/flush_cache", "/update_weight_version", "/continue_generation"]].concat()
    );
    assert_eq!(scene.activator.serving().unwrap(), Some(scene.label.clone()));
}

#[test]
fn an_engine_that_dies_between_pause_and_continue_is_activated_again() {
    let mut scene = Scene::new();
    scene.fake.fault("POST /update_weights_from_disk", Fault::Die);
    scene.fake.engine().faults.insert(
        "POST /continue_generation",
        [Fault::Answer(200, String::new()), Fault::Die, Fault::Die, Fault::Die].into(),
    );
    match scene.fails() {
        Error::LeftPaused { engine, first: Some(first), .. } => {
            assert!(
                engine.contains(&scene.fake.address.to_string())
                    && first.contains("/update_weights_from_disk"),
                "{engine}: {first}"
            );
        }
        other => panic!("{other:?}"),
    }
    scene.fake.restart();
    assert_eq!(scene.activator.serving().unwrap(), None);
    scene.activate().unwrap();
    assert_eq!(scene.activator.serving().unwrap(), Some(scene.label.clone()));
}

#[test]
fn a_pause_that_could_not_be_ended_is_ended_later() {
    let client = short(|calls| &mut calls.control);
    let mut scene = Scene::with(DiskOptions { client, ..DiskOptions::default() });
    scene.fake.engine().faults.insert(
        "POST /continue_generation",
        [Fault::Answer(200, String::new()), Fault::Hang, Fault::Hang, Fault::Hang].into(),
    );
    assert!(matches!(scene.fails(), Error::LeftPaused { first: None, .. }));
    assert!(scene.fake.engine().paused);
    scene.activator.serving().unwrap();
    assert!(!scene.fake.engine().paused);
}

#[test]
fn a_checkpoint_that_would_end_the_engine_is_not_posted() {
    let mut scene = Scene::new();
    // Shapes of another model under the config of this one.
    let config = std::fs::read(scene.next.dir().join("config.json")).unwrap();
    let config = serde_json::from_slice(&config).unwrap();
    scene.next = Checkpoint::open(write(&scene.dir.path().join("c"), 2, 8, &config)).unwrap();
    match scene.fails() {
        Error::Checkpoint { tensor, expected, found, .. } => {
            assert_eq!(
                (tensor.as_str(), expected.as_str(), found.as_str()),
                ("model.embed_tokens.weight", "BF16 [10, 4]", "BF16 [10, 8]")
            );
        }
        other => panic!("{other:?}"),
    }
    scene.next = Checkpoint::open(checkpoint(&scene.dir.path().join("d"), 2, 8)).unwrap();
    assert!(matches!(scene.fails(), Error::Refused { what, .. } if what == "hidden_size"));
    assert!(
        scene.fake.changes().iter().all(|path| path == "/continue_generation"),
        "{:?}",
        scene.fake.changes()
    );
}

#[test]
fn an_engine_whose_config_is_elsewhere_needs_a_base() {
    let mut scene = Scene::new();
    scene.fake.engine().started_with = "/elsewhere/model".into();
    assert!(matches!(scene.fails(), Error::Refused { what, .. } if what.starts_with("config.json")));
    let base = Some(scene.dir.path().join("a"));
    let options = DiskOptions { client: patient(), base, ..DiskOptions::default() };
    scene.activator = DiskActivator::new(&scene.fake.address.to_string(), options).unwrap();
    scene.activate().unwrap();
}

#[test]
fn the_engine_gets_the_path_as_it_sees_it() {
    let dir = tempfile::tempdir().unwrap();
    let seen = dir.path().join("seen");
    let mut scene = Scene::with(DiskOptions {
        client: patient(),
        engine_checkpoint_dir: Some(seen.clone()),
        ..DiskOptions::default()
    });
    std::os::unix::fs::symlink(scene.next.dir(), &seen).unwrap();
    scene.activate().unwrap();
    assert_eq!(scene.fake.engine().model_path, seen);
}

#[test]
fn it_can_be_called_from_a_runtime() {
    let mut scene = Scene::new();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async { scene.activate().unwrap() });
}
