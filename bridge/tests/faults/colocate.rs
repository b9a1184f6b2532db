//! Pushes within a device into engines that give memory back meanwhile, and followers that die in between: no
//! engine goes on without its memory, and none is told what would end it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use driftless_bridge::push::colocate::{Colocation, ColocationOptions, Place, Share};
use driftless_bridge::push::{Bucket, PushActivator, PushOptions};
use driftless_bridge::sglang::MemoryTag;
use driftless_bridge::{ClientOptions, Error, Result};
use driftless_transport::activate::Activate as _;
use driftless_transport::{Checkpoint, Snapshot};

use crate::inline::InlineShare;
use crate::scene::{self, Engines, Look};
use driftless_testkit::sglang::{Fake, Fault, checkpoint, patient, short, version};

/// Memory that ranks never let go of, if it is told so.
#[derive(Debug, Default)]
struct Held {
    stuck: Arc<AtomicBool>,
    closed: Arc<AtomicUsize>,
}

impl Share for Held {
    fn device(&self) -> &'static str {
        "cpu"
    }

    fn local(&self) -> bool {
        true
    }

    fn place(
        &mut self,
        slot: usize,
        weights: &dyn Snapshot,
        bucket: &Bucket,
        ranks: u32,
    ) -> Result<Vec<Place>> {
        InlineShare.place(slot, weights, bucket, ranks)
    }

    fn released(&self, _slot: usize) -> bool {
        !self.stuck.load(Ordering::SeqCst)
    }

    fn close(&mut self) {
        self.closed.fetch_add(1, Ordering::SeqCst);
    }
}

/// An engine, and what becomes of the memory that is pushed through.
struct Colocated {
    fake: Fake,
    stuck: Arc<AtomicBool>,
    closed: Arc<AtomicUsize>,
}

impl Engines for Colocated {
    fn looks(&self, version: &Checkpoint) -> Vec<Look> {
        self.fake.looks(version)
    }
}

type Scene = scene::Scene<Colocated, PushActivator<Colocation<Held>>>;

impl Scene {
    fn new(saver: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let fake = Fake::start(&checkpoint(&dir.path().join("a"), 1, 4));
        fake.engine().facts().enable_memory_saver = saver;
        let share = Held::default();
        let (stuck, closed) = (share.stuck.clone(), share.closed.clone());
        let activator = activator(&fake, share, patient());
        Self::of(Colocated { fake, stuck, closed }, activator, version(dir.path()), dir)
    }

    /// A new process in the place of one that was killed.
    fn restart_follower(&mut self) {
        self.activator = activator(&self.engine.fake, Held::default(), patient());
    }

    fn holds(&mut self) {
        assert_eq!(self.activator.serving().unwrap(), Some(self.label.clone()));
        let engine = self.engine.fake.engine();
        assert!(!engine.is_paused() && !engine.pushes.session);
        assert!(engine.memory.released.is_empty(), "{:?}", engine.memory.released);
        assert_eq!(engine.memory.death, None);
    }
}

fn activator(fake: &Fake, share: Held, client: ClientOptions) -> PushActivator<Colocation<Held>> {
    // Several buckets, of a checkpoint that has 13 tensors and 390 bytes.
    let options = ColocationOptions::default().with_bucket_bytes(100).with_release(Duration::from_millis(50));
    let push = Colocation::new(share, options).unwrap();
    let release = vec![MemoryTag::KvCache];
    let options = PushOptions::default().with_client(client).with_release(release);
    PushActivator::new(&[fake.address.to_string()], push, options).unwrap()
}

#[test]
fn an_engine_gives_its_cache_back_while_it_is_updated() {
    let mut scene = Scene::new(true);
    for _ in 0..2 {
        // The activator compares the checksums of what the fake received.
        scene.activate().unwrap();
        scene.holds();
    }
    assert_eq!(scene.engine.closed.load(Ordering::SeqCst), 2, "memory is given back after each push");
    let engine = scene.engine.fake.engine();
    let begin = engine.calls.iter().position(|(path, _)| path == "/pause_generation").unwrap();
    let end = engine.calls[begin..].iter().position(|(path, _)| path == "/continue_generation").unwrap();
    let mut steps: Vec<_> = engine.calls[begin..=begin + end]
        .iter()
        .map(|(path, body)| match body["new_version"].as_str() {
            Some(label) => label.replace(&scene.label, "L"),
            None => path.clone(),
        })
        .collect();
    steps.dedup();
    let order = [
        "/pause_generation",
        "/flush_cache",
        "L?partial",
        "L?releasing=kv_cache",
        "/release_memory_occupation",
        "L?released=kv_cache",
        "/begin_weight_update",
        "/update_weights_from_tensor",
        "/end_weight_update",
        "L?resuming=kv_cache",
        "/resume_memory_occupation",
        "L?partial",
        "L",
        "/continue_generation",
    ];
    assert_eq!(steps, order);
    let updates = engine.calls.iter().filter(|(path, _)| path == "/update_weights_from_tensor");
    assert!(
        updates.clone().count() >= 8 && updates.clone().all(|(_, body)| body.get("weight_version").is_none())
    );
}

#[test]
fn an_engine_that_cannot_give_memory_back_is_not_asked_to() {
    let mut scene = Scene::new(false);
    scene.activate().unwrap();
    scene.holds();
    assert!(!scene.engine.fake.changes().iter().any(|path| path.contains("memory_occupation")));
    scene.engine.fake.assert_labelled_after("/update_weights_from_tensor", &scene.label);
}

#[test]
fn requests_that_wait_are_aborted_before_memory_goes() {
    let mut scene = Scene::new(true);
    scene.engine.fake.engine().memory.waiting = 3;
    scene.activate().unwrap();
    scene.holds();
    let modes: Vec<_> =
        scene.engine.fake.engine().calls.iter().filter_map(|(_, body)| body.get("mode").cloned()).collect();
    assert_eq!(modes, ["retract", "abort"]);
}

#[test]
fn a_failed_update_leaves_the_engine_with_all_of_its_memory() {
    let mut scene = Scene::new(true);
    let refusal = r#"{"success": false, "message": "no such tensor"}"#;
    scene.engine.fake.fault("POST /update_weights_from_tensor", Fault::Answer(400, refusal.into()));
    let error = scene.fails();
    assert!(matches!(&error, Error::Status { status: 400, .. }), "{error}");
    assert_eq!(scene.activator.serving().unwrap(), None);
    {
        let engine = scene.engine.fake.engine();
        assert!(engine.is_paused() && engine.memory.released.is_empty() && engine.memory.death.is_none());
    }
    scene.activate().unwrap();
    scene.holds();
}

/// Whatever call the follower died after, the next one brings the engine to the version, or says that it must
/// be started again.
#[test]
fn follower_that_dies_in_between_leaves_it_to_the_next() {
    for (label, released) in [
        ("L?partial", &[][..]),
        ("L?released=kv_cache", &["kv_cache"][..]),
        ("L?released=kv_cache,weights", &["kv_cache", "weights"][..]),
        ("L?released=weights", &["weights"][..]),
    ] {
        for session in [false, true] {
            let mut scene = Scene::new(true);
            {
                let mut engine = scene.engine.fake.engine();
                engine.set_paused(true);
                engine.set_label(label.replace('L', "0123456789ab:7"));
                engine.memory.released = released.iter().map(|tag| (*tag).to_owned()).collect();
                if session {
                    engine.pushes.session = true;
                }
            }
            assert_eq!(scene.activator.serving().unwrap(), None, "{label}");
            scene.activate().unwrap();
            scene.holds();
        }
    }
}

#[test]
fn memory_that_may_be_there_or_not_is_not_touched() {
    for label in ["0123456789ab:7?releasing=kv_cache", "0123456789ab:7?resuming=kv_cache"] {
        let mut scene = Scene::new(true);
        scene.engine.fake.engine().set_paused(true);
        scene.engine.fake.engine().set_label(label);
        assert_eq!(scene.activator.serving().unwrap(), None);
        let refused = scene.fails();
        assert!(
            matches!(&refused, Error::Refused { expected, .. } if expected.contains("memory")),
            "{refused}"
        );
        assert_eq!(scene.engine.fake.changes(), Vec::<String>::new());
        // What the error asks for.
        scene.engine.fake.restart();
        scene.activate().unwrap();
        scene.holds();
    }
}

#[test]
fn a_follower_that_dies_while_memory_goes_leaves_a_doubt() {
    let mut scene = Scene::new(true);
    scene.activator = activator(&scene.engine.fake, Held::default(), short(|calls| &mut calls.load));
    scene.engine.fake.fault("POST /release_memory_occupation", Fault::Hang);
    let error = scene.fails();
    assert!(matches!(&error, Error::LeftPaused { first: Some(_), .. }), "{error}");
    assert!(scene.engine.fake.engine().is_paused(), "nothing continues on memory that may be gone");
    scene.restart_follower();
    assert!(matches!(scene.fails(), Error::Refused { .. }));
}

#[test]
fn memory_that_is_never_let_go_of_ends_in_a_deadline() {
    let mut scene = Scene::new(false);
    scene.engine.stuck.store(true, Ordering::SeqCst);
    let error = scene.fails();
    assert!(matches!(&error, Error::Unreleased { engines, .. } if engines.len() == 1), "{error}");
    assert_eq!(scene.activator.serving().unwrap(), None);
    scene.engine.stuck.store(false, Ordering::SeqCst);
    scene.activate().unwrap();
    scene.holds();
}

#[test]
fn version_whose_tied_head_parted_is_not_pushed() {
    let mut scene = Scene::new(true);
    (scene.next, scene.manifest) = crate::parted(scene.dir.path());
    scene.label = scene.manifest.label();
    crate::refused_for_its_head(&scene.fails());
    let engine = scene.engine.fake.engine();
    assert!(!engine.is_paused() && engine.memory.released.is_empty());
    assert!(
        !engine.calls.iter().any(|(path, _)| path == "/update_weights_from_tensor"),
        "{:?}",
        engine.calls
    );
}

#[test]
fn an_engine_without_the_call_is_refused_before_it_is_paused() {
    let mut scene = Scene::new(true);
    scene.engine.fake.fault("GET /update_weights_from_tensor", Fault::Answer(404, String::new()));
    let refused = scene.fails();
    assert!(
        matches!(&refused, Error::Refused { what, .. } if what == "/update_weights_from_tensor"),
        "{refused}"
    );
    assert!(!scene.engine.fake.engine().is_paused());
}
