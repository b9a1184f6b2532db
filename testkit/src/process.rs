//! Other processes of a test.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Only a hang reaches it.
const LONG: Duration = Duration::from_secs(120);

/// Whose turn it is: who starts a process, or who takes a lock or a port again that was just let go of. A
/// process that is being started holds all that this one does until its program runs.
pub fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    // A test that failed while it had its turn says so itself.
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Another process and what it prints; killed when dropped.
pub struct Process {
    child: Child,
    lines: Receiver<String>,
}

impl Process {
    /// Starts it; what it prints is read from here on.
    pub fn start(command: &mut Command) -> Self {
        let turn = turn();
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        drop(turn);
        let output = BufReader::new(child.stdout.take().unwrap());
        let (print, lines) = channel();
        // A thread, as nothing else ends a read of a process that says nothing.
        thread::spawn(move || {
            for line in output.lines().map_while(std::io::Result::ok) {
                // Nobody may want to know any more.
                let _ = print.send(line);
            }
        });
        Self { child, lines }
    }

    /// What follows `word` on the next line that has it.
    pub fn says(&self, word: &str) -> String {
        let (begun, mut said) = (Instant::now(), Vec::new());
        loop {
            let line = self.lines.recv_timeout(LONG.saturating_sub(begun.elapsed()));
            let line = line.unwrap_or_else(|error| panic!("{error} before `{word}`: {said:#?}"));
            if let Some((_, rest)) = line.split_once(word) {
                return rest.to_owned();
            }
            said.push(line);
        }
    }

    /// Waits for what the process brings about; one that ends instead fails the test.
    pub fn brings<T>(&mut self, what: &str, mut look: impl FnMut() -> Option<T>) -> T {
        until(what, || {
            // Asked for before the look: its last deed may be what is waited for.
            let ended = self.ended();
            let value = look();
            assert!(value.is_some() || ended.is_none(), "{ended:?} before {what}");
            value
        })
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }

    /// Waits for its end, which has to be a success.
    pub fn succeed(mut self) {
        let status = until("end of it", || self.ended());
        assert!(status.success(), "{status}: {:#?}", self.lines.iter().collect::<Vec<_>>());
    }

    /// Ends it by SIGKILL.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
    }
}

fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(value) = look() {
            return value;
        }
        assert!(begun.elapsed() < LONG, "no {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It has ended, or has to.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
