//! How little an idle follower asks, and how soon it looks when it is told to.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

use std::io::Read as _;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use driftless_follower::{ServeOptions, serve};
use driftless_http::{Error as HttpError, Followers};
use driftless_store::wait::Stop;
use driftless_store::wrap::{Count, Counts};
use driftless_store::{Memory, PutMode, Store};
use driftless_testkit::http::exchange;
use driftless_testkit::publications::{self, MODEL, RUN, Weights, publisher, step};
use driftless_transport::follow::FollowerOptions;
use driftless_transport::publish::{Mode, Notify, PublisherOptions, Start};
use driftless_transport::{Checkpoint, Follower, Publisher, Run, Version};

struct World {
    store: Arc<dyn Store>,
    count: Arc<Count>,
    publisher: Publisher,
    follower: Follower,
    weights: Weights,
    dir: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store: Arc<dyn Store> = Arc::new(Memory::new());
        let publisher = publisher(&store, Start::NewRun, &dir.path().join("baseline"));
        let count = Arc::new(Count::new(store.clone()));
        let mut options = FollowerOptions::new(RUN, dir.path().join("replica"), "host");
        // A look happens when somebody asks for it, or not within this test.
        options.poll = Duration::from_secs(3600);
        let follower = Follower::open(count.clone(), options, Vec::new()).unwrap();
        let mut world = Self { store, count, publisher, follower, weights: Weights::small(1), dir };
        world.publish();
        world
    }

    fn publish(&mut self) -> Version {
        self.weights.step(7, 9);
        self.publisher.publish(&self.weights, step(0), Mode::Delta).unwrap().version
    }

    /// What one look asks of the store.
    fn look(&self) -> (Version, [u64; 4]) {
        let before = self.count.counts();
        let version = self.follower.prepare(None).unwrap().version;
        (version, calls(self.count.counts(), before))
    }
}

fn calls(now: Counts, before: Counts) -> [u64; 4] {
    let of = |counts: Counts| [counts.gets, counts.heads, counts.lists, counts.puts];
    std::array::from_fn(|i| of(now)[i] - of(before)[i])
}

/// Waits for what another thread does.
fn until(what: &str, done: &dyn Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !done() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::yield_now();
    }
}

#[test]
fn an_idle_look_is_one_request() {
    let mut world = World::new();
    assert_eq!(world.look().0, Version(0));
    for _ in 0..5 {
        assert_eq!(world.look(), (Version(0), [1, 0, 0, 0]), "gets, heads, lists, puts");
    }
    for expected in 1..4 {
        assert_eq!(world.publish(), Version(expected));
        let (version, [gets, heads, lists, puts]) = world.look();
        // The next manifest and the object; whether there is another one behind it; the floor; lease and
        // acknowledgement.
        assert_eq!(version, Version(expected));
        assert!(gets <= 2 && heads <= 1 && lists <= 1 && puts <= 2, "{gets} {heads} {lists} {puts}");
        assert_eq!(world.look(), (version, [1, 0, 0, 0]));
    }
    // Several at once are found, whatever the head says.
    for _ in 0..3 {
        world.publish();
    }
    let head = driftless_store::Key::new(format!("{}/{MODEL}/head", world.publisher.run().id())).unwrap();
    world.store.put(&head, b"{\"version\":0}", PutMode::Overwrite).unwrap();
    assert_eq!(world.look().0, Version(6));
    assert_eq!(world.look(), (Version(6), [1, 0, 0, 0]));
    let found = Checkpoint::open(world.dir.path().join("replica")).unwrap();
    driftless_testkit::publications::assert_same(&found, &world.weights);
    assert_eq!(Run::open(world.store.clone(), RUN).unwrap().newest_version(MODEL).unwrap(), Some(Version(6)));
}

#[test]
fn version_after_a_quiet_look_is_taken_without_asking_more() {
    let mut world = World::new();
    let stop = Stop::new();
    let (follower, switch) = (world.follower.clone(), stop.clone());
    let watcher = std::thread::spawn(move || follower.run_until(&switch, false));
    let has =
        |follower: &Follower, version| follower.status().applied.is_some_and(|ack| ack.version >= version);
    let look = |world: &World| {
        let gets = world.count.counts().gets;
        until("nobody watches", &|| world.follower.notify());
        until("it does not look", &|| world.count.counts().gets > gets);
    };
    until("version 0", &|| has(&world.follower, Version(0)));
    // The second begins when the first has found nothing.
    look(&world);
    look(&world);
    let before = world.count.counts();
    assert_eq!(world.publish(), Version(1));
    look(&world);
    until("version 1", &|| has(&world.follower, Version(1)));
    assert_eq!(calls(world.count.counts(), before)[1..3], [0, 1], "heads, and the floor");
    // Several are found as well, the first of them maybe by itself.
    look(&world);
    for _ in 0..3 {
        world.publish();
    }
    look(&world);
    until("version 2", &|| has(&world.follower, Version(2)));
    look(&world);
    until("version 4", &|| has(&world.follower, Version(4)));
    stop.stop();
    watcher.join().unwrap().unwrap();
}

fn notified(addr: SocketAddr) -> (u16, String) {
    exchange(addr, "POST /notify", "", "")
}

#[test]
fn a_follower_that_is_told_looks_at_once() {
    let mut world = World::new();
    let server = serve(world.follower.clone(), ServeOptions::new(([127, 0, 0, 1], 0))).unwrap();
    assert_eq!(notified(server.addr()), (202, "{\"watching\":false}".to_owned()));
    let stop = Stop::new();
    let (follower, switch) = (world.follower.clone(), stop.clone());
    let (done, ended) = channel();
    let watcher = std::thread::spawn(move || {
        let outcome = follower.run_until(&switch, false);
        done.send(()).unwrap();
        outcome
    });
    for version in 0..4 {
        if version > 0 {
            assert_eq!(world.publish(), Version(version));
            // Also while the loop is at work: the look that follows is not lost.
            assert_eq!(notified(server.addr()), (202, "{\"watching\":true}".to_owned()));
        }
        until("the version was not looked for", &|| {
            world.follower.status().applied.is_some_and(|ack| ack.version == Version(version))
        });
    }
    stop.stop();
    ended.recv_timeout(Duration::from_secs(60)).unwrap();
    watcher.join().unwrap().unwrap();
    assert!(!world.follower.notify(), "nobody watches any more");
}

/// Options of a publisher that tells the followers at `urls`.
fn telling(urls: &[String], token: Option<&str>, start: Start, dir: &Path) -> PublisherOptions {
    let followers = Followers::new(urls, token).unwrap();
    publications::options(start, dir).with_notify(Notify::new(move |_| followers.tell()))
}

#[test]
fn publish_followers_away_or_silent_hold_nothing_up() {
    let gone = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let urls = [gone, silent.local_addr().unwrap()].map(|addr| format!("http://{addr}"));
    let dir = tempfile::tempdir().unwrap();
    let options = telling(&urls, None, Start::NewRun, dir.path());
    let mut publisher = Publisher::open(Arc::new(Memory::new()), options).unwrap();
    let mut weights = Weights::small(1);
    for version in 0..5 {
        weights.step(version, 9);
        publisher.publish(&weights, step(0), Mode::Delta).unwrap();
    }
    // It has been told, and no version waited for its answer.
    let mut heard = [0; 12];
    silent.accept().unwrap().0.read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"POST /notify");
}

#[test]
fn publish_tells_a_follower_that_wants_a_token() {
    let world = World::new();
    let (stop, follower) = (Stop::new(), world.follower.clone());
    let switch = stop.clone();
    let watcher = std::thread::spawn(move || follower.run_until(&switch, false));
    let options = ServeOptions::new(([127, 0, 0, 1], 0)).with_token("secret");
    let server = serve(world.follower.clone(), options).unwrap();
    let has = |version| world.follower.status().applied.is_some_and(|ack| ack.version == Version(version));
    until("version 0", &|| has(0));
    let urls = [format!("http://{}/", server.addr())];
    let options = telling(&urls, Some("secret"), Start::Resume, &world.dir.path().join("other"));
    let mut other = Publisher::open(world.store.clone(), options).unwrap();
    other.publish(&world.weights, step(0), Mode::Full).unwrap();
    until("version 1", &|| has(1));
    stop.stop();
    watcher.join().unwrap().unwrap();
}

#[test]
fn followers_urls_with_secrets_are_refused_without_them() {
    for bad in ["host:1", "ftp://host", "http://user:word@host", "http://host?token=word"] {
        let error = Followers::new(&[bad.to_owned()], None).unwrap_err();
        assert!(matches!(&error, HttpError::BadUrl { text, .. } if !text.contains("word")), "{error:?}");
    }
}
