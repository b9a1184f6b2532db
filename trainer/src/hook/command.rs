//! A command in any language, over its standard input and output.

use std::collections::VecDeque;
use std::process::Stdio;
use std::sync::{Arc, PoisonError};

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout};
use tokio::sync::{Mutex, MutexGuard, Semaphore};

use super::clients::Patience;
use super::many::{Announced, Many, PROTOCOL, Talk};
use super::{ANSWER_BYTES_MAX, Head, HookOptions, shown};
use crate::error::plain;
use crate::failure::Failure;
use crate::service::Silent;

/// Longest line of its standard error that is kept whole.
const NOTE_BYTES_MAX: u64 = 16 << 10;
/// Times that a question is given to a command that ends instead of answering.
pub(super) const ATTEMPTS: u32 = 2;
/// Lines of its standard error by which one that is started again is known to repeat itself.
const NOTES_KEPT: usize = 64;

/// Processes of one command. They are started when they are first needed, again when one ended, and end with
/// this value.
#[derive(Debug)]
pub(super) struct Pool {
    /// What names the command.
    flag: &'static str,
    options: HookOptions,
    /// As many permits as places: a question waits here for a free process.
    free: Semaphore,
    places: Vec<Mutex<Place>>,
    /// Held while a place is chosen: a look at all places holds some of them for a moment.
    choice: std::sync::Mutex<()>,
}

/// Where a process is, one after another.
#[derive(Debug, Default)]
struct Place {
    process: Option<Process>,
    /// A process that has many answers open.
    many: Option<Many>,
    notes: Notes,
}

/// What a question has led to.
enum Begun {
    Answer(Vec<u8>),
    Talk(Talk),
}

/// What a process wrote first.
enum Said {
    Answer(Vec<u8>),
    Announced(Announced),
}

impl Pool {
    pub(super) fn new(flag: &'static str, options: &HookOptions) -> Self {
        let processes = options.processes.max(1);
        let places = std::iter::repeat_with(Mutex::default).take(processes).collect();
        let free = Semaphore::new(processes);
        Pool { flag, options: options.clone(), free, places, choice: std::sync::Mutex::default() }
    }

    /// The line that answers `line`, which has this `id`, of so many processes at most, and what it belongs to where the process can be told more.
    pub(super) async fn ask(
        self: &Arc<Self>,
        id: u64,
        mut line: Vec<u8>,
        patience: Patience,
        attempts: u32,
    ) -> Result<(Vec<u8>, Option<Talk>), Silent> {
        line.push(b'\n');
        let (line, mut found) = (Arc::new(line), String::new());
        for _ in 0..attempts {
            match self.ask_once(id, line.clone(), &patience).await {
                Ok(answer) => return Ok(answer),
                // A new one may do better.
                Err(Broken::Ended(how)) => found = how,
                Err(Broken::Silent(silent)) => return Err(silent),
            }
        }
        Err(Broken::Ended(found).silent())
    }

    /// Where the asking task is stopped, a process with one question gives its answer all the same, and then takes the
    /// next: it may have loaded a model for minutes.
    async fn ask_once(
        self: &Arc<Self>,
        id: u64,
        line: Arc<Vec<u8>>,
        patience: &Patience,
    ) -> Result<(Vec<u8>, Option<Talk>), Broken> {
        let (pool, within) = (self.clone(), patience.clone());
        let asked = tokio::spawn(async move { pool.begin(id, &line, &within).await });
        let begun = match asked.await.map_err(tokio::task::JoinError::try_into_panic) {
            Ok(begun) => begun?,
            Err(Ok(panic)) => std::panic::resume_unwind(panic),
            Err(Err(_)) => return Err(Broken::Silent(Silent::new("the end of the program that asks"))),
        };
        match begun {
            Begun::Answer(answer) => Ok((answer, None)),
            Begun::Talk(mut talk) => Ok((talk.next(patience).await?, Some(talk))),
        }
    }

    async fn begin(&self, id: u64, line: &[u8], patience: &Patience) -> Result<Begun, Broken> {
        let gone = || Broken::Silent(Silent::new("the end of its processes"));
        let _permit = self.free.acquire().await.map_err(|_| gone())?;
        let mut place = self.idlest().ok_or_else(gone)?;
        if let Some(many) = &place.many {
            if let Some(talk) = many.begin(id, line).await {
                return Ok(Begun::Talk(talk));
            }
            place.many = None;
        }
        let mut running = match place.process.take() {
            Some(running) => running,
            None => Process::start(self.flag, &self.options.at, &place.notes).map_err(|error| {
                Broken::Silent(Silent::new(format_args!("that it does not start: {error}")))
            })?,
        };
        let deadline = self.options.deadline;
        let late = || Broken::Silent(Silent::late(deadline));
        match patience.wait(running.ask(id, line)).await.ok_or_else(late)?? {
            Said::Answer(answer) => {
                place.process = Some(running);
                Ok(Begun::Answer(answer))
            }
            Said::Announced(Announced { protocol: PROTOCOL, open: open @ 1.. }) => {
                let many = Many::new(self.flag, deadline, running, open, id);
                let (many, talk) = many.ok_or_else(gone)?;
                place.many = Some(many);
                Ok(Begun::Talk(talk))
            }
            Said::Announced(other) => Err(Broken::nonsense(format_args!(
                "protocol {} with {} open answers, not protocol {PROTOCOL} with at least 1",
                other.protocol, other.open
            ))),
        }
    }

    /// Of the places where no question waits, the one with the fewest open answers. A permit says that there is one.
    fn idlest(&self) -> Option<MutexGuard<'_, Place>> {
        let _choice = self.choice.lock().unwrap_or_else(PoisonError::into_inner);
        let open = |place: &MutexGuard<'_, Place>| place.many.as_ref().map_or(0, Many::open);
        self.places.iter().filter_map(|place| place.try_lock().ok()).min_by_key(open)
    }
}

/// Why a process is not asked again.
#[derive(Debug)]
pub(super) enum Broken {
    /// It ended: another may do better.
    Ended(String),
    Silent(Silent),
}

impl Broken {
    /// It said what it may not.
    pub(super) fn nonsense(said: impl std::fmt::Display) -> Self {
        Broken::Silent(Silent { failure: Failure::Hook, ..Silent::new(said) })
    }

    /// What is said of a question that was asked as often as it may be.
    pub(super) fn silent(self) -> Silent {
        match self {
            Broken::Ended(how) => Silent::new(format_args!("its end, {ATTEMPTS} times: {how}")),
            Broken::Silent(silent) => silent,
        }
    }

    /// The reason alone.
    pub(super) fn why(self) -> String {
        match self {
            Broken::Ended(why) | Broken::Silent(Silent { found: why, .. }) => why,
        }
    }
}

/// Reads a line; whether it came whole.
pub(super) async fn read_line(output: &mut BufReader<ChildStdout>, line: &mut Vec<u8>) -> bool {
    let read = output.take(ANSWER_BYTES_MAX as u64).read_until(b'\n', line).await;
    read.is_ok() && line.last() == Some(&b'\n')
}

/// One running process. Its whole group is killed when this is dropped.
#[derive(Debug)]
pub(super) struct Process {
    child: Child,
    pub(super) input: ChildStdin,
    pub(super) output: BufReader<ChildStdout>,
    /// Whether its next line is its first.
    is_new: bool,
}

impl Process {
    fn start(flag: &'static str, command: &str, notes: &Notes) -> std::io::Result<Self> {
        let mut shell = tokio::process::Command::new("sh");
        shell.arg("-c").arg(command).kill_on_drop(true).process_group(0);
        shell.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = shell.spawn()?;
        let pipes = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (Some(input), Some(output), Some(errors)) = pipes else {
            return Err(std::io::Error::other("it has no pipes"));
        };
        tokio::spawn(notes.clone().tell(flag, child.id().unwrap_or_default(), errors));
        Ok(Process { child, input, output: BufReader::new(output), is_new: true })
    }

    async fn ask(&mut self, id: u64, line: &[u8]) -> Result<Said, Broken> {
        let mut answer = Vec::new();
        // A command may answer before it has read everything: both go on at once, so that neither side waits
        // for the other's pipe.
        let write = async {
            self.input.write_all(line).await?;
            self.input.flush().await
        };
        let (written, read) = tokio::join!(write, read_line(&mut self.output, &mut answer));
        if written.is_err() || !read {
            return Err(self.ended(&answer).await);
        }
        let is_new = std::mem::take(&mut self.is_new);
        match serde_json::from_slice(&answer) {
            Ok(Head { id: Some(said), .. }) if said == id => Ok(Said::Answer(answer)),
            Ok(Head { id: None, announced: Some(announced), .. }) if is_new => Ok(Said::Announced(announced)),
            Ok(_) => Err(Broken::nonsense(format_args!("{}, not a line with \"id\": {id}", shown(&answer)))),
            Err(_) => Err(Broken::nonsense(shown(&answer))),
        }
    }

    /// How the process ended, or that its line was longer than an answer may be.
    pub(super) async fn ended(&mut self, answer: &[u8]) -> Broken {
        if answer.len() >= ANSWER_BYTES_MAX {
            return Broken::nonsense(format_args!("a line of more than {ANSWER_BYTES_MAX} bytes"));
        }
        self.kill();
        match self.child.wait().await {
            Ok(status) => Broken::Ended(status.to_string()),
            Err(error) => Broken::Ended(error.to_string()),
        }
    }

    fn kill(&self) {
        let group = self.child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
        // It may have ended by itself.
        let _ = group.map(|group| kill_process_group(group, Signal::KILL));
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The last lines that the processes of a place wrote on standard error, each with the number of its process.
#[derive(Clone, Debug, Default)]
struct Notes(Arc<std::sync::Mutex<VecDeque<(u32, String)>>>);

impl Notes {
    /// Logs what a process writes, line by line.
    async fn tell(self, flag: &'static str, process: u32, errors: impl AsyncRead + Unpin) {
        let (mut errors, mut line) = (BufReader::new(errors), Vec::new());
        loop {
            line.clear();
            match (&mut errors).take(NOTE_BYTES_MAX).read_until(b'\n', &mut line).await {
                Ok(0) | Err(_) => return,
                Ok(_) => {}
            }
            let text = plain(&line);
            if self.is_new(process, &text) {
                tracing::warn!(target: "hook", "{flag}: {text}");
            }
        }
    }

    /// Whether a line is not one that another process wrote before: a question that ends a process ends the next one
    /// in the same words.
    fn is_new(&self, process: u32, text: &str) -> bool {
        let mut notes = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let known = notes.iter().position(|(other, known)| *other != process && known == text);
        known.map(|at| notes.remove(at));
        notes.push_back((process, text.to_owned()));
        if notes.len() > NOTES_KEPT {
            notes.pop_front();
        }
        known.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_permit_finds_a_place_whoever_looks_at_the_same_time() {
        let pool = Pool::new("--flag", &HookOptions::new("cat").with_processes(3));
        let ask = || {
            for _ in 0..20_000 {
                let _permit = pool.free.try_acquire().expect("a permit each");
                assert!(pool.idlest().is_some());
            }
        };
        std::thread::scope(|scope| (0..3).for_each(|_| drop(scope.spawn(ask))));
    }

    #[test]
    fn line_that_the_process_before_wrote_is_told_once() {
        let notes = Notes::default();
        let told = |process, lines: &[&str]| {
            lines.iter().map(|line| notes.is_new(process, line)).collect::<Vec<_>>()
        };
        assert_eq!(told(1, &["loading", "Traceback", "KeyError: x"]), [true; 3]);
        assert_eq!(
            told(2, &["loading", "Traceback", "KeyError: x", "KeyError: x"]),
            [false, false, false, true]
        );
        assert_eq!(told(2, &["loading"]), [true], "the same process says it again");
    }
}
