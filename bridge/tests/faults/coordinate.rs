//! One coordinator for several hosts, of which some are away, slow or lie.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::routing::post;
use axum::{Json, Router};
use driftless_bridge::activate::{DiskActivator, DiskOptions};
use driftless_bridge::coordinate::{Coordinator, CoordinatorOptions};
use driftless_bridge::fleet::{FleetOptions, Route};
use driftless_bridge::{
    ClientOptions, Error, Expected, Fleet, GenerateRequest, Keys, Label, Rid, SamplingParams,
};
use driftless_follower::{ServeOptions, serve};
use driftless_http::Server;
use driftless_store::{Memory, Store};
use driftless_transport::activate::Activate;
use driftless_transport::follow::FollowerOptions;
use driftless_transport::publish::{Mode, PublisherOptions, Start, Step};
use driftless_transport::{Checkpoint, Follower, Publisher};
use serde_json::json;
use tokio::runtime::Runtime;

use driftless_testkit::sglang::{Fake, Fault, checkpoint, patient, short};

const TOKEN: &str = "of the followers";

/// Hosts with a follower and an engine each, on version 0; versions 1 and 2 are published.
struct Scene {
    hosts: Vec<Host>,
    fleet: Fleet,
    labels: Vec<Label>,
    runtime: Runtime,
    dir: tempfile::TempDir,
}

struct Host {
    engine: Fake,
    server: Option<Server>,
}

fn scene(count: usize) -> Scene {
    scene_with(count, &patient())
}

/// The followers ask their engines as `client` says.
fn scene_with(count: usize, client: &ClientOptions) -> Scene {
    let dir = tempfile::tempdir().unwrap();
    let start = checkpoint(&dir.path().join("start"), 1, 4);
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    let options = PublisherOptions::new("test", Start::NewRun, dir.path().join("baseline"));
    let mut publisher = Publisher::open(store.clone(), options).unwrap();
    publisher.publish_reference(&start, Step::default()).unwrap();
    for seed in [2, 3] {
        let next = Checkpoint::open(checkpoint(&dir.path().join("next"), seed, 4)).unwrap();
        publisher.publish(&next, Step::default(), Mode::Delta).unwrap();
    }
    let labels: Vec<Label> =
        (0..3).map(|version| Label::new(&publisher.run().id().to_string(), version).unwrap()).collect();
    let hosts: Vec<Host> =
        (0..count).map(|number| host(&store, &start, dir.path(), number, client)).collect();
    let addresses: Vec<String> = hosts.iter().map(|host| host.engine.address.to_string()).collect();
    let runtime = Runtime::new().unwrap();
    let coordinator = Coordinator::new(&followers(&hosts), options_of(0)).unwrap();
    runtime.block_on(coordinator.roll(&labels[0])).unwrap();
    let options = FleetOptions::default()
        .with_route(Route::RoundRobin)
        .with_deadline(Duration::from_secs(60))
        .with_calls(patient().deadlines);
    let expected = Expected::from_checkpoint(&start).unwrap();
    let fleet = runtime.block_on(Fleet::attach(&addresses, &Keys::default(), &expected, options)).unwrap();
    Scene { hosts, fleet, labels, runtime, dir }
}

fn host(store: &Arc<dyn Store>, start: &Path, dir: &Path, number: usize, client: &ClientOptions) -> Host {
    let engine = Fake::start(start);
    let activator = DiskOptions::default().with_client(client.clone());
    let activator: Box<dyn Activate> =
        Box::new(DiskActivator::new(&engine.address.to_string(), activator).unwrap());
    let id = format!("host-{number}");
    let mut options = FollowerOptions::new("test", dir.join(&id), id);
    options.hf_checkpoint = Some(PathBuf::from(start));
    options.coordinated = true;
    let follower = Follower::open(store.clone(), options, vec![activator]).unwrap();
    let server = serve(follower, ServeOptions::new(([127, 0, 0, 1], 0)).with_token(TOKEN)).unwrap();
    Host { engine, server: Some(server) }
}

fn followers(hosts: &[Host]) -> Vec<String> {
    hosts.iter().map(|host| host.server.as_ref().unwrap().addr().to_string()).collect()
}

/// Patient with a busy machine, impatient with stragglers.
fn options_of(hosts_min: usize) -> CoordinatorOptions {
    CoordinatorOptions::default()
        .with_keys(Keys::new(Some(TOKEN), None).unwrap())
        .with_hosts_min(hosts_min)
        .with_grace(if hosts_min == 0 { Duration::from_secs(60) } else { Duration::from_secs(3) })
        .with_prepare_deadline(Duration::from_secs(120))
        .with_activate_deadline(Duration::from_secs(120))
}

impl Scene {
    fn coordinator(&self, hosts_min: usize) -> Coordinator {
        Coordinator::new(&followers(&self.hosts), options_of(hosts_min)).unwrap()
    }

    /// Version that each engine says it serves.
    fn serving(&self) -> Vec<String> {
        self.hosts.iter().map(|host| host.engine.engine().label()).collect()
    }

    fn label(&self, version: usize) -> String {
        self.labels[version].to_string()
    }

    fn pauses(&self, host: usize) -> usize {
        self.hosts[host].engine.changes().iter().filter(|path| *path == "/pause_generation").count()
    }

    /// The engines, by number, that a few requests for at least this version went to.
    fn asked(&self, first: u64, version: usize) -> Vec<usize> {
        self.runtime.block_on(self.fleet.look()).unwrap();
        let mut asked: Vec<usize> = (first..first + 6)
            .map(|sample| {
                let sampling = SamplingParams { max_new_tokens: 1, ..SamplingParams::default() };
                let request = GenerateRequest::new(Rid::new(1, sample), vec![1], sampling);
                let generation =
                    self.runtime.block_on(self.fleet.generate(request, Some(&self.labels[version]))).unwrap();
                let of = |host: &Host| generation.engine.contains(&host.engine.address.to_string());
                self.hosts.iter().position(of).unwrap()
            })
            .collect();
        asked.sort_unstable();
        asked.dedup();
        asked
    }
}

#[test]
fn every_host_changes_and_a_second_time_nothing_is_done() {
    let scene = scene(3);
    let coordinator = scene.coordinator(0);
    let rolled = scene.runtime.block_on(coordinator.roll(&scene.labels[2])).unwrap();
    assert_eq!((rolled.label.to_string(), rolled.stragglers().count()), (scene.label(2), 0));
    assert_eq!(scene.serving(), vec![scene.label(2); 3]);
    assert_eq!(scene.asked(0, 2), [0, 1, 2]);
    let before: Vec<usize> = (0..3).map(|host| scene.pauses(host)).collect();
    scene.runtime.block_on(coordinator.roll(&scene.labels[2])).unwrap();
    assert_eq!((0..3).map(|host| scene.pauses(host)).collect::<Vec<_>>(), before);
}

#[test]
fn no_engine_is_paused_before_enough_hosts_are_prepared() {
    let mut scene = scene(2);
    let coordinator = scene.coordinator(0);
    drop(scene.hosts[1].server.take());
    let before = scene.pauses(0);
    match scene.runtime.block_on(coordinator.roll(&scene.labels[1])) {
        Err(Error::Unprepared { version: 1, wanted: 2, hosts }) => assert_eq!(hosts.len(), 1, "{hosts:?}"),
        other => panic!("{other:?}"),
    }
    assert_eq!((scene.pauses(0), scene.serving()), (before, vec![scene.label(0); 2]));
    assert_eq!(scene.asked(0, 0), [0, 1]);
}

#[test]
fn straggler_is_asked_for_nothing_and_comes_along_later() {
    for fault in [Fault::Hang, Fault::Answer(500, "no".into()), Fault::Rollback, Fault::Die] {
        let client = if matches!(fault, Fault::Hang) { short(|calls| &mut calls.load) } else { patient() };
        let scene = scene_with(3, &client);
        let coordinator = scene.coordinator(2);
        scene.hosts[1].engine.fault("POST /update_weights_from_disk", fault.clone());
        let rolled = scene.runtime.block_on(coordinator.roll(&scene.labels[1])).unwrap();
        let stragglers: Vec<_> = rolled.stragglers().collect();
        assert_eq!(stragglers.len(), 1, "{fault:?}: {rolled:?}");
        assert!(stragglers[0].failure.is_some() && stragglers[0].prepared.is_some(), "{stragglers:?}");
        let unknown = format!("{}?partial", scene.label(1));
        assert_eq!(scene.serving(), [scene.label(1), unknown, scene.label(1)], "{fault:?}");
        assert_eq!(scene.asked(0, 1), [0, 2], "{fault:?}: no traffic below the version");
        // The next version takes it along.
        let rolled = scene.runtime.block_on(coordinator.roll(&scene.labels[2])).unwrap();
        assert_eq!(rolled.stragglers().count(), 0, "{fault:?}: {rolled:?}");
        assert_eq!(scene.asked(10, 2), [0, 1, 2], "{fault:?}");
    }
}

#[test]
fn a_host_that_never_answers_costs_its_grace_and_is_named() {
    let scene = scene(1);
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let addresses = [followers(&scene.hosts), vec![silent.local_addr().unwrap().to_string()]].concat();
    let options = options_of(1).with_grace(Duration::from_millis(50));
    let coordinator = Coordinator::new(&addresses, options).unwrap();
    let rolled = scene.runtime.block_on(coordinator.roll(&scene.labels[1])).unwrap();
    let stragglers: Vec<_> = rolled.stragglers().map(|host| (&host.url, host.failure.as_ref())).collect();
    assert_eq!(stragglers.len(), 1);
    assert!(stragglers[0].0.contains(&addresses[1]), "{stragglers:?}");
    assert_eq!(scene.serving(), [scene.label(1)]);
}

/// A follower of another run, or one that is behind, which answers before anybody else.
#[test]
fn host_that_prepares_another_version_is_the_only_straggler() {
    let scene = scene(1);
    for (version, label) in [(1, "ffffffffffff:1".to_owned()), (2, scene.label(1))] {
        let reply = json!({"version": 1, "label": label, "links": 0, "bytes": 0, "changed": 0});
        let prepared = Router::new().route("/prepare", post(move || async move { Json(reply) }));
        let listener = scene.runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let liar = listener.local_addr().unwrap().to_string();
        scene.runtime.spawn(async move { axum::serve(listener, prepared).await });
        let addresses = [vec![liar.clone()], followers(&scene.hosts)].concat();
        let coordinator = Coordinator::new(&addresses, options_of(1)).unwrap();
        let rolled = scene.runtime.block_on(coordinator.roll(&scene.labels[version])).unwrap();
        let [straggler] = rolled.stragglers().collect::<Vec<_>>()[..] else { panic!("{rolled:?}") };
        assert!(straggler.url.contains(&liar), "{straggler:?}");
        assert!(straggler.failure.as_ref().unwrap().contains(&label), "{straggler:?}");
        assert_eq!(scene.serving(), [scene.label(version)]);
    }
}

#[test]
fn too_few_hosts_that_activate_are_an_error() {
    let scene = scene(2);
    let coordinator = scene.coordinator(2);
    // It goes on with what it has.
    scene.hosts[0].engine.fault("POST /update_weight_version", Fault::KeepLabel);
    match scene.runtime.block_on(coordinator.roll(&scene.labels[1])) {
        Err(Error::Unactivated { label, wanted: 2, hosts }) => {
            assert_eq!((label, hosts.len()), (scene.label(1), 1), "{hosts:?}")
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(scene.asked(0, 0), [0, 1]);
}

#[test]
fn wrong_tokens_and_addresses_are_refused() {
    let scene = scene(1);
    let options = options_of(0).with_keys(Keys::default());
    let coordinator = Coordinator::new(&followers(&scene.hosts), options).unwrap();
    match scene.runtime.block_on(coordinator.roll(&scene.labels[1])) {
        Err(Error::Unprepared { hosts, .. }) => assert!(hosts[0].contains("401"), "{hosts:?}"),
        other => panic!("{other:?}"),
    }
    let one = followers(&scene.hosts).remove(0);
    for addresses in [vec![], vec![one.clone(), format!("http://{one}/")]] {
        assert!(matches!(Coordinator::new(&addresses, options_of(0)), Err(Error::Fleet { .. })));
    }
    assert!(scene.dir.path().join("host-0").is_dir());
}
