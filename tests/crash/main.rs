//! kill -9 of the trainer, the follower and the engine at every named protocol point. The same command is started again,
//! and the run has to end as if nothing had happened: every step once, every acknowledged record in the log, the fleet on
//! the newest version, all digests equal.

#![allow(clippy::expect_used, reason = "a test ends where its set-up fails")]

#[path = "../common/mod.rs"]
mod common;

use common::{Process, driftless, free_port, run};
use driftless::bridge::{Client, ClientOptions, checksums};
use driftless::buffer::{self, Reader};
use driftless::transport::{Checkpoint, Run, Snapshot, Version, open};
use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const STEPS: u64 = 3;
const GROUPS: u64 = 4;
const SAMPLES: u64 = 2;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Victim {
    Trainer,
    Follower,
    Engine,
}

/// Who is killed, where, and at which passage of that point. The trainer's baseline and the follower's checkpoint are
/// the same kind of replica, so both pass the points of an apply.
const KILLS: &[(Victim, &str, u32)] = &[
    (Victim::Trainer, "publish.encode", 2),
    (Victim::Trainer, "publish.upload", 1),
    (Victim::Trainer, "publish.manifest", 1),
    (Victim::Trainer, "publish.manifest", 2),
    (Victim::Trainer, "publish.committed", 1),
    (Victim::Trainer, "publish.committed", 3),
    (Victim::Trainer, "follow.journal", 2),
    (Victim::Trainer, "follow.apply", 2),
    (Victim::Trainer, "follow.marker", 1),
    (Victim::Trainer, "follow.marker", 2),
    (Victim::Trainer, "log.append", 1),
    (Victim::Trainer, "log.append", 11),
    (Victim::Trainer, "log.commit", 12),
    (Victim::Trainer, "train.step", 2),
    (Victim::Trainer, "train.checkpoint", 1),
    (Victim::Trainer, "train.checkpoint", 3),
    (Victim::Follower, "follow.fetch", 1),
    (Victim::Follower, "follow.journal", 2),
    (Victim::Follower, "follow.apply", 2),
    (Victim::Follower, "follow.marker", 1),
    (Victim::Follower, "follow.marker", 3),
    (Victim::Follower, "follow.activate", 1),
    (Victim::Follower, "follow.activate", 3),
    (Victim::Follower, "activate.paused", 1),
    (Victim::Follower, "activate.paused", 3),
    (Victim::Engine, "engine.generate", 1),
    (Victim::Engine, "engine.generate", 9),
    (Victim::Engine, "engine.load", 1),
    (Victim::Engine, "engine.load", 3),
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
    let hit = |point: &str, victim: Victim| table.get(point).is_some_and(|kills| kills[victim as usize] > 0);
    assert!(KILLS.iter().all(|(victim, point, _)| hit(point, *victim)), "every point was hit");
}

fn cold_start(dir: &Path) -> PathBuf {
    let config = dir.join("config.json");
    std::fs::write(&config, common::TINY_CONFIG).expect("a config");
    let model = dir.join("model");
    run(driftless()
        .args(["train", "--loss-type", "sft_loss", "--num-rollout", "5", "--seed", "3"])
        .arg("--model-config")
        .arg(&config)
        .arg("--save")
        .arg(dir.join("sft"))
        .arg("--save-hf")
        .arg(&model));
    model
}

/// One run: a trainer, an engine, a follower, and the directories they share.
struct Stage {
    dir: PathBuf,
    model: PathBuf,
    port: u16,
}

impl Stage {
    fn new(dir: &Path, model: &Path) -> Stage {
        Stage { dir: dir.to_path_buf(), model: model.to_path_buf(), port: free_port() }
    }

    fn command(&self, who: Victim) -> Command {
        let mut command = driftless();
        match who {
            Victim::Engine => {
                command.args(["serve", "--port", &self.port.to_string(), "--num-threads", "1"]);
                command.arg("--model-path").arg(&self.model);
            }
            Victim::Follower => {
                command.args(["follow", "--run", "crash", "--id", "host-0", "--poll-ms", "20"]);
                command.args(["--engine", &format!("http://127.0.0.1:{}", self.port)]);
                command.arg("--store").arg(self.dir.join("store"));
                command.arg("--checkpoint-dir").arg(self.dir.join("host"));
                command.arg("--hf-checkpoint").arg(&self.model);
            }
            Victim::Trainer => {
                command.args(["train", "--run", "crash", "--seed", "3", "--num-rollout", &STEPS.to_string()]);
                command.args(["--rollout-batch-size", &GROUPS.to_string()]);
                command.args(["--n-samples-per-prompt", &SAMPLES.to_string()]);
                // The entropy term moves the weights also where all rewards are equal.
                command.args([
                    "--lr",
                    "1e-3",
                    "--entropy-coef",
                    "0.01",
                    "--n-eval-prompts",
                    "4",
                    "--num-threads",
                    "1",
                ]);
                command.args(["--check-weight-update-equal"]);
                command.args(["--rollout-external-engine-addrs", &format!("127.0.0.1:{}", self.port)]);
                command.arg("--hf-checkpoint").arg(&self.model);
                command.arg("--store").arg(self.dir.join("store"));
                command.arg("--save").arg(self.dir.join("rl"));
                command.arg("--save-hf").arg(self.dir.join("final"));
            }
        }
        command
    }

    fn start(&self, who: Victim, kill_at: Option<&str>) -> Process {
        let mut command = self.command(who);
        if let Some(point) = kill_at {
            command.env("DRIFTLESS_KILL_AT", point);
        }
        let name = format!("{who:?}").to_lowercase();
        let mut process = Process::start(&name, &self.dir, &mut command);
        if who == Victim::Engine && kill_at.is_none() {
            process.listening(self.port);
        }
        process
    }

    /// Runs it with one kill; false if the run was over before the point was passed that often.
    fn play(&self, victim: Victim, point: &str, passage: u32) -> bool {
        let kill_at = format!("{point}:{passage}");
        let arm = |who| (who == victim).then_some(kill_at.as_str());
        let mut engine = self.start(Victim::Engine, arm(Victim::Engine));
        engine.listening(self.port);
        let mut follower = self.start(Victim::Follower, arm(Victim::Follower));
        let mut trainer = self.start(Victim::Trainer, arm(Victim::Trainer));
        let doomed = match victim {
            Victim::Trainer => &mut trainer,
            Victim::Follower => &mut follower,
            Victim::Engine => &mut engine,
        };
        let killed = self.await_kill(doomed, victim);
        let acknowledged = self.acknowledged();
        match victim {
            Victim::Trainer if killed => trainer = self.start(victim, None),
            Victim::Follower if killed => follower = self.start(victim, None),
            Victim::Engine if killed => engine = self.start(victim, None),
            _ => {}
        }
        trainer.succeed();
        self.check(&acknowledged);
        assert!(follower.ended().is_none(), "the follower ended:\n{}", follower.output());
        assert!(engine.ended().is_none(), "the engine ended:\n{}", engine.output());
        killed
    }

    /// Waits for the victim's death by SIGKILL, or for the end of the run.
    fn await_kill(&self, doomed: &mut Process, victim: Victim) -> bool {
        let over = self.dir.join("final/config.json");
        doomed.until("the kill", |process| match process.ended() {
            Some(status) if victim == Victim::Trainer && status.success() => Some(false),
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
        let report = buffer::verify(&log).expect("a log");
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
        let run = Run::open(store, "crash").expect("the run");
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
