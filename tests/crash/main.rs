//! kill -9 of the trainer, the follower and the engine at named protocol points. The same command is started
//! again, and the run has to end as if nothing had happened: every step once, every acknowledged record in
//! the log, the fleet on the newest version, all digests equal.

#![allow(clippy::expect_used, reason = "a test ends where its set-up fails")]

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/stage.rs"]
mod stage;

use common::{Process, driftless};
use driftless::bridge::ClientOptions;
use driftless::bridge::sglang::{Client, checksums};
use driftless::buffer::{self, Reader};
use driftless::store::open;
use driftless::transport::{Checkpoint, Run, Snapshot, Version};
use rustix::process::{Pid, Signal, kill_process};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Stdio;

use stage::{GROUPS, Role, SAMPLES, STEPS, Stage, cold_start};

/// Who is killed, where, and at which passage of that point. The trainer's baseline and the follower's
/// checkpoint are the same kind of replica, so both pass the points of an apply.
const KILLS: &[(Role, &str, u32)] = &[
    (Role::Trainer, "publish.encode", 2),
    (Role::Trainer, "publish.upload", 1),
    (Role::Trainer, "publish.manifest", 1),
    (Role::Trainer, "publish.manifest", 2),
    (Role::Trainer, "publish.committed", 1),
    (Role::Trainer, "publish.committed", 3),
    (Role::Trainer, "follow.journal", 2),
    (Role::Trainer, "follow.apply", 2),
    (Role::Trainer, "follow.marker", 1),
    (Role::Trainer, "follow.marker", 2),
    (Role::Trainer, "log.append", 1),
    (Role::Trainer, "log.append", 11),
    (Role::Trainer, "log.commit", 12),
    (Role::Trainer, "train.step", 2),
    (Role::Trainer, "train.checkpoint", 1),
    (Role::Trainer, "train.checkpoint", 3),
    (Role::Follower, "follow.fetch", 1),
    (Role::Follower, "follow.journal", 2),
    (Role::Follower, "follow.apply", 2),
    (Role::Follower, "follow.marker", 1),
    (Role::Follower, "follow.marker", 3),
    (Role::Follower, "follow.activate", 1),
    (Role::Follower, "follow.activate", 3),
    (Role::Follower, "activate.paused", 1),
    (Role::Follower, "activate.paused", 3),
    (Role::Engine, "engine.generate", 1),
    (Role::Engine, "engine.generate", 9),
    (Role::Engine, "engine.load", 1),
    (Role::Engine, "engine.load", 3),
];

#[test]
fn every_kill_ends_in_a_whole_run() {
    let dir = tempfile::tempdir().expect("a directory");
    let model = cold_start(dir.path());
    let rounds = if std::env::var_os("DRIFTLESS_LONG").is_some() { 10 } else { 1 };
    let mut table: BTreeMap<&str, [u32; 3]> = BTreeMap::new();
    for round in 0..rounds {
        for (index, (victim, point, passage)) in KILLS.iter().enumerate() {
            // Later rounds hit the same points at other times.
            let passage = passage + round % 2;
            println!("kill -9 {victim:?} at {point}:{passage}");
            let stage = Stage::new(&dir.path().join(format!("{round}-{index}")), &model);
            if stage.play(*victim, point, passage) {
                table.entry(point).or_default()[*victim as usize] += 1;
            }
            stage.clean_up();
        }
    }
    println!("\n{:18} trainer follower engine", "kills");
    for (point, [trainer, follower, engine]) in &table {
        println!("{point:18} {trainer:7} {follower:8} {engine:6}");
    }
    let hit = |point: &str, victim: Role| table.get(point).is_some_and(|kills| kills[victim as usize] > 0);
    assert!(KILLS.iter().all(|(victim, point, _)| hit(point, *victim)), "every point was hit");
}

impl Stage {
    /// Runs it with one kill; false if the run was over before the point was passed that often.
    fn play(&self, victim: Role, point: &str, passage: u32) -> bool {
        let kill_at = format!("{point}:{passage}");
        let arm = |who| (who == victim).then_some(kill_at.as_str());
        let mut engine = self.start(Role::Engine, arm(Role::Engine));
        engine.listening(self.port);
        let mut follower = self.start(Role::Follower, arm(Role::Follower));
        let mut trainer = self.start(Role::Trainer, arm(Role::Trainer));
        let doomed = match victim {
            Role::Trainer => &mut trainer,
            Role::Follower => &mut follower,
            Role::Engine => &mut engine,
        };
        let killed = self.await_kill(doomed, victim);
        let acknowledged = self.acknowledged();
        match victim {
            Role::Trainer if killed => trainer = self.start(victim, None),
            Role::Follower if killed => follower = self.start(victim, None),
            Role::Engine if killed => engine = self.start(victim, None),
            _ => {}
        }
        trainer.succeed();
        self.check(&acknowledged);
        assert!(follower.ended().is_none(), "the follower ended:\n{}", follower.output());
        assert!(engine.ended().is_none(), "the engine ended:\n{}", engine.output());
        killed
    }

    /// Waits for the victim's death by SIGKILL, or for the end of the run.
    fn await_kill(&self, doomed: &mut Process, victim: Role) -> bool {
        let over = self.dir.join("final/config.json");
        doomed.until("the kill", |process| match process.ended() {
            Some(status) if victim == Role::Trainer && status.success() => Some(false),
            Some(status) => {
                assert_eq!(status.signal(), Some(9), "{victim:?} ended with {status}:\n{}", process.output());
                Some(true)
            }
            None => over.exists().then_some(false),
        })
    }

    /// The records that are durable now, by sample.
    fn acknowledged(&self) -> BTreeMap<u64, Vec<i32>> {
        let Ok(reader) = Reader::open(self.dir.join("rl/log")) else {
            return BTreeMap::new();
        };
        let records = reader.iter(reader.oldest()).filter_map(|record| record.ok());
        let is_learned =
            |record: &buffer::Record| record.kind() == buffer::Kind::Sample && !record.scalars().evaluation;
        let records = records.filter(is_learned);
        records.map(|record| (record.scalars().sample_id, record.tokens().to_vec())).collect()
    }

    fn check(&self, acknowledged: &BTreeMap<u64, Vec<i32>>) {
        let text = std::fs::read_to_string(self.dir.join("rl/metrics.jsonl")).expect("metrics");
        let step = |line: &str| {
            serde_json::from_str::<serde_json::Value>(line).expect("a step")["rollout_id"].as_u64()
        };
        let steps: Vec<_> = text.lines().map(step).collect();
        assert_eq!(steps, (0..STEPS).map(Some).collect::<Vec<_>>(), "every step once, in order");
        self.check_log(acknowledged);
        self.check_fleet();
    }

    fn check_log(&self, acknowledged: &BTreeMap<u64, Vec<i32>>) {
        let log = self.dir.join("rl/log");
        let report = buffer::check::verify(&log).expect("a log");
        assert!(report.is_clean(), "{:?}", report.damage);
        let now = self.acknowledged();
        assert_eq!(
            now.keys().copied().collect::<Vec<_>>(),
            (0..STEPS * GROUPS * SAMPLES).collect::<Vec<_>>()
        );
        for (sample, tokens) in acknowledged {
            assert_eq!(
                now.get(sample),
                Some(tokens),
                "sample {sample} was acknowledged and is not what it was"
            );
        }
    }

    /// Trainer, store, host and engine hold the same newest version.
    fn check_fleet(&self) {
        let store = open(&self.dir.join("store").to_string_lossy()).expect("a store");
        let run = Run::open(store, "test").expect("the run");
        let newest = run.newest("policy").expect("a chain").expect("a version");
        assert_eq!(newest.manifest.trainer_step, STEPS);
        for version in 0..=newest.manifest.version.0 {
            run.get("policy", Version(version)).expect("no gap in the chain");
        }
        let policy = Checkpoint::open(self.dir.join("final")).expect("the saved policy");
        let host = Checkpoint::open(self.dir.join("host")).expect("the host's checkpoint");
        assert_eq!(policy.tensors(), host.tensors());
        for index in 0..policy.tensors().len() {
            assert!(
                policy.bytes(index).expect("bytes") == host.bytes(index).expect("bytes"),
                "tensor {index}"
            );
        }
        let client =
            Client::new(&format!("127.0.0.1:{}", self.port), ClientOptions::default()).expect("an address");
        let runtime = tokio::runtime::Runtime::new().expect("threads");
        let label = runtime.block_on(client.model_info()).expect("the engine answers").weight_version;
        assert_eq!(label, Some(newest.manifest.label()));
        let live = runtime.block_on(client.checksums()).expect("the engine answers");
        let expected = checksums(&policy, Path::new("final")).expect("a dense model");
        assert_eq!(live.first().map(|rank| &rank.checksums), Some(&expected));
    }

    fn clean_up(self) {
        std::fs::remove_dir_all(&self.dir).expect("the stage can be cleared");
    }
}

/// The status of a GET of the engine.
fn status(port: u16, path: &str) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("it listens");
    write!(stream, "GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").expect("it reads");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    answer.split(' ').nth(1).unwrap_or_default().to_owned()
}

/// The command without libtorch has all tests of pipes; this one has what that library could change.
#[test]
fn command_with_libtorch_ends_at_a_closed_or_a_full_pipe() {
    for args in [&["--version"][..], &["serve", "--help"]] {
        let (reader, closed) = std::io::pipe().expect("a pipe");
        drop(reader);
        let full = File::options().write(true).open("/dev/full").expect("a device");
        for (out, code, words) in [(Stdio::from(closed), 141, ""), (full.into(), 1, "cannot be written")] {
            let output = driftless().args(args).stdout(out).output().expect("it runs");
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(
                (output.status.code(), said.is_empty()),
                (Some(code), words.is_empty()),
                "{args:?}: {said}"
            );
            assert!(said.contains(words), "{args:?}: {said}");
        }
    }
}

#[test]
fn a_second_signal_ends_an_engine_that_does_not_end_by_itself() {
    let dir = tempfile::tempdir().expect("a directory");
    let stage = Stage::new(dir.path(), &cold_start(dir.path()));
    let mut command = stage.command(Role::Engine);
    // The generating thread stops in its first forward pass.
    command.env("FAILPOINTS", "engine.generate=pause").env("RUST_LOG", "info");
    let mut engine = Process::start("engine", &stage.dir, &mut command);
    engine.listening(stage.port);
    assert_eq!(status(stage.port, "/health"), "503");
    let id = Pid::from_raw(engine.id() as i32).expect("a process");
    kill_process(id, Signal::TERM).expect("it runs");
    engine.until("the first signal", |engine| engine.output().contains("SIGTERM came").then_some(()));
    // It may have ended by itself, on a busy machine, and with the same.
    let _ = kill_process(id, Signal::INT);
    let (ended, words) = (engine.wait(), engine.output());
    assert_eq!(ended.code(), Some(143), "{words}");
    assert!(words.contains("was interrupted by SIGTERM"), "{words}");
}
