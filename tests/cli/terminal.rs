//! What commands do on a terminal, and the terminal.

use crate::Run;
use crate::common::{driftless, json, run};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use std::fs::File;
use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// For something to be drawn.
const DEADLINE: Duration = Duration::from_secs(120);

/// A command on a terminal.
pub(crate) struct Drawing {
    pub(crate) child: Child,
    /// The terminal's other side, where keys come from, and what was drawn.
    pub(crate) keys: File,
    pub(crate) drawn: Receiver<Vec<u8>>,
}

/// What of a command is on the terminal.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Streams {
    All,
    /// Standard output.
    Out,
    /// Standard error.
    Err,
}

/// Starts the command on a terminal of so many columns.
pub(crate) fn on_terminal(mut command: Command, columns: u16, streams: Streams) -> Drawing {
    let terminal =
        openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).expect("a terminal");
    grantpt(&terminal).and_then(|()| unlockpt(&terminal)).expect("a terminal");
    let size = Winsize { ws_row: 30, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(&terminal, size).expect("a size");
    let name = ptsname(&terminal, Vec::new()).expect("its name");
    let side = |of| {
        if streams != Streams::All && streams != of {
            return Stdio::null();
        }
        let path = Path::new(name.to_str().expect("a path"));
        Stdio::from(OwnedFd::from(File::options().read(true).write(true).open(path).expect("its side")))
    };
    command.stdin(side(Streams::All)).stdout(side(Streams::Out)).stderr(side(Streams::Err));
    let child = command.spawn().expect("a process");
    drop(command);
    let keys = File::from(terminal);
    let (mut side, (send, drawn)) = (keys.try_clone().expect("its other side"), channel());
    std::thread::spawn(move || {
        let mut chunk = [0; 4096];
        // It ends with an error once nothing has the terminal open.
        while let Ok(count) = side.read(&mut chunk) {
            if send.send(chunk[..count].to_vec()).is_err() {
                return;
            }
        }
    });
    Drawing { child, keys, drawn }
}

impl Drawing {
    /// What is drawn until `text` is among it.
    pub(crate) fn until(&self, text: &str) -> String {
        let (mut drawn, end) = (Vec::new(), Instant::now() + DEADLINE);
        while !String::from_utf8_lossy(&drawn).contains(text) {
            // Each frame has something, so that waiting for each would never end.
            match self.drawn.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(chunk) => drawn.extend_from_slice(&chunk),
                Err(error) => panic!("{text}: {error}: {:?}", String::from_utf8_lossy(&drawn)),
            }
        }
        String::from_utf8_lossy(&drawn).into_owned()
    }

    /// All that is drawn by a command that ends by itself.
    pub(crate) fn whole(mut self) -> String {
        let (mut drawn, end) = (Vec::new(), Instant::now() + DEADLINE);
        loop {
            match self.drawn.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(chunk) => drawn.extend_from_slice(&chunk),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(error) => panic!("{error}: {:?}", String::from_utf8_lossy(&drawn)),
            }
        }
        self.child.wait().expect("its end");
        String::from_utf8_lossy(&drawn).replace('\r', "")
    }
}

#[test]
fn log_on_a_terminal_has_colours_unless_no_color_is_set() {
    let mut run = Run::new();
    run.publish();
    for (no_color, is_coloured) in [("", true), ("1", false)] {
        let mut follow = run.follow_once();
        follow.args(["--listen", "127.0.0.1:0"]).env("RUST_LOG", "info").env("NO_COLOR", no_color);
        let drawn = on_terminal(follow, 100, Streams::Err).whole();
        let line = drawn.lines().find(|line| line.contains("listening")).expect(&drawn);
        // A bar that is drawn over clears its line.
        let plain = line.replace("\u{1b}[2K", "");
        assert_eq!(plain.contains("\u{1b}["), is_coloured, "{line:?}");
    }
}

#[test]
fn work_that_may_last_is_shown_on_a_terminal_alone() {
    let mut run = Run::new();
    run.publish();
    json(&mut run.follow_once());
    let [checkpoint, delta, log] = ["checkpoint", "step.delta", "log"].map(|name| run.path(name));
    let prompts = run.path("prompts.jsonl");
    std::fs::write(&prompts, "{\"input\": \"a\"}\n{\"input\": \"b\"}\n").expect("a file");
    let steps = run.path("steps");
    std::fs::create_dir(&steps).expect("a directory");
    std::fs::write(steps.join("metrics.jsonl"), "").expect("a file");
    let with = |args: &[&str], paths: &[&Path]| {
        let mut command = driftless();
        command.args(args).args(paths);
        command
    };
    let work = |run: &Run| {
        let mut gc = run.command("gc");
        gc.arg("--dry-run");
        [
            ("repair", with(&["repair"], &[&run.path("host")])),
            ("encode", with(&["delta", "encode", "-o"], &[&delta, &checkpoint, &checkpoint])),
            ("verify", with(&["delta", "verify"], &[&checkpoint, &delta, &checkpoint])),
            ("import", with(&["log", "import"], &[&log, &prompts])),
            ("verify", with(&["log", "verify"], &[&log])),
            #[cfg(feature = "arrow")]
            ("export", with(&["log", "export"], &[&log, &run.path("out.parquet")])),
            ("trace", with(&["trace", "-o"], &[&run.path("trace.json"), &steps])),
            ("gc", gc),
        ]
    };
    for (what, command) in work(&run) {
        let drawn = on_terminal(command, 100, Streams::Err).whole();
        assert!(drawn.contains(&format!("{what} ")) && drawn.contains(" 0 s"), "{what}: {drawn:?}");
        assert!(drawn.ends_with("\u{1b}[2K"), "nothing of it is left: {what}: {drawn:?}");
    }
    for (what, mut command) in work(&run) {
        let said = crate::common::output(&mut command);
        assert!(said.status.success() && said.stderr.is_empty(), "{what}: {said:?}");
    }
}

#[test]
fn reports_keep_within_a_terminal_of_40_columns() {
    let mut published = Run::new();
    published.publish();
    json(&mut published.follow_once());
    let mut doctor = driftless();
    doctor.args(["doctor", "--engine", "http://127.0.0.1:1"]);
    let mut init = crate::init::init(published.dir.path());
    init.args(["--engine", "127.0.0.1:1"]);
    for (name, command) in [("status", published.command("status")), ("doctor", doctor), ("init", init)] {
        let drawn = on_terminal(command, 40, Streams::Out).whole();
        assert!(drawn.lines().count() > 3, "{name}: {drawn}");
        let long: Vec<_> = drawn.lines().filter(|line| line.chars().count() > 40).collect();
        assert!(long.is_empty(), "{name}: {long:#?}");
    }
    let wide = run(&mut published.command("status"));
    assert!(wide.lines().any(|line| line.starts_with("follower  version  lag")), "off a terminal: {wide}");
}
