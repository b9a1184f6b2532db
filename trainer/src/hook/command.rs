//! A command in any language, over its standard input and output.

use std::fmt;
use std::process::Stdio;
use std::sync::Arc;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout};
use tokio::sync::{Mutex, OnceCell, mpsc, oneshot};

use super::{Head, HookOptions};
use crate::error::short;
use crate::service::Silent;

/// Longest answer.
const ANSWER_BYTES_MAX: u64 = 64 << 20;
/// Longest line of its standard error that is kept whole.
const NOTE_BYTES_MAX: u64 = 16 << 10;
/// Times that a question is given to a command that ends instead of answering.
const ATTEMPTS: u32 = 2;

/// Processes of one command. They are started when they are first needed, again when one ended, and end with
/// this value.
pub(super) struct Pool {
    options: HookOptions,
    queue: OnceCell<mpsc::Sender<Job>>,
}

/// A question that waits for a process.
struct Job {
    id: u64,
    line: Vec<u8>,
    answer: oneshot::Sender<Result<Vec<u8>, Silent>>,
}

impl Pool {
    pub(super) fn new(options: &HookOptions) -> Self {
        Pool { options: options.clone(), queue: OnceCell::new() }
    }

    /// The line that answers `line`, which has this `id`.
    pub(super) async fn ask(&self, id: u64, mut line: Vec<u8>) -> Result<Vec<u8>, Silent> {
        line.push(b'\n');
        let (answer, answered) = oneshot::channel();
        let gone = || Silent::new("the end of its processes");
        let queue = self.queue.get_or_init(|| self.start()).await;
        queue.send(Job { id, line, answer }).await.map_err(|_| gone())?;
        answered.await.map_err(|_| gone())?
    }

    async fn start(&self) -> mpsc::Sender<Job> {
        let processes = self.options.processes.max(1);
        // A question waits here for a free process.
        let (queue, jobs) = mpsc::channel(processes);
        let jobs = Arc::new(Mutex::new(jobs));
        for _ in 0..processes {
            tokio::spawn(work(self.options.clone(), jobs.clone()));
        }
        queue
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("command", &self.options.at).finish_non_exhaustive()
    }
}

/// Serves jobs with one process at a time, until there are no more.
async fn work(options: HookOptions, jobs: Arc<Mutex<mpsc::Receiver<Job>>>) {
    let mut process = None;
    loop {
        let job = jobs.lock().await.recv().await;
        let Some(Job { id, line, mut answer }) = job else { return };
        // The asking task may have been stopped. The process then owes an answer that has no taker, and ends.
        tokio::select! {
            answered = serve(&options, &mut process, id, &line) => {
                let _ = answer.send(answered);
            }
            () = answer.closed() => {}
        }
    }
}

async fn serve(
    options: &HookOptions,
    process: &mut Option<Process>,
    id: u64,
    line: &[u8],
) -> Result<Vec<u8>, Silent> {
    let mut found = String::new();
    for _ in 0..ATTEMPTS {
        let mut running = match process.take() {
            Some(running) => running,
            None => Process::start(&options.at)
                .map_err(|error| Silent::new(format_args!("that it does not start: {error}")))?,
        };
        match tokio::time::timeout(options.deadline, running.ask(id, line)).await {
            Ok(Ok(answer)) => {
                *process = Some(running);
                return Ok(answer);
            }
            // It ended: a new one may do better.
            Ok(Err(Broken::Ended(how))) => found = how,
            Ok(Err(Broken::Nonsense(said))) => return Err(Silent::new(said)),
            Err(_) => return Err(Silent::late(options.deadline)),
        }
    }
    Err(Silent::new(format_args!("its end, {ATTEMPTS} times: {found}")))
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
}

impl Process {
    fn start(command: &str) -> std::io::Result<Self> {
        let mut shell = tokio::process::Command::new("sh");
        shell.arg("-c").arg(command).kill_on_drop(true).process_group(0);
        shell.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = shell.spawn()?;
        let pipes = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (Some(input), Some(output), Some(notes)) = pipes else {
            return Err(std::io::Error::other("it has no pipes"));
        };
        tokio::spawn(tell(command.to_owned(), notes));
        Ok(Process { child, input, output: BufReader::new(output) })
    }

    async fn ask(&mut self, id: u64, line: &[u8]) -> Result<Vec<u8>, Broken> {
        let mut answer = Vec::new();
        // A command may answer before it has read everything: both go on at once, so that neither side waits
        // for the other's pipe.
        let write = async {
            self.input.write_all(line).await?;
            self.input.flush().await
        };
        let read = async { (&mut self.output).take(ANSWER_BYTES_MAX).read_until(b'\n', &mut answer).await };
        let (written, read) = tokio::join!(write, read);
        if written.is_err() || read.is_err() || answer.last() != Some(&b'\n') {
            return Err(self.ended(&answer).await);
        }
        match serde_json::from_slice(&answer) {
            Ok(Head { id: Some(said), .. }) if said == id => Ok(answer),
            _ => {
                let said = String::from_utf8_lossy(&answer);
                Err(Broken::Nonsense(format!("`{}`, not a line with \"id\": {id}", short(said.trim()))))
            }
        }
    }

    /// How the process ended, or that its line was longer than an answer may be.
    async fn ended(&mut self, answer: &[u8]) -> Broken {
        if answer.len() as u64 >= ANSWER_BYTES_MAX {
            return Broken::Nonsense(format!("a line of more than {ANSWER_BYTES_MAX} bytes"));
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
