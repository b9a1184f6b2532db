//! Standard output and standard error that are closed or full.

use crate::Run;
use crate::common::driftless;
use std::fs::File;
use std::path::PathBuf;
use std::process::{Command, Output};

/// The exit code of a program whose reader has gone, as a shell says it.
const CLOSED: i32 = 141;

/// A pipe that nobody reads.
fn closed() -> std::io::PipeWriter {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    writer
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Commands that print results, each as it is run.
fn commands(run: &mut Run) -> Vec<Box<dyn Fn() -> Command>> {
    run.publish();
    let [base, file, store] = ["checkpoint", "step.delta", "store"].map(|name| run.path(name));
    let encode = driftless().args(["delta", "encode"]).args([&base, &base]).arg("-o").arg(&file).output();
    assert!(encode.expect("it runs").status.success());
    let of = |args: &'static [&'static str], paths: Vec<PathBuf>| -> Box<dyn Fn() -> Command> {
        Box::new(move || {
            let mut command = driftless();
            command.args(args).args(&paths);
            command
        })
    };
    vec![
        of(&["inspect"], vec![store.join("test")]),
        of(&["inspect", "--json", "--store"], vec![store.clone()]),
        of(&["gc", "--run", "test", "--store"], vec![store]),
        of(&["delta", "stat"], vec![file.clone()]),
        of(&["delta", "verify"], vec![base.clone(), file, base]),
        of(&["--help"], vec![]),
        of(&["publish", "--help"], vec![]),
        of(&["--version"], vec![]),
    ]
}

#[test]
fn a_reader_that_has_gone_ends_a_command_quietly() {
    for command in commands(&mut Run::new()) {
        let mut command = command();
        let output = command.stdout(closed()).output().expect("it runs");
        assert_eq!(output.status.code(), Some(CLOSED), "{command:?}: {}", text(&output));
        assert_eq!(text(&output), "", "{command:?}");
    }
}

#[test]
fn a_full_disk_behind_standard_output_is_a_plain_error() {
    for command in commands(&mut Run::new()) {
        let mut command = command();
        let full = File::options().write(true).open("/dev/full").expect("a device");
        let output = command.stdout(full).output().expect("it runs");
        assert_eq!(output.status.code(), Some(1), "{command:?}: {}", text(&output));
        assert!(text(&output).contains("results cannot be written to standard output"), "{}", text(&output));
    }
}

#[test]
fn a_version_whose_result_is_not_read_is_published_all_the_same() {
    let mut run = Run::new();
    run.publish();
    run.made.step(100);
    let mut command = run.command("publish");
    command.arg("--resume").arg("--checkpoint").arg(run.made.write(&run.path("checkpoint")));
    let output = command.arg("--baseline-dir").arg(run.path("baseline")).stdout(closed()).output();
    let output = output.expect("it runs");
    assert_eq!((output.status.code(), text(&output)), (Some(CLOSED), String::new()));
    run.made.step(10);
    assert_eq!(run.publish()["version"], 2);
}

#[test]
fn errors_and_logs_that_cannot_be_written_change_no_exit_code() {
    let mut run = Run::new();
    run.publish();
    for full in [false, true] {
        let attempts: [(Command, i32); 3] =
            [(run.follow_once(), 0), (run.command("inspect"), 0), (driftless(), 2)];
        for (mut command, code) in attempts {
            command.env("RUST_LOG", "trace").stdout(std::process::Stdio::null());
            match full {
                true => command.stderr(File::options().write(true).open("/dev/full").expect("a device")),
                false => command.stderr(closed()),
            };
            assert_eq!(command.status().expect("it runs").code(), Some(code), "{command:?}");
        }
        let mut missing = driftless();
        missing.args(["inspect", "--store", "memory:", "--run", "none"]).stderr(closed());
        assert_eq!(missing.status().expect("it runs").code(), Some(1));
    }
}
