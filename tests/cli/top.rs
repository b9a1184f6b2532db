//! `driftless top`: what it prints of a run's files, and what it draws on a terminal.

use crate::common::{driftless, json as reported, output, run};
use crate::terminal::{Drawing, Streams, on_terminal};
use serde_json::{Value, json};
use std::io::Write as _;
use std::path::Path;

/// Writes the files of a run of two steps, one engine of which is lost.
fn run_of_two_steps(dir: &Path) {
    let step = |number: u64, reward: f64, trained: f64| {
        let goodput =
            json!({ "began_at_ms": 1, "places_s": 4, "trained_s": trained, "idle_s": { "no request": 1 } });
        json!({ "rollout_id": number, "reward": reward, "staleness_mean": 0, "goodput": goodput })
    };
    let events = [
        json!({ "at_ms": 1, "event": "begin", "step": 0, "of": 9 }),
        json!({ "at_ms": 2, "event": "phase", "url": "http://a", "phase": "serving", "why": "", "gets": "patches" }),
        json!({ "at_ms": 2, "event": "phase", "url": "http://b", "phase": "lost", "why": "no answer\u{1b}[2J" }),
        json!({ "at_ms": 4, "event": "published", "version": 2, "step": 2 }),
        json!({ "at_ms": 9, "event": "served", "version": 2, "behind": 0 }),
        json!({ "at_ms": 9, "event": "alert", "alert": "truncation", "begins": true, "text": "all is cut off" }),
    ];
    write(dir, "metrics.jsonl", &[step(0, 0.25, 1.0), step(1, 0.5, 3.0)]);
    write(dir, "events.jsonl", &events);
}

fn write(dir: &Path, name: &str, lines: &[Value]) {
    let lines: String = lines.iter().map(|line| format!("{line}\n")).collect();
    std::fs::write(dir.join(name), lines).expect("a file");
}

#[test]
fn run_is_printed_once_where_there_is_no_terminal() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = dir.path().join("first");
    std::fs::create_dir(&at).expect("a directory");
    assert_eq!(run(driftless().arg("top").arg(&at)).trim_end(), "first  0 steps");
    run_of_two_steps(&at);
    let text = run(driftless().arg("top").arg(&at));
    for part in [
        "first  2 steps of 9\nall is cut off\n  read the answers",
        "engine http://b is lost: no answer [2J\n",
        "\nFigures\nreward               0.5000 ▁█\nsteps old                 0 ▁▁\n",
        "\nEngines' time\ntrained                 75 % ███",
        "\nidle: no request        25 % ███",
        "\nFleet\nversion 2, served after 5 ms\nhttp://a                       serving  ",
        "  patches\nhttp://b                       lost     ",
    ] {
        assert!(text.contains(part), "expected {part:?} in\n{text}");
    }
    assert!(text.lines().all(|line| line.chars().count() <= 100) && !text.contains('\u{1b}'), "{text}");
    let told = reported(driftless().arg("top").arg(&at));
    assert_eq!((&told["steps"], &told["figures"]["reward"]), (&json!(2), &json!([0.25, 0.5])));
}

#[test]
fn directory_that_is_not_there_is_named() {
    let said = output(driftless().args(["top", "/nonexistent/run"]));
    let text = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(said.status.code() == Some(2) && text.contains("/nonexistent/run"), "{text}");
}

/// `top` on a terminal of so many columns.
fn top_on_terminal(dir: &Path, columns: u16, no_color: &str) -> Drawing {
    let mut command = driftless();
    command.args(["--die-with-parent", "top"]).arg(dir).env("NO_COLOR", no_color);
    on_terminal(command, columns, Streams::All)
}

#[test]
fn terminal_is_drawn_on_and_given_back_as_it_was() {
    const LEAVES: &str = "\u{1b}[?1049l";
    const RED: &str = "\u{1b}[38;5;1;49m";
    let dir = tempfile::tempdir().expect("a directory");
    run_of_two_steps(dir.path());
    for (columns, no_color, colour) in [(100, "", true), (40, "1", false)] {
        let mut top = top_on_terminal(dir.path(), columns, no_color);
        let first = top.until("http://b");
        assert_eq!(first.contains(RED), colour, "{first:?}");
        // What is added is drawn without being asked for.
        write(dir.path(), "metrics.jsonl", &[json!({ "rollout_id": 6, "reward": 0.125 })]);
        // Of 0.5000 and 0.1250 these digits differ, and no others are drawn.
        top.until("125");
        top.keys.write_all(b"q").expect("a key");
        top.until(LEAVES);
        assert_eq!(top.child.wait().expect("its end").code(), Some(0));
        run_of_two_steps(dir.path());
    }
}

#[test]
fn top_ends_with_its_terminal() {
    let dir = tempfile::tempdir().expect("a directory");
    run_of_two_steps(dir.path());
    let mut top = top_on_terminal(dir.path(), 80, "1");
    top.until("http://b");
    drop((top.keys, top.drawn));
    // The thread that reads has the last handle, and ends with the next frame.
    write(dir.path(), "metrics.jsonl", &[json!({ "rollout_id": 6, "reward": 0.125 })]);
    assert_eq!(top.child.wait().expect("its end").code(), Some(0));
}
