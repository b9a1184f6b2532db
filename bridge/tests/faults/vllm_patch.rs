//! Activation of a vLLM server with our backend: it is patched by vLLM's own calls, and whatever else happens
//! it never claims weights that it does not have.

use std::fs;
use std::time::Duration;

use driftless_bridge::activate::{DiskActivator, DiskOptions, PluginOptions};
use driftless_bridge::engine::{ClientOptions, PauseMode};
use driftless_testkit::sglang::{checkpoint, patient, short, version};
use driftless_testkit::vllm::{Fault, Vllm, digest};
use driftless_transport::activate::Activate as _;
use serde_json::Value;

use crate::scene::{self, WithPlugin, plugins_in};

const PAUSE: &str = "/pause?mode=keep";
const EMPTY: &str = "/reset_prefix_cache?reset_running_requests=true";
const LABEL: &str = "/update_weight_version";
const TELL: &str = "/init_weight_transfer_engine";
const RELOAD: &str = "/collective_rpc reload_weights";
const UPDATE: [&str; 3] = ["/start_weight_update", "/update_weights", "/finish_weight_update"];
const RESUME: &str = "/resume";

const BASE: &str = "3f0c9a12b7de:0";

type Scene = scene::Scene<WithPlugin<Vllm>, DiskActivator>;

impl Scene {
    fn new() -> Self {
        Self::with(patient(), PauseMode::Retract)
    }

    /// A server that serves the base of a version which its backend has prepared.
    fn with(client: ClientOptions, pause: PauseMode) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (next, manifest) = version(dir.path());
        let (vllm, label) = (Vllm::start(next.dir()), manifest.label());
        let base = digest(&checkpoint(&dir.path().join("a"), 1, 4));
        {
            let mut server = vllm.server();
            (server.backend, server.weights, server.label) = (true, Some(base), BASE.into());
            server.truths.extend([(label, digest(next.dir())), (BASE.into(), base)]);
        }
        let plugins = plugins_in(dir.path());
        let plugin = PluginOptions::new(&plugins).with_deadline(Duration::from_millis(20));
        let options = DiskOptions::default().with_client(client).with_pause(pause).with_plugin(plugin);
        let activator = DiskActivator::new(&vllm.url(), options).unwrap();
        let engine = WithPlugin { port: vllm.address.port(), engine: vllm, plugins };
        let scene = Self::of(engine, activator, (next, manifest), dir);
        scene.offers(&scene.label);
        scene.says(&scene.label, Value::Null);
        scene
    }

    /// The calls since the last pause began.
    fn calls(&self) -> Vec<String> {
        let calls = self.engine.server().calls.clone();
        let begin = calls.iter().rposition(|call| call.starts_with("/pause")).unwrap_or(calls.len());
        calls[begin..].to_vec()
    }
}

#[test]
fn activate_prepared_version_is_patched_behind_a_fence() {
    let mut scene = Scene::new();
    scene.activate().unwrap();
    assert_eq!(scene.calls(), [PAUSE, EMPTY, LABEL, UPDATE[0], UPDATE[1], UPDATE[2], RESUME]);
    scene.serves();
    assert!(!scene.engine.server().updating);

    let mut scene = Scene::with(patient(), PauseMode::InPlace);
    scene.activate().unwrap();
    let calls = scene.calls();
    assert!(calls.contains(&"/reset_prefix_cache".to_owned()), "{calls:?}");
    assert!(calls.iter().all(|call| call != RELOAD && call != EMPTY), "{calls:?}");
    scene.serves();
}

#[test]
fn activate_refused_patch_is_a_load_in_the_same_pause() {
    let mut scene = Scene::new();
    scene.engine.fault("POST /update_weights", Fault::Unprepared);
    scene.activate().unwrap();
    let load = [EMPTY, LABEL, RELOAD, TELL, LABEL, RESUME];
    assert_eq!(scene.calls(), [&[PAUSE, EMPTY, LABEL, UPDATE[0], UPDATE[1]][..], &load].concat());
    scene.serves();
}

#[test]
fn activate_failed_patch_fences_until_a_load_succeeds() {
    const HTML: Fault = Fault::Answer(200, "<html>");
    for (call, fault) in [
        ("POST /start_weight_update", HTML),
        ("POST /start_weight_update", Fault::Die),
        ("POST /update_weights", HTML),
        ("POST /update_weights", Fault::Half(Some(500))),
        ("POST /update_weights", Fault::Half(None)),
        ("POST /update_weights", Fault::Die),
        ("POST /update_weights", Fault::Hang),
        // The weights are those of the version by now, and the label is not.
        ("POST /finish_weight_update", HTML),
        ("POST /finish_weight_update", Fault::Answer(500, "Internal Server Error")),
        ("POST /finish_weight_update", Fault::Die),
        ("POST /finish_weight_update", Fault::KeepLabel),
    ] {
        let client = if matches!(fault, Fault::Hang) { short(|calls| &mut calls.load) } else { patient() };
        let mut scene = Scene::with(client, PauseMode::Retract);
        scene.engine.fault(call, fault.clone());
        scene.activate().expect_err(call);
        scene.is_fenced();
        // The next follower does not know what happened.
        let plugin = PluginOptions::new(&scene.engine.plugins);
        let options = DiskOptions::default().with_client(patient()).with_plugin(plugin);
        scene.activator = DiskActivator::new(&scene.engine.url(), options).unwrap();
        assert_eq!(scene.activator.serving().unwrap(), None, "{call} {fault:?}");
        scene.is_fenced();
        scene.activate().unwrap();
        assert_eq!(scene.calls(), [PAUSE, EMPTY, LABEL, RELOAD, TELL, LABEL, RESUME], "{call} {fault:?}");
        scene.serves();
        // An update that was left open is in nobody's way.
        scene.activate().unwrap();
        assert!(scene.calls().contains(&UPDATE[1].to_owned()), "{call} {fault:?}");
        scene.serves();
    }
}

#[test]
fn activate_unprepared_version_loads_and_tells_the_backend() {
    let mut scene = Scene::new();
    fs::remove_file(scene.rank(0)).unwrap();
    for _ in 0..2 {
        scene.activate().unwrap();
        assert_eq!(scene.calls(), [PAUSE, EMPTY, LABEL, RELOAD, TELL, LABEL, RESUME]);
        scene.serves();
        let told = scene.engine.server().told.clone();
        assert_eq!(told, Some((scene.engine.address.port().into(), format!("{}?partial", scene.label))));
    }
}

#[test]
fn activate_server_with_a_backend_of_format_1_loads() {
    let mut scene = Scene::new();
    let mut said = scene.told(1, &scene.label, Value::Null);
    said.as_object_mut().unwrap().remove("format").unwrap();
    fs::write(scene.rank(0), said.to_string()).unwrap();
    scene.activate().unwrap();
    assert_eq!(scene.calls(), [PAUSE, EMPTY, LABEL, RELOAD, TELL, LABEL, RESUME]);
    scene.serves();
}

#[test]
fn activate_server_without_the_backend_asks_each_process_once() {
    let mut scene = Scene::new();
    fs::remove_file(scene.rank(0)).unwrap();
    scene.engine.server().backend = false;
    let asked = |scene: &Scene| scene.engine.server().calls.iter().filter(|call| *call == TELL).count();
    for expected in [1, 1] {
        scene.activate().unwrap();
        assert_eq!(asked(&scene), expected);
        scene.serves();
    }
    scene.engine.restart();
    scene.engine.server().backend = true;
    scene.activate().unwrap();
    assert_eq!(asked(&scene), 2, "it may have been started with the backend");
    assert!(scene.engine.server().told.is_some());
}
