//! `driftless dashboard`: what it answers of runs whose files grow, are damaged or lie.

use crate::Run;
use crate::common::{Process, code, driftless, json as reported, output, run};
use crate::log::{learned_in, run_with_samples};
use crate::trace::{BEGAN, made};
use driftless_testkit::http::exchange;
use driftless_testkit::tree::tree;
use serde_json::{Value, json};
use std::fs::File;
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A dashboard that runs, of these runs.
pub(crate) struct Dashboard {
    process: Process,
    pub(crate) addr: SocketAddr,
}

impl Dashboard {
    pub(crate) fn of(dir: &Path, runs: &[&Path], token: Option<&Path>) -> Dashboard {
        let mut command = driftless();
        command.args(["--json", "--die-with-parent", "dashboard", "--listen", "127.0.0.1:0"]).args(runs);
        command.env_remove("DRIFTLESS_TOKEN");
        token.map(|file| command.arg("--token-file").arg(file));
        let mut process = Process::start("dashboard", dir, &mut command);
        let said = process.says(0).expect("where it listens");
        let addr = said["url"].as_str().and_then(|url| url.strip_prefix("http://")).expect("a URL");
        Dashboard { addr: addr.parse().expect("an address"), process }
    }

    pub(crate) fn ask(&self, path: &str, headers: &str) -> (u16, String) {
        exchange(self.addr, &format!("GET {path}"), headers, "")
    }

    /// What comes of asking until it is as it shall be.
    pub(crate) fn until(&mut self, path: &str, is_so: impl Fn(&Value) -> bool) -> Value {
        let addr = self.addr;
        self.process.until(path, |_| {
            let (_, body) = exchange(addr, &format!("GET {path}"), &format!("host: {addr}\r\n"), "");
            serde_json::from_str(&body).ok().filter(&is_so)
        })
    }

    pub(crate) fn get(&self, path: &str) -> Value {
        let (status, body) = self.ask(path, &format!("host: {}\r\n", self.addr));
        assert_eq!(status, 200, "{path}: {body}");
        serde_json::from_str(&body).expect("JSON")
    }
}

pub(crate) fn file(dir: &Path, name: &str, text: &[u8]) -> PathBuf {
    let path = dir.join(name);
    std::fs::write(&path, text).expect("a file");
    path
}

fn append(path: &Path, text: &str) {
    File::options().append(true).open(path).expect("a file").write_all(text.as_bytes()).expect("a disk");
}

pub(crate) fn step(number: u64, reward: f64) -> String {
    let figures = json!({ "rollout_id": number, "reward": reward, "skipped": false, "publication": { "density": 0.5 },
        "staleness": [1, 2], "goodput": { "began_at_ms": 1, "idle_s": { "no request": 2.5 } } });
    format!("{figures}\n")
}

#[test]
fn figures_grow_and_damaged_lines_are_counted() {
    let dir = tempfile::tempdir().expect("a directory");
    let whole = format!("{}not a step\n{{\"reward\": 1}}\n{}", step(0, 0.25), step(1, 0.5));
    let metrics =
        file(dir.path(), "metrics.jsonl", &[b"\xff\xfe\n", whole.as_bytes(), b"{\"rollout_id\":2,"].concat());
    let told = "# What `driftless train` was told\n[train]\nlr = \"1e-6\"\nstore = 's3://u:hidden@b'\ncustom-rm-command = 'KEY=hidden exec python a.py --key hidden'\nlearner = 'KEY=hidden'\nenvironment-args = '{\"key\": \"hidden\"}'\n";
    file(dir.path(), "run.toml", told.as_bytes());
    let board = Dashboard::of(dir.path(), &[dir.path()], None);
    let runs = board.get("/api/runs");
    let facts = ["steps", "damaged", "settings"].map(|name| runs[0][name].clone());
    let settings = json!({ "lr": "1e-6", "store": "s3://…@b", "custom-rm-command": "python …",
        "learner": "the command …", "environment-args": "…" });
    assert_eq!(json!(facts), json!([2, { "metrics": 3, "events": 0, "ledger": 0 }, settings]));
    let first = board.get("/api/metrics");
    assert_eq!((&first["rows"], &first["columns"]["reward"]), (&json!(2), &json!([0.25, 0.5])));
    assert_eq!(first["columns"]["goodput.idle_s.no request"], json!([2.5, 2.5]));
    assert_eq!(first["columns"]["publication.density"], json!([0.5, 0.5]));
    append(&metrics, "\"reward\":0.75,\"pass\":1}\n");
    let next = board.get("/api/metrics?from=2");
    assert_eq!(
        json!([next["from"], next["columns"]["reward"], next["columns"]["pass"]]),
        json!([2, [0.75], [1]])
    );
    assert_eq!(next["columns"]["publication.density"], json!([null]), "what a step does not tell is nothing");
}

#[test]
fn run_that_begins_again_is_read_again() {
    let dir = tempfile::tempdir().expect("a directory");
    let metrics =
        file(dir.path(), "metrics.jsonl", (step(0, 0.0) + &step(1, 0.1) + &step(2, 0.2)).as_bytes());
    let board = Dashboard::of(dir.path(), &[dir.path()], None);
    let epoch = |answer: &Value| answer["epoch"].as_u64().expect("a number");
    let first = epoch(&board.get("/api/metrics"));
    // As a run that goes on from a checkpoint leaves it.
    let fresh = file(dir.path(), "metrics.new", step(0, 0.0).as_bytes());
    std::fs::rename(fresh, &metrics).expect("a file");
    append(&metrics, &step(1, 0.9));
    let again = board.get(&format!("/api/metrics?epoch={first}&from=3"));
    assert_eq!(json!([again["from"], again["columns"]["reward"]]), json!([0, [0, 0.9]]));
    // A step that is done again, in the same file.
    append(&metrics, &step(1, 0.7));
    let third = board.get(&format!("/api/metrics?epoch={}&from=2", epoch(&again)));
    assert_eq!(json!([third["from"], third["columns"]["reward"]]), json!([0, [0, 0.7]]));
    File::options().write(true).open(&metrics).expect("a file").set_len(0).expect("a disk");
    append(&metrics, &step(0, 0.3));
    assert_eq!(board.get("/api/metrics")["columns"]["reward"], json!([0.3]), "a file that shrinks");
}

#[test]
fn answers_are_listed_filtered_and_shown_by_token() {
    let dir = tempfile::tempdir().expect("a directory");
    let run_dir = run_with_samples(dir.path());
    let board = Dashboard::of(dir.path(), &[&run_dir], None);
    let list = board.get("/api/samples?step=7&order=best");
    let rewards = |list: &Value| {
        list["rows"].as_array().expect("rows").iter().map(|row| row["reward"].clone()).collect::<Vec<_>>()
    };
    assert_eq!((list["total"].as_u64(), rewards(&list)), (Some(2), vec![json!(1.0), json!(0.0)]), "{list}");
    assert_eq!(rewards(&board.get("/api/samples?step=7&reward_max=0.4")), [json!(0.0)]);
    assert_eq!(board.get("/api/samples?step=7&finish=length")["total"], 0);
    assert_eq!(board.get("/api/samples?step=7&length_min=2")["total"], 0);
    assert_eq!(board.get("/api/samples")["steps"], json!([6, 7]), "as the log says, without a ledger");
    file(&run_dir, "ledger.jsonl", b"{\"step\":7,\"groups\":[0]}\n{\"step\":8,\"groups\":[5, 6]}\n{\"st");
    let gone = board.get("/api/samples");
    assert_eq!(json!([gone["step"], gone["groups"], gone["found"], gone["steps"]]), json!([8, 2, 0, [7, 8]]));
    let worst = rewards(&list).len() - 1;
    let one = board.get(&format!("/api/sample?position={}", list["rows"][worst]["position"]));
    let shown = ["prompt", "texts", "log_probs", "mask", "label", "finish"].map(|name| one[name].clone());
    assert_eq!(json!(shown), json!(["What is", ["\u{1b}[2J"], [-1.0], [1], "42", "stop"]));
    std::fs::remove_file(run_dir.join("baseline/tokenizer.json")).expect("a file");
    let bare = Dashboard::of(dir.path(), &[&run_dir], None);
    let one = bare.get(&format!("/api/sample?position={}", list["rows"][0]["position"]));
    assert_eq!(one["texts"], json!(["2"]), "ids without a tokenizer");
    assert!(one["untold"].as_str().is_some_and(|why| why.contains("tokenizer.json")), "{one}");
    let (status, told) = bare.ask("/api/sample?position=99", &format!("host: {}\r\n", bare.addr));
    assert!(status == 404 && told.contains("that of an answer"), "{status}: {told}");
}

#[test]
fn answers_are_found_by_how_far_learner_and_engine_are_apart() {
    let dir = tempfile::tempdir().expect("a directory");
    let run_dir = run_with_samples(dir.path());
    learned_in(&run_dir, 6, &[(1, -1.5)]);
    learned_in(&run_dir, 7, &[(2, -1.125), (3, -4.0)]);
    let board = Dashboard::of(dir.path(), &[&run_dir], None);
    let rows = |query: &str| {
        let list = board.get(&format!("/api/samples?{query}"));
        let row = |row: &Value| json!([row["position"], row["learned"], row["mismatch"]]);
        json!(list["rows"].as_array().expect("rows").iter().map(row).collect::<Vec<_>>())
    };
    let [first, second, third] = [json!([3, 7, 3.0]), json!([1, 6, 0.5]), json!([2, 7, 0.125])];
    assert_eq!(rows("step=7&order=mismatch"), json!([first, third]));
    assert_eq!(rows("step=7&mismatch_min=0.2"), json!([first]));
    assert_eq!(rows("kind=mismatched&order=mismatch"), json!([first, second, third]), "of all steps");
    assert_eq!(rows("kind=mismatched&order=mismatch&reward_max=0.6"), json!([second, third]));
    let one = board.get("/api/sample?position=3");
    assert_eq!(
        json!([one["learner_log_probs"], one["log_probs"], one["mismatch"]]),
        json!([[-4.0], [-1.0], 3.0])
    );
    let columns = run_dir.join("log/learned/00000000000000000007.columns");
    file(
        &run_dir,
        "log/learned/00000000000000000007.columns",
        &std::fs::read(columns).expect("a file")[..99],
    );
    let list = board.get("/api/samples?step=7");
    assert!(list["untold"].as_str().is_some_and(|why| why.contains("columns")), "{list}");
    assert_eq!((&list["total"], &list["rows"][0]["mismatch"]), (&json!(2), &Value::Null));
}

#[test]
fn engines_and_events_are_those_of_the_files() {
    let dir = tempfile::tempdir().expect("a directory");
    let html = "<script>alert(1)</script>";
    let lines = [
        json!({ "at_ms": 1, "event": "begin", "step": 0, "of": 9 }),
        json!({ "at_ms": 2, "event": "phase", "url": "http://a", "phase": "serving", "why": "" }),
        json!({ "at_ms": 3, "event": "phase", "url": "http://a", "phase": "lost", "why": html }),
        json!({ "at_ms": 4, "event": "published", "version": 3, "step": 3 }),
        json!({ "at_ms": 9, "event": "served", "version": 3, "behind": 1 }),
        json!({ "at_ms": 9, "event": "step", "rollout_id": 3 }),
        json!({ "at_ms": 9, "event": "alert", "alert": "truncation", "begins": true, "text": "all is cut off" }),
    ];
    let lines: Vec<String> = lines.iter().map(Value::to_string).collect();
    let huge = format!("{{\"at_ms\":5,\"event\":\"{}\"}}", "x".repeat(5 << 20));
    file(dir.path(), "events.1.jsonl", format!("{}\n{{\"at_ms\":\n", lines[0]).as_bytes());
    file(dir.path(), "events.jsonl", format!("{}\n{huge}\n", lines[1..].join("\n")).as_bytes());
    let board = Dashboard::of(dir.path(), &[dir.path()], None);
    let fleet = board.get("/api/fleet");
    let engine = &fleet["engines"]["http://a"];
    assert_eq!(
        json!([engine["lost"], engine["why"], engine["phases"]]),
        json!([1, html, [[2, "serving"], [3, "lost"]]])
    );
    let version = json!({ "step": 3, "published_at_ms": 4, "served_at_ms": 9, "behind": 1 });
    assert_eq!(
        json!([fleet["of"], fleet["versions"]["3"], fleet["facts"].as_array().map(Vec::len)]),
        json!([9, version, 5])
    );
    let alerts = |board: &Dashboard| {
        let told = board.get("/api/runs")[0]["alerts"].clone();
        let one = |alert: &Value| {
            json!([alert["at_ms"], alert["text"], alert["remedy"].as_str().is_some_and(|it| it.len() > 20)])
        };
        told.as_array().into_iter().flatten().map(one).collect::<Vec<_>>()
    };
    let lost = json!([3, format!("engine http://a is lost: {html}"), true]);
    assert_eq!(alerts(&board), [json!([9, "all is cut off", true]), lost.clone()]);
    assert_eq!(board.get("/api/runs")[0]["damaged"]["events"], 2);
    // The next file of events goes on.
    std::fs::rename(dir.path().join("events.jsonl"), dir.path().join("events.1.jsonl")).expect("a file");
    let over = json!({ "at_ms": 10, "event": "alert", "alert": "truncation", "begins": false, "text": "little is cut off" });
    file(dir.path(), "events.jsonl", format!("{over}\n").as_bytes());
    assert_eq!(board.get("/api/fleet")["facts"].as_array().map(Vec::len), Some(6));
    assert_eq!(alerts(&board), [lost]);
}

/// What there is of this kind: each bar, as it came.
pub(crate) fn bars(window: &Value, kind: &str) -> Vec<Value> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let rows = list(&window["tracks"]).into_iter().flat_map(|track| list(&track["rows"]));
    let lanes = rows.filter(|row| row["kind"] == kind).flat_map(|row| list(&row["lanes"]));
    lanes.flat_map(|lane| list(&lane)).collect()
}

#[test]
fn time_of_steps_has_the_bars_that_trace_writes() {
    let dir = tempfile::tempdir().expect("a directory");
    // Of three steps, and cut off by a crash.
    let run_dir = made(dir.path());
    let board = Dashboard::of(dir.path(), &[&run_dir], None);
    let whole = board.get("/api/time");
    assert_eq!(json!([whole["steps"], whole["shown"], whole["cut"]]), json!([[0, 2], [0, 2], false]));
    assert_eq!(json!([whole["from_us"], whole["for_us"]]), json!([BEGAN * 1000 - 250, 3_000_250]));
    for (kind, count) in [("steps", 3), ("learner", 6), ("answers", 6), ("evaluations", 1), ("versions", 3)] {
        assert_eq!(bars(&whole, kind).len(), count, "{kind}: {whole}");
    }
    for (kind, count) in [("waits", 1), ("events", 2), ("engine", 3)] {
        assert_eq!(bars(&whole, kind).len(), count, "{kind}: {whole}");
    }
    let step = board.get("/api/time?step=1&steps=1");
    assert_eq!(
        json!([step["shown"], bars(&step, "steps").len(), bars(&step, "events")]),
        json!([[1, 1], 1, []])
    );
    let answer = &bars(&step, "answers")[1];
    let parts = json!([
        ["prefill", 10_250, 103_000, null],
        ["decode", 113_250, 287_000, null],
        ["reward", 400_250, 50_000, null]
    ]);
    assert_eq!(
        json!([answer["name"], answer["at"], answer["took"], answer["parts"]]),
        json!(["answer 3", 10_250, 440_000, parts])
    );
    assert_eq!((&answer["told"]["step"], answer["position"].is_u64()), (&json!(1), true));
    let serving = &bars(&step, "engine")[0];
    assert_eq!(
        json!([serving["name"], serving["at"]]),
        json!(["serving", 50_000 - 999_750]),
        "as long as it lasted"
    );
    let asked = ["step=99&steps=2", "step=0&steps=999", "steps=0"]
        .map(|ask| board.get(&format!("/api/time?{ask}"))["shown"].clone());
    assert_eq!(json!(asked), json!([[1, 2], [0, 0], [2, 2]]));
    assert_eq!(board.ask("/api/time?steps=-1", &format!("host: {}\r\n", board.addr)).0, 400);
}

#[test]
fn time_of_a_long_run_reads_its_window_alone() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = |step: u64| BEGAN + step * 1000;
    let line = |number: u64| {
        let figures = json!({ "rollout_id": number, "completed_at_ms": at(number), "reward": 0.5, "response_length": 2.0,
            "staleness_mean": 0.0, "staleness_max": 0, "generate_ms": 5.0, "train_ms": 300.0, "train_wait_ms": 400.0,
            "wall_ms": 1000.0, "publication": null, "eval": null });
        format!("{figures}\n")
    };
    let phase = |ms: u64, url: &str, phase: &str| {
        format!("{}\n", json!({ "at_ms": ms, "event": "phase", "url": url, "phase": phase, "why": "" }))
    };
    // Two engines, one of which goes through its phases in every step; the other one's began long before.
    let (mut metrics, mut events) = (String::new(), phase(BEGAN, "http://old", "serving"));
    for step in 0..10_000 {
        metrics += &line(step);
        events +=
            &(phase(at(step), "http://busy", "syncing") + &phase(at(step) + 500, "http://busy", "serving"));
    }
    let metrics = file(dir.path(), "metrics.jsonl", metrics.as_bytes());
    file(dir.path(), "events.1.jsonl", events.as_bytes());
    let lost = phase(at(9_999) + 700, "http://old", "lost");
    let other = "x".repeat(5000);
    let told = json!({ "at_ms": at(9_999) + 600, "event": "changed", "name": other });
    file(dir.path(), "events.jsonl", format!("garbage\n{told}\n{lost}").as_bytes());
    let board = Dashboard::of(dir.path(), &[dir.path()], None);
    let names = |window: &Value, kind: &str| {
        bars(window, kind).iter().map(|bar| bar["name"].clone()).collect::<Vec<_>>()
    };
    let middle = board.get("/api/time?step=5001&steps=2");
    assert_eq!(names(&middle, "steps"), ["step 5000", "step 5001"]);
    assert_eq!(names(&middle, "learner"), ["wait", "learn", "wait", "learn"]);
    // Of the busy one what touches these two seconds.
    assert_eq!(names(&middle, "engine").len(), 6 + 1, "{middle}");
    let old = &bars(&middle, "engine")[6];
    assert_eq!((&old["name"], old["at"].as_i64()), (&json!("serving"), Some(-4_999_000_000)), "{middle}");
    let newest = board.get("/api/time");
    assert_eq!(names(&newest, "steps").len(), 4);
    assert_eq!(names(&newest, "engine").last(), Some(&json!("lost")), "the file before goes on in this one");
    let changed = bars(&newest, "events");
    assert!(
        changed[0]["told"]["name"].as_str().is_some_and(|text| text.chars().count() == 301),
        "{changed:?}"
    );
    // A step that is done again has its new place.
    append(&metrics, &line(9_999).replace("\"train_ms\":300", "\"train_ms\":100"));
    let learn = |window: &Value| bars(window, "learner").last().expect("one")["took"].clone();
    assert_eq!(json!([learn(&newest), learn(&board.get("/api/time"))]), json!([300_000, 100_000]));
    file(dir.path(), "metrics.jsonl", b"");
    assert_eq!(board.get("/api/time")["steps"], Value::Null, "a run that begins again");
}

#[test]
fn time_of_a_directory_without_files_is_empty() {
    let dir = tempfile::tempdir().expect("a directory");
    let board = Dashboard::of(dir.path(), &[dir.path()], None);
    let empty = board.get("/api/time?step=7");
    assert_eq!(json!([empty["steps"], empty["tracks"], empty["cut"]]), json!([null, [], false]), "{empty}");
    let waiting = json!({ "at_ms": BEGAN, "event": "waiting", "what": "engines", "on": "<b>" });
    let begun = json!({ "at_ms": BEGAN + 500, "event": "begin", "step": 0, "of": 9 });
    file(dir.path(), "events.jsonl", format!("{waiting}\n{begun}\n").as_bytes());
    let first = board.get("/api/time");
    let waits = bars(&first, "waits");
    assert_eq!(
        json!([first["from_us"], first["for_us"], waits[0]["took"]]),
        json!([BEGAN * 1000, 500_000, 500_000])
    );
}

#[test]
fn store_of_a_run_is_told_and_nothing_is_written() {
    let mut run = Run::new();
    for more in [&[][..], &[], &["--anchor-every", "2"]] {
        run.publish_with(|command| command.args(more));
        run.made.step(50);
    }
    reported(run.follow_once().args(["--until-version", "1"]));
    let save = tempfile::tempdir().expect("a directory");
    let told = format!(
        "# What was told, in {}; driftless 1.\n[train]\nstore = 'store'\nrun = 'test'\n",
        run.dir.path().display()
    );
    file(save.path(), "run.toml", told.as_bytes());
    let before = tree(&run.path("store"));
    let mut board = Dashboard::of(save.path(), &[save.path()], None);
    let is_told = |answer: &Value| !answer["found"].is_null() || !answer["unreachable"].is_null();
    let answer = board.until("/api/store", is_told);
    assert!(tree(&run.path("store")) == before, "something is written");
    let found = &answer["found"];
    let chain = reported(&mut run.command("inspect"));
    let versions = found["newest"].as_array().expect("versions");
    assert_eq!(versions.len(), 3, "{answer}");
    for (held, link) in versions.iter().rev().zip(chain["chain"].as_array().expect("a chain")) {
        for name in ["version", "kind", "anchor", "bytes", "density", "trainer_step"] {
            assert_eq!(held[name], link[name], "{name} of {held}");
        }
        assert!(held["created_ms"].as_u64() > Some(0), "{held}");
    }
    assert_eq!(json!([found["leases"][0]["follower"], found["leases"][0]["live"]]), json!(["host", true]));
    let gc = reported(run.command("gc").arg("--dry-run"));
    assert_eq!((&found["gc"]["floor"], &found["gc"]["removed"]), (&gc["floor"], &gc["removed"]), "{answer}");
    let kept = json!([{ "from": 1, "why": "host needs it" }, { "from": 2, "why": "the newest anchor: a follower that joins late begins there" },
        { "from": 2, "why": "the newest 1" }]);
    assert_eq!((&found["gc"]["kept"], &found["gc"]["places"]), (&kept, &json!(1)), "{answer}");
}

#[test]
fn store_that_does_not_answer_holds_up_nothing() {
    let dir = tempfile::tempdir().expect("a directory");
    // Accepts calls, and answers none.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let addr = silent.local_addr().expect("an address");
    let told = format!("[train]\nstore = 's3://bucket?endpoint=http://{addr}'\n");
    let settings = file(dir.path(), "run.toml", told.as_bytes());
    file(dir.path(), "metrics.jsonl", step(0, 0.5).as_bytes());
    let board = Dashboard::of(dir.path(), &[dir.path()], None);
    for _ in 0..20 {
        let answer = board.get("/api/store");
        assert_eq!(json!([answer["found"], answer["run"]]), json!([null, "default"]));
    }
    assert_eq!(board.get("/api/metrics")["rows"], 1);
    drop(board);
    let nowhere = dir.path().join("nowhere");
    std::fs::write(&settings, format!("[train]\nstore = '{}'\nrun = 'r'\n", nowhere.display()))
        .expect("a file");
    let mut board = Dashboard::of(dir.path(), &[dir.path()], None);
    let answer = board.until("/api/store", |answer| !answer["unreachable"].is_null());
    assert!(answer["unreachable"].as_str().is_some_and(|why| why.contains("`r`")), "{answer}");
    assert!(!nowhere.exists(), "nothing is made");
    std::fs::remove_file(settings).expect("a file");
    assert_eq!(board.get("/api/store")["store"], Value::Null, "a directory that names none");
}

#[test]
fn strangers_and_pages_from_elsewhere_are_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let token = file(dir.path(), "token", b"secret\n");
    let open = Dashboard::of(dir.path(), &[dir.path()], None);
    let (own, elsewhere) = (format!("host: {}\r\n", open.addr), "host: evil.example\r\n");
    assert_eq!(open.ask("/", &own).0, 200);
    for (path, headers) in [
        ("/", elsewhere.to_owned()),
        ("/api/runs", elsewhere.to_owned()),
        ("/api/runs", own.clone() + "origin: http://evil.example\r\n"),
    ] {
        assert_eq!(open.ask(path, &headers).0, 403, "{path}: {headers}");
    }
    for (path, status) in [
        ("/api/nothing", 404),
        ("/api/metrics?run=1", 404),
        ("/api/metrics?run=x", 400),
        ("/../run.toml", 404),
    ] {
        assert_eq!(open.ask(path, &own).0, status, "{path}");
    }
    assert_eq!(exchange(open.addr, "POST /api/runs", &own, "{}").0, 405, "nothing is changed here");
    let guarded = Dashboard::of(dir.path(), &[dir.path()], Some(&token));
    let own = format!("host: {}\r\n", guarded.addr);
    assert_eq!((guarded.ask("/page.js", &own).0, guarded.ask("/api/runs", &own).0), (200, 401));
    assert_eq!(guarded.ask("/api/runs", &(own.clone() + "authorization: Bearer wrong\r\n")).0, 401);
    assert_eq!(guarded.ask("/api/runs", &(own + "authorization: Bearer secret\r\n")).0, 200);
    let mut exposed = driftless();
    exposed.args(["dashboard", "--listen", "0.0.0.0:0"]).arg(dir.path()).env_remove("DRIFTLESS_TOKEN");
    let (status, told) = code(&mut exposed);
    assert!(status == Some(2) && told.contains("--token-file"), "{told}");
}

#[test]
fn export_is_one_page_whose_data_ends_no_script() {
    let dir = tempfile::tempdir().expect("a directory");
    let run_dir = run_with_samples(dir.path());
    file(&run_dir, "metrics.jsonl", step(0, 0.5).as_bytes());
    file(
        &run_dir,
        "events.jsonl",
        b"{\"at_ms\":1,\"event\":\"waiting\",\"what\":\"</script><script>alert(1)\",\"on\":\"\"}\n",
    );
    let page = dir.path().join("page.html");
    run(driftless().arg("dashboard").arg(&run_dir).arg("--export").arg(&page));
    let page = std::fs::read_to_string(page).expect("a page");
    let data = page.split_once("id=\"data\">").expect("data").1.split_once("</script>").expect("its end").0;
    let data: Value = serde_json::from_str(data).expect("JSON");
    assert_eq!(data["fleet/0"]["facts"][0]["what"], "</script><script>alert(1)");
    assert_eq!(data["time/0"]["shown"], json!([4, 7]));
    assert_eq!((&data["metrics/0"]["rows"], &data["samples/0"]["total"]), (&json!(1), &json!(2)));
    let position = &data["samples/0"]["rows"][0]["position"];
    assert_eq!(data[format!("sample/0/{position}")]["prompt"], "What is");
    assert!(!page.contains("src=\"") && !page.contains("stylesheet"), "nothing is fetched");
}

/// Every view in a browser: what it holds, and that its console stays empty. Only `DRIFTLESS_LONG` asks for it.
#[test]
fn views_have_content_in_chromium() {
    if std::env::var_os("DRIFTLESS_LONG").is_none()
        || Command::new("chromium").arg("--version").output().is_err()
    {
        return println!("no Chromium is asked for, or there is none: nothing is looked at");
    }
    let dir = tempfile::tempdir().expect("a directory");
    let run_dir = run_with_samples(dir.path());
    let metrics = file(&run_dir, "metrics.jsonl", (step(0, 0.25) + &step(1, 0.5)).as_bytes());
    let lost = json!({ "at_ms": 3, "event": "phase", "url": "http://a", "phase": "lost", "why": "<b>gone</b>\u{1b}[2J" });
    file(&run_dir, "events.jsonl", format!("{lost}\n").as_bytes());
    let board = Dashboard::of(dir.path(), &[&run_dir], None);
    let shown = |view: &str| {
        let mut chromium = Command::new("chromium");
        chromium.args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            "--dump-dom",
        ]);
        chromium
            .args(["--window-size=1300,900", "--virtual-time-budget=4000"])
            .arg(format!("http://{}/#{view}", board.addr));
        let said = output(&mut chromium);
        let told = String::from_utf8_lossy(&said.stderr);
        assert!(!told.contains("CONSOLE"), "{view}: {told}");
        String::from_utf8_lossy(&said.stdout).into_owned()
    };
    let first = shown("run");
    assert!(
        first.contains("2 steps") && first.contains("<canvas") && first.contains("elements changed"),
        "{first}"
    );
    append(&metrics, &step(2, 0.75));
    assert!(shown("run").contains("3 steps"), "a run goes on");
    assert!(shown("goodput").contains("The largest loss is 100.0 %: idle: no request"));
    let time = shown("time");
    assert!(time.contains("steps 4–7") && time.contains("<canvas"), "{time}");
    let position = &board.get("/api/samples?order=worst")["rows"][0]["position"];
    let samples = shown(&format!("samples?position={position}"));
    assert!(
        samples.contains("2 answers of step 7") && samples.contains("What is") && samples.contains("U+001B"),
        "{samples}"
    );
    let fleet = shown("fleet");
    assert!(fleet.contains("engine http://a is lost: &lt;b&gt;gone"), "{fleet}");
    assert!(
        fleet.contains("&lt;b&gt;gone&lt;/b&gt;") && fleet.contains("phase: lost, url http://a"),
        "{fleet}"
    );
}
