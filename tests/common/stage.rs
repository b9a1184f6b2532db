//! A whole run on one machine: a trainer, an engine with its follower, and the directories they share.
#![allow(dead_code, unreachable_pub, reason = "every test binary uses its own part of this")]

use crate::common::{self, Process, driftless, free_port};
use std::path::{Path, PathBuf};
use std::process::Command;

pub const STEPS: u64 = 3;
pub const GROUPS: u64 = 4;
pub const SAMPLES: u64 = 2;

/// The processes of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Role {
    Trainer,
    Follower,
    Engine,
}

/// A model of fresh weights, trained for a moment.
pub fn cold_start(dir: &Path) -> PathBuf {
    common::cold_start(dir, 5, "bfloat16")
}

/// One run: a trainer, an engine, a follower, and the directories they share.
pub struct Stage {
    pub dir: PathBuf,
    pub model: PathBuf,
    pub port: u16,
    pub steps: u64,
    /// What is learned, as flags.
    pub task: Vec<String>,
    /// Milliseconds between two looks of the follower.
    pub poll_ms: u64,
}

impl Stage {
    pub fn new(dir: &Path, model: &Path) -> Stage {
        let (dir, model) = (dir.to_path_buf(), model.to_path_buf());
        let task = ["--task", "arithmetic", "--rollout-max-response-len", "4", "--save-interval", "1"];
        let task = task.map(str::to_owned).to_vec();
        Stage { dir, model, port: free_port(), steps: STEPS, task, poll_ms: 20 }
    }

    pub fn command(&self, who: Role) -> Command {
        let mut command = driftless();
        match who {
            Role::Engine => {
                command.args(["serve", "--port", &self.port.to_string(), "--num-threads", "1"]);
                command.arg("--model-path").arg(&self.model);
            }
            Role::Follower => {
                command.args(["follow", "--run", "test", "--id", "host-0"]);
                command.args(["--poll-ms", &self.poll_ms.to_string(), "--engine-poll-ms", "20"]);
                command.args(["--engine", &format!("http://127.0.0.1:{}", self.port)]);
                command.arg("--store").arg(self.dir.join("store"));
                command.arg("--checkpoint-dir").arg(self.dir.join("host"));
                command.arg("--hf-checkpoint").arg(&self.model);
            }
            Role::Trainer => {
                command.arg("train").args(&self.task);
                command.args(["--run", "test", "--seed", "3", "--num-rollout", &self.steps.to_string()]);
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

    pub fn start(&self, who: Role, kill_at: Option<&str>) -> Process {
        let mut command = self.command(who);
        if let Some(point) = kill_at {
            command.env("DRIFTLESS_KILL_AT", point);
        }
        let name = format!("{who:?}").to_lowercase();
        let mut process = Process::start(&name, &self.dir, &mut command);
        if who == Role::Engine && kill_at.is_none() {
            process.listening(self.port);
        }
        process
    }
}
