//! kill -9 of publishers, followers and relays, as the processes they are: at named points and at random
//! moments. Nobody repairs anything; the same command is started again, and host and engine end on the newest
//! version, bit for bit.
//!
//! 100 kills, and 150 of runs over prompts; `DRIFTLESS_LONG=1` makes them 1,000 and 750. What is random comes
//! from seeds, which are printed.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test ends where its set-up fails")]

#[path = "../common/mod.rs"]
mod common;
mod model;
mod points;
mod prompts;
mod relay;

use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use common::{driftless, json};
use driftless_store::open;
use driftless_testkit::random::Random;
use driftless_testkit::sglang::Fake;
use driftless_transport::run::Committed;
use driftless_transport::{Checkpoint, Replica, Run};
use model::contents;
use relay::Relay;

/// Who is killed, and where. The publisher's baseline is a replica like the follower's checkpoint.
const POINTS: &[(Role, &str)] = &[
    (Role::Publisher, "publish.encode"),
    (Role::Publisher, "publish.upload"),
    (Role::Publisher, "publish.manifest"),
    (Role::Publisher, "publish.committed"),
    (Role::Publisher, "follow.fetch"),
    (Role::Publisher, "follow.journal"),
    (Role::Publisher, "follow.apply"),
    (Role::Publisher, "follow.sync"),
    (Role::Publisher, "follow.marker"),
    (Role::Publisher, "gc.floor"),
    (Role::Publisher, "gc.manifest"),
    (Role::Publisher, "gc.objects"),
    (Role::Follower, "follow.fetch"),
    (Role::Follower, "follow.offered"),
    (Role::Follower, "follow.journal"),
    (Role::Follower, "follow.apply"),
    (Role::Follower, "follow.sync"),
    (Role::Follower, "follow.marker"),
    (Role::Follower, "follow.activate"),
    (Role::Follower, "activate.paused"),
    (Role::Relay, "relay.fetch"),
    (Role::Relay, "relay.range"),
    (Role::Relay, "relay.whole"),
];
/// How often a command that ended before the point is started again, on another version, until it is hit.
const TRIES: u64 = 4;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Role {
    Publisher,
    Follower,
    Relay,
}

/// 1, or 10 in the long form.
fn times() -> u64 {
    if std::env::var_os("DRIFTLESS_LONG").is_some() { 10 } else { 1 }
}

#[test]
fn at_every_named_point() {
    let mut kills = 0;
    for round in 0..3 * times() {
        let mut stage = Stage::new();
        for (role, point) in POINTS {
            // Every third round goes for the second passage, which not every point has.
            let passage = 1 + u64::from(round % 3 == 2);
            let hit = (0..if passage == 1 { TRIES } else { 1 }).any(|_| stage.kill_at(*role, point, passage));
            assert!(hit || passage > 1, "{role:?} never passed {point}");
            kills += u64::from(hit);
        }
    }
    println!("{kills} kills at {} points", POINTS.len());
    assert!(kills >= 32 * times(), "{kills} kills");
}

#[test]
fn at_random_moments() {
    let mut kills = 0;
    for seed in 0..5 * times() {
        println!("seed {seed}");
        let mut stage = Stage::new();
        let mut random = Random(seed);
        for _ in 0..14 {
            kills += stage.kill_randomly(&mut random);
        }
    }
    println!("{kills} kills at random moments");
    assert!(kills >= 70 * times(), "{kills} kills");
}

/// A run whose publisher and follower are processes that die.
struct Stage {
    dir: tempfile::TempDir,
    engine: Fake,
    /// The optimiser step of the next checkpoint; what it holds follows from it.
    step: u64,
    /// How long a publication takes that is let be.
    usual: Duration,
    /// Whether followers offer versions before their journals are durable.
    offers_decoded: bool,
}

impl Stage {
    /// With version 0 on the host and on the engine.
    fn new() -> Stage {
        let dir = tempfile::tempdir().expect("a directory");
        let engine = Fake::start(&contents(0).write(&dir.path().join("start")));
        let mut stage = Stage { dir, engine, step: 0, usual: Duration::ZERO, offers_decoded: false };
        stage.pretend_plugin();
        let started = Instant::now();
        json(&mut stage.publish());
        stage.usual = started.elapsed();
        stage.settle();
        stage
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The command that publishes the checkpoint of the next step, anchors often and collects what can be.
    fn publish(&mut self) -> Command {
        let start = if self.step == 0 { "--new-run" } else { "--resume" };
        contents(self.step).write(&self.path("checkpoint"));
        let mut command = driftless();
        command.args(["publish", "--run", "test", "--store"]).arg(self.path("store"));
        command.args([start, "--anchor-every", "2", "--keep", "1", "--step", &self.step.to_string()]);
        command.arg("--checkpoint").arg(self.path("checkpoint"));
        command.arg("--baseline-dir").arg(self.path("baseline"));
        self.step += 1;
        command
    }

    fn follow(&self) -> Command {
        let mut command = driftless();
        command.args(["follow", "--run", "test", "--id", "host", "--poll-ms", "2", "--store"]);
        command.arg(self.path("store")).arg("--checkpoint-dir").arg(self.path("host"));
        command.args(["--engine", &self.engine.address.to_string()]);
        command.args(["--offer", if self.offers_decoded { "decoded" } else { "durable" }]);
        command.arg("--plugin-dir").arg(self.path("plugins"));
        command
    }

    /// Has followers offer versions, to an engine that loads them all the same.
    fn pretend_plugin(&self) {
        let dir = self.path("plugins");
        std::fs::create_dir(&dir).expect("a directory");
        let own = std::fs::Permissions::from_mode(0o700);
        std::fs::set_permissions(&dir, own).expect("an own directory");
        std::fs::write(dir.join("rank-1-0.json"), "{}").expect("space");
    }

    fn follow_once(&self) -> Command {
        let mut command = self.follow();
        command.arg("--once");
        command
    }

    /// Kills one at the `passage`-th time that it passes `point`; false if it ended before.
    fn kill_at(&mut self, role: Role, point: &str, passage: u64) -> bool {
        self.offers_decoded = point == "follow.offered";
        println!("kill -9 {role:?} at {point}:{passage}");
        let had = self.on_host();
        let kill_at = format!("{point}:{passage}");
        let killed = match role {
            Role::Relay => self.kill_relay_at(&kill_at),
            _ => {
                let mut command = self.victim(role, point);
                command.env("DRIFTLESS_KILL_AT", kill_at);
                was_killed(quiet(&mut command).wait().expect("a child"), role)
            }
        };
        self.check_host(had);
        self.settle();
        killed
    }

    /// The publisher, or the follower of what another one has just published.
    fn victim(&mut self, role: Role, point: &str) -> Command {
        if role == Role::Follower {
            json(&mut self.publish());
            return self.follow_once();
        }
        if point == "follow.fetch" {
            // Only a baseline that has to be built anew is fetched.
            std::fs::remove_dir_all(self.path("baseline")).expect("there was one");
        }
        self.publish()
    }

    /// Follows a version through a relay that dies meanwhile; false if it did not.
    fn kill_relay_at(&mut self, kill_at: &str) -> bool {
        json(&mut self.publish());
        let relay = self.relay(Some(kill_at));
        json(self.follow_once().args(["--relay", relay.url()]));
        relay.has_ended()
    }

    /// A relay over the cache that the one before left.
    fn relay(&self, kill_at: Option<&str>) -> Relay {
        Relay::start(&self.path("store"), &self.path("cache"), kill_at)
    }

    /// Lets all work at once and kills the follower, and mostly the publisher and the relay, some time during
    /// it; how many were killed.
    fn kill_randomly(&mut self, random: &mut Random) -> u64 {
        self.offers_decoded = random.unit() < 0.5;
        let had = self.on_host();
        let relay = self.relay(None);
        let mut follower = quiet(self.follow().args(["--relay", relay.url()]));
        let mut publisher = quiet(&mut self.publish());
        let moment = self.usual.mul_f64(random.unit() * 1.2);
        std::thread::sleep(moment);
        if random.unit() < 0.75 {
            publisher.kill().expect("a child");
        }
        let published = publisher.wait().expect("a child");
        let relays = u64::from(random.unit() < 0.75);
        if relays == 1 {
            std::thread::sleep(self.usual.mul_f64(random.unit() * 0.5));
            drop(relay);
        }
        std::thread::sleep(self.usual.mul_f64(random.unit()));
        follower.kill().expect("a child");
        let followed = follower.wait().expect("a child");
        let kills = u64::from(was_killed(published, Role::Publisher))
            + u64::from(was_killed(followed, Role::Follower))
            + relays;
        if random.unit() < 0.5 {
            self.check_host(had);
        }
        self.settle();
        kills
    }

    /// The version that the host's state names.
    fn on_host(&self) -> Option<u64> {
        let text = std::fs::read(self.path("host/.driftless/state.json")).ok()?;
        let state: serde_json::Value = serde_json::from_slice(&text).expect("a marker is replaced whole");
        state["applied"]["version"].as_u64()
    }

    /// What a restart finds on the host: one version whole, and not an older one.
    fn check_host(&self, had: Option<u64>) {
        self.check_what_loads();
        let replica = Replica::open(self.path("host")).expect("a crash leaves nothing damaged");
        let applied = replica.applied().cloned();
        assert!(had <= applied.as_ref().map(|applied| applied.version.0), "{had:?}, then {applied:?}");
        if let Some(manifest) = replica.manifest() {
            contents(manifest.trainer_step).assert_in(replica.checkpoint().expect("applied"));
        }
    }

    /// An engine that starts before the follower does gets a version whole, or nothing: without its config no
    /// engine loads a directory.
    fn check_what_loads(&self) {
        if self.path("host/config.json").exists() {
            let found = Checkpoint::open(self.path("host")).expect("a checkpoint");
            assert!(
                (0..self.step).rev().any(|step| contents(step).is_in(&found)),
                "a mixture could be loaded"
            );
        }
    }

    /// Publishes and follows once more without a kill: everybody ends on the newest version.
    fn settle(&mut self) {
        if self.step > 1 {
            json(&mut self.publish());
        }
        let had = self.on_host();
        json(&mut self.follow_once());
        let newest = self.newest();
        assert_eq!(newest.manifest.trainer_step + 1, self.step);
        assert!(had <= self.on_host());
        assert_eq!(self.on_host(), Some(newest.manifest.version.0));
        contents(newest.manifest.trainer_step)
            .assert_in(&Checkpoint::open(self.path("host")).expect("a checkpoint"));
        let engine = self.engine.engine();
        assert_eq!((&engine.label(), engine.is_paused()), (&newest.manifest.label(), false));
    }

    fn newest(&self) -> Committed {
        let store = open(&self.path("store").to_string_lossy()).expect("a store");
        Run::open(store, "test").expect("the run").newest("policy").expect("a chain").expect("a version")
    }
}

fn quiet(command: &mut Command) -> Child {
    command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().expect("the program starts")
}

/// Whether it was killed; otherwise it has to have ended well.
fn was_killed(status: ExitStatus, role: Role) -> bool {
    assert!(status.success() || status.signal() == Some(9), "{role:?} ended with {status}");
    status.signal() == Some(9)
}

/// The directory of the workspace.
fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}
