//! `driftless dashboard`: what it answers of runs whose files grow, are damaged or lie.

use crate::common::{Process, code, driftless, output, run};
use crate::log::run_with_samples;
use driftless_testkit::http::exchange;
use serde_json::{Value, json};
use std::fs::File;
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A dashboard that runs, of these runs.
struct Dashboard {
    _process: Process,
    addr: SocketAddr,
}

impl Dashboard {
    fn of(dir: &Path, runs: &[&Path], token: Option<&Path>) -> Dashboard {
        let mut command = driftless();
        command.args(["--json", "--die-with-parent", "dashboard", "--listen", "127.0.0.1:0"]).args(runs);
        command.env_remove("DRIFTLESS_TOKEN");
        token.map(|file| command.arg("--token-file").arg(file));
        let mut process = Process::start("dashboard", dir, &mut command);
        let said = process.says(0).expect("where it listens");
        let addr = said["url"].as_str().and_then(|url| url.strip_prefix("http://")).expect("a URL");
        Dashboard { addr: addr.parse().expect("an address"), _process: process }
    }

    fn ask(&self, path: &str, headers: &str) -> (u16, String) {
        exchange(self.addr, &format!("GET {path}"), headers, "")
    }

    fn get(&self, path: &str) -> Value {
        let (status, body) = self.ask(path, &format!("host: {}\r\n", self.addr));
        assert_eq!(status, 200, "{path}: {body}");
        serde_json::from_str(&body).expect("JSON")
    }
}

fn file(dir: &Path, name: &str, text: &[u8]) -> PathBuf {
    let path = dir.join(name);
    std::fs::write(&path, text).expect("a file");
    path
}

fn append(path: &Path, text: &str) {
    File::options().append(true).open(path).expect("a file").write_all(text.as_bytes()).expect("a disk");
}

fn step(number: u64, reward: f64) -> String {
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
    let told = "# What `driftless train` was told\n[train]\nlr = \"1e-6\"\nstore = 's3://u:hidden@b'\ncustom-rm-command = 'python a.py --key hidden'\n";
    file(dir.path(), "run.toml", told.as_bytes());
    let board = Dashboard::of(dir.path(), &[dir.path()], None);
    let runs = board.get("/api/runs");
    let facts = ["steps", "damaged", "settings"].map(|name| runs[0][name].clone());
    let settings = json!({ "lr": "1e-6", "store": "s3://…@b", "custom-rm-command": "python …" });
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
