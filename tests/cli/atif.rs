//! `driftless log export --atif` and `driftless verify --atif`, on logs made by the crate.

use crate::common::{code, driftless, json};
use crate::log::run_with_samples;
use driftless_bridge::Rid;
use driftless_bridge::engine::{Digester, ReplyDigest, context};
use driftless_buffer::sample::{ColumnId, Element};
use driftless_buffer::{Kind, Log, Options, Reader, Sample, Scalars, VersionSpan};
use serde_json::Value;
use std::path::Path;

/// Puts an answer of two turns into a run's log, twice: the first try had a part more. What an engine drew has a digest.
fn append_conversation(run_dir: &Path) {
    let root = run_dir.join("log");
    let identity = Reader::open(&root).expect("a log").identity().expect("a segment").clone();
    let log = Log::open(&root, Options::new(identity)).expect("a log");
    let tokens = [0, 1, 2, 0, 2, 1];
    let log_probs = [-0.5, 0.0, -0.25, -0.125];
    let reply = |nth, start: u32, end: u32| {
        let rid = Rid::new(1, 7).generation(nth);
        let before = context(0, &tokens[..2 + start as usize]);
        let mut digester = Digester::new(rid, before);
        for at in start as usize..end as usize {
            digester.push(tokens[2 + at], log_probs[at], Some(nth));
        }
        ReplyDigest { rid, start, end, context: before, digest: digester.digest() }.to_bytes()
    };
    let replies = [reply(0, 0, 1), reply(1, 2, 4)].concat();
    let spans = [(0, 0, 1), (1, 2, 4)].map(|(version, start, end)| VersionSpan { version, start, end });
    for parts in [3, 2] {
        for part in (0..parts).rev() {
            let sample_id = Scalars::sample_id_of(7, part);
            let sample = Sample {
                scalars: Scalars { sample_id, parts, score_follows: true, status: 1, ..Scalars::default() },
                prompt_len: 2,
                tokens: &tokens,
                log_probs: &log_probs,
                loss_mask: &[1, 0, 1, 1],
                spans: &spans,
                engine: "e",
                extra: &[(ColumnId::REPLIES, Element::U8, &replies)],
                ..Sample::default()
            };
            log.append(&sample).expect("room").wait().expect("a disk");
        }
    }
    let measured = Scalars {
        sample_id: u64::MAX,
        group_id: u64::MAX,
        reward: 0.25,
        evaluation: true,
        status: 1,
        ..Scalars::default()
    };
    let measured = Sample {
        scalars: measured,
        prompt_len: 1,
        tokens: &[0, 2],
        log_probs: &[-1.0],
        loss_mask: &[1],
        metadata: br#"{"set": "test", "label": "6"}"#,
        ..Sample::default()
    };
    let rewards = [2.0_f32, 0.75].map(f32::to_le_bytes).concat();
    let score = Sample {
        kind: Kind::Score,
        scalars: Scalars { sample_id: 7, reward: 0.75, ..Scalars::default() },
        extra: &[(ColumnId::REWARDS, Element::F32, &rewards)],
        ..Sample::default()
    };
    log.append_all(&[measured, score]).expect("a disk");
    log.close().expect("a disk");
}

fn read(dir: &Path, name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(dir.join(name)).expect("a file")).expect("JSON")
}

#[test]
fn what_a_run_drew_goes_out_as_atif_and_is_verified() {
    let dir = tempfile::tempdir().expect("a directory");
    let run_dir = run_with_samples(dir.path());
    append_conversation(&run_dir);
    let out = dir.path().join("trajectories");
    let done = json(driftless().args(["log", "export"]).arg(&run_dir).arg("--atif").arg(&out));
    assert_eq!(done, serde_json::json!({ "trajectories": 6, "damaged": 0 }));
    let mut names: Vec<_> = std::fs::read_dir(&out)
        .expect("a directory")
        .map(|entry| entry.expect("a file").file_name().into_string().expect("a name"))
        .collect();
    names.sort();
    let expected = ["answer-0", "answer-1", "answer-2", "answer-7.1", "answer-7", "evaluation-9"];
    assert_eq!(
        names,
        expected.map(|name| format!("{name}.json")),
        "a part of an earlier try is none of the answer"
    );
    let first = read(&out, "answer-7.json");
    let said: Vec<_> =
        first["steps"].as_array().expect("steps").iter().map(|step| &step["message"]).collect();
    assert_eq!(said, ["What is", "six", "What", "six is"]);
    assert_eq!(first["steps"][3]["extra"]["driftless"]["weight_versions"], serde_json::json!([[1, 0, 2]]));
    let own = &first["extra"]["driftless"];
    assert_eq!(
        (&own["reward"], &own["raw_reward"], &own["finish"]),
        (&0.75.into(), &2.0.into(), &"stop".into())
    );
    let part = read(&out, "answer-7.1.json");
    assert_eq!(first["session_id"], part["session_id"]);
    assert_ne!(first["trajectory_id"], part["trajectory_id"]);
    let measured = &read(&out, "evaluation-9.json")["extra"]["driftless"];
    assert_eq!((&measured["evaluation"], &measured["label"]), (&"test".into(), &"6".into()));

    let tokenizer = run_dir.join("baseline/tokenizer.json");
    let verify = || {
        let mut command = driftless();
        command.arg("verify").arg("--atif").arg(&out).arg("--tokenizer").arg(&tokenizer);
        command
    };
    let report = json(&mut verify());
    let counts = ["trajectories", "turns", "continued", "texts", "replies", "faults"];
    assert_eq!(counts.map(|name| report[name].as_u64()), [6, 8, 2, 16, 4, 0].map(Some), "{report}");
    let mut changed = first.clone();
    changed["steps"][3]["metrics"]["logprobs"][1] = (-0.2).into();
    std::fs::write(out.join("answer-7.json"), changed.to_string()).expect("a file");
    let (status, told) = code(&mut verify());
    assert!(status == Some(3) && told.contains("1 damaged"), "{told}");
    let found = crate::common::output(&mut verify());
    let found = String::from_utf8_lossy(&found.stdout).into_owned();
    let fault = "answer-7.json, trajectory 1, step 4: digest of a reply's ids, log-probabilities and versions: expected ";
    assert!(found.contains(fault), "{found}");
    assert!(found.contains("not checked: 4 turns without digests of replies"), "{found}");
}

#[test]
fn atif_is_refused_where_it_cannot_be_meant() {
    let dir = tempfile::tempdir().expect("a directory");
    let run_dir = run_with_samples(dir.path());
    let [full, empty, file, log] =
        ["full", "empty", "empty/not.json", "run/log/out"].map(|name| dir.path().join(name));
    std::fs::create_dir_all(full.join("mine")).expect("a directory");
    std::fs::create_dir(&empty).expect("a directory");
    for (out, expected) in [(&full, "a new or empty directory"), (&log, "elsewhere than in the log")] {
        let (status, told) = code(driftless().args(["log", "export"]).arg(&run_dir).arg("--atif").arg(out));
        assert!(status == Some(2) && told.contains(expected), "{told}");
    }
    let (status, told) = code(driftless().args(["verify", "--atif"]).arg(&empty));
    assert!(status == Some(2) && told.contains(".json or .jsonl"), "{told}");
    std::fs::write(&file, "{\"schema_version\": [[[").expect("a file");
    let (status, _) = code(driftless().args(["verify", "--atif"]).arg(&file));
    assert_eq!(status, Some(3));
    let (status, told) = code(driftless().arg("verify").arg(&run_dir).arg("--atif").arg(&file));
    assert!(status == Some(2) && told.contains("cannot be used with"), "{told}");
    let (status, told) = code(driftless().args(["log", "export"]).arg(&run_dir));
    assert!(status == Some(2) && told.contains("--atif"), "{told}");
}
