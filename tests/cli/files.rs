//! `driftless dashboard`: what becomes of what it read when a run begins anew, or its files are written over.

use crate::common::{code, driftless, run};
use crate::dashboard::{Dashboard, bars, file, step};
use crate::log::run_with_samples;
use crate::trace::BEGAN;
use serde_json::{Value, json};
use std::io::Read as _;
use std::path::Path;

/// Lines of events, each a second behind the one before.
fn events(lines: &[Value]) -> String {
    let at = |(line, second): (&Value, u64)| {
        let mut line = line.clone();
        line["at_ms"] = json!(BEGAN + 1000 * second);
        format!("{line}\n")
    };
    lines.iter().zip(0..).map(at).collect()
}

fn phase(url: &str, phase: &str) -> Value {
    json!({ "event": "phase", "url": url, "phase": phase, "why": if phase == "lost" { "no answer" } else { "" } })
}

/// Engines with their last phase, the alerts' texts, and the bars of engines' phases as name, start and length in seconds.
fn told(dir: &Path) -> (Value, Value, Vec<Value>) {
    let board = Dashboard::of(dir, &[dir], None);
    let engines = board.get("/api/fleet")["engines"].clone();
    let last = engines.as_object().expect("engines").iter().map(|(url, engine)| {
        (url.clone(), engine["phases"].as_array().and_then(|all| all.last()).expect("one")[1].clone())
    });
    let alerts = board.get("/api/runs")[0]["alerts"].clone();
    let texts = alerts.as_array().expect("alerts").iter().map(|alert| alert["text"].clone()).collect();
    let window = board.get("/api/time");
    let second = |at: &Value| at.as_i64().expect("a number") / 1_000_000;
    let drawn = bars(&window, "engine")
        .into_iter()
        .map(|bar| json!([bar["name"], second(&bar["at"]), second(&bar["took"])]));
    (last.collect(), texts, drawn.collect())
}

#[test]
fn engines_of_a_process_that_ended_are_gone() {
    let dir = tempfile::tempdir().expect("a directory");
    let starts = json!({ "event": "waiting", "what": "the learner to start", "on": "" });
    let begin = json!({ "event": "begin", "step": 0, "of": 9 });
    let mut lines =
        vec![starts.clone(), phase("http://a", "serving"), phase("http://b", "lost"), begin.clone()];
    // The same process starts its learner again, and has its engines still.
    lines.extend([json!({ "event": "learner_lost", "error": "" }), starts.clone(), begin.clone()]);
    file(dir.path(), "events.jsonl", events(&lines).as_bytes());
    let lost = json!(["engine http://b is lost: no answer"]);
    let (engines, alerts, drawn) = told(dir.path());
    assert_eq!((engines, alerts), (json!({ "http://a": "serving", "http://b": "lost" }), lost));
    assert_eq!(drawn, [json!(["serving", 1, 5]), json!(["lost", 2, 4])]);
    // Another one goes on a while later, and one of the engines is not there any more.
    lines.extend((0..9).map(|_| json!({ "event": "waiting", "what": "x", "on": "" })));
    lines.extend([starts, phase("http://a", "joining"), begin]);
    file(dir.path(), "events.jsonl", events(&lines).as_bytes());
    let (engines, alerts, drawn) = told(dir.path());
    assert_eq!((engines, alerts), (json!({ "http://a": "joining", "http://b": "gone" }), json!([])));
    assert_eq!(drawn, [json!(["serving", 1, 14]), json!(["joining", 17, 1]), json!(["lost", 2, 13])]);
}

#[test]
fn versions_of_a_run_that_begins_anew_are_held() {
    let dir = tempfile::tempdir().expect("a directory");
    let published = |version: u64| json!({ "event": "published", "version": version, "step": version });
    let lines: Vec<_> = (1000..1500).chain(0..3).map(published).collect();
    file(dir.path(), "events.jsonl", events(&lines).as_bytes());
    let board = Dashboard::of(dir.path(), &[dir.path()], None);
    let versions = board.get("/api/fleet")["versions"].clone();
    let numbers: Vec<_> = versions.as_object().expect("versions").keys().cloned().collect();
    assert_eq!(numbers, ["0", "1", "2"]);
}

#[test]
fn file_that_is_written_over_in_its_place_is_read_again() {
    let dir = tempfile::tempdir().expect("a directory");
    let lost = events(&[phase("http://a", "lost")]);
    file(dir.path(), "metrics.jsonl", (step(0, 0.25) + &step(1, 0.5)).as_bytes());
    file(dir.path(), "events.jsonl", lost.as_bytes());
    let board = Dashboard::of(dir.path(), &[dir.path()], None);
    let first = board.get("/api/metrics");
    assert_eq!(board.get("/api/runs")[0]["steps"], 2);
    // As an editor or `cp` leaves it: the same file, as long or longer.
    let longer = step(0, 0.75) + &step(1, 0.5) + &step(2, 0.5) + &step(3, 0.5);
    file(dir.path(), "metrics.jsonl", longer.as_bytes());
    file(dir.path(), "events.jsonl", lost.replace("http://a", "http://b").as_bytes());
    let again = board.get(&format!("/api/metrics?epoch={}&from=2", first["epoch"]));
    assert_eq!(json!([again["from"], again["columns"]["reward"]]), json!([0, [0.75, 0.5, 0.5, 0.5]]));
    let fleet = board.get("/api/fleet");
    let engines: Vec<_> = fleet["engines"].as_object().expect("engines").keys().cloned().collect();
    assert_eq!(
        (&engines[..], fleet["facts"].as_array().map(Vec::len)),
        (&["http://b".to_owned()][..], Some(1))
    );
    assert_eq!(board.get("/api/runs")[0]["damaged"]["metrics"], 0);
    // In its middle, with the same begin.
    file(dir.path(), "metrics.jsonl", longer.replace("\"rollout_id\":3", "\"rollout_id\":9").as_bytes());
    assert_eq!(board.get("/api/runs")[0]["steps"], 10);
}

#[test]
fn export_replaces_a_page_that_is_open() {
    let dir = tempfile::tempdir().expect("a directory");
    let run_dir = run_with_samples(dir.path());
    let page = file(dir.path(), "page.html", b"the page before");
    let mut open = std::fs::File::open(&page).expect("a file");
    run(driftless().arg("dashboard").arg(&run_dir).arg("--export").arg(&page));
    let mut before = String::new();
    open.read_to_string(&mut before).expect("a file");
    assert_eq!(before, "the page before");
    assert!(std::fs::read_to_string(&page).expect("a file").contains("id=\"data\""));
    assert!(!dir.path().join("page.html.new").exists());
}

#[test]
fn hosts_are_those_that_steps_told_of_last() {
    let dir = tempfile::tempdir().expect("a directory");
    let line = |step: u64, hosts: Value| {
        format!("{}\n", json!({ "rollout_id": step, "publication": { "hosts": hosts } }))
    };
    let phases = |version: u64| json!({ "version": version, "began_at_ms": BEGAN, "fetch_ms": 2.5 });
    let steps = [
        line(0, json!({ "a": [phases(0)], "b": [phases(0)] })),
        line(1, json!({ "a": [phases(1), phases(2)], "c": [] })),
    ];
    file(dir.path(), "metrics.jsonl", steps.concat().as_bytes());
    let board = Dashboard::of(dir.path(), &[dir.path()], None);
    let hosts = board.get("/api/fleet")["hosts"].clone();
    assert_eq!(hosts, json!({ "a": phases(2), "b": phases(0) }));
}

#[test]
fn export_has_the_answers_of_the_step_that_is_asked_for() {
    let dir = tempfile::tempdir().expect("a directory");
    let run_dir = run_with_samples(dir.path());
    file(&run_dir, "metrics.jsonl", (step(6, 0.5) + &step(7, 0.75)).as_bytes());
    let page = dir.path().join("page.html");
    let export = |step: &str| {
        let mut export = driftless();
        export.arg("dashboard").arg(&run_dir).args(["--step", step, "--export"]).arg(&page);
        export
    };
    run(&mut export("6"));
    let page = std::fs::read_to_string(&page).expect("a page");
    let data = page.split_once("id=\"data\">").expect("data").1.split_once("</script>").expect("its end").0;
    let data: Value = serde_json::from_str(data).expect("JSON");
    let samples = &data["samples/0"];
    assert_eq!(json!([samples["step"], samples["total"], data["time/0"]["shown"][1]]), json!([6, 1, 6]));
    assert_eq!(data[format!("sample/0/{}", samples["rows"][0]["position"])]["step"], 6);
    let (status, told) = code(&mut export("8"));
    assert!(status == Some(2) && told.contains("at most 7"), "{told}");
}
