//! A process that has many answers open at once. Each line says by its id which answer it is of, and a turn has what is
//! new in it alone.

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::pending;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::Deserialize;
use serde::de::IgnoredAny;
use tokio::io::AsyncWriteExt;
use tokio::runtime::Handle;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::task::JoinSet;

use super::clients::Patience;
use super::command::{Broken, Process, read_line};
use super::shown;
use crate::service::Silent;

/// The protocol of this module, as the first line of a process names it.
pub(super) const PROTOCOL: u32 = 2;
/// Answers that one process has open at once, whatever it says.
const OPEN_MAX: usize = 1024;

/// The first line of a process that speaks this protocol.
#[derive(Debug, Deserialize)]
pub(super) struct Announced {
    pub(super) protocol: u32,
    /// Answers that it takes at once.
    pub(super) open: usize,
}

/// What of a process's line says whose it is, and whether it is the last of its answer.
#[derive(Deserialize)]
struct Line {
    id: u64,
    /// Generations that the process had been told of.
    #[serde(default)]
    turn: u64,
    generate: Option<IgnoredAny>,
}

/// A running process with its open answers. It ends with this value.
#[derive(Debug)]
pub(super) struct Many {
    shared: Arc<Shared>,
    /// Reads and writes; aborted when this is dropped.
    _task: JoinSet<()>,
}

#[derive(Debug)]
struct Shared {
    flag: &'static str,
    deadline: Duration,
    /// Lines that are to be written. An open answer has two at most: one that it is told, and that it is given up.
    lines: mpsc::Sender<Vec<u8>>,
    room: Arc<Semaphore>,
    table: Mutex<Table>,
    stop: Notify,
    runtime: Handle,
}

#[derive(Debug, Default)]
struct Table {
    open: HashMap<u64, Open>,
    end: Option<End>,
}

/// An answer whose last line has not come.
#[derive(Debug)]
struct Open {
    /// Generations that the process was told of.
    turn: u64,
    state: State,
    _room: OwnedSemaphorePermit,
}

#[derive(Debug)]
enum State {
    /// The process has the word.
    Asked(oneshot::Sender<Vec<u8>>),
    /// Engines have it.
    Generating,
    /// Nobody waits for it, which the process was told.
    GivenUp,
}

/// Why a process is not asked again.
#[derive(Debug, Clone)]
struct End {
    why: String,
    /// The answer that is at fault, where it is known.
    by: Option<u64>,
}

impl Many {
    /// Takes a process over that was asked for answer `id` and has announced itself.
    pub(super) fn new(
        flag: &'static str,
        deadline: Duration,
        process: Process,
        open: usize,
        id: u64,
    ) -> Option<(Self, Talk)> {
        let open = open.min(OPEN_MAX);
        let (lines, queue) = mpsc::channel(2 * open.max(1));
        let shared = Arc::new(Shared {
            flag,
            deadline,
            lines,
            room: Arc::new(Semaphore::new(open)),
            table: Mutex::default(),
            stop: Notify::new(),
            runtime: Handle::current(),
        });
        let room = shared.room.clone().try_acquire_owned().ok()?;
        let talk = Talk { answer: shared.expect(id, Some(room)), shared: shared.clone(), id };
        let mut task = JoinSet::new();
        task.spawn(shared.clone().run(process, queue));
        Some((Many { shared, _task: task }, talk))
    }

    /// Answers that are open.
    pub(super) fn open(&self) -> usize {
        self.shared.table().open.len()
    }

    /// Asks for an answer, once there is room for it; `None` if the process has ended.
    pub(super) async fn begin(&self, id: u64, line: &[u8]) -> Option<Talk> {
        let room = self.shared.room.clone().acquire_owned().await.ok()?;
        let answer = self.shared.expect(id, Some(room));
        self.shared.write(line.to_vec());
        Some(Talk { shared: self.shared.clone(), id, answer })
    }
}

/// An answer that is open. If this is dropped before its last line, the process is told that it is given up.
#[derive(Debug)]
pub(super) struct Talk {
    shared: Arc<Shared>,
    id: u64,
    answer: oneshot::Receiver<Vec<u8>>,
}

impl Talk {
    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// Tells the process something, which it has to answer.
    pub(super) async fn say(&mut self, line: Vec<u8>, patience: &Patience) -> Result<Vec<u8>, Broken> {
        self.answer = self.shared.expect(self.id, None);
        self.shared.write(line);
        self.next(patience).await
    }

    /// The line that is waited for.
    pub(super) async fn next(&mut self, patience: &Patience) -> Result<Vec<u8>, Broken> {
        match patience.wait(&mut self.answer).await {
            Some(Ok(line)) => Ok(line),
            Some(Err(_)) => Err(self.shared.broken(self.id)),
            None => Err(Broken::Silent(Silent::late(patience.deadline))),
        }
    }
}

impl Drop for Talk {
    fn drop(&mut self) {
        self.shared.give_up(self.id);
    }
}

impl Shared {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where the next line of an answer comes. It has `room` if it is new; if it is neither new nor open, no line comes.
    fn expect(&self, id: u64, room: Option<OwnedSemaphorePermit>) -> oneshot::Receiver<Vec<u8>> {
        let (sender, receiver) = oneshot::channel();
        if let Table { open, end: None } = &mut *self.table() {
            match (room, open.get_mut(&id)) {
                (Some(room), _) => {
                    open.insert(id, Open { turn: 0, state: State::Asked(sender), _room: room });
                }
                (None, Some(open)) => (open.turn, open.state) = (open.turn + 1, State::Asked(sender)),
                (None, None) => {}
            }
        }
        receiver
    }

    fn write(&self, mut line: Vec<u8>) {
        if line.last() != Some(&b'\n') {
            line.push(b'\n');
        }
        if let Err(mpsc::error::TrySendError::Full(_)) = self.lines.try_send(line) {
            self.end(End { why: "it does not read what it is asked".to_owned(), by: None });
        }
    }

    /// Tells the process that nobody waits for an answer, if it is open. One that does not say in time that it has ended
    /// it is killed.
    fn give_up(self: &Arc<Self>, id: u64) {
        match self.table().open.get_mut(&id) {
            Some(open) => open.state = State::GivenUp,
            None => return,
        }
        self.write(format!("{{\"id\": {id}, \"cancel\": true}}").into_bytes());
        let shared = Arc::downgrade(self);
        let deadline = self.deadline;
        self.runtime.spawn(async move {
            tokio::time::sleep(deadline).await;
            if let Some(shared) = shared.upgrade().filter(|shared| shared.table().open.contains_key(&id)) {
                let seconds = deadline.as_secs_f64();
                let why = format!("it did not end answer {id} in the {seconds} s after it was given up");
                shared.end(End { why, by: Some(id) });
            }
        });
    }

    /// Why no line came.
    fn broken(&self, id: u64) -> Broken {
        match self.table().end.clone() {
            Some(End { why, by: Some(by) }) if by == id => Broken::nonsense(why),
            Some(End { why, .. }) => Broken::Ended(why),
            None => Broken::Ended("the answer is not open".to_owned()),
        }
    }

    /// Ends the process; its open answers hear of it.
    fn end(&self, end: End) {
        let mut table = self.table();
        let open = std::mem::take(&mut table.open);
        if !open.is_empty() {
            let (flag, why) = (self.flag, &end.why);
            tracing::warn!(target: "hook", "{flag}: a process with {} open answers ended: {why}", open.len());
        }
        table.end.get_or_insert(end);
        drop(table);
        self.room.close();
        self.stop.notify_one();
    }

    async fn run(self: Arc<Self>, mut process: Process, mut queue: mpsc::Receiver<Vec<u8>>) {
        let Process { input, output, .. } = &mut process;
        let writes = async {
            while let Some(line) = queue.recv().await {
                // Where it reads no more, its output ends too, or a deadline passes.
                if input.write_all(&line).await.is_err() || input.flush().await.is_err() {
                    break;
                }
            }
            pending::<Infallible>().await
        };
        let reads = async {
            loop {
                let mut line = Vec::new();
                if !read_line(output, &mut line).await {
                    return Err(line);
                }
                if let Err(end) = self.take(line) {
                    return Ok(end);
                }
            }
        };
        let read = tokio::select! {
            read = reads => read,
            never = writes => match never {},
            () = self.stop.notified() => return,
        };
        let end = match read {
            Ok(end) => end,
            Err(line) => End { why: process.ended(&line).await.why(), by: None },
        };
        self.end(end);
    }

    /// Gives a line to whoever waits for it; one that nobody may expect ends the process.
    fn take(&self, line: Vec<u8>) -> Result<(), End> {
        let wrong = |why: &str, by| End { why: format!("{}, {why}", shown(&line)), by };
        let Ok(Line { id, turn, generate }) = serde_json::from_slice(&line) else {
            return Err(wrong("not a line with the \"id\" of an open answer", None));
        };
        let mut table = self.table();
        let Some(open) = table.open.get_mut(&id) else {
            return Err(wrong("but that answer is not open: it has ended, or was never asked for", None));
        };
        // Whoever waits hears of a wrong line once the end is known.
        match open.state {
            State::Generating => return Err(wrong("a second line before it was told more", Some(id))),
            State::Asked(_) if turn != open.turn => {
                return Err(wrong(&format!("a line of turn {turn}, not of turn {}", open.turn), Some(id)));
            }
            State::GivenUp => {}
            State::Asked(_) => {
                if let State::Asked(sender) = std::mem::replace(&mut open.state, State::Generating) {
                    // Whoever waited may be gone: then the answer is given up at once.
                    drop(sender.send(line));
                }
            }
        }
        if generate.is_none() {
            table.open.remove(&id);
        }
        Ok(())
    }
}
