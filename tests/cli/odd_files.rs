//! FIFOs in place of files: named, and not waited for.

use crate::Run;
use crate::common::{code, driftless, json};
use driftless_testkit::tree::tree;
use std::path::Path;
use std::process::Command;

#[test]
fn fifo_in_place_of_a_stored_file_or_key_is_named() {
    let mut run = Run::new();
    run.publish();
    json(&mut run.follow_once());
    let fifo = run.path("fifo");
    let make = |path: &Path| {
        let _ = std::fs::remove_file(path);
        assert!(Command::new("mkfifo").arg(path).status().expect("mkfifo").success());
    };
    make(&fifo);
    let checkpoint = run.path("checkpoint");
    let key = |name: &str, flag: &str| {
        let mut command = run.command(name);
        match name {
            "publish" => command.arg("--resume").arg("--checkpoint").arg(&checkpoint),
            _ => command.args(["--once", "--checkpoint-dir"]).arg(run.path("host")),
        };
        command.arg(flag).arg(&fifo);
        let (status, words) = code(&mut command);
        assert_eq!(status, Some(2), "{words}");
        words
    };
    for (name, flag) in [
        ("publish", "--sign-key"),
        ("follow", "--trust-key"),
        ("follow", "--api-key-file"),
        ("follow", "--engine-ca"),
    ] {
        let words = key(name, flag);
        assert!(words.contains("a device, a pipe or a socket"), "{words}");
    }
    // A log: its segment, and its lock.
    let (log, prompts) = (run.path("log"), run.path("prompts.jsonl"));
    std::fs::write(&prompts, "{\"input\": \"a\"}\n").expect("a file");
    for file in ["lock", "segment-00000000000000000000.log"] {
        let _ = std::fs::remove_dir_all(&log);
        crate::common::run(driftless().args(["log", "import"]).args([&log, &prompts]));
        assert!(log.join(file).is_file(), "{file}");
        make(&log.join(file));
        for subcommand in ["stat", "verify", "tail"] {
            let (status, words) = code(driftless().args(["log", subcommand]).arg(&log));
            assert!(status == Some(1) && words.contains(file) && words.contains("a FIFO"), "{words}");
        }
    }
    // The head of a store only says where to begin; a manifest does not.
    let [head, manifest] = ["head", "manifest"].map(|name| {
        let found = tree(&run.path("store")).into_iter().find(|(path, ..)| path.ends_with(name));
        found.expect("a file of the store").0
    });
    // Nothing but files are leases.
    let followers = manifest.ancestors().nth(3).expect("the run").join("followers");
    make(&followers.join("fifo"));
    std::fs::create_dir_all(followers.join("directory/empty")).expect("a directory");
    std::os::unix::fs::symlink(run.path("nowhere"), followers.join("link")).expect("a link");
    for command in ["inspect", "status", "gc"] {
        let shown = json(&mut run.command(command));
        let leases = shown["followers"].as_array().or(shown["leases"].as_array());
        assert_eq!(leases.map(Vec::len), Some(1), "{command}: {shown}");
    }
    make(&head);
    json(&mut run.follow_once());
    make(&manifest);
    let (status, words) = code(run.command("inspect").args(["--model", "policy", "--version", "0"]));
    assert!(
        status == Some(3) && words.contains("manifest") && words.contains("a FIFO"),
        "{status:?}: {words}"
    );
}
