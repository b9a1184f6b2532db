//! Which way versions come, chosen by what was measured.

use crate::Run;
use crate::common::{code, driftless, json};
use crate::signed::{start, without_ucx};
use std::path::PathBuf;
use std::process::Command;

/// A file of figures: `driftless plan` with these flags besides the sizes.
fn plan(run: &Run, name: &str, flags: &[&str]) -> PathBuf {
    let file = run.path(name);
    let mut command = driftless();
    command.args(["plan", "--model-gb", "0.001", "--delta-gb", "0.0001"]).args(flags);
    json(command.arg("--save").arg(&file));
    file
}

fn follow(run: &Run, plan: &PathBuf, more: &[&str]) -> Command {
    let mut command = run.follow_once();
    command.arg("--plan").arg(plan).args(more);
    command
}

#[test]
fn a_follower_chooses_says_why_and_keeps_to_what_is_pinned() {
    let mut run = Run::new();
    run.publish();
    let store = plan(&run, "store.json", &["--store-gb-s", "1"]);
    let text = std::fs::read_to_string(&store).expect("a plan");
    assert!(
        text.contains("\"model_bytes\": 1000000,") && text.contains("\"delta_bytes\": 100000,"),
        "{text}"
    );
    let status = json(&mut follow(&run, &store, &[]));
    let route = &status["route"];
    assert_eq!((&route["version"], &route["way"]), (&0.into(), &"store".into()), "{status}");
    assert_eq!(route["bytes"], status["applied"]["bytes"], "{status}");
    let reason = route["reason"].as_str().expect("a reason");
    assert!(reason.starts_with("full weights, ") && reason.contains("over the store: "), "{reason}");

    run.made.step(100);
    run.publish();
    let status = json(&mut follow(&run, &store, &["--update-weight-transport", "disk"]));
    let route = &status["route"];
    assert_eq!((&route["way"], &route["bytes"]), (&"store".into(), &status["applied"]["bytes"]));
    let reason = route["reason"].as_str().expect("a reason");
    assert!(reason.starts_with("a delta, ") && reason.ends_with("; pinned"), "{reason}");
    run.assert_host_is_current();

    run.made.step(100);
    run.publish();
    let (ended, words) = code(follow(&run, &store, &[]).env("RUST_LOG", "info"));
    let logged = words.lines().find(|line| line.contains("how the version comes")).unwrap_or_default();
    assert!(
        ended == Some(0) && logged.contains("a delta, ") && logged.contains("over the store: "),
        "{words}"
    );
    assert!(json(&mut run.follow_once()).get("route").is_none(), "nobody chooses without figures");
}

#[test]
fn plans_that_cannot_be_followed_are_refused_before_anything_is_touched() {
    let run = Run::new();
    let store = plan(&run, "store.json", &["--store-gb-s", "1"]);
    let nccl = plan(&run, "nccl.json", &["--nccl-gb-s", "100"]);
    let edited = |name: &str, from: &str, to: &str| {
        let text = std::fs::read_to_string(&store).expect("a plan");
        assert!(text.contains(from), "{text}");
        std::fs::write(run.path(name), text.replace(from, to)).expect("written");
        run.path(name)
    };
    let newer = edited("newer.json", "\"driftless_plan\": 1", "\"driftless_plan\": 2");
    let unknown = edited("unknown.json", "\"encode\"", "\"encoded\"");
    let zero = edited("zero.json", "\"rate\": 1000000000.0", "\"rate\": 0.0");
    let ucx = ["--update-weight-transport", "ucx", "--relay", "ucx://127.0.0.1:1"];
    let library = ["--nccl-library", "/nowhere/libnccl.so.2", "--engine", "127.0.0.1:1"];
    for (file, more, status, word) in [
        (&run.path("absent.json"), &[][..], 2, "absent.json"),
        (&newer, &[], 2, "expected 1, found 2"),
        (&unknown, &[], 1, "unknown.json is not valid JSON"),
        (&zero, &[], 1, "a rate above 0 for store"),
        (&nccl, &[], 1, "a figure of the store"),
        (&store, &ucx, 1, "a figure of UCX"),
        (&store, &ucx[2..], 1, "a figure of UCX"),
        (&store, &library, 1, "a figure of NCCL"),
        (&store, &["--layout", "slime"], 2, "--layout slime"),
        (&store, &["--colocate"], 2, "--colocate"),
    ] {
        let (found, words) = code(&mut follow(&run, file, more));
        assert!(found == Some(status) && words.contains(word), "{more:?}: {found:?} {words}");
    }
    assert!(!run.path("host").exists());
}

/// NCCL is chosen at the start, where it is the quicker way into engines, and then its library is wanted.
#[test]
fn how_weights_enter_the_engines_follows_from_the_figures_too() {
    let run = Run::new();
    let library = ["--nccl-library", "/nowhere/libnccl.so.2", "--engine", "127.0.0.1:1"];
    for (rate, pin, nccl) in [("100", None, true), ("1", None, false), ("100", Some("disk"), false)] {
        let file = plan(&run, "plan.json", &["--store-gb-s", "1", "--nccl-gb-s", rate, "--load-gb-s", "6"]);
        let mut command = follow(&run, &file, &library);
        command.args(pin.iter().flat_map(|pin| ["--update-weight-transport", pin]));
        let (found, words) = code(&mut command);
        assert_eq!(words.contains("/nowhere/libnccl.so.2"), nccl, "{rate} {pin:?}: {found:?} {words}");
    }
}

#[test]
fn each_version_comes_over_ucx_or_from_the_store_as_its_bytes_say() {
    let mut run = Run::new();
    run.publish();
    let (_relay, said) = match start(&run, &["--listen-ucx", "127.0.0.1:0"]) {
        Ok(started) => started,
        Err(words) => return without_ucx(&words),
    };
    let relay = ["--relay", said["ucx_url"].as_str().expect("a URL")];
    let kept = |run: &Run| std::fs::read_dir(run.path("cache/objects")).map_or(0, Iterator::count);
    let slow =
        plan(&run, "slow.json", &["--ucx-gb-s", "1", "--store-gb-s", "1e-6", "--store-latency-ms", "0"]);
    let quick =
        plan(&run, "quick.json", &["--ucx-gb-s", "1e-6", "--store-gb-s", "1", "--store-latency-ms", "0"]);
    let status = json(&mut follow(&run, &quick, &relay));
    assert_eq!((&status["route"]["way"], kept(&run)), (&"store".into(), 0), "{status}");

    run.made.step(100);
    run.publish();
    let status = json(&mut follow(&run, &slow, &relay));
    assert_eq!(status["route"]["way"], "ucx", "{status}");
    let through = kept(&run);
    assert!(through > 0, "the objects came through the relay");

    run.made.step(100);
    run.publish();
    let disk = [&relay[..], &["--update-weight-transport", "disk"]].concat();
    let status = json(&mut follow(&run, &slow, &disk));
    assert_eq!((&status["route"]["way"], kept(&run)), (&"store".into(), through), "pinned: {status}");
    run.assert_host_is_current();
}
