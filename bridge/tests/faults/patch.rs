//! Activation of an engine with the plugin: it is patched by few calls, and whatever else happens it never
//! claims weights that it does not have.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use driftless_bridge::Error;
use driftless_bridge::activate::{DiskActivator, DiskOptions, PluginOptions};
use driftless_bridge::engine::PauseMode;
use driftless_bridge::sglang::Dialect;
use driftless_transport::Checkpoint;
use driftless_transport::activate::{Activate, Limit, Target};
use driftless_transport::manifest::Manifest;
use driftless_transport::prepared::offer_path;
use serde_json::{Value, json};

use driftless_testkit::sglang::{Fake, Fault, checkpoint, patient, version};

use crate::plugins_in;

const LEAN: [&str; 3] = ["/pause_generation", "/update_weights_from_disk", "/continue_generation"];

/// An engine that serves a version, another one, and a directory where the plugin has spoken.
struct Scene {
    fake: Fake,
    activator: DiskActivator,
    next: Checkpoint,
    manifest: Manifest,
    label: String,
    plugins: PathBuf,
    _dir: tempfile::TempDir,
}

impl Scene {
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
        let label = manifest.label();
        let scene = Self { label, fake, activator, next, manifest, plugins, _dir: dir };
        fs::write(scene.offer(), [b"dftlpre2".as_slice(), &[0; 56]].concat()).unwrap();
        scene.says(&scene.label, Value::Null);
        scene
    }

    fn offer(&self) -> PathBuf {
        offer_path(&self.plugins, self.next.dir()).unwrap()
    }

    fn rank(&self) -> PathBuf {
        self.plugins.join(format!("rank-{}-0.json", self.fake.address.port()))
    }

    /// The rank has prepared the delta to a label, or says why not.
    fn says(&self, target: &str, why_not: Value) {
        fs::write(self.rank(), self.told(1, target, why_not)).unwrap();
    }

    fn told(&self, ranks: u32, target: &str, why_not: Value) -> String {
        let name = self.offer().file_name().unwrap().to_str().unwrap().to_owned();
        let deltas = json!({name: {"target": target, "why_not": why_not}});
        let content = json!({"pid": std::process::id(), "start": started(), "ranks": ranks, "why_not": null,
            "deltas": deltas});
        content.to_string()
    }

    /// The server of the engine hands on patches without a pause, as long as this process lives.
    fn hands_on(&self, start: u64) {
        let path = self.plugins.join(format!("server-{}.json", self.fake.address.port()));
        fs::write(path, json!({"pid": std::process::id(), "start": start}).to_string()).unwrap();
    }

    /// What the plugin in the engine will answer.
    fn answers(&self, fault: Fault) {
        self.fake.fault("POST /update_weights_from_disk", fault);
    }

    fn activate(&mut self) -> Result<(), Error> {
        self.activate_within(Duration::from_secs(60)).map(drop)
    }

    /// How long the engine was paused for it.
    fn activate_within(&mut self, limit: Duration) -> Result<Duration, Error> {
        let limit = Limit::within(limit);
        let (checkpoint, manifest) = (&self.next, &self.manifest);
        let target = Target { checkpoint, weights: checkpoint, label: &self.label, manifest, limit: &limit };
        let done = self.activator.activate(&target).map(|done| done.pause);
        done.map_err(|error| *error.downcast::<Error>().unwrap())
    }

    /// The calls since the last pause began.
    fn calls(&self) -> Vec<String> {
        let calls = self.fake.changes();
        let begin = calls.iter().rposition(|path| path == "/pause_generation").unwrap_or(calls.len());
        calls[begin..].to_vec()
    }

    fn update(&self) -> Value {
        let engine = self.fake.engine();
        let update = engine.calls.iter().find(|(path, _)| path == "/update_weights_from_disk");
        update.unwrap().1.clone()
    }

    fn serves(&mut self) {
        assert_eq!(self.activator.serving().unwrap(), Some(self.label.clone()));
        let engine = self.fake.engine();
        assert!(!engine.is_paused());
        assert_eq!((engine.weights.as_deref(), &engine.lies[..]), (Some(self.next.dir()), &[][..]));
    }
}

/// Tokens that the engine was asked for.
fn generated(scene: &Scene) -> usize {
    scene.fake.engine().keys.iter().filter(|(path, _)| path == "/generate").count()
}

pub(crate) fn started() -> u64 {
    let text = fs::read_to_string(Path::new("/proc/self/stat")).unwrap();
    text[text.rfind(')').unwrap()..].split(' ').nth(20).unwrap().parse().unwrap()
}

#[test]
fn a_prepared_engine_takes_weights_cache_and_label_in_one_call() {
    let mut scene = Scene::new();
    scene.answers(Fault::Patched);
    scene.activate().unwrap();
    assert_eq!(scene.calls(), LEAN);
    let asked: Vec<_> = scene.fake.engine().keys.iter().map(|(path, _)| path.clone()).collect();
    let begin = asked.iter().rposition(|path| path == LEAN[0]).unwrap();
    assert_eq!(asked[begin..begin + 3], LEAN, "nothing else is asked in the pause: the reply has the label");
    let body = scene.update();
    assert_eq!((&body["weight_version"], &body["flush_cache"]), (&json!(scene.label), &json!(true)));
    scene.serves();
}

#[test]
fn the_cache_is_emptied_by_a_call_of_its_own_where_the_plugin_or_the_patch_cannot() {
    let (update, flush) = (LEAN[1], "/flush_cache");
    for (pause, release, answer, expected) in [
        (PauseMode::InPlace, "0.5.23", Fault::Patched, vec![update]),
        (PauseMode::InPlace, "0.5.23", Fault::PatchedOnly, vec![update, flush]),
        (PauseMode::Retract, "0.5.20", Fault::Patched, vec![flush, update]),
    ] {
        let mut scene = Scene::with(pause, |_| {});
        scene.fake.engine().facts().dialect = Dialect::of_release(release);
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
    scene.fake.engine().generating = 1;
    scene.activate().unwrap();
    assert_eq!(generated(&scene), 1, "the one after the process began");
    scene.serves();

    // One that says that it does not go on is asked all the same.
    let mut scene = Scene::new();
    scene.answers(Fault::Patched);
    scene.fake.engine().generating = 1;
    scene.fake.fault("POST /continue_generation", Fault::Answer(200, r#"{"status":"ok"}"#.into()));
    scene.fake.fault("POST /continue_generation", Fault::Answer(200, r#"{"status":"ok"}"#.into()));
    assert!(matches!(scene.activate(), Err(Error::LeftPaused { .. })));
    assert!(scene.activator.is_paused());
}

#[test]
fn a_patch_that_is_refused_is_a_load_in_the_same_pause() {
    let mut scene = Scene::new();
    let refusal = r#"{"success":false,"message":"driftless: not patched to x: Error: `w` changed"}"#;
    scene.answers(Fault::Answer(400, refusal.into()));
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
    scene.fake.fault("POST /weights_checker", Fault::WrongSum);
    assert!(matches!(scene.activate(), Err(Error::LiveWeights { .. })));
    assert_eq!(scene.activator.serving().unwrap(), None);
    assert!(scene.fake.engine().label().ends_with("?partial") && scene.activator.is_paused());
    scene.activate().unwrap();
    assert_eq!(scene.calls()[1], "/flush_cache", "weights that may be anything are no base");
    scene.serves();
}

#[test]
fn an_engine_that_fails_meanwhile_is_fenced_until_a_load_succeeds() {
    for fault in [Fault::Answer(500, "no".into()), Fault::Unflushed, Fault::Answer(200, "<html>".into())] {
        let mut scene = Scene::new();
        let unflushed = matches!(fault, Fault::Unflushed);
        scene.answers(fault);
        if unflushed {
            // Its own load of the version, without the flush and the label.
            scene.fake.engine().truths.remove("default");
            scene.activate().unwrap();
        } else {
            scene.activate().unwrap_err();
            assert!(scene.fake.engine().label().ends_with("?partial") && scene.fake.engine().is_paused());
            scene.activate().unwrap();
        }
        scene.serves();
    }
}

#[test]
fn an_engine_that_keeps_another_label_is_fenced() {
    let mut scene = Scene::new();
    let done = r#"{"success":true,"message":"driftless: patched to x"}"#;
    scene.answers(Fault::Answer(200, done.into()));
    assert!(matches!(scene.activate(), Err(Error::LabelMismatch { .. })));
    assert!(scene.fake.engine().label().ends_with("?partial"));
}

#[test]
fn an_engine_that_is_not_ready_loads() {
    let soon = |plugin: &mut PluginOptions| plugin.deadline = Duration::from_millis(20);
    type Spoil = fn(&Scene);
    let spoil: [(&str, Spoil); 6] = [
        ("no rank", |scene| fs::remove_file(scene.rank()).unwrap()),
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
            fs::set_permissions(&scene.plugins, fs::Permissions::from_mode(0o755)).unwrap();
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
fn ranks_that_agree_are_patched_without_a_fence() {
    let mut scene = Scene::new();
    scene.fake.engine().facts().tp_size = 2;
    for rank in 0..2 {
        let path = scene.rank().with_file_name(format!("rank-{}-{rank}.json", scene.fake.address.port()));
        fs::write(path, scene.told(2, &scene.label, Value::Null)).unwrap();
    }
    scene.answers(Fault::Patched);
    scene.activate().unwrap();
    assert_eq!(scene.calls(), LEAN);
    scene.serves();
}

#[test]
fn an_engine_whose_server_hands_on_is_patched_while_it_generates() {
    let mut scene = Scene::with(PauseMode::InPlace, |_| {});
    scene.hands_on(started());
    scene.answers(Fault::Patched);
    scene.fake.engine().generating = 1;
    let paused = scene.activate_within(Duration::from_secs(60)).unwrap();
    assert_eq!(paused, Duration::from_micros(16_250), "as the first rank says");
    assert_eq!(scene.fake.changes(), [LEAN[2], LEAN[1]], "nothing but what an earlier process may owe");
    let body = scene.update();
    assert_eq!((&body["manifest"], &body["flush_cache"]), (&json!({"driftless": "patch"}), &json!(false)));
    assert_eq!(generated(&scene), 1, "the one after the process began");
    scene.serves();
}

#[test]
fn a_running_engine_that_tells_no_time_stood_still_for_the_call_at_most() {
    let mut scene = Scene::with(PauseMode::InPlace, |_| {});
    scene.hands_on(started());
    scene.answers(Fault::PatchedOnly);
    scene.fake.engine().generating = 1;
    let began = Instant::now();
    let paused = scene.activate_within(Duration::from_secs(60)).unwrap();
    assert!(!paused.is_zero() && paused <= began.elapsed(), "{paused:?}");
    scene.serves();
}

#[test]
fn an_engine_is_paused_for_a_patch_where_its_server_does_not_hand_on_or_requests_lose_their_cache() {
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
    let refusal = r#"{"success":false,"message":"driftless: not patched to x: Error: nothing is prepared"}"#;
    let (done, other) =
        (r#"{"success":true,"message":"driftless: patched to x"}"#, r#"{"success":true,"message":""}"#);
    for (status, reply) in
        [(400, refusal), (400, "busy"), (500, "no"), (200, "<html>"), (200, done), (200, other)]
    {
        let mut scene = Scene::with(PauseMode::InPlace, |_| {});
        scene.hands_on(started());
        scene.answers(Fault::Answer(status, reply.into()));
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
    let error = scene.activate_within(Duration::from_secs(5)).unwrap_err();
    assert!(matches!(error, Error::Deadline { .. } | Error::GivenUp { .. }), "{error}");
    came.try_recv().expect("it was asked");
    assert_eq!(scene.calls(), [] as [&str; 0], "it is not paused");
    assert!(!scene.activator.is_paused());
    scene.answers(Fault::Patched);
    scene.activate().unwrap();
    scene.serves();
}

#[test]
fn an_idle_engine_that_generates_nothing_sound_after_a_patch_is_fenced() {
    let mut scene = Scene::with(PauseMode::InPlace, |_| {});
    scene.hands_on(started());
    scene.answers(Fault::Patched);
    scene.fake.engine().broken = Some(scene.next.dir().into());
    assert!(matches!(scene.activate(), Err(Error::Unsound { .. })));
    assert!(scene.fake.engine().label().ends_with("?partial") && scene.fake.engine().is_paused());
}

#[test]
fn an_engine_without_the_plugin_is_refused_where_it_is_required() {
    let mut scene = Scene::with(PauseMode::Retract, |plugin| plugin.required = true);
    fs::remove_file(scene.rank()).unwrap();
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
    scene.fake.fault("POST /weights_checker", Fault::WrongSum);
    assert!(matches!(scene.activate(), Err(Error::LiveWeights { .. })));
    assert!(scene.fake.engine().label().ends_with("?partial") && scene.fake.engine().is_paused());
    scene.activate().unwrap();
    assert_eq!(scene.calls()[1], "/flush_cache");
    scene.serves();
}
