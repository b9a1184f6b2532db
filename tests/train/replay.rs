//! `driftless replay`: a run of two sets of options, again from its log.

use crate::algorithms::copy;
use crate::common::{Process, code, driftless, output};
use crate::stage::{Role, SAMPLES, Stage, cold_start};
use crate::{steps, train};
use driftless::buffer::sample::{ColumnId, Element};
use driftless::buffer::{Kind, Log, Options, Position, Reader, Record, Retention, Sample};
use serde_json::Value;
use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A replay of the run in `dir`.
fn replay(dir: &Path) -> Command {
    let mut command = driftless();
    command.arg("replay").arg(dir);
    command
}

/// The refusal of a replay, which has to have this exit code and say all of these words.
fn refused(command: &mut Command, exit: i32, words: &[&str]) {
    let (status, error) = code(command);
    assert!(status == Some(exit) && words.iter().all(|word| error.contains(word)), "{status:?}: {error}");
}

/// Every file below a directory.
fn files(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(dir).expect("a directory") {
        let path = entry.expect("an entry").path();
        match path.is_dir() {
            true => found.extend(files(&path)),
            false => _ = found.insert(path.clone(), std::fs::read(&path).expect("a file")),
        }
    }
    found
}

/// A copy of a run.
fn copy_of(run: &Path, name: &str) -> PathBuf {
    let dir = run.with_file_name(name);
    copy(run, &dir);
    dir
}

/// A copy of a run with another text in a file.
fn edited(run: &Path, name: &str, file: &str, edit: impl Fn(&str) -> String) -> PathBuf {
    let dir = copy_of(run, name);
    let text = std::fs::read_to_string(dir.join(file)).expect("a file");
    let other = edit(&text);
    assert_ne!(text, other, "{file} is edited");
    std::fs::write(dir.join(file), other).expect("a file");
    dir
}

/// Writes the log of a run anew, with log-probs as `change` has them and `padding` bytes beside each record.
fn rewritten(run: &Path, padding: usize, change: impl Fn(&Record, &mut Vec<f32>)) -> Log {
    let old = run.join("old");
    std::fs::rename(run.join("log"), &old).expect("a log");
    let reader = Reader::open(&old).expect("a log");
    let options = Options::new(reader.identity().expect("an identity").clone()).with_segment_bytes(64 << 10);
    let log = Log::open(run.join("log"), options).expect("a log");
    for record in reader.iter(Position(0)) {
        let record = record.expect("a record");
        let mut log_probs = record.log_probs().to_vec();
        change(&record, &mut log_probs);
        let bytes = |column| record.column(column).map_or(&[][..], |(_, bytes): (Element, _)| bytes);
        let further = [ColumnId::TIMES, ColumnId::REWARDS, ColumnId::TEACHER_LOG_PROBS];
        let extra: Vec<_> = further
            .into_iter()
            .filter_map(|id| record.column(id).map(|(element, bytes)| (id, element, bytes)))
            .collect();
        let sample = Sample {
            kind: record.kind(),
            scalars: *record.scalars(),
            prompt_len: record.prompt_len(),
            tokens: record.tokens(),
            log_probs: &log_probs,
            loss_mask: bytes(ColumnId::LOSS_MASK),
            spans: record.spans(),
            engine: record.engine(),
            metadata: &[record.metadata(), &vec![b' '; padding]].concat(),
            extra: &extra,
        };
        log.append(&sample).expect("a record").wait().expect("a record");
    }
    log
}

/// Steps 1 to 3 with one learning rate, steps 4 and 5 with another and one version for both.
fn trained(dir: &Path) -> (Stage, PathBuf) {
    let mut stage = Stage::new(dir, &cold_start(dir));
    let _engine = stage.start(Role::Engine, None);
    let _follower = stage.start(Role::Follower, None);
    train(&stage, &["--max-staleness", "1"]);
    stage.steps = 5;
    let task: Vec<_> = ["--max-staleness", "1", "--update-weights-interval", "2", "--eps-clip", "0.3"].into();
    train(&stage, &task);
    let run = stage.dir.join("rl");
    (stage, run)
}

#[test]
fn replay_of_a_run_is_the_same_to_the_digest() {
    let dir = tempfile::tempdir().expect("a directory");
    let (stage, run) = trained(dir.path());
    let published: Vec<_> =
        steps(&stage).iter().filter_map(|step| step["publication"]["version"].as_u64()).collect();
    let newest = published.last().copied().expect("a version");
    // Neither is needed.
    std::fs::remove_dir_all(stage.dir.join("store")).expect("a store");
    std::fs::remove_dir_all(stage.dir.join("host")).expect("a host");
    let before = files(&run);
    let replayed = output(&mut replay(&run));
    let [said, told] = [&replayed.stdout, &replayed.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    assert!(replayed.status.success(), "{said}{told}");
    assert!(said.starts_with(&format!("version {newest} is the same to the digest, ")), "{said}");
    assert!(said.contains(&format!(": 5 steps, {} versions", published.len())), "{said}");
    let lines: Vec<_> = (1..=5).map(|step| format!("step {step} of 5: same as the run")).collect();
    assert!(told.lines().eq(&lines), "{told}");
    assert!(files(&run) == before, "the run is only read");
    let first = crate::common::json(replay(&run).args(["--to", "1"]));
    assert_eq!((&first["version"], &first["steps"]), (&1.into(), &1.into()), "{first}");
    refused(replay(&run).args(["--to", "99"]), 2, &["--to: expected a version", "from 1 to", "found 99"]);

    // A sample was changed, and the log is sound.
    let taken = driftless_trainer::ledger::read(&run).expect("a ledger")[&1][0];
    let forged = copy_of(&run, "forged");
    drop(rewritten(&forged, 0, |record, log_probs| {
        if record.kind() == Kind::Sample && record.scalars().sample_id == taken * SAMPLES {
            log_probs[0] -= 0.001;
        }
    }));
    let sample = format!("sample {} of group {taken}", taken * SAMPLES);
    refused(&mut replay(&forged), 1, &["step 2 of 5", &sample, "log show RUN --step 1"]);

    // A byte was changed: its record is damaged.
    let damaged = copy_of(&run, "damaged");
    let record = Reader::open(damaged.join("log")).expect("a log").sample(taken * SAMPLES);
    let log_probs: Vec<u8> = record
        .expect("a record")
        .expect("a sample")
        .log_probs()
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    let segment = damaged.join("log/segment-00000000000000000000.log");
    let mut bytes = std::fs::read(&segment).expect("a segment");
    let at = bytes.windows(log_probs.len()).position(|bytes| bytes == log_probs).expect("its place");
    bytes[at] ^= 1;
    std::fs::write(&segment, bytes).expect("a segment");
    refused(&mut replay(&damaged), 1, &["groups of step 1 in ledger.jsonl", "3 whole ones; verify the log"]);

    // Old records were removed.
    let trimmed = copy_of(&run, "trimmed");
    let log = rewritten(&trimmed, 4 << 10, |_, _| {});
    let retired = log.retain(&Retention { bytes_max: Some(64 << 10), ..Retention::default() });
    assert!(retired.expect("segments go").records > 0);
    drop(log);
    refused(
        &mut replay(&trimmed),
        1,
        &["cannot be replayed: groups of step 0 in ledger.jsonl", "was trimmed"],
    );

    // Steps that learned in another way, by a program that is not here, from another checkpoint.
    let once = |text: &str, old: &str, new: &str| text.replacen(old, new, 1);
    let other = edited(&run, "rate", "ledger.jsonl", |text| once(text, r#""lr":0.001"#, r#""lr":0.002"#));
    refused(&mut replay(&other), 1, &["step 1 of 5", "lr: expected 0.001, found 0.002"]);
    let clip = |text: &str| once(text, r#""weight_decay":0.0"#, r#""weight_decay":0.5"#);
    let other = edited(&run, "decay", "ledger.jsonl", clip);
    refused(&mut replay(&other), 1, &["step 1 of 5", "digest of the weights", "deterministic"]);
    let foreign = |text: &str| {
        let line = |line: &str| {
            let mut line: Value = serde_json::from_str(line).expect("a line");
            if !line["recipe"].is_null() {
                line["recipe"]["learner"] = Value::Null;
            }
            format!("{line}\n")
        };
        text.lines().map(line).collect()
    };
    let other = edited(&run, "foreign", "ledger.jsonl", foreign);
    refused(&mut replay(&other), 1, &["learner of step 0 in ledger.jsonl", "a process of its own"]);
    let other = edited(&run, "older", "ledger.jsonl", |text| text.replace("\"samples\"", "\"then\""));
    refused(&mut replay(&other), 1, &["step 0 in ledger.jsonl", "releases before"]);
    let start = crate::common::cold_start(&dir.path().join("other"), 1, "bfloat16");
    refused(
        replay(&run).arg("--hf-checkpoint").arg(start),
        1,
        &["cannot be replayed: weights of", "--hf-checkpoint"],
    );
}

/// Options that change on the way are taken over with the critic and the reference; the run's critic is left alone.
#[test]
fn replay_of_a_killed_run_with_a_critic_is_the_same() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut stage = Stage::new(dir.path(), &cold_start(dir.path()));
    let critic = stage.dir.join("critic").display().to_string();
    let ppo = ["--advantage-estimator", "ppo", "--num-steps-per-rollout", "2", "--kl-coef", "0.05"];
    let more =
        ["--ref-update-interval", "2", "--critic-lr", "1e-2", "--critic-save", &critic, "--deterministic"];
    let engine = stage.start(Role::Engine, None);
    let follower = stage.start(Role::Follower, None);
    let mut doomed = stage.command(Role::Trainer);
    doomed.args(ppo).args(more).env("DRIFTLESS_KILL_AT", "train.checkpoint:2");
    let status = Process::start("trainer", &stage.dir, &mut doomed).wait();
    assert_eq!(status.signal(), Some(9), "{status:?}");
    train(&stage, &[&ppo[..], &more].concat());
    stage.steps += 1;
    train(&stage, &[&ppo[..], &more, &["--value-clip", "0.3"]].concat());
    drop((engine, follower));
    let (run, before) = (stage.dir.join("rl"), files(Path::new(&critic)));
    let replayed = crate::common::json(&mut replay(&run));
    assert_eq!((&replayed["steps"], &replayed["versions"]), (&stage.steps.into(), &stage.steps.into()));
    assert!(files(Path::new(&critic)) == before);
}
