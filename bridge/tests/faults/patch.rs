//! Activation of an engine with the plugin: it is patched by few calls, and whatever else happens it never
//! claims weights that it does not have.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::time::Duration;

use driftless_bridge::Error;
use driftless_bridge::activate::{DiskActivator, DiskOptions, PluginOptions};
use driftless_bridge::engine::PauseMode;
use driftless_bridge::sglang::Dialect;
use driftless_store::wait::Stop;
use driftless_transport::activate::{Activate as _, Limit};
use serde_json::{Value, json};

use driftless_testkit::sglang::{Fake, Fault, checkpoint, patient, version};

use crate::scene::{self, WithPlugin, plugins_in, started};

/// What the plugin says behind which the engine has not the label of the version.
const DONE: &str = r#"driftless: {"patched":"LABEL","elements":1,"prepared_us":1,"wrote_us":1,"stood_still_us":1,"cache":"dropped"}"#;
/// What it says where it wrote nothing.
pub(crate) const REFUSED: &str = r#"driftless: {"label":"a:1","refused":"Error: `w` changed"}"#;

const LEAN: [&str; 3] = ["/pause_generation", "/update_weights_from_disk", "/continue_generation"];

type Scene = scene::Scene<WithPlugin<Fake>, DiskActivator>;

impl Scene {
    /// An engine whose plugin has prepared the version.
    fn new() -> Self {
        Self::with(PauseMode::Retract, |_| {})
    }

    fn with(pause: PauseMode, set: impl FnOnce(&mut PluginOptions)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let fake = Fake::start(&checkpoint(&dir.path().join("a"), 1, 4));
        let (next, manifest) = version(dir.path());
        let plugins = plugins_in(dir.path());
        let mut plugin = PluginOptions::new(&plugins);
        set(&mut plugin);
        let options = DiskOptions::default().with_client(patient()).with_pause(pause).with_plugin(plugin);
        let activator = DiskActivator::new(&fake.address.to_string(), options).unwrap();
        fake.engine().truths.insert(manifest.label(), next.dir().into());
        let engine = WithPlugin { port: fake.address.port(), engine: fake, plugins };
        let scene = Self::of(engine, activator, (next, manifest), dir);
        scene.offers(&scene.label);
        scene.says(&scene.label, Value::Null);
        scene
    }

    /// The server of the engine hands on patches without a pause, as long as this process lives.
    fn hands_on(&self, start: u64) {
        let path = self.engine.plugins.join(format!("server-{}.json", self.engine.port));
        fs::write(path, json!({"pid": std::process::id(), "start": start}).to_string()).unwrap();
    }

    /// What the plugin in the engine will answer.
    fn answers(&self, fault: Fault) {
        self.engine.fault("POST /update_weights_from_disk", fault);
    }

    /// The calls since the last pause began.
    fn calls(&self) -> Vec<String> {
        let calls = self.engine.changes();
        let begin = calls.iter().rposition(|path| path == "/pause_generation").unwrap_or(calls.len());
        calls[begin..].to_vec()
    }

    fn update(&self) -> Value {
        let engine = self.engine.engine();
        let update = engine.calls.iter().find(|(path, _)| path == "/update_weights_from_disk");
        update.unwrap().1.clone()
    }
}

/// Tokens that the engine was asked for.
fn generated(scene: &Scene) -> usize {
    scene.engine.engine().keys.iter().filter(|(path, _)| path == "/generate").count()
}

#[test]
fn a_prepared_engine_takes_weights_cache_and_label_in_one_call() {
    let mut scene = Scene::new();
    scene.answers(Fault::Patched);
    scene.activate().unwrap();
    assert_eq!(scene.calls(), LEAN);
    let asked: Vec<_> = scene.engine.engine().keys.iter().map(|(path, _)| path.clone()).collect();
    let begin = asked.iter().rposition(|path| path == LEAN[0]).unwrap();
    assert_eq!(asked[begin..begin + 3], LEAN, "nothing else is asked in the pause: the reply has the label");
    let body = scene.update();
    assert_eq!((&body["weight_version"], &body["flush_cache"]), (&json!(scene.label), &json!(true)));
    scene.serves();
}

#[test]
fn cache_is_emptied_by_its_own_call_where_the_patch_cannot() {
    let (update, flush) = (LEAN[1], "/flush_cache");
    for (pause, release, answer, expected) in [
        (PauseMode::InPlace, "0.5.23", Fault::Patched, vec![update]),
        (PauseMode::InPlace, "0.5.23", Fault::PatchedOnly, vec![update, flush]),
        (PauseMode::Retract, "0.5.20", Fault::Patched, vec![flush, update]),
    ] {
        let mut scene = Scene::with(pause, |_| {});
        scene.engine.engine().facts().dialect = Dialect::of_release(release);
        scene.answers(answer);
        scene.activate().unwrap();
        assert_eq!(scene.calls(), [&[LEAN[0]], &expected[..], &[LEAN[2]]].concat());
        assert_eq!(scene.update()["flush_cache"], false);
        scene.serves();
    }
}

#[test]
fn a_patched_engine_is_asked_for_a_token_unless_it_has_requests() {
    let mut scene = Scene::new();
    scene.answers(Fault::Patched);
    scene.engine.engine().generating = 1;
    scene.activate().unwrap();
    assert_eq!(generated(&scene), 1, "the one after the process began");
    scene.serves();

    // One that says that it does not go on is asked all the same.
    let mut scene = Scene::new();
    scene.answers(Fault::Patched);
    scene.engine.engine().generating = 1;
    scene.engine.fault("POST /continue_generation", Fault::Answer(200, r#"{"status":"ok"}"#.into()));
    scene.engine.fault("POST /continue_generation", Fault::Answer(200, r#"{"status":"ok"}"#.into()));
    assert!(matches!(scene.activate(), Err(Error::LeftPaused { .. })));
    assert!(scene.activator.is_paused());
}

#[test]
fn a_patch_that_is_refused_is_a_load_in_the_same_pause() {
    let mut scene = Scene::new();
    let refusal = json!({"success": false, "message": REFUSED}).to_string();
    scene.answers(Fault::Answer(400, refusal));
    scene.activate().unwrap();
    let fence = "/update_weight_version";
    assert_eq!(scene.calls(), [LEAN[0], LEAN[1], "/flush_cache", fence, LEAN[1], fence, LEAN[2]]);
    scene.serves();
}

#[test]
fn an_engine_that_loads_instead_is_fenced_and_checked() {
    let mut scene = Scene::new();
    scene.activate().unwrap();
    let fence = "/update_weight_version";
    assert_eq!(scene.calls(), [LEAN[0], LEAN[1], fence, fence, LEAN[2]]);
    scene.serves();

    let mut scene = Scene::new();
    scene.engine.fault("POST /weights_checker", Fault::WrongSum);
    assert!(matches!(scene.activate(), Err(Error::LiveWeights { .. })));
    assert_eq!(scene.activator.serving().unwrap(), None);
    assert!(scene.engine.engine().label().ends_with("?partial") && scene.activator.is_paused());
    scene.activate().unwrap();
    assert_eq!(scene.calls()[1], "/flush_cache", "weights that may be anything are no base");
    scene.serves();
}

#[test]
fn engine_that_fails_meanwhile_is_fenced_until_a_load_succeeds() {
    for fault in [Fault::Answer(500, "no".into()), Fault::Unflushed, Fault::Answer(200, "<html>".into())] {
        let mut scene = Scene::new();
        let unflushed = matches!(fault, Fault::Unflushed);
        scene.answers(fault);
        if unflushed {
            // Its own load of the version, without the flush and the label.
            scene.engine.engine().truths.remove("default");
            scene.activate().unwrap();
        } else {
            scene.activate().unwrap_err();
            assert!(scene.engine.engine().label().ends_with("?partial") && scene.engine.engine().is_paused());
            scene.activate().unwrap();
        }
        scene.serves();
    }
}

#[test]
fn an_engine_that_keeps_another_label_is_fenced() {
    let mut scene = Scene::new();
    let done = json!({"success": true, "message": DONE.replace("LABEL", &scene.label)}).to_string();
    scene.answers(Fault::Answer(200, done));
    assert!(matches!(scene.activate(), Err(Error::LabelMismatch { .. })));
    assert!(scene.engine.engine().label().ends_with("?partial"));

    let mut scene = Scene::new();
    let other = json!({"success": true, "message": DONE.replace("LABEL", "another:1")}).to_string();
    scene.answers(Fault::Answer(200, other));
    assert!(matches!(scene.activate(), Err(Error::LabelMismatch { found, .. }) if found == "another:1"));
    assert!(scene.engine.engine().label().ends_with("?partial"));
}

#[test]
fn an_engine_that_is_not_ready_loads() {
    let soon = |plugin: &mut PluginOptions| plugin.deadline = Duration::from_millis(20);
    type Spoil = fn(&Scene);
    let spoil: [(&str, Spoil); 6] = [
        ("no rank", |scene| fs::remove_file(scene.rank(0)).unwrap()),
        ("refused", |scene| scene.says(&scene.label, json!("the live weights are not those of it"))),
        ("late", |scene| scene.says("another:1", Value::Null)),
        ("no offer", |scene| {
            scene.says("another:1", Value::Null);
            fs::remove_file(scene.offer()).unwrap();
        }),
        ("an offer withdrawn", |scene| {
            scene.says("another:1", Value::Null);
            fs::write(scene.offer(), [0; 64]).unwrap();
        }),
        ("open to others", |scene| {
            fs::set_permissions(&scene.engine.plugins, fs::Permissions::from_mode(0o755)).unwrap();
        }),
    ];
    for (what, spoil) in spoil {
        let mut scene = Scene::with(PauseMode::Retract, soon);
        spoil(&scene);
        scene.activate().unwrap();
        assert_eq!(scene.calls()[1], "/flush_cache", "{what}");
        scene.serves();
    }
}

#[test]
fn offer_of_something_else_is_a_load_at_once() {
    type Spoil = fn(&Scene);
    let spoil: [(&str, Spoil); 3] = [
        ("a stale delta", |scene| scene.offers("another:1")),
        ("a header that is none", |scene| {
            fs::write(scene.offer(), [b"dftlpre2".as_slice(), &[0; 56]].concat()).unwrap();
        }),
        ("a text", |scene| fs::write(scene.offer(), "something else").unwrap()),
    ];
    for (what, spoil) in spoil {
        // Whoever waits for it waits longer than the activation may take.
        let mut scene = Scene::with(PauseMode::Retract, |plugin| plugin.deadline = Duration::from_secs(3600));
        spoil(&scene);
        scene.says("another:1", Value::Null);
        scene.activate().expect(what);
        assert_eq!(scene.calls()[1], "/flush_cache", "{what}");
        scene.serves();
    }
}

/// A plugin of the release before: its file has no `format`, and its replies are sentences.
#[test]
fn plugin_of_format_1_is_named_and_its_engine_loads() {
    let old = |scene: &Scene| {
        let mut said = scene.told(1, &scene.label, Value::Null);
        said.as_object_mut().unwrap().remove("format").unwrap();
        fs::write(scene.rank(0), said.to_string()).unwrap();
    };
    let mut scene = Scene::with(PauseMode::Retract, |plugin| plugin.required = true);
    old(&scene);
    let refused = scene.fails();
    assert!(
        matches!(&refused, Error::NoPlugin { why, .. } if why.contains("format 1, expected 2")),
        "{refused}"
    );
    assert_eq!(scene.calls(), [] as [&str; 0], "nothing was touched");

    for mode in [PauseMode::Retract, PauseMode::InPlace] {
        let mut scene = Scene::with(mode, |_| {});
        old(&scene);
        scene.hands_on(started());
        scene.activate().unwrap();
        let fence = "/update_weight_version";
        assert_eq!(scene.calls(), [LEAN[0], "/flush_cache", fence, LEAN[1], fence, LEAN[2]]);
        assert_eq!(scene.update()["weight_version"], format!("{}?partial", scene.label), "a load");
        scene.serves();
    }
}

#[test]
fn reply_of_format_1_is_no_patch() {
    let mut scene = Scene::new();
    let sentence =
        format!("driftless: patched to {}, 7 elements in 0.250 ms, prepared in 0.900 ms.", scene.label);
    let reply = json!({"success": true, "message": sentence}).to_string();
    scene.answers(Fault::Answer(200, reply));
    assert!(matches!(scene.activate(), Err(Error::LiveWeights { .. })), "it is compared as a load is");
    scene.is_fenced();
    scene.activate().unwrap();
    scene.serves();
}

#[test]
fn ranks_that_agree_are_patched_without_a_fence() {
    let mut scene = Scene::new();
    scene.engine.engine().facts().tp_size = 2;
    for rank in 0..2 {
        fs::write(scene.rank(rank), scene.told(2, &scene.label, Value::Null).to_string()).unwrap();
    }
    scene.answers(Fault::Patched);
    scene.activate().unwrap();
    assert_eq!(scene.calls(), LEAN);
    scene.serves();
}

#[test]
fn engine_whose_server_hands_on_is_patched_while_it_generates() {
    let mut scene = Scene::with(PauseMode::InPlace, |_| {});
    scene.hands_on(started());
    scene.answers(Fault::Patched);
    scene.engine.engine().generating = 1;
    let paused = scene.activate_within(&Limit::within(Duration::from_secs(60))).unwrap();
    assert_eq!(paused, Duration::from_micros(16_250), "as the first rank says");
    assert_eq!(scene.engine.changes(), [LEAN[2], LEAN[1]], "nothing but what an earlier process may owe");
    let body = scene.update();
    assert_eq!((&body["manifest"], &body["flush_cache"]), (&json!({"driftless": "patch"}), &json!(false)));
    assert_eq!(generated(&scene), 1, "the one after the process began");
    scene.serves();
}

#[test]
fn engine_without_handing_on_is_paused_for_a_patch() {
    for (mode, start) in [
        (PauseMode::Retract, Some(started())),
        (PauseMode::InPlace, Some(started() + 1)),
        (PauseMode::InPlace, None),
    ] {
        let mut scene = Scene::with(mode, |_| {});
        if let Some(start) = start {
            scene.hands_on(start);
        }
        scene.answers(Fault::Patched);
        scene.activate().unwrap();
        assert_eq!(scene.calls(), LEAN);
        assert_eq!(scene.update()["manifest"], Value::Null);
        scene.serves();
    }
}

#[test]
fn a_running_engine_that_is_not_patched_is_paused_and_loads() {
    let said = |success: bool, message: &str| json!({"success": success, "message": message}).to_string();
    for (status, reply) in [
        (400, said(false, REFUSED)),
        (400, "busy".into()),
        (500, "no".into()),
        (200, "<html>".into()),
        (200, said(true, DONE)),
        (200, said(true, "")),
    ] {
        let mut scene = Scene::with(PauseMode::InPlace, |_| {});
        scene.hands_on(started());
        scene.answers(Fault::Answer(status, reply.clone()));
        scene.activate().unwrap();
        let fence = "/update_weight_version";
        let loaded = [LEAN[0], "/flush_cache", fence, LEAN[1], fence, LEAN[2]];
        assert_eq!(scene.calls(), loaded, "{status} {reply}");
        scene.serves();
    }
}

#[test]
fn a_running_engine_that_does_not_answer_is_left_as_it_is() {
    let mut scene = Scene::with(PauseMode::InPlace, |_| {});
    scene.hands_on(started());
    let (told, came) = std::sync::mpsc::channel();
    scene.answers(Fault::HangTold(told));
    let stop = Stop::new();
    let limit = Limit::new(Duration::from_secs(600), stop.clone());
    let stopper = std::thread::spawn(move || {
        let came = came.recv_timeout(Duration::from_secs(60));
        stop.stop();
        came.unwrap();
    });
    let error = scene.activate_within(&limit).unwrap_err();
    stopper.join().unwrap();
    assert!(matches!(error, Error::GivenUp { .. }), "{error}");
    assert_eq!(scene.calls(), [] as [&str; 0], "it is not paused");
    assert!(!scene.activator.is_paused());
    scene.answers(Fault::Patched);
    scene.activate().unwrap();
    scene.serves();
}

#[test]
fn pause_of_somebody_else_stays_once_a_patch_has_passed() {
    let mut scene = Scene::with(PauseMode::InPlace, |_| {});
    let (told, came) = std::sync::mpsc::channel();
    scene.engine.fault("POST /pause_generation", Fault::HangTold(told));
    let stop = Stop::new();
    let limit = Limit::new(Duration::from_secs(600), stop.clone());
    let stopper = std::thread::spawn(move || {
        let came = came.recv_timeout(Duration::from_secs(60));
        stop.stop();
        came.unwrap();
    });
    let error = scene.activate_within(&limit).unwrap_err();
    stopper.join().unwrap();
    assert!(matches!(error, Error::GivenUp { .. }), "{error}");
    scene.hands_on(started());
    scene.answers(Fault::Patched);
    scene.activate().unwrap();
    scene.engine.engine().set_paused(true);
    scene.activator.serving().unwrap();
    assert!(scene.engine.engine().is_paused() && scene.activator.is_paused());
}

#[test]
fn idle_engine_that_generates_nothing_sound_is_fenced() {
    let mut scene = Scene::with(PauseMode::InPlace, |_| {});
    scene.hands_on(started());
    scene.answers(Fault::Patched);
    scene.engine.engine().broken = Some(scene.next.dir().into());
    assert!(matches!(scene.activate(), Err(Error::Unsound { .. })));
    assert!(scene.engine.engine().label().ends_with("?partial") && scene.engine.engine().is_paused());
}

#[test]
fn an_engine_without_the_plugin_is_refused_where_it_is_required() {
    let mut scene = Scene::with(PauseMode::Retract, |plugin| plugin.required = true);
    fs::remove_file(scene.rank(0)).unwrap();
    let refused = scene.activate().unwrap_err();
    assert!(matches!(&refused, Error::NoPlugin { why, .. } if why.contains("rank 0")), "{refused}");
    assert_eq!(scene.calls(), [] as [&str; 0], "nothing was touched");
    assert!(!scene.activator.is_paused());
    // What has no delta yet loads.
    scene.says(&scene.label, json!("live is None"));
    scene.activate().unwrap();
    scene.serves();
}

#[test]
fn every_so_many_versions_all_weights_are_compared() {
    let mut scene = Scene::with(PauseMode::Retract, |plugin| plugin.prove_every = 2);
    let fence = "/update_weight_version";
    for proved in [false, false, true, false] {
        scene.answers(Fault::Patched);
        scene.activate().unwrap();
        let lean = [LEAN[0], LEAN[1], LEAN[2]].map(String::from).to_vec();
        let compared = [LEAN[0], LEAN[1], fence, fence, LEAN[2]].map(String::from).to_vec();
        assert_eq!(scene.calls(), if proved { compared } else { lean });
        scene.serves();
    }
    // One that fails it is fenced, and loads.
    scene.answers(Fault::Patched);
    scene.activate().unwrap();
    scene.answers(Fault::Patched);
    scene.engine.fault("POST /weights_checker", Fault::WrongSum);
    assert!(matches!(scene.activate(), Err(Error::LiveWeights { .. })));
    assert!(scene.engine.engine().label().ends_with("?partial") && scene.engine.engine().is_paused());
    scene.activate().unwrap();
    assert_eq!(scene.calls()[1], "/flush_cache");
    scene.serves();
}
