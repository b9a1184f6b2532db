//! `driftless trace`, on a run whose files are made here.

use crate::common::{code, driftless, json};
use driftless_buffer::sample::{ColumnId, Element};
use driftless_buffer::{Identity, Kind, Log, Options, Sample, Scalars, VersionSpan};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// Milliseconds since 1970 at which the run begins.
pub(crate) const BEGAN: u64 = 1_795_000_000_000;

/// A run of three steps of a second each, two answers a step and one of an evaluation, whose files a crash has cut off.
pub(crate) fn made(dir: &Path) -> PathBuf {
    let run = dir.join("run");
    std::fs::create_dir_all(&run).expect("a directory");
    let options = Options::new(Identity { run_id: [1; 16], model: "m".into(), tokenizer_digest: [0; 32] });
    let log = Log::open(run.join("log"), options).expect("a log");
    let mut metrics = String::new();
    for step in 0..3 {
        let begun = BEGAN + step * 1000;
        for answer in 0..2 {
            append(&log, step, step * 2 + answer, begun, false);
        }
        let hosts = json!({"h": [{"version": step + 1, "began_at_ms": begun + 900, "see_ms": 1.5, "sync_ms": 0, "fetch_ms": 20,
            "decode_ms": 1, "journal_ms": 2, "offer_ms": 3, "copy_ms": 4, "patch_ms": 5}]});
        let publication = json!({"version": step + 1, "publication_bytes": 9, "full_bytes": 10, "density": 0.5,
            "encode_publish_ms": 100.0, "committed_at_ms": begun + 900, "engines_checked": 0, "hosts": hosts});
        let line = json!({"rollout_id": step, "completed_at_ms": begun + 1000, "reward": 0.5, "response_length": 2.0,
            "staleness_mean": 0.0, "staleness_max": 0, "generate_ms": 500.0, "train_ms": 300.0, "wall_ms": 1000.25,
            "publication": publication, "eval": null});
        let _ = writeln!(metrics, "{line}");
    }
    append(&log, 2, 100, BEGAN + 2000, true);
    log.close().expect("a disk");
    std::fs::write(run.join("metrics.jsonl"), metrics + "{\"rollout_id\":3,\"rew").expect("a file");
    let phase = |at: u64, phase: &str| json!({"at_ms": BEGAN + at, "event": "phase", "url": "http://e:1", "phase": phase, "why": ""});
    let at = |at: u64, event: &str| json!({"at_ms": BEGAN + at, "event": event, "what": "engines", "on": "", "step": 0, "of": 3});
    let lines = [
        phase(0, "joining"),
        at(1, "waiting"),
        phase(50, "serving"),
        at(60, "begin"),
        phase(2500, "lost"),
        at(2600, "new"),
    ];
    let events: String = lines.iter().map(|line| format!("{line}\n")).collect();
    std::fs::write(run.join("events.jsonl"), format!("[1]\n{events}{{\"at_ms\":")).expect("a file");
    run
}

fn append(log: &Log, step: u64, id: u64, begun: u64, evaluation: bool) {
    let scalars = Scalars {
        sample_id: id,
        group_id: step,
        rollout_id: step,
        parts: 1,
        score_follows: !evaluation,
        evaluation,
        ..Scalars::default()
    };
    let times =
        [begun + 10, begun + 110 + id, begun + 400].map(|ms| ms as i64 * 1000).map(i64::to_le_bytes).concat();
    let answer = Sample {
        scalars,
        prompt_len: 1,
        tokens: &[1, 2, 3],
        log_probs: &[-1.0; 2],
        loss_mask: &[1; 2],
        spans: &[VersionSpan { version: step, start: 0, end: 2 }],
        engine: "http://e:1",
        extra: &[(ColumnId::TIMES, Element::I64, &times)],
        ..Sample::default()
    };
    log.append(&answer).expect("room").wait().expect("a disk");
    if !evaluation {
        let scalars =
            Scalars { reward: 1.0, clock_us: (begun + 450) * 1000, score_follows: false, ..scalars };
        let score = Sample { kind: Kind::Score, scalars, ..Sample::default() };
        log.append(&score).expect("room").wait().expect("a disk");
    }
}

/// The command's counts, and the events of what it wrote.
fn traced(run: &Path, more: &[&str]) -> (Value, Vec<Value>) {
    let file = run.parent().expect("a directory").join("trace.json");
    let counts = json(driftless().arg("trace").arg(run).arg("-o").arg(&file).args(more));
    let trace: Value = serde_json::from_slice(&std::fs::read(&file).expect("a file")).expect("JSON");
    (counts, trace["traceEvents"].as_array().expect("events").clone())
}

fn number(event: &Value, field: &str) -> u64 {
    event[field].as_u64().unwrap_or_else(|| panic!("{field} of {event}"))
}

/// Spans of a row lie within each other or apart, lanes are closed in the order in which they were opened, and all have a
/// process with a name.
fn check_nesting(events: &[Value]) {
    let named: Vec<_> = events
        .iter()
        .filter(|event| event["name"] == "process_name")
        .map(|event| number(event, "pid"))
        .collect();
    let (mut rows, mut lanes) =
        (BTreeMap::<_, Vec<(u64, u64)>>::new(), BTreeMap::<String, Vec<(String, u64)>>::new());
    for event in events.iter().filter(|event| event["ph"] != "M") {
        let (start, name) = (number(event, "ts"), event["name"].as_str().expect("a name").to_owned());
        assert!(named.contains(&number(event, "pid")), "{event}");
        match event["ph"].as_str().expect("a phase") {
            "X" => {
                let row = rows.entry((number(event, "pid"), number(event, "tid"))).or_default();
                let end = start + number(event, "dur");
                let is_crossed = |&(a, b): &(u64, u64)| {
                    a < start && start < b && b < end || start < a && a < end && end < b
                };
                assert!(!row.iter().any(is_crossed), "{event} crosses one of {row:?}");
                row.push((start, end));
            }
            "b" => {
                let lane = lanes.entry(event["id"].to_string()).or_default();
                assert!(
                    lane.last().is_none_or(|(_, begun)| *begun <= start),
                    "{event} begins before {lane:?}"
                );
                lane.push((name, start));
            }
            "e" => {
                let (opened, begun) =
                    lanes.get_mut(&event["id"].to_string()).and_then(Vec::pop).expect("one that is open");
                assert!(opened == name && begun <= start, "{event} ends {opened}");
            }
            "i" => {}
            other => panic!("{other} of {event}"),
        }
    }
    assert!(lanes.values().all(Vec::is_empty), "{lanes:?}");
}

fn count(events: &[Value], ph: &str, begins: &str) -> usize {
    let is_it = |event: &&Value| {
        event["ph"] == ph && event["name"].as_str().is_some_and(|name| name.starts_with(begins))
    };
    events.iter().filter(is_it).count()
}

#[test]
fn trace_has_every_step_and_sample_and_tells_of_damage() {
    let dir = tempfile::tempdir().expect("a directory");
    let (counts, events) = traced(&made(dir.path()), &[]);
    let expected = json!({"steps": 3, "samples": 7, "samples_without_times": 0, "events": 6, "damaged_lines": 3, "damaged_records": 0});
    assert_eq!(counts, expected);
    check_nesting(&events);
    for (ph, begins, expected) in [
        ("X", "step ", 3),
        ("X", "learn", 3),
        ("X", "publish version ", 3),
        ("b", "answer ", 6),
        ("b", "evaluated", 1),
        ("b", "prefill", 7),
        // Of answers, and of versions on their way to the host.
        ("b", "decode", 7 + 3),
        ("b", "reward", 6),
        ("b", "version ", 3),
        ("b", "fetch", 3),
        ("X", "joining", 1),
        ("X", "serving", 1),
        ("X", "engines", 1),
        ("i", "begin", 1),
        ("i", "new", 1),
    ] {
        assert_eq!(count(&events, ph, begins), expected, "{ph} {begins}");
    }
    let answer = events.iter().find(|event| event["name"] == "answer 3").expect("an answer");
    assert_eq!(number(answer, "ts"), (BEGAN + 1010) * 1000);
    assert_eq!(
        (&answer["args"]["step"], &answer["args"]["reward"], &answer["args"]["versions"]),
        (&json!(1), &json!(1.0), &json!([1]))
    );
}

#[test]
fn steps_that_are_asked_for_come_alone() {
    let dir = tempfile::tempdir().expect("a directory");
    let run = made(dir.path());
    let (counts, events) = traced(&run, &["--steps", "1..2"]);
    check_nesting(&events);
    assert_eq!((number(&counts, "steps"), number(&counts, "samples")), (1, 2));
    assert_eq!(
        (count(&events, "X", "step 1"), count(&events, "b", "answer "), count(&events, "i", "")),
        (1, 2, 0)
    );
    assert_eq!(count(&events, "X", "serving"), 1, "a phase that spans the step");
    for wrong in ["3..3", "7..9", "a..b"] {
        let file = dir.path().join("none.json");
        let (status, words) =
            code(driftless().arg("trace").arg(&run).arg("-o").arg(&file).args(["--steps", wrong]));
        assert!(status == Some(2) && words.contains("--steps") && !file.exists(), "{wrong}: {words}");
    }
}

#[test]
fn directory_without_a_run_is_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let (status, words) = code(driftless().arg("trace").arg(dir.path()).args(["-o", "trace.json"]));
    assert!(status == Some(2) && words.contains("metrics.jsonl"), "{words}");
    let run = made(dir.path());
    let (status, words) = code(driftless().arg("trace").arg(&run).arg("-o").arg(run.join("metrics.jsonl")));
    assert!(status == Some(2) && words.contains("elsewhere"), "{words}");
}
