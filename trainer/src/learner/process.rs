//! The process behind a child learner: started, asked, watched, ended.

use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Read, Seek, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use super::wire::{Call, Line, Reply};
use crate::error::{Error, Result, io, plain};

/// The variable that names the socket to a child.
const SOCKET: &str = "DRIFTLESS_LEARNER_SOCKET";
/// Longest name of a socket that Linux takes.
const SOCKET_BYTES_MAX: usize = 107;
/// Longest line of output that is kept whole.
const NOTE_BYTES_MAX: u64 = 16 << 10;
/// Time between two looks at what does not wake us.
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// How long a process may take to end once its socket is closed; it is killed then.
const END_DEADLINE: Duration = Duration::from_secs(10);

/// Why a process is of no more use.
pub(super) enum Lost {
    /// It ended, or did not answer in time.
    Gone(String),
    /// It said something else than a reply.
    Nonsense(String),
}

/// A running process with its connection. Its whole group has ended when this is dropped.
#[derive(Debug)]
pub(super) struct Process {
    child: Child,
    /// Absent once it was closed, which tells the process to end.
    stream: Option<BufReader<UnixStream>>,
    asked: u64,
    ended: bool,
    /// Held by every process of the learner, as its standard input, and here.
    _lock: File,
}

impl Process {
    /// Starts it and waits for its connection. Messages call it `name`. `save` is its directory: made here, with the
    /// socket and the lock in it.
    pub(super) fn start(command: &str, name: &str, save: &Path, deadline: Duration) -> Result<Self> {
        let end = Instant::now() + deadline;
        std::fs::create_dir_all(save).map_err(io("create", save))?;
        let socket = save.join("socket");
        if socket.as_os_str().len() > SOCKET_BYTES_MAX {
            let expected =
                format!("a path that leaves room for a socket's name: {SOCKET_BYTES_MAX} bytes in all");
            return Err(crate::error::input("save", expected, socket.display()));
        }
        let mut lock = take_lock(&save.join("lock"), deadline)?;
        match std::fs::remove_file(&socket) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(io("remove", &socket)(error)),
            _ => {}
        }
        let listener = UnixListener::bind(&socket).map_err(io("listen on", &socket))?;
        listener.set_nonblocking(true).map_err(io("listen on", &socket))?;
        let input = lock.try_clone().map_err(io("lend", &socket))?;
        let mut child = spawn(command, &socket, input)?;
        note_holder(&mut lock, child.id()).map_err(io("write", save.join("lock")))?;
        let (written, errors) = (child.stdout.take(), child.stderr.take());
        written.map_or(Ok(()), |output| forward(name.to_owned(), output))?;
        errors.map_or(Ok(()), |output| forward(name.to_owned(), output))?;
        let mut process = Process { child, stream: None, asked: 0, ended: false, _lock: lock };
        process.stream = Some(process.accept(name, &listener, end, deadline)?);
        // It is connected: the name is of no more use.
        let _ = std::fs::remove_file(&socket);
        Ok(process)
    }

    pub(super) fn id(&self) -> u32 {
        self.child.id()
    }

    fn accept(
        &mut self,
        name: &str,
        listener: &UnixListener,
        end: Instant,
        deadline: Duration,
    ) -> Result<BufReader<UnixStream>> {
        let lost = |found: String| Error::LearnerLost {
            learner: format!("`{name}`"),
            call: "connect to the socket that DRIFTLESS_LEARNER_SOCKET names",
            found,
        };
        loop {
            match listener.accept() {
                Ok((stream, _)) => {
                    let blocking = stream.set_nonblocking(false).map_err(|error| lost(error.to_string()));
                    return blocking.map(|()| BufReader::new(stream));
                }
                Err(error) if error.kind() != ErrorKind::WouldBlock => return Err(lost(error.to_string())),
                Err(_) => {}
            }
            if self.exited() {
                return Err(lost(
                    self.end().map_or_else(|e| e.to_string(), |status| format!("its end: {status}")),
                ));
            }
            if Instant::now() >= end {
                return Err(lost(silence(deadline)));
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// One call and its reply, within `deadline`.
    pub(super) fn ask(&mut self, call: Call, deadline: Duration) -> Result<Reply, Lost> {
        let end = Instant::now() + deadline;
        let most = call.reply_bytes_max();
        self.asked += 1;
        let mut line = serde_json::to_vec(&Line { id: self.asked, call })
            .map_err(|error| Lost::Nonsense(format!("a call that JSON cannot say: {error}")))?;
        line.push(b'\n');
        let id = self.asked;
        let exchanged = match &mut self.stream {
            Some(stream) => exchange(stream, &line, end, most),
            None => return Err(Lost::Gone("a closed connection".to_owned())),
        };
        let reply = match exchanged {
            Ok(reply) => reply,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                // How it ended is our doing.
                let _ = self.end();
                return Err(Lost::Gone(silence(deadline)));
            }
            Err(error) => return Err(Lost::Gone(self.ended(&error))),
        };
        if reply.last() != Some(&b'\n') {
            if reply.len() >= most {
                return Err(Lost::Nonsense(format!("a line of more than {most} bytes")));
            }
            return Err(Lost::Gone(self.ended(&ErrorKind::UnexpectedEof.into())));
        }
        let said = || Lost::Nonsense(crate::error::short(&plain(&reply)));
        let parsed: Reply = serde_json::from_slice(&reply).map_err(|_| said())?;
        if parsed.id == id { Ok(parsed) } else { Err(said()) }
    }

    /// How it ended, once its connection has.
    fn ended(&mut self, error: &std::io::Error) -> String {
        match self.end() {
            Ok(status) => format!("the end of its connection ({error}); {status}"),
            Err(error) => error.to_string(),
        }
    }

    /// Whether it has ended, which leaves its number taken.
    fn exited(&self) -> bool {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        self.pid().is_none_or(|pid| !matches!(waitid(WaitId::Pid(pid), options), Ok(None)))
    }

    fn pid(&self) -> Option<Pid> {
        Pid::from_raw(self.child.id().cast_signed())
    }

    /// Ends its whole group. The group is killed before its leader is waited for: its number is ours until
    /// then.
    fn end(&mut self) -> std::io::Result<ExitStatus> {
        self.stream = None;
        if !std::mem::replace(&mut self.ended, true) {
            // It may have ended by itself.
            let _ = self.pid().map(|group| kill_process_group(group, Signal::KILL));
        }
        self.child.wait()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The end of its connection has it end by itself.
        if self.stream.take().is_some() {
            let end = Instant::now() + END_DEADLINE;
            while !self.exited() && Instant::now() < end {
                std::thread::sleep(LOOK_EVERY);
            }
        }
        let _ = self.end();
    }
}

/// What is found of a process that says nothing.
fn silence(deadline: Duration) -> String {
    format!("nothing after {} s, which is `ChildOptions::deadline`", deadline.as_secs_f64())
}

fn spawn(command: &str, socket: &Path, input: File) -> Result<Child> {
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(command).env(SOCKET, socket).process_group(0);
    shell.stdin(input).stdout(Stdio::piped()).stderr(Stdio::piped());
    shell.spawn().map_err(io("start", "sh"))
}

/// Writes a call and reads a line, or the first `most` bytes of one. Each of both may take until `end`.
fn exchange(
    stream: &mut BufReader<UnixStream>,
    line: &[u8],
    end: Instant,
    most: usize,
) -> std::io::Result<Vec<u8>> {
    let mut rest = line;
    while !rest.is_empty() {
        stream.get_ref().set_write_timeout(Some(left(end)?))?;
        let written = stream.get_mut().write(rest)?;
        rest = &rest[written..];
    }
    let mut reply = Vec::new();
    while reply.last() != Some(&b'\n') && reply.len() < most {
        stream.get_ref().set_read_timeout(Some(left(end)?))?;
        let arrived = stream.fill_buf()?;
        if arrived.is_empty() {
            break;
        }
        let length = arrived.iter().position(|byte| *byte == b'\n').map_or(arrived.len(), |at| at + 1);
        reply.extend_from_slice(&arrived[..length]);
        stream.consume(length);
    }
    Ok(reply)
}

fn left(end: Instant) -> std::io::Result<Duration> {
    let left = end.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// Takes the lock that every process of a learner holds. One that outlived its loop is waited for.
fn take_lock(path: &Path, deadline: Duration) -> Result<File> {
    let end = Instant::now() + deadline;
    let options = File::options().read(true).write(true).create(true).truncate(false).open(path);
    let mut lock = options.map_err(io("open", path))?;
    loop {
        match lock.try_lock() {
            Ok(()) => return Ok(lock),
            Err(std::fs::TryLockError::Error(error)) => return Err(io("lock", path)(error)),
            Err(std::fs::TryLockError::WouldBlock) if Instant::now() >= end => {
                let mut holder = String::new();
                // Only for the message.
                let _ = lock.read_to_string(&mut holder);
                return Err(Error::LearnerStillRuns { path: path.to_owned(), holder, waited: deadline });
            }
            Err(std::fs::TryLockError::WouldBlock) => std::thread::sleep(LOOK_EVERY),
        }
    }
}

/// Writes who holds the lock, and leaves its end to be read: a child that reads its standard input finds
/// nothing.
fn note_holder(lock: &mut File, id: u32) -> std::io::Result<()> {
    lock.set_len(0)?;
    lock.rewind()?;
    lock.write_all(id.to_string().as_bytes())
}

/// Logs what a child writes, line by line.
fn forward(name: String, output: impl Read + Send + 'static) -> Result<()> {
    let log = move || {
        let (mut lines, mut line) = (BufReader::new(output), Vec::new());
        loop {
            line.clear();
            match (&mut lines).take(NOTE_BYTES_MAX).read_until(b'\n', &mut line) {
                Ok(0) | Err(_) => return,
                Ok(_) => tracing::warn!(target: "learner", "{name}: {}", plain(&line)),
            }
        }
    };
    let thread = std::thread::Builder::new().name("learner output".to_owned());
    thread.spawn(log).map(drop).map_err(io("start a thread for", "the learner's output"))
}
