//! `--custom-rm-command`: a command in any language that scores, over JSON lines.
//!
//! A request is one line on its standard input: `{"id": 1, "samples": [{…}, …]}`, the samples of a group as
//! [`Answer`] has them. The reply is one line on its standard output: `{"id": 1, "rewards": [1.0, …]}`, a
//! number for each sample in order, or `{"id": 1, "error": "…"}`. What it writes on standard error goes to
//! the log. Its input ends with the run.

use std::fmt;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use rustix::process::{Pid, Signal, kill_process_group};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout};
use tokio::sync::{Mutex, OnceCell, mpsc, oneshot};

use super::{Answer, Reward, short};
use crate::error::{Error, Result};

/// Longest reply of a command.
const REPLY_BYTES_MAX: u64 = 16 << 20;
/// Longest line of its standard error that is kept whole.
const NOTE_BYTES_MAX: u64 = 16 << 10;
/// Times that a request is given to a command that ends instead of replying.
const ATTEMPTS: u32 = 2;

const EXPECTED: &str = "one line {\"id\": …, \"rewards\": [one finite number per sample]} from the command";
const REMEDY: &str =
    "look at what the command wrote on standard error, above; it gets and gives lines as docs/loop.md shows";

/// How a command is run.
#[derive(Debug, Clone)]
pub struct CommandOptions {
    /// A line for the shell.
    pub command: String,
    /// Processes of it that work side by side; at least 1.
    pub processes: usize,
    /// How long one reply may take.
    pub deadline: Duration,
}

/// Processes of one command. They are started when they are first needed, again when one ended, and end with
/// this value.
pub struct Command {
    options: CommandOptions,
    queue: OnceCell<mpsc::Sender<Job>>,
}

/// A group to be scored.
struct Job {
    answers: Vec<Answer>,
    reply: oneshot::Sender<Result<Vec<f32>>>,
}

#[derive(Serialize)]
struct Request<'a> {
    id: u64,
    samples: &'a [Answer],
}

#[derive(Deserialize)]
struct Reply {
    id: u64,
    rewards: Option<Vec<Value>>,
    error: Option<String>,
}

impl Command {
    /// Makes ready to run it, on the tokio runtime that first asks for a reward; it has to drive time and
    /// I/O.
    #[must_use]
    pub fn new(options: &CommandOptions) -> Self {
        Command { options: options.clone(), queue: OnceCell::new() }
    }

    async fn start(&self) -> mpsc::Sender<Job> {
        let processes = self.options.processes.max(1);
        // Who has no process to turn to waits here.
        let (queue, jobs) = mpsc::channel(processes);
        let jobs = Arc::new(Mutex::new(jobs));
        for _ in 0..processes {
            tokio::spawn(work(self.options.clone(), jobs.clone()));
        }
        queue
    }
}

impl fmt::Debug for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Command").field("command", &self.options.command).finish_non_exhaustive()
    }
}

#[async_trait]
impl Reward for Command {
    async fn score(&self, answers: &[Answer]) -> Result<Vec<f32>> {
        let Some(first) = answers.first() else { return Ok(Vec::new()) };
        let (reply, replied) = oneshot::channel();
        let gone = || first.refused(EXPECTED, "the end of its processes", REMEDY);
        let queue = self.queue.get_or_init(|| self.start()).await;
        queue.send(Job { answers: answers.to_vec(), reply }).await.map_err(|_| gone())?;
        replied.await.map_err(|_| gone())?
    }
}

/// Serves jobs with one process at a time, until there are no more.
async fn work(options: CommandOptions, jobs: Arc<Mutex<mpsc::Receiver<Job>>>) {
    let mut process = None;
    loop {
        let job = jobs.lock().await.recv().await;
        let Some(Job { answers, reply }) = job else { return };
        let scored = score(&options, &mut process, &answers).await;
        // Whoever asked may have been stopped.
        let _ = reply.send(scored);
    }
}

async fn score(
    options: &CommandOptions,
    process: &mut Option<Process>,
    answers: &[Answer],
) -> Result<Vec<f32>> {
    let Some(first) = answers.first() else { return Ok(Vec::new()) };
    let mut found = String::new();
    for _ in 0..ATTEMPTS {
        let mut running = match process.take() {
            Some(running) => running,
            None => Process::start(&options.command)?,
        };
        let answered = tokio::time::timeout(options.deadline, running.ask(answers)).await;
        match answered {
            Ok(Ok(reply)) => {
                *process = Some(running);
                return rewards(reply, answers);
            }
            // It ended: a new one may do better.
            Ok(Err(Broken::Ended(how))) => found = how,
            Ok(Err(Broken::Nonsense(line))) => return Err(first.refused(EXPECTED, line, REMEDY)),
            Err(_) => {
                let found = format!("nothing after {} s", options.deadline.as_secs_f64());
                return Err(first.refused(
                    EXPECTED,
                    found,
                    "make it faster, or give it longer with --rm-deadline",
                ));
            }
        }
    }
    Err(first.refused(EXPECTED, format_args!("its end, {ATTEMPTS} times: {found}"), REMEDY))
}

fn rewards(reply: Reply, answers: &[Answer]) -> Result<Vec<f32>> {
    let Some(first) = answers.first() else { return Ok(Vec::new()) };
    if let Some(error) = reply.error {
        return Err(first.refused(EXPECTED, format_args!("its error: {}", short(&error)), REMEDY));
    }
    let rewards = reply.rewards.unwrap_or_default();
    if rewards.len() != answers.len() {
        let found = format!("{} rewards for {} samples", rewards.len(), answers.len());
        return Err(first.refused(EXPECTED, found, REMEDY));
    }
    rewards.iter().zip(answers).map(|(reward, answer)| answer.number(reward, REMEDY)).collect()
}

/// Why a process is not asked again.
enum Broken {
    Ended(String),
    Nonsense(String),
}

/// One running process. Its whole group is killed when this is dropped.
struct Process {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    asked: u64,
}

impl Process {
    fn start(command: &str) -> Result<Self> {
        let io = |source| Error::Io { action: "start the command", path: command.into(), source };
        let mut shell = tokio::process::Command::new("sh");
        shell.arg("-c").arg(command).kill_on_drop(true).process_group(0);
        shell.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = shell.spawn().map_err(io)?;
        let pipes = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (Some(input), Some(output), Some(notes)) = pipes else {
            return Err(io(std::io::Error::other("it has no pipes")));
        };
        tokio::spawn(tell(command.to_owned(), notes));
        Ok(Process { child, input, output: BufReader::new(output), asked: 0 })
    }

    async fn ask(&mut self, answers: &[Answer]) -> Result<Reply, Broken> {
        self.asked += 1;
        let request = Request { id: self.asked, samples: answers };
        let mut line = serde_json::to_vec(&request).map_err(|error| Broken::Nonsense(error.to_string()))?;
        line.push(b'\n');
        let mut reply = Vec::new();
        // A command may reply before it has read everything: both go on at once, so that neither side waits
        // for the other's pipe.
        let write = async {
            self.input.write_all(&line).await?;
            self.input.flush().await
        };
        let read = async { (&mut self.output).take(REPLY_BYTES_MAX).read_until(b'\n', &mut reply).await };
        let (written, read) = tokio::join!(write, read);
        if written.is_err() || read.is_err() || reply.last() != Some(&b'\n') {
            return Err(self.ended(&reply).await);
        }
        let said = String::from_utf8_lossy(&reply);
        let found = || Broken::Nonsense(format!("`{}`", short(said.trim())));
        let reply: Reply = serde_json::from_slice(&reply).map_err(|_| found())?;
        if reply.id == self.asked { Ok(reply) } else { Err(found()) }
    }

    /// How it ended, or that it said more than a reply has.
    async fn ended(&mut self, reply: &[u8]) -> Broken {
        if reply.len() as u64 >= REPLY_BYTES_MAX {
            return Broken::Nonsense(format!("a line of more than {REPLY_BYTES_MAX} bytes"));
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

/// Logs what a command writes on standard error.
async fn tell(command: String, notes: impl AsyncRead + Unpin) {
    let mut notes = BufReader::new(notes);
    let mut line = Vec::new();
    loop {
        line.clear();
        match (&mut notes).take(NOTE_BYTES_MAX).read_until(b'\n', &mut line).await {
            Ok(0) | Err(_) => return,
            Ok(_) => tracing::warn!(command, "{}", short(String::from_utf8_lossy(&line).trim_end())),
        }
    }
}
