//! `driftless dashboard`: answers of all steps, and those that no step learns from by why.

use crate::dashboard::Dashboard;
use crate::log::run_with_samples;
use driftless::buffer::{Kind, Log, Options, Reader, Sample, Scalars, VersionSpan};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// A run with 300 more answers, of steps from 10 on. Those of even numbers end with their length, and each was drawn by
/// the version of its step.
fn run_of_many(dir: &Path) -> PathBuf {
    let run_dir = run_with_samples(dir);
    let log = open(&run_dir);
    for number in 0..300_u64 {
        let step = 10 + number / 10;
        let scalars = Scalars {
            sample_id: 100 + number,
            group_id: 100 + number / 2,
            rollout_id: step,
            reward: number as f32 / 100.0,
            status: 1 + u16::from(number % 2 == 0),
            ..Scalars::default()
        };
        let tokens = vec![2; 2 + number as usize % 7];
        let length = tokens.len() - 1;
        let span = VersionSpan { version: step, start: 0, end: length as u32 };
        let sample = Sample {
            scalars,
            prompt_len: 1,
            tokens: &tokens,
            log_probs: &vec![-1.0; length],
            loss_mask: &vec![1; length],
            spans: &[span],
            ..Sample::default()
        };
        log.append_all(&[sample]).expect("a disk");
    }
    log.close().expect("a disk");
    run_dir
}

fn open(run_dir: &Path) -> Log {
    let root = run_dir.join("log");
    let identity = Reader::open(&root).expect("a log").identity().expect("a segment").clone();
    Log::open(&root, Options::new(identity)).expect("a log")
}

#[test]
fn answers_of_all_steps_are_found_by_what_the_index_has() {
    let dir = tempfile::tempdir().expect("a directory");
    let run_dir = run_of_many(dir.path());
    let board = Dashboard::of(dir.path(), &[&run_dir], None);
    let list = |query: &str| board.get(&format!("/api/samples?kind=all&{query}"));
    let counts = |list: &Value| json!([list["looked"], list["total"], list["rows"].as_array().map(Vec::len)]);
    let best = list("order=best");
    assert_eq!(counts(&best), json!([303, 303, 200]), "the first ones alone are listed");
    assert_eq!(json!([best["rows"][0]["reward"], best["rows"][0]["seat"]]), json!([2.99, 39]));
    let rewards: Vec<_> =
        best["rows"].as_array().expect("rows").iter().map(|row| row["reward"].as_f64()).collect();
    assert!(rewards.windows(2).all(|pair| pair[0] >= pair[1]), "{rewards:?}");
    assert_eq!(list("order=worst")["rows"][0]["reward"], 0.0);
    let some = list("reward_min=1&reward_max=1.5&finish=length&length_min=3");
    let rows = some["rows"].as_array().expect("rows");
    let is_so = |row: &Value| {
        (1.0..=1.5).contains(&row["reward"].as_f64().expect("a number"))
            && row["finish"] == "length"
            && row["tokens"].as_u64() >= Some(3)
    };
    let expected = (100..=150).filter(|number| number % 2 == 0 && 1 + number % 7 >= 3).count();
    assert_eq!((rows.len(), &some["total"]), (expected, &json!(expected)), "{some}");
    assert!(rows.iter().all(is_so), "{some}");
    let of_version = list("version=12");
    assert_eq!(counts(&of_version), json!([303, 10, 10]));
    assert!(
        of_version["rows"].as_array().expect("rows").iter().all(|row| row["versions"] == json!([12, 12]))
    );
    assert_eq!(board.get("/api/samples?step=12&version=11")["total"], 0);
    assert_eq!(board.get("/api/samples?step=12&version=12")["total"], 10);
    assert_eq!(board.get("/api/samples?step=12")["looked"], Value::Null);
    for (query, why) in [("kind=all&mismatch_min=1", "mismatch_min"), ("failure=hook", "left_out")] {
        let (status, told) =
            board.ask(&format!("/api/samples?{query}"), &format!("host: {}\r\n", board.addr));
        assert!(status == 404 && told.contains(why), "{status}: {told}");
    }
}

#[test]
fn groups_that_no_step_learns_from_are_counted_by_why() {
    let dir = tempfile::tempdir().expect("a directory");
    let run_dir = run_with_samples(dir.path());
    let log = open(&run_dir);
    let notes = [
        r#"{"dropped": "it died", "outcome": "environment"}"#,
        r#"{"dropped": "its time was up", "outcome": "deadline"}"#,
        r#"{"dropped": "it died again", "outcome": "environment"}"#,
        r#"{"dropped": "filtered: one reward"}"#,
        "{}",
    ];
    for (note, group) in notes.into_iter().zip(50..) {
        let ids = Scalars {
            sample_id: 10 * group,
            group_id: group,
            rollout_id: 9,
            status: 1,
            ..Scalars::default()
        };
        let answer = Sample {
            scalars: ids,
            prompt_len: 2,
            tokens: &[0, 1, 2],
            log_probs: &[-1.0],
            loss_mask: &[1],
            ..Sample::default()
        };
        let prompt = Sample {
            kind: Kind::Prompt,
            scalars: Scalars { sample_id: group, status: 2, ..ids },
            prompt_len: 2,
            tokens: &[0, 1],
            metadata: note.as_bytes(),
            ..Sample::default()
        };
        // The last group that failed has no answer.
        let records = if group == 52 { vec![prompt] } else { vec![answer, prompt] };
        log.append_all(&records).expect("a disk");
    }
    log.close().expect("a disk");
    let board = Dashboard::of(dir.path(), &[&run_dir], None);
    let list = |query: &str| board.get(&format!("/api/samples?step=9&kind=left_out&{query}"));
    let all = list("");
    let causes = json!({ "environment": 2, "deadline": 1, "filtered": 1 });
    assert_eq!(json!([all["total"], all["causes"]]), json!([3, causes]));
    let one = list("failure=environment");
    assert_eq!(json!([one["total"], one["rows"][0]["why"], one["causes"]]), json!([1, "it died", causes]));
    assert_eq!(list("failure=filtered")["rows"][0]["why"], "filtered: one reward");
}
