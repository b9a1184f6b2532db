//! Event files, read back by TensorBoard itself; lane `rewards` has it.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use driftless_observe::TensorBoard;
use driftless_trainer::events::{Event, Fact, Sink};
use driftless_trainer::metrics::{PublicationMetrics, StepMetrics};
use serde_json::Value;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime};

fn step(rollout_id: u64, reward: f64) -> Event {
    let publication = PublicationMetrics { density: 0.25, ..PublicationMetrics::default() };
    Event::Step(
        StepMetrics { rollout_id, reward, publication: Some(publication), ..StepMetrics::default() }.into(),
    )
}

/// What one process tells of a run.
fn tell(dir: &Path, at: u64, events: impl IntoIterator<Item = Event>) {
    let mut board = TensorBoard::new(dir);
    for event in events {
        board.take(&Fact::new(SystemTime::UNIX_EPOCH + Duration::from_secs(at), event));
    }
}

#[test]
fn tensorboard_reads_each_step_of_a_resumed_run_once() {
    let Some(python) = std::env::var_os("DRIFTLESS_REWARDS_PYTHON") else {
        eprintln!("skipped: DRIFTLESS_REWARDS_PYTHON is not set; `cargo xtask test rewards` sets it");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    tell(dir.path(), 100, [Event::Begin { step: 0, of: 4 }, step(0, 1.0), step(1, 2.0), step(2, 3.0)]);
    // It had its last checkpoint after one step; its clock goes back, and a piece of a record is left of it.
    let newest = std::fs::read_dir(dir.path()).unwrap().next().unwrap().unwrap().path();
    std::fs::write(&newest, [std::fs::read(&newest).unwrap(), vec![9; 7]].concat()).unwrap();
    tell(dir.path(), 90, [Event::Begin { step: 1, of: 4 }, step(1, 20.0), step(2, 30.0), step(3, 40.0)]);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/event_files.py");
    let read = Command::new(python).arg(script).arg(dir.path()).output().unwrap();
    assert!(read.status.success(), "{}", String::from_utf8_lossy(&read.stderr));
    let read: Value = serde_json::from_slice(&read.stdout).unwrap();
    let rewards = serde_json::json!([[0, 1.0, 100.0], [1, 20.0, 90.0], [2, 30.0, 90.0], [3, 40.0, 90.0]]);
    assert_eq!(read["reward"], rewards);
    assert_eq!(read["publication/density"].as_array().unwrap().len(), 4);
}
