//! Keys, signed versions and relays, as a script uses them.

use crate::Run;
use crate::common::{Process, code, driftless, json};

#[test]
fn only_what_the_trainer_signed_is_followed() {
    let mut run = Run::new();
    let keygen = |name: &str| json(driftless().arg("keygen").arg(run.path(name)));
    let [ours, theirs] = ["ours", "theirs"].map(keygen);
    assert!(ours["public_key"] != theirs["public_key"]);
    let secret = std::fs::read_to_string(run.path("ours")).expect("a key file");
    assert!(
        !ours.to_string().contains(secret.split(' ').next_back().expect("a key").trim()),
        "a secret is shown"
    );
    assert_eq!(code(driftless().arg("keygen").arg(run.path("ours"))).0, Some(1), "no key is replaced");

    let sign = run.path("ours");
    run.publish_with(|command| command.arg("--sign-key").arg(&sign));
    let follow = |key: &str| {
        let mut command = run.follow_once();
        command.arg("--trust-key").arg(run.path(key));
        command
    };
    let (refused, words) = code(&mut follow("theirs.pub"));
    assert!(refused == Some(3) && words.contains("is not signed by a trusted key"), "{refused:?} {words}");
    assert_eq!(json(&mut follow("ours.pub"))["applied"]["version"], 0);
    run.assert_host_is_current();

    run.made.step(100);
    let unsigned = run.path("intruder");
    let mut intruder = run.command("publish");
    intruder.args(["--resume", "--baseline-dir"]).arg(&unsigned);
    intruder.arg("--checkpoint").arg(run.made.write(&run.path("checkpoint")));
    json(&mut intruder);
    let mut again = run.follow_once();
    let (refused, words) = code(again.arg("--trust-key").arg(run.path("ours.pub")));
    assert!(refused == Some(3) && words.contains("signed by: no key"), "{refused:?} {words}");
}

/// Starts a relay of the run's store. Returns it and what it prints, or what it said when it did not start.
pub(crate) fn start(run: &Run, more: &[&str]) -> Result<(Process, serde_json::Value), String> {
    let mut command = driftless();
    command
        .args(["--json", "--die-with-parent", "relay", "--listen", "127.0.0.1:0", "--store"])
        .arg(run.path("store"));
    command.arg("--cache-dir").arg(run.path("cache")).args(more);
    let mut relay = Process::start("relay", run.dir.path(), &mut command);
    let said = relay.says(0)?;
    Ok((relay, said))
}

/// Checks the message where there is no UCX, and ends the test, unless the lane `ucx` has installed it.
pub(crate) fn without_ucx(words: &str) {
    assert!(words.contains("libucx0"), "it says what to install: {words}");
    assert!(std::env::var_os("DRIFTLESS_UCX_REQUIRED").is_none(), "{words}");
    println!("skipped: {words}");
}

/// Follows version 0 through the relay, and version 1 when the relay is gone.
fn follow_through(mut run: Run, relay: Process, url: &serde_json::Value, more: &[&str]) {
    let url = url.as_str().expect("a URL");
    let follow = |run: &Run| json(run.follow_once().args(["--relay", url]).args(more));
    assert_eq!(follow(&run)["applied"]["version"], 0);
    run.assert_host_is_current();
    let kept = std::fs::read_dir(run.path("cache/objects")).expect("a cache").count();
    assert!(kept > 0, "the objects came through the relay");

    drop(relay);
    run.made.step(100);
    run.publish();
    assert_eq!(follow(&run)["applied"]["version"], 1);
    run.assert_host_is_current();
}

#[test]
fn a_host_follows_through_a_relay_and_without_it() {
    let mut run = Run::new();
    run.publish();
    let (relay, said) = start(&run, &[]).expect("a relay");
    assert!(said["ucx_url"].is_null(), "{said}");
    follow_through(run, relay, &said["url"], &[]);
}

#[test]
fn a_host_follows_over_ucx_and_without_it() {
    let mut run = Run::new();
    run.publish();
    let (relay, said) = match start(&run, &["--listen-ucx", "127.0.0.1:0"]) {
        Ok(started) => started,
        Err(words) => return without_ucx(&words),
    };
    follow_through(run, relay, &said["ucx_url"], &["--update-weight-transport", "ucx"]);
}

#[test]
fn the_transport_object_wants_an_object_store() {
    let run = Run::new();
    let mut command = run.follow_once();
    let (refused, words) = code(command.args(["--update-weight-transport", "object"]));
    let named = words.contains("--update-weight-transport object") && words.contains("s3://");
    assert!(refused == Some(2) && named && words.contains("found --store"), "{refused:?} {words}");
}

#[test]
fn the_transport_ucx_wants_a_relay_over_ucx() {
    let run = Run::new();
    for relay in [&[][..], &["--relay", "http://127.0.0.1:1"]] {
        let mut command = run.follow_once();
        let (refused, words) = code(command.args(["--update-weight-transport", "ucx"]).args(relay));
        assert!(refused == Some(2) && words.contains("--relay ucx://"), "{refused:?} {words}");
    }
}
