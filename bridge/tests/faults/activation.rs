//! Activation on an engine that misbehaves: it is never left paused, and never serves under our label what is
//! not ours.

use std::path::Path;
use std::time::Duration;

use driftless_bridge::Error;
use driftless_bridge::activate::{DiskActivator, DiskOptions};
use driftless_bridge::engine::PauseMode;
use driftless_store::wait::Stop;
use driftless_transport::Checkpoint;
use driftless_transport::activate::{Activate as _, Limit};
use driftless_transport::manifest::Manifest;

use driftless_testkit::sglang::{
    Fake, Fault, SHORT, checkpoint, odd_checkpoint, odd_version, patient, short, version, write,
};

use crate::scene;

const ORDER: [&str; 6] = [
    "/pause_generation",
    "/flush_cache",
    "/update_weight_version",
    "/update_weights_from_disk",
    "/update_weight_version",
    "/continue_generation",
];

type Scene = scene::Scene<Fake, DiskActivator>;

impl Scene {
    fn new() -> Self {
        Self::with(DiskOptions::default().with_client(patient()))
    }

    fn with(options: DiskOptions) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let fake = Fake::start(&checkpoint(&dir.path().join("a"), 1, 4));
        let version = version(dir.path());
        Self::serving(fake, version, options, dir)
    }

    /// An engine of a family that nothing here knows.
    fn odd() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let fake = Fake::start(&odd_checkpoint(&dir.path().join("a"), 1));
        let version = odd_version(dir.path());
        Self::serving(fake, version, DiskOptions::default().with_client(patient()), dir)
    }

    fn serving(
        fake: Fake,
        version: (Checkpoint, Manifest),
        options: DiskOptions,
        dir: tempfile::TempDir,
    ) -> Self {
        let (next, manifest) = version;
        let activator = DiskActivator::new(&fake.address.to_string(), options).unwrap();
        fake.engine().truths.insert(manifest.label(), next.dir().into());
        Self::of(fake, activator, (next, manifest), dir)
    }

    /// The calls of the last transaction, without the precautionary continue in front of it.
    fn transaction(&self) -> Vec<String> {
        let calls = self.engine.changes();
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
        .engine
        .engine()
        .calls
        .iter()
        .find(|(path, _)| path == "/update_weights_from_disk")
        .unwrap()
        .1
        .clone();
    assert_eq!(body["flush_cache"], false);
    assert_eq!(body["weight_version"], format!("{}?partial", scene.label), "not looked at yet");
    assert_eq!(body["model_path"], scene.next.dir().to_str().unwrap());
    assert_eq!(body.get("load_format"), None);
}

#[test]
fn engine_of_an_unknown_family_loads_without_checksums() {
    let mut scene = Scene::odd();
    scene.activate().unwrap();
    scene.serves();
    assert_eq!(scene.transaction(), ORDER);
    assert!(scene.engine.engine().keys.iter().all(|(path, _)| path != "/weights_checker"));
}

#[test]
fn tensors_of_an_unknown_family_need_the_dtype_of_the_engine() {
    let mut scene = Scene::odd();
    let path = scene.next.dir().join("config.json");
    let other = std::fs::read_to_string(&path).unwrap().replace("bfloat16", "float16");
    for dir in [scene.next.dir(), &scene.engine.engine().started_with.clone()] {
        std::fs::write(dir.join("config.json"), &other).unwrap();
    }
    scene.next = Checkpoint::open(scene.next.dir()).unwrap();
    match scene.fails() {
        Error::Checkpoint { expected, found, .. } => {
            assert_eq!(
                (expected.as_str(), found.as_str()),
                ("F16, as config.json and the engine have it", "BF16")
            );
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(scene.transaction(), Vec::<String>::new(), "nothing was posted");
}

#[test]
fn an_engine_started_with_dummy_is_told_how_to_load() {
    let mut scene = Scene::new();
    {
        let engine = scene.engine.engine();
        let mut facts = engine.facts();
        facts.launched.load_format = "dummy".into();
        facts.serving.load_format = "dummy".into();
    }
    scene.activate().unwrap();
    let body = scene
        .engine
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
    scene.engine.engine().set_paused(true);
    scene.activator.serving().unwrap();
    assert!(!scene.engine.engine().is_paused());
}

#[test]
fn an_engine_whose_load_fails_is_fenced_until_one_succeeds() {
    let refusal = r#"{"success":false,"message":"no"}"#;
    for fault in [
        Fault::Rollback,
        Fault::Half(Some(400)),
        Fault::Half(Some(500)),
        Fault::Half(None),
        Fault::Answer(500, "no".into()),
        Fault::Answer(400, refusal.into()),
        Fault::Answer(200, refusal.into()),
        Fault::Answer(200, "<html>".into()),
        Fault::Die,
        Fault::Hang,
    ] {
        // A GPU's engine: no checksum tells what it holds.
        for device in ["cpu", "cuda"] {
            let client =
                if matches!(fault, Fault::Hang) { short(|calls| &mut calls.load) } else { patient() };
            let mut scene = Scene::with(DiskOptions::default().with_client(client));
            scene.engine.engine().facts().device = device.into();
            for _ in 0..2 {
                scene.engine.fault("POST /update_weights_from_disk", fault.clone());
                let error = scene.fails();
                assert!(error.to_string().contains("/update_weights_from_disk"), "{fault:?}: {error}");
                scene.is_fenced();
            }
            // Whoever comes next does not know what happened, and still has the engine load first.
            let options = DiskOptions::default().with_client(patient());
            scene.activator = DiskActivator::new(&scene.engine.address.to_string(), options).unwrap();
            scene.is_fenced();
            scene.activate().unwrap();
            scene.serves();
        }
    }
}

#[test]
fn a_pause_that_a_failed_load_left_counts_from_its_beginning() {
    let client = short(|calls| &mut calls.load);
    let mut scene = Scene::with(DiskOptions::default().with_client(client));
    scene.engine.fault("POST /update_weights_from_disk", Fault::Hang);
    scene.fails();
    assert!(scene.activate_within(&Limit::within(Duration::from_secs(60))).unwrap() >= SHORT);
}

#[test]
fn a_label_that_a_failed_load_set_is_not_believed() {
    let mut scene = Scene::new();
    scene.engine.fault("POST /update_weights_from_disk", Fault::Half(Some(400)));
    scene.fails();
    scene.engine.engine().set_label(&scene.label);
    assert_eq!(scene.activator.serving().unwrap(), None);
    assert!(scene.engine.engine().is_paused());
    scene.activate().unwrap();
    assert_eq!(scene.activator.serving().unwrap(), Some(scene.label.clone()));
}

#[test]
fn an_engine_that_was_restarted_after_a_failed_load_goes_on() {
    let mut scene = Scene::new();
    scene.engine.fault("POST /update_weights_from_disk", Fault::Half(None));
    scene.fails();
    scene.engine.restart();
    assert_eq!(scene.activator.serving().unwrap(), None);
    assert!(!scene.engine.engine().is_paused(), "the weights of its start are known");
    scene.activate().unwrap();
    scene.serves();
}

#[test]
fn a_failure_before_the_update_is_continued_all_the_same() {
    let client = short(|calls| &mut calls.control);
    let mut scene = Scene::with(DiskOptions::default().with_client(client));
    scene.engine.fault("POST /flush_cache", Fault::Hang);
    assert!(matches!(scene.fails(), Error::Deadline { call, .. } if call == "POST /flush_cache"));
    assert_eq!(
        scene.transaction(),
        ["/pause_generation", "/flush_cache", "/update_weight_version", "/continue_generation"]
    );
    assert_eq!(scene.engine.engine().label(), "default", "nothing was touched");
}

#[test]
fn an_engine_that_keeps_its_label_is_not_loaded_into() {
    let mut scene = Scene::new();
    scene.engine.fault("POST /update_weight_version", Fault::KeepLabel);
    assert!(matches!(scene.fails(), Error::LabelMismatch { found, .. } if found == "default"));
    let engine = scene.engine.engine();
    assert!(!engine.is_paused() && engine.weights == Some(engine.started_with.clone()));
}

#[test]
fn wrong_live_weights_never_carry_our_label() {
    let mut scene = Scene::new();
    scene.engine.fault("POST /weights_checker", Fault::WrongSum);
    match scene.fails() {
        Error::LiveWeights { count: 1, tensor, found, .. } => {
            assert_eq!((tensor.as_str(), found.as_str()), ("model.norm.weight", "0000000000000000"))
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(scene.transaction(), &ORDER[..4]);
    scene.is_fenced();
    scene.activate().unwrap();
    scene.serves();
}

#[test]
fn a_refused_flush_aborts_what_waits() {
    let mut scene = Scene::new();
    scene.engine.fault("POST /flush_cache", Fault::Answer(400, "Flush cache failed.".into()));
    scene.activate().unwrap();
    let modes: Vec<_> = scene
        .engine
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
            "/update_weight_version",
            "/update_weights_from_disk",
            "/update_weight_version",
            "/continue_generation"
        ]
    );
}

#[test]
fn in_place_keeps_what_runs() {
    let mut scene = Scene::with(DiskOptions::default().with_client(patient()).with_pause(PauseMode::InPlace));
    scene.engine.fault("POST /flush_cache", Fault::Answer(400, "Flush cache failed.".into()));
    scene.activate().unwrap();
    assert_eq!(scene.transaction(), ORDER);
}

#[test]
fn applied_but_not_flushed_counts_as_applied() {
    let mut scene = Scene::new();
    scene.engine.fault("POST /update_weights_from_disk", Fault::Unflushed);
    scene.activate().unwrap();
    assert_eq!(
        scene.transaction(),
        [&ORDER[..4], &["/flush_cache", "/update_weight_version", "/continue_generation"]].concat()
    );
    scene.serves();
}

#[test]
fn engine_that_dies_before_its_continue_is_activated_again() {
    let mut scene = Scene::new();
    scene.engine.fault("POST /flush_cache", Fault::Die);
    scene.engine.engine().faults.insert(
        "POST /continue_generation",
        [Fault::Answer(200, r#"{"status":"ok"}"#.into()), Fault::Die, Fault::Die, Fault::Die].into(),
    );
    match scene.fails() {
        Error::LeftPaused { engine, first: Some(first), .. } => {
            assert!(
                engine.contains(&scene.engine.address.to_string()) && first.contains("/flush_cache"),
                "{engine}: {first}"
            );
        }
        other => panic!("{other:?}"),
    }
    scene.engine.restart();
    assert_eq!(scene.activator.serving().unwrap(), None);
    scene.activate().unwrap();
    scene.serves();
}

#[test]
fn a_pause_that_could_not_be_ended_is_ended_later() {
    let client = short(|calls| &mut calls.control);
    let mut scene = Scene::with(DiskOptions::default().with_client(client));
    scene.engine.engine().faults.insert(
        "POST /continue_generation",
        [Fault::Answer(200, r#"{"status":"ok"}"#.into()), Fault::Hang, Fault::Hang, Fault::Hang].into(),
    );
    assert!(matches!(scene.fails(), Error::LeftPaused { first: None, .. }));
    assert!(scene.engine.engine().is_paused());
    scene.activator.serving().unwrap();
    assert!(!scene.engine.engine().is_paused());
}

#[test]
fn pause_that_comes_behind_its_continue_is_ended() {
    let client = short(|calls| &mut calls.control);
    let mut scene = Scene::with(DiskOptions::default().with_client(client));
    scene.activator.serving().unwrap();
    scene.engine.fault("POST /pause_generation", Fault::Hang);
    assert!(matches!(scene.fails(), Error::Deadline { call, .. } if call.contains("pause_generation")));
    assert!(!scene.activator.is_paused());
    // What hung is carried out now.
    scene.engine.engine().set_paused(true);
    scene.activator.serving().unwrap();
    assert!(!scene.engine.engine().is_paused() && !scene.activator.is_paused());
    // Whoever pauses it after a version came in whole is somebody else.
    scene.activate().unwrap();
    scene.engine.engine().set_paused(true);
    scene.activator.serving().unwrap();
    assert!(scene.engine.engine().is_paused() && scene.activator.is_paused());
}

#[test]
fn pause_that_hangs_is_remembered_over_another_failure() {
    let client = short(|calls| &mut calls.control);
    let mut scene = Scene::with(DiskOptions::default().with_client(client));
    scene.activator.serving().unwrap();
    scene.engine.fault("POST /pause_generation", Fault::Hang);
    assert!(matches!(scene.fails(), Error::Deadline { .. }));
    scene.engine.fault("POST /pause_generation", Fault::Answer(500, "no".into()));
    assert!(matches!(scene.fails(), Error::Status { .. }));
    scene.engine.engine().set_paused(true);
    scene.activator.serving().unwrap();
    assert!(!scene.engine.engine().is_paused() && !scene.activator.is_paused());
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
        scene.engine.changes().iter().all(|path| path == "/continue_generation"),
        "{:?}",
        scene.engine.changes()
    );
}

#[test]
fn version_whose_tied_head_parted_is_not_loaded() {
    let mut scene = Scene::new();
    (scene.next, scene.manifest) = crate::parted(scene.dir.path());
    scene.label = scene.manifest.label();
    crate::refused_for_its_head(&scene.fails());
    let changes = scene.engine.changes();
    assert!(changes.iter().all(|path| path == "/continue_generation"), "{changes:?}");
}

#[test]
fn an_engine_whose_config_is_elsewhere_needs_a_base() {
    let mut scene = Scene::new();
    scene.engine.engine().facts().launched.model_path = "/elsewhere/model".into();
    assert!(matches!(scene.fails(), Error::Refused { what, .. } if what.starts_with("config.json")));
    let options = DiskOptions::default().with_client(patient()).with_base(scene.dir.path().join("a"));
    scene.activator = DiskActivator::new(&scene.engine.address.to_string(), options).unwrap();
    scene.activate().unwrap();
}

#[test]
fn the_engine_gets_the_path_as_it_sees_it() {
    let dir = tempfile::tempdir().unwrap();
    let seen = dir.path().join("seen");
    let mut scene =
        Scene::with(DiskOptions::default().with_client(patient()).with_engine_checkpoint_dir(seen.clone()));
    std::os::unix::fs::symlink(scene.next.dir(), &seen).unwrap();
    scene.activate().unwrap();
    assert_eq!(Path::new(&scene.engine.engine().facts().serving.model_path), seen);
}

#[test]
fn it_can_be_called_from_a_runtime() {
    let mut scene = Scene::new();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async { scene.activate().unwrap() });
}

/// Throws the switch once the engine has been asked for `path`, which it is told not to answer.
fn stopped_at(scene: &mut Scene, call: &'static str) -> Error {
    let (stop, asked) = (Stop::new(), scene.engine.hang(call));
    let limit = Limit::new(Duration::from_secs(600), stop.clone());
    let stopper = std::thread::spawn(move || {
        asked.recv().unwrap();
        stop.stop();
    });
    let failed = scene.activate_within(&limit).unwrap_err();
    stopper.join().unwrap();
    failed
}

#[test]
fn follower_stopped_while_an_engine_loads_leaves_it_fenced() {
    let mut scene = Scene::new();
    let error = stopped_at(&mut scene, "POST /update_weights_from_disk");
    assert!(matches!(&error, Error::GivenUp { call, .. } if call.contains("from_disk")), "{error}");
    assert!(scene.activator.is_paused());
    scene.is_fenced();
    scene.activate().unwrap();
    scene.serves();
}

#[test]
fn follower_stopped_before_the_load_lets_the_engine_go_on() {
    let mut scene = Scene::new();
    let error = stopped_at(&mut scene, "POST /flush_cache");
    assert!(matches!(&error, Error::GivenUp { call, .. } if call.contains("flush")), "{error}");
    assert!(!scene.activator.is_paused());
    let engine = scene.engine.engine();
    assert!(!engine.is_paused() && engine.label() == "default", "{}", engine.label());
}

#[test]
fn a_continue_that_does_nothing_is_not_believed() {
    for reply in [r#"{"success": false}"#, "<html>ok</html>", "", r#"{"status": "ok"}"#] {
        let mut scene = Scene::new();
        scene.activator.serving().unwrap();
        for _ in 0..3 {
            scene.engine.fault("POST /continue_generation", Fault::Answer(200, reply.into()));
        }
        assert!(matches!(scene.fails(), Error::LeftPaused { first: None, .. }), "{reply}");
        assert!(scene.activator.is_paused(), "{reply}");
        scene.engine.engine().faults.clear();
        scene.serves();
        assert!(!scene.activator.is_paused());
    }
}

#[test]
fn an_engine_that_somebody_else_pauses_shows_as_paused() {
    let mut scene = Scene::new();
    scene.activate().unwrap();
    scene.engine.engine().set_paused(true);
    for _ in 0..2 {
        assert_eq!(scene.activator.serving().unwrap(), Some(scene.label.clone()));
        assert!(scene.activator.is_paused());
    }
    assert!(scene.engine.engine().is_paused(), "it is left alone");
    scene.engine.engine().set_paused(false);
    scene.serves();
    assert!(!scene.activator.is_paused());
}

#[test]
fn an_engine_with_nan_weights_is_brought_to_the_next_version() {
    let mut scene = Scene::new();
    {
        let mut engine = scene.engine.engine();
        engine.broken = engine.weights.clone();
    }
    scene.activate().unwrap();
    scene.serves();
}

#[test]
fn a_version_that_generates_nan_is_fenced_and_loaded_over() {
    let mut scene = Scene::new();
    let sound = Checkpoint::open(scene.dir.path().join("a")).unwrap();
    scene.engine.engine().broken = Some(scene.next.dir().into());
    for _ in 0..2 {
        assert!(matches!(scene.fails(), Error::Unsound { label, .. } if label == scene.label));
        scene.is_fenced();
    }
    (scene.next, scene.label) = (sound, scene.label.replace(":0", ":1"));
    let (label, path) = (scene.label.clone(), scene.next.dir().to_owned());
    scene.engine.engine().truths.insert(label, path);
    scene.activate().unwrap();
    scene.serves();
}
