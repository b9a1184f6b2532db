//! A fleet of engines of which some are slow to learn, and some fail.

use std::sync::Arc;
use std::time::{Duration, Instant};

use driftless_bridge::fleet::{FleetOptions, Newest};
use driftless_bridge::sglang::Dialect;
use driftless_bridge::{Error, Expected, Fleet, GenerateRequest, Keys, Label, Rid, SamplingParams};
use tokio::runtime::Runtime;

use driftless_testkit::sglang::{self, Fake, Fault, checkpoint};

pub(super) const OLD: &str = "3f0c9a12b7de:1";
pub(super) const NEW: &str = "3f0c9a12b7de:2";
/// `vocab_size` of the engines' checkpoint.
const VOCABULARY: i32 = 10;

pub(super) struct Scene {
    pub(super) fakes: Vec<Fake>,
    pub(super) fleet: Arc<Fleet>,
    pub(super) runtime: Runtime,
    pub(super) dir: tempfile::TempDir,
}

impl Scene {
    /// Another fleet of the same engines.
    fn attach(&self, options: FleetOptions) -> driftless_bridge::Result<Fleet> {
        let addresses: Vec<String> = self.fakes.iter().map(|fake| fake.address.to_string()).collect();
        let expected = Expected::from_checkpoint(&self.fakes[0].engine().started_with.clone()).unwrap();
        self.runtime.block_on(Fleet::attach(&addresses, &Keys::default(), &expected, options))
    }
}

pub(super) fn scene(engines: usize, options: FleetOptions) -> Scene {
    scene_with(engines, options, |_| {})
}

pub(super) fn scene_with(engines: usize, options: FleetOptions, change: impl Fn(&Fake)) -> Scene {
    let dir = tempfile::tempdir().unwrap();
    let path = checkpoint(&dir.path().join("a"), 1, 4);
    let fakes: Vec<Fake> = (0..engines).map(|_| Fake::start(&path)).collect();
    for fake in &fakes {
        fake.engine().set_label(OLD);
        change(fake);
    }
    let addresses: Vec<String> = fakes.iter().map(|fake| fake.address.to_string()).collect();
    let runtime = Runtime::new().unwrap();
    let expected = Expected::from_checkpoint(&path).unwrap();
    let fleet = runtime.block_on(Fleet::attach(&addresses, &Keys::default(), &expected, options)).unwrap();
    Scene { fakes, fleet: Arc::new(fleet), runtime, dir }
}

/// Enough for what should succeed, whatever the machine is doing.
pub(super) fn patient() -> FleetOptions {
    let calls = sglang::patient().deadlines;
    FleetOptions::default().with_deadline(Duration::from_secs(60)).with_calls(calls)
}

/// Little, for what should not.
fn hasty() -> FleetOptions {
    patient().with_deadline(Duration::from_millis(900))
}

pub(super) fn request(sample: u64) -> GenerateRequest {
    let sampling = SamplingParams { max_new_tokens: 1, ..SamplingParams::default() };
    GenerateRequest::new(Rid::new(1, sample), vec![1, 2], sampling)
}

pub(super) fn label(text: &str) -> Label {
    text.parse().unwrap()
}

/// Until it is so; a test that waits in vain fails.
pub(super) fn until(what: &str, mut check: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !check() {
        assert!(begun.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn only_engines_that_are_new_enough_are_asked() {
    let scene = scene(2, patient());
    scene.fakes[1].engine().set_label(NEW);
    for sample in 0..4 {
        let generation =
            scene.runtime.block_on(scene.fleet.generate(request(sample), Some(&label(NEW)))).unwrap();
        assert!(generation.engine.contains(&scene.fakes[1].address.to_string()));
        assert_eq!(generation.spans[0].label, NEW);
    }
}

#[test]
fn older_tokens_are_discarded_and_asked_for_again() {
    let scene = scene(1, patient());
    scene.fakes[0].engine().set_label(NEW);
    // The engine was updated, but this request had been drawn from the old weights.
    scene.fakes[0].fault("POST /generate", Fault::Label(OLD));
    let generation = scene.runtime.block_on(scene.fleet.generate(request(0), Some(&label(NEW)))).unwrap();
    assert_eq!(generation.spans[0].label, NEW);
    assert_eq!(generation.rid, Rid::new(1, 0).next_attempt());
}

#[test]
fn a_sample_waits_until_an_engine_has_caught_up() {
    let scene = scene(1, patient());
    let fleet = scene.fleet.clone();
    let waiting = scene.runtime.spawn(async move { fleet.generate(request(0), Some(&label(NEW))).await });
    scene.runtime.block_on(scene.fleet.look()).unwrap();
    assert!(!waiting.is_finished());
    scene.fakes[0].engine().set_label(NEW);
    assert_eq!(scene.runtime.block_on(waiting).unwrap().unwrap().spans[0].label, NEW);
}

#[test]
fn cached_tokens_count_and_those_of_another_version_count_apart() {
    let scene = scene(1, patient());
    for (label, cached) in [(OLD, 5), (NEW, 7)] {
        // The fleet sends both for OLD, which is what it knows of the engine.
        let body = format!(
            r#"{{"output_ids": [3], "meta_info": {{"finish_reason": {{"type": "length"}}, "completion_tokens": 1,
                "cached_tokens": {cached}, "weight_versions": [{{"version": "{label}", "start": 0, "end": 1}}],
                "output_token_logprobs": [[-0.5, 3, null]]}}}}"#
        );
        scene.fakes[0].fault("POST /generate", Fault::Answer(200, body));
        let generation = scene.runtime.block_on(scene.fleet.generate(request(cached), None)).unwrap();
        assert_eq!(generation.cached_tokens, Some(cached as u32));
    }
    let (engines, _) = scene.fleet.usage();
    assert_eq!((engines[0].1.tokens.cached, engines[0].1.tokens.stale), (12, 7));
}

#[test]
fn requests_of_a_closed_fleet_say_that_it_was_closed() {
    let Scene { fakes: _fakes, fleet, runtime, dir: _dir } = scene(1, patient());
    let ask = |sample: u64| {
        let fleet = fleet.clone();
        async move { fleet.generate(request(sample), Some(&label(NEW))).await }
    };
    let other = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let waiting: Vec<_> = (0..100).map(|sample| other.spawn(ask(sample))).collect();
    // On the one thread, each has asked for a place before this goes on, or waits to get to the fleet's task.
    other.block_on(tokio::task::yield_now());
    drop(runtime);
    for waits in waiting {
        let ended = other.block_on(waits).unwrap();
        assert!(matches!(ended, Err(Error::Closed)), "{ended:?}");
    }
    let late = other.block_on(ask(100));
    assert!(matches!(late, Err(Error::Closed)), "{late:?}");
}

#[test]
fn a_failing_engine_is_replaced_by_another() {
    for fault in [Fault::Answer(500, "broken".into()), Fault::Die, Fault::Answer(200, "{}".into())] {
        let scene = scene(2, patient());
        for fake in &scene.fakes {
            // One of the two is asked first, and fails; the other may fail once as well.
            fake.fault("POST /generate", fault.clone());
        }
        let generation = scene.runtime.block_on(scene.fleet.generate(request(0), None)).unwrap();
        assert_ne!(generation.rid, Rid::new(1, 0), "{fault:?}");
    }
}

#[test]
fn generate_has_the_fleets_deadline_and_not_the_calls() {
    let calls = patient().calls.with_generate(Duration::from_millis(1));
    let scene = scene(1, patient().with_calls(calls));
    scene.fakes[0].fault("POST /generate", Fault::Slow(Duration::from_millis(200)));
    let generation = scene.runtime.block_on(scene.fleet.generate(request(0), None)).unwrap();
    assert_eq!(generation.rid, Rid::new(1, 0), "the first attempt");
}

#[test]
fn late_reply_is_the_engines_failure_only_if_it_is_away() {
    let calls = sglang::short(|calls| &mut calls.info).deadlines;
    let scene = scene(1, hasty().with_calls(calls));
    let generate = || scene.runtime.block_on(scene.fleet.generate(request(0), None)).unwrap_err();
    scene.fakes[0].fault("POST /generate", Fault::Hang);
    let error = generate();
    assert!(matches!(error, Error::Deadline { .. }) && !error.is_no_engine(), "{error}");
    assert!(scene.fleet.status()[0].up);
    for call in ["POST /generate", "GET /model_info"] {
        scene.fakes[0].fault(call, Fault::Hang);
    }
    let error = generate();
    assert!(error.is_no_engine(), "{error}");
    assert!(!scene.fleet.status()[0].up);
}

#[test]
fn generate_label_that_nobody_published_is_the_engines_failure() {
    let scene = scene(1, patient().with_newest(Newest::new(|| Some(label(NEW)))));
    // The newest version is one that the fleet has not heard of before.
    scene.fakes[0].fault("POST /generate", Fault::Label("3f0c9a12b7de:7"));
    scene.fakes[0].fault("POST /generate", Fault::Label(NEW));
    let generation = scene.runtime.block_on(scene.fleet.generate(request(0), Some(&label(OLD)))).unwrap();
    assert_eq!(generation.rid, Rid::new(1, 0).next_attempt());
    assert_eq!(generation.spans[0].label, NEW);
    let failure = scene.fleet.status().remove(0).failure.unwrap();
    for part in [&scene.fakes[0].address.to_string(), "3f0c9a12b7de:7", NEW] {
        assert!(failure.contains(part), "{failure}");
    }
}

#[test]
fn engine_that_serves_an_unpublished_version_is_not_waited_for() {
    let scene = scene(2, patient().with_newest(Newest::new(|| Some(label(NEW)))));
    scene.fakes[0].engine().set_label(NEW);
    scene.fakes[1].engine().set_label("3f0c9a12b7de:7");
    let newest = label(NEW);
    let wait = scene.fleet.wait_for_those_up(&newest, Duration::from_secs(60));
    let behind = scene.runtime.block_on(wait).unwrap();
    let [behind] = behind.as_slice() else { panic!("{behind:?}") };
    for part in [&scene.fakes[1].address.to_string(), "3f0c9a12b7de:7", "published"] {
        assert!(behind.contains(part), "{behind}");
    }
}

#[test]
fn generate_reply_without_a_token_is_the_engines_failure() {
    let scene = scene(1, patient());
    let empty = r#"{"output_ids": [], "meta_info": {"finish_reason": {"type": "stop", "matched": 7},
        "weight_version": "3f0c9a12b7de:1", "num_retractions": 0, "output_token_logprobs": []}}"#;
    scene.fakes[0].fault("POST /generate", Fault::Answer(200, empty.into()));
    let generation = scene.runtime.block_on(scene.fleet.generate(request(0), None)).unwrap();
    assert_eq!(generation.output_ids.len(), 1);
    let failure = scene.fleet.status().remove(0).failure.unwrap();
    assert!(failure.contains("at least one token"), "{failure}");
}

#[test]
fn generate_token_beyond_the_vocabulary_is_the_engines_failure() {
    let scene = scene(1, patient());
    // The last id of a vocabulary is the model's, the next one is nobody's.
    scene.fakes[0].engine().tokens = vec![VOCABULARY, VOCABULARY - 1];
    let generation = scene.runtime.block_on(scene.fleet.generate(request(0), None)).unwrap();
    assert_eq!(generation.rid, Rid::new(1, 0).next_attempt());
    assert_eq!(generation.output_ids, [VOCABULARY - 1]);
    let failure = scene.fleet.status().remove(0).failure.unwrap();
    let (address, vocabulary) = (scene.fakes[0].address, VOCABULARY);
    for part in [address.to_string(), format!("0..{vocabulary}"), format!("token {vocabulary}")] {
        assert!(failure.contains(&part), "{failure}");
    }
}

#[test]
fn when_every_engine_is_down_the_error_names_them() {
    let scene = scene(2, hasty());
    scene.fakes.iter().for_each(Fake::kill);
    match scene.runtime.block_on(scene.fleet.generate(request(0), None)) {
        Err(Error::Exhausted { attempts, .. }) => {
            for fake in &scene.fakes {
                assert!(attempts.iter().any(|text| text.contains(&fake.address.to_string())), "{attempts:?}");
            }
        }
        other => panic!("{other:?}"),
    }
    let status = scene.fleet.status();
    assert!(
        status.iter().all(|engine| engine.in_flight == 0) && status.iter().any(|engine| !engine.up),
        "{status:?}"
    );
}

#[test]
fn restarted_engine_is_attached_again_and_asked_once_in_step() {
    let scene = scene(1, patient());
    scene.fakes[0].kill();
    let fleet = scene.fleet.clone();
    let waiting = scene.runtime.spawn(async move { fleet.generate(request(0), Some(&label(OLD))).await });
    scene.fakes[0].restart();
    let serving = || scene.runtime.block_on(scene.fleet.look()).unwrap().remove(0).serving;
    until("it is attached again", || serving().as_deref() == Some("default"));
    assert!(!waiting.is_finished());
    scene.fakes[0].engine().set_label(OLD);
    assert_eq!(scene.runtime.block_on(waiting).unwrap().unwrap().spans[0].label, OLD);
}

#[test]
fn requests_that_no_engine_would_take_are_not_tried_again() {
    let scene = scene(1, patient());
    scene.fakes[0].fault("POST /generate", Fault::Answer(400, "unknown field".into()));
    assert!(matches!(
        scene.runtime.block_on(scene.fleet.generate(request(0), None)),
        Err(Error::Status { status: 400, .. })
    ));
    let mut outside = request(1);
    outside.input_ids = vec![10];
    assert!(matches!(
        scene.runtime.block_on(scene.fleet.generate(outside, None)),
        Err(Error::Request { .. })
    ));
}

#[test]
fn an_id_still_in_use_is_replaced_by_the_next_attempt() {
    let scene = scene(1, patient());
    scene.fakes[0].fault("POST /generate", Fault::Answer(400, "Duplicate request ID detected: 0".into()));
    let generation = scene.runtime.block_on(scene.fleet.generate(request(0), None)).unwrap();
    assert_eq!(generation.rid, Rid::new(1, 0).next_attempt());
}

#[test]
fn concurrency_is_bounded_per_engine() {
    let scene = scene(2, patient().with_concurrency(3));
    // Nothing is answered before every place is taken.
    scene.fakes.iter().for_each(|fake| fake.engine().set_paused(true));
    let all = (0..40).map(|sample| {
        let fleet = scene.fleet.clone();
        scene.runtime.spawn(async move { fleet.generate(request(sample), None).await })
    });
    let all: Vec<_> = all.collect();
    until("both engines are full", || scene.fakes.iter().all(|fake| fake.engine().generating == 3));
    scene.fakes.iter().for_each(|fake| fake.engine().set_paused(false));
    for sample in all {
        scene.runtime.block_on(sample).unwrap().unwrap();
    }
    for fake in &scene.fakes {
        let most = fake.engine().most_generating;
        assert_eq!(most, 3);
    }
}

#[test]
fn samples_of_a_group_go_to_one_engine_and_groups_to_all() {
    let scene = scene(2, patient());
    // Nothing is answered before every place is taken.
    scene.fakes.iter().for_each(|fake| fake.engine().set_paused(true));
    let all = (0..24).map(|sample| {
        let fleet = scene.fleet.clone();
        let request = request(sample).with_affinity(sample / 4);
        scene.runtime.spawn(async move { fleet.generate(request, None).await.unwrap().engine })
    });
    let all: Vec<_> = all.collect();
    let generating = || scene.fakes.iter().map(|fake| fake.engine().generating).sum::<usize>();
    until("all are under way", || generating() == 24);
    scene.fakes.iter().for_each(|fake| fake.engine().set_paused(false));
    let engines: Vec<_> = all.into_iter().map(|sample| scene.runtime.block_on(sample).unwrap()).collect();
    for group in engines.chunks(4) {
        assert!(group.iter().all(|engine| *engine == group[0]), "{engines:?}");
    }
    assert!(engines.iter().any(|engine| *engine != engines[0]), "{engines:?}");
}

#[test]
fn an_abandoned_request_is_aborted_on_its_engine() {
    let scene = scene(1, patient());
    scene.fakes[0].fault("POST /generate", Fault::Hang);
    let fleet = scene.fleet.clone();
    let abandoned = scene.runtime.spawn(async move { fleet.generate(request(5), None).await });
    until("it is under way", || scene.fleet.status()[0].in_flight > 0);
    abandoned.abort();
    until("it is aborted", || scene.fakes[0].changes().contains(&"/abort_request".to_owned()));
    let calls = scene.fakes[0].engine().calls.clone();
    let (_, body) = calls.iter().find(|(path, _)| path == "/abort_request").unwrap();
    assert_eq!(body["rid"], Rid::new(1, 5).to_string());
    assert_eq!(body["abort_all"], false);
}

#[test]
fn without_spans_a_change_of_weights_in_mid_reply_is_noticed() {
    let old = Dialect::of_release("0.5.18");
    let scene = scene_with(1, patient(), |fake| fake.engine().facts().dialect = old);
    scene.fakes[0].fault("POST /generate", Fault::Label(NEW));
    let generation = scene.runtime.block_on(scene.fleet.generate(request(0), Some(&label(OLD)))).unwrap();
    assert_eq!((generation.spans[0].label.as_str(), generation.rid), (OLD, Rid::new(1, 0).next_attempt()));
}

#[test]
fn a_fleet_needs_each_engine_once() {
    let scene = scene(1, patient());
    let address = scene.fakes[0].address.to_string();
    let expected = Expected::from_checkpoint(&scene.fakes[0].engine().started_with.clone()).unwrap();
    for addresses in [vec![], vec![address.clone(), format!("http://{address}/")]] {
        let found = scene.runtime.block_on(Fleet::attach(&addresses, &Keys::default(), &expected, patient()));
        assert!(matches!(found, Err(Error::Fleet { .. })), "{addresses:?}");
    }
}

#[test]
fn samples_that_queue_for_a_busy_engine_are_not_late() {
    let deadline = Duration::from_secs(3);
    let scene = scene(1, patient().with_deadline(deadline).with_concurrency(1));
    let begin = Instant::now();
    let slow = (0..5).map(|sample| {
        scene.fakes[0].fault("POST /generate", Fault::Slow(deadline / 4));
        let fleet = scene.fleet.clone();
        scene.runtime.spawn(async move { fleet.generate(request(sample), None).await })
    });
    for sample in slow.collect::<Vec<_>>() {
        scene.runtime.block_on(sample).unwrap().unwrap();
    }
    assert!(begin.elapsed() > deadline, "the last one waited for longer than a sample may take");
}

#[test]
fn thousand_requests_that_wait_are_each_asked_once() {
    let scene = scene(1, patient().with_concurrency(4));
    let all = (0..1000).map(|sample| {
        let fleet = scene.fleet.clone();
        scene.runtime.spawn(async move { fleet.generate(request(sample), None).await })
    });
    for (number, sample) in all.collect::<Vec<_>>().into_iter().enumerate() {
        let generation = scene.runtime.block_on(sample).unwrap().unwrap();
        assert_eq!(generation.rid, Rid::new(1, number as u64));
    }
    let engine = scene.fakes[0].engine();
    assert_eq!(engine.keys.iter().filter(|(path, _)| path == "/generate").count(), 1000);
    assert!(engine.most_generating <= 4);
}

#[test]
fn request_that_lacks_an_engine_does_not_hold_up_the_next() {
    let scene = scene(1, patient().with_concurrency(1));
    scene.runtime.block_on(async {
        let new = label(NEW);
        let mut first = std::pin::pin!(scene.fleet.generate(request(0), Some(&new)));
        for sample in 1..20 {
            tokio::select! {
                biased;
                early = &mut first => panic!("{early:?}"),
                next = scene.fleet.generate(request(sample), None) => assert!(next.is_ok(), "{next:?}"),
            }
        }
        scene.fakes[0].engine().set_label(NEW);
        assert_eq!(first.await.unwrap().spans[0].label, NEW);
    });
}

#[test]
fn request_that_is_given_up_while_it_waits_leaves_its_turn() {
    let scene = scene(1, patient().with_concurrency(1));
    scene.fakes[0].fault("POST /generate", Fault::Hang);
    let ask = |sample| {
        let fleet = scene.fleet.clone();
        scene.runtime.spawn(async move { fleet.generate(request(sample), None).await })
    };
    let first = ask(0);
    until("it has the place", || scene.fleet.status()[0].in_flight > 0);
    let (second, third) = (ask(1), ask(2));
    second.abort();
    first.abort();
    assert_eq!(scene.runtime.block_on(third).unwrap().unwrap().rid, Rid::new(1, 2));
}

#[test]
fn straggler_and_engine_that_is_away_do_not_hold_up_the_others() {
    let scene = scene(3, patient());
    let wait =
        |to: &str, deadline| scene.runtime.block_on(scene.fleet.wait_for_those_up(&label(to), deadline));
    let long = Duration::from_secs(60);
    assert_eq!(wait(OLD, long).unwrap(), Vec::<String>::new());
    // One has moved, one is away, and one stays behind for as long as it is waited for.
    scene.fakes[0].engine().set_label(NEW);
    scene.fakes[1].kill();
    let behind = wait(NEW, Duration::from_secs(2)).unwrap();
    assert!(behind.len() == 2 && behind.iter().any(|engine| engine.contains(OLD)), "{behind:?}");
    // It is not waited for again: this would take the whole deadline, and the test with it.
    assert_eq!(wait(NEW, Duration::from_secs(3600)).unwrap().len(), 2);
    scene.fakes[2].engine().set_label(NEW);
    until("the straggler is there", || wait(NEW, long).unwrap().len() == 1);
    scene.fakes[1].restart();
    scene.fakes[1].engine().set_label(NEW);
    until("all are there", || wait(NEW, long).unwrap().is_empty());
}

#[test]
fn fleet_of_which_no_engine_comes_to_a_version_is_behind() {
    let scene = scene(2, patient());
    let error =
        scene.runtime.block_on(scene.fleet.wait_for_those_up(&label(NEW), Duration::from_millis(300)));
    assert!(matches!(error, Err(Error::Behind { laggards, .. }) if laggards.len() == 2));
}

#[test]
fn attach_begins_with_those_that_answer_if_they_are_enough() {
    let scene = scene(2, patient());
    scene.fakes[1].kill();
    assert!(matches!(scene.attach(patient()), Err(Error::Unreachable { .. })), "all, unless told");
    match scene.attach(patient().with_engines_min(2)) {
        Err(error @ Error::Unattached { wanted: 2, attached: 1, .. }) => {
            assert!(error.is_transient() && error.to_string().starts_with("1 of 2 engines"), "{error}");
            assert!(error.to_string().contains(&scene.fakes[1].address.to_string()), "{error}");
        }
        other => panic!("{other:?}"),
    }
    let fleet = scene.attach(patient().with_engines_min(1)).unwrap();
    let urls = || fleet.engines().iter().map(|engine| engine.engine().url().to_owned()).collect::<Vec<_>>();
    assert!(urls()[0].contains(&scene.fakes[0].address.to_string()) && urls().len() == 1, "{:?}", urls());
    let status = fleet.status().remove(1);
    assert!(!status.up && status.failure.is_some(), "{status:?}");
    scene.fakes[1].restart();
    scene.fakes[1].engine().set_label(NEW);
    // Only the one that was away has the version.
    let generation = scene.runtime.block_on(fleet.generate(request(0), Some(&label(NEW)))).unwrap();
    assert!(generation.engine.contains(&scene.fakes[1].address.to_string()));
    assert_eq!(urls().len(), 2);
}

#[test]
fn attach_refused_engine_ends_the_start_and_stays_out_later() {
    let scene = scene(1, patient());
    let other = Fake::start(&checkpoint(&scene.dir.path().join("b"), 1, 8));
    let addresses = [&other, &scene.fakes[0]].map(|fake| fake.address.to_string());
    let expected = Expected::from_checkpoint(&scene.fakes[0].engine().started_with.clone()).unwrap();
    let options = patient().with_engines_min(1);
    let attach = || {
        let keys = Keys::default();
        scene.runtime.block_on(Fleet::attach(&addresses, &keys, &expected, options.clone()))
    };
    assert!(matches!(attach(), Err(Error::Refused { .. })));
    other.kill();
    let fleet = attach().unwrap();
    other.restart();
    let look = || scene.runtime.block_on(fleet.look()).unwrap().remove(0);
    until("it is refused", || look().failure.is_some_and(|failure| failure.contains("hidden_size")));
    assert!(!look().up && fleet.engines().len() == 1);
}

#[test]
fn wait_is_patient_with_the_rest_only_once_enough_are_there() {
    let short = Duration::from_millis(100);
    let scene = scene(3, patient().with_engines_min(2).with_patience(short));
    let wait = |deadline| scene.runtime.block_on(scene.fleet.wait_for_those_up(&label(NEW), deadline));
    scene.fakes[0].engine().set_label(NEW);
    match wait(Duration::from_millis(500)) {
        Err(Error::Behind { laggards, .. }) => assert_eq!(laggards.len(), 2, "{laggards:?}"),
        other => panic!("{other:?}"),
    }
    scene.fakes[1].engine().set_label(NEW);
    // The third never takes the version: this would take the whole deadline, and the test with it.
    for _ in 0..2 {
        let behind = wait(Duration::from_secs(3600)).unwrap();
        let [behind] = behind.as_slice() else { panic!("{behind:?}") };
        assert!(behind.contains(&scene.fakes[2].address.to_string()) && behind.contains(OLD), "{behind}");
    }
}
