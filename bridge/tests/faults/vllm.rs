//! vLLM behind the seam of engines: what it is asked, and what becomes of one that fails, lies, or was
//! started again.

use std::sync::Arc;
use std::time::Duration;

use driftless_bridge::activate::{DiskActivator, DiskOptions};
use driftless_bridge::engine::{PauseMode, Piece};
use driftless_bridge::fleet::FleetOptions;
use driftless_bridge::{
    ClientOptions, Error, Expected, Fleet, GenerateRequest, Keys, Label, Rid, SamplingParams, connect,
};
use driftless_testkit::vllm::{Fault, Vllm, digest};
use driftless_transport::activate::Activate as _;
use tokio::runtime::Runtime;

use crate::{in_fp8, scene};
use driftless_testkit::sglang::{Fake, checkpoint, patient, short, version};

const ORDER: [&str; 6] = [
    "/pause?mode=keep",
    "/reset_prefix_cache?reset_running_requests=true",
    "/update_weight_version",
    "/collective_rpc reload_weights",
    "/update_weight_version",
    "/resume",
];

const OLD: &str = "3f0c9a12b7de:1";
const NEW: &str = "3f0c9a12b7de:2";

type Scene = scene::Scene<Vllm, DiskActivator>;

impl Scene {
    fn new() -> Self {
        Self::with(DiskOptions::default().with_client(patient()))
    }

    /// A server that was started with a directory in which other weights lie by now: those of a version.
    fn with(options: DiskOptions) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (next, manifest) = version(dir.path());
        let vllm = Vllm::start(next.dir());
        {
            let mut server = vllm.server();
            server.weights = Some(digest(&checkpoint(&dir.path().join("a"), 1, 4)));
            server.truths.insert(manifest.label(), digest(next.dir()));
        }
        let activator = DiskActivator::new(&vllm.url(), options).unwrap();
        Self::of(vllm, activator, (next, manifest), dir)
    }
}

#[test]
fn server_says_its_release_and_what_it_was_started_with() {
    let scene = Scene::new();
    let engine = connect(&scene.engine.url(), ClientOptions::default()).unwrap();
    let about = Runtime::new().unwrap().block_on(engine.about()).unwrap();
    assert!(about.release.is_some(), "{about:?}");
    assert_eq!(std::path::Path::new(&about.model), scene.next.dir());
}

#[test]
fn activate_asks_in_the_order_of_every_engine() {
    let mut scene = Scene::new();
    assert_eq!(scene.activator.serving().unwrap(), None, "`default` is no label of ours");
    scene.activate().unwrap();
    scene.serves();
    let mut calls = scene.engine.server().calls.clone();
    let begin = calls.iter().position(|call| call.starts_with("/pause")).unwrap();
    let asked = calls.remove(begin + 4);
    assert_eq!(
        (asked.as_str(), &calls[begin..]),
        ("/init_weight_transfer_engine", &ORDER.map(String::from)[..])
    );
    scene.activate().unwrap();
    let again = scene.engine.server().calls[calls.len() + 1..].to_vec();
    assert_eq!(again, ORDER, "nothing else for a process that is known");
}

#[test]
fn activate_each_pause_mode_in_the_servers_words() {
    for (pause, calls) in [
        (PauseMode::Abort, ["/pause?mode=abort", "/reset_prefix_cache?reset_running_requests=true"]),
        (PauseMode::InPlace, ["/pause?mode=keep", "/reset_prefix_cache"]),
    ] {
        let mut scene = Scene::with(DiskOptions::default().with_client(patient()).with_pause(pause));
        scene.activate().unwrap();
        let seen = scene.engine.server().calls.clone();
        let begin = seen.iter().position(|call| call.starts_with("/pause")).unwrap();
        assert_eq!(seen[begin..begin + 2], calls, "{pause:?}");
    }
}

#[test]
fn activate_failed_load_fences_until_one_succeeds() {
    for fault in [
        Fault::Half(Some(400)),
        Fault::Half(Some(500)),
        Fault::Half(None),
        Fault::Answer(500, "Internal Server Error"),
        Fault::Answer(200, "<html>"),
        Fault::Answer(200, r#"{"results": ["RuntimeError('shape')"]}"#),
        Fault::Answer(200, r#"{"error": "no"}"#),
        Fault::Die,
        Fault::Hang,
    ] {
        let client = if matches!(fault, Fault::Hang) { short(|calls| &mut calls.load) } else { patient() };
        let mut scene = Scene::with(DiskOptions::default().with_client(client));
        for _ in 0..2 {
            scene.engine.fault("POST /collective_rpc", fault.clone());
            let error = scene.fails();
            assert!(error.to_string().contains("/collective_rpc"), "{fault:?}: {error}");
            scene.is_fenced();
        }
        // The next follower does not know what happened, and has the engine load first all the same.
        let options = DiskOptions::default().with_client(patient());
        scene.activator = DiskActivator::new(&scene.engine.url(), options).unwrap();
        scene.is_fenced();
        scene.activate().unwrap();
        scene.serves();
    }
}

#[test]
fn activate_failure_before_the_load_keeps_the_old_weights() {
    for (call, fault) in [
        ("POST /pause", Fault::Answer(200, r#"{"status": "ok"}"#)),
        ("POST /reset_prefix_cache", Fault::Answer(409, "held")),
        ("POST /reset_prefix_cache", Fault::Answer(200, r#"{"success": false}"#)),
        ("POST /update_weight_version", Fault::Answer(200, r#"{"success": false}"#)),
        ("POST /update_weight_version", Fault::KeepLabel),
    ] {
        let mut scene = Scene::new();
        scene.engine.fault(call, fault.clone());
        scene.fails();
        assert!(!scene.activator.is_paused(), "{call} {fault:?}");
        let server = scene.engine.server();
        assert_eq!((server.paused, server.label.as_str()), (false, "default"), "{call} {fault:?}");
        assert!(!server.calls.iter().any(|call| call.starts_with("/collective_rpc")), "{call} {fault:?}");
    }
}

#[test]
fn serving_after_a_restart_is_no_version() {
    let mut scene = Scene::new();
    scene.activate().unwrap();
    scene.serves();
    scene.engine.restart();
    assert_eq!(scene.activator.serving().unwrap(), None, "the label went with the process");
    scene.activate().unwrap();
    scene.serves();
    scene.engine.fault("POST /collective_rpc", Fault::Half(None));
    scene.fails();
    scene.is_fenced();
    scene.engine.restart();
    assert_eq!(scene.activator.serving().unwrap(), None);
    assert!(!scene.engine.server().paused, "the weights of its start are known");
    scene.activate().unwrap();
    scene.serves();
}

#[test]
fn activate_server_of_another_directory_is_refused() {
    let mut scene = Scene::new();
    let other = checkpoint(&scene.dir.path().join("other"), 1, 4);
    scene.engine.server().root = other.clone();
    let refused = scene.fails().to_string();
    for directory in [&other, &scene.next.dir().to_path_buf()] {
        assert!(refused.contains(directory.to_str().unwrap()), "{refused}");
    }
    assert!(
        !scene.engine.server().calls.iter().any(|call| call.starts_with("/pause")),
        "nothing was touched"
    );
}

#[test]
fn activate_quantised_weights_is_refused() {
    let mut scene = Scene::new();
    scene.next = in_fp8(scene.next.dir());
    let refused = scene.fails().to_string();
    assert!(refused.contains("quantization of the checkpoint should be none"), "{refused}");
    assert!(
        !scene.engine.server().calls.iter().any(|call| call.starts_with("/pause")),
        "nothing was touched"
    );
}

#[test]
fn activate_server_without_development_mode_is_refused() {
    let mut scene = Scene::new();
    scene.engine.server().dev_mode = false;
    let refused = scene.fails().to_string();
    assert!(refused.contains("VLLM_SERVER_DEV_MODE=1"), "{refused}");
}

/// A fleet of a vLLM server and an SGLang engine, of which only the first may serve `NEW` later.
fn fleet(vllm: &Vllm, others: &[&Fake], path: &std::path::Path) -> (Runtime, Arc<Fleet>) {
    let mut addresses = vec![vllm.url()];
    addresses.extend(others.iter().map(|fake| fake.address.to_string()));
    let runtime = Runtime::new().unwrap();
    let expected = Expected::from_checkpoint(path).unwrap();
    let options =
        FleetOptions::default().with_deadline(Duration::from_secs(60)).with_calls(patient().deadlines);
    let fleet = runtime.block_on(Fleet::attach(&addresses, &Keys::default(), &expected, options)).unwrap();
    (runtime, Arc::new(fleet))
}

fn request(sample: u64) -> GenerateRequest {
    let sampling = SamplingParams { max_new_tokens: 1, ..SamplingParams::default() };
    GenerateRequest::new(Rid::new(1, sample), vec![1, 2], sampling)
}

#[test]
fn fleet_routes_to_both_kinds_by_their_labels() {
    let dir = tempfile::tempdir().unwrap();
    let path = checkpoint(&dir.path().join("a"), 1, 4);
    let (vllm, fake) = (Vllm::start(&path), Fake::start(&path));
    vllm.server().label = NEW.into();
    fake.engine().set_label(OLD);
    let (runtime, fleet) = fleet(&vllm, &[&fake], &path);
    let minimum: Label = NEW.parse().unwrap();
    for sample in 0..4 {
        let made = runtime.block_on(fleet.generate(request(sample), Some(&minimum))).unwrap();
        assert_eq!(made.engine, format!("http://{}", vllm.address), "the other one is behind");
        assert_eq!((made.output_ids, made.spans[0].label.as_str()), (vec![7], NEW));
    }
    let salts: Vec<_> = vllm.server().generations.iter().map(|body| body["cache_salt"].clone()).collect();
    assert_eq!(salts, [NEW; 4], "what other weights left in its cache is not for them");
    let engines: Vec<_> = (4..8)
        .map(|sample| runtime.block_on(fleet.generate(request(sample), None)).unwrap().engine)
        .collect();
    assert!(engines.contains(&format!("http://{}", fake.address)), "{engines:?}");
}

#[test]
fn fleet_reply_across_a_change_of_weights_is_thrown_away() {
    let dir = tempfile::tempdir().unwrap();
    let path = checkpoint(&dir.path().join("a"), 1, 4);
    let vllm = Vllm::start(&path);
    vllm.server().label = OLD.into();
    let (runtime, fleet) = fleet(&vllm, &[], &path);
    vllm.fault("POST /v1/completions", Fault::Cross);
    let sample = runtime.spawn({
        let fleet = fleet.clone();
        async move { fleet.generate(request(1), None).await }
    });
    let engine = connect(&vllm.url(), ClientOptions::default()).unwrap();
    while vllm.server().generations.is_empty() {
        std::thread::yield_now();
    }
    runtime.block_on(engine.set_label(NEW)).unwrap();
    let made = runtime.block_on(sample).unwrap().unwrap();
    assert_eq!(made.spans[0].label, NEW);
    assert_eq!(vllm.server().generations.len(), 2, "the first one could not say which tokens were whose");
}

#[test]
fn fleet_answer_goes_on_behind_its_tokens_on_another_kind() {
    let dir = tempfile::tempdir().unwrap();
    let path = checkpoint(&dir.path().join("a"), 1, 4);
    let (vllm, fake) = (Vllm::start(&path), Fake::start(&path));
    vllm.server().label = NEW.into();
    vllm.server().is_long = true;
    vllm.server().stuck_after = Some(70);
    fake.engine().set_label(OLD);
    fake.engine().is_long = true;
    let (runtime, fleet) = fleet(&vllm, &[&fake], &path);
    let newest: Label = NEW.parse().unwrap();
    fleet.published(&newest);
    let (told, pieces) = std::sync::mpsc::channel();
    let answer = runtime.spawn({
        let (fleet, mut request) = (fleet.clone(), request(1));
        request.sampling.max_new_tokens = 100;
        async move {
            let mut tell = |piece: Piece<'_>| told.send(piece.output_ids.len()).unwrap();
            fleet.stream(request, Some(&newest), &mut tell).await
        }
    });
    assert_eq!((pieces.recv().unwrap(), pieces.recv().unwrap()), (1, 64), "the first one at once");
    fake.engine().set_label(NEW);
    // What comes back has no version.
    vllm.restart();
    let whole = runtime.block_on(answer).unwrap().unwrap();
    let prompt = request(1).input_ids.len();
    let expected: Vec<i32> = (prompt..prompt + 100).map(|place| (place % 10) as i32).collect();
    assert_eq!((whole.output_ids, whole.spans.len()), (expected, 1));
    assert_eq!(fake.engine().asked, [prompt + 65]);
}

#[test]
fn fleet_request_that_a_kind_cannot_do_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = checkpoint(&dir.path().join("a"), 1, 4);
    let vllm = Vllm::start(&path);
    let (runtime, fleet) = fleet(&vllm, &[], &path);
    let mut hot = request(1);
    hot.sampling.temperature = 0.7;
    let refused = runtime.block_on(fleet.generate(hot, None));
    assert!(matches!(&refused, Err(Error::Request { what: "temperature", .. })), "{refused:?}");
    assert!(vllm.server().generations.is_empty());
}
