//! The owner's side of producers in other processes: one thread for each, all on the log that the owner has
//! open.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::layout::ALIGN;
use crate::layout::body;
use crate::layout::frame::FRAME_HEADER;
use crate::map::Exclusive;
use crate::sample::Kind;
use crate::segment::Segment;
use crate::shared::{Complete, Shared};
use crate::wire::{self, Message, SOCKET, refusal, welcome};

/// Most producers at a time.
const PRODUCERS_MAX: usize = 1024;
/// How long the owner waits for a producer to take an answer of a few bytes.
const ANSWER: Duration = Duration::from_secs(10);
/// Pause after a connection could not be taken.
const AGAIN: Duration = Duration::from_millis(50);

/// Other processes may write to the log as long as this is held, see [`crate::Log::serve`].
///
/// Dropping it disconnects the producers and gives up what they have reserved.
#[derive(Debug)]
pub struct Producers {
    shared: Arc<Shared>,
    stop: Arc<AtomicBool>,
    listener: UnixListener,
    accepting: Option<JoinHandle<()>>,
    served: Arc<Mutex<Vec<Served>>>,
}

#[derive(Debug)]
struct Served {
    stream: UnixStream,
    thread: JoinHandle<()>,
}

impl Producers {
    pub(crate) fn start(shared: Arc<Shared>) -> Result<Self> {
        {
            let mut state = shared.lock();
            shared.check(&state)?;
            if state.serving {
                return Err(Error::invalid(
                    "producers",
                    "one `Log::serve` at a time",
                    "another one is in use",
                ));
            }
            state.serving = true;
        }
        let listening = listen(&shared);
        let (listener, copy) = listening.map_err(|source| {
            shared.lock().serving = false;
            Error::io("listen at", shared.root.join(SOCKET))(source)
        })?;
        let (stop, served) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
        let mut producers =
            Self { shared: Arc::clone(&shared), stop, listener: copy, accepting: None, served };
        let (stop, served) = (Arc::clone(&producers.stop), Arc::clone(&producers.served));
        let thread = spawn("rollout-log-door", move || accept(&shared, &listener, &stop, &served));
        let thread = thread.map_err(Error::io("start a thread for", &producers.shared.root))?;
        producers.accepting = Some(thread);
        Ok(producers)
    }
}

impl Drop for Producers {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // Ends the `accept` under way. A failure leaves nothing to be done.
        if let Ok(copy) = self.listener.try_clone() {
            let _ = UnixStream::from(OwnedFd::from(copy)).shutdown(std::net::Shutdown::Both);
        }
        if let Some(thread) = self.accepting.take() {
            let _ = thread.join();
        }
        let served = std::mem::take(&mut *self.served.lock().unwrap_or_else(PoisonError::into_inner));
        for one in &served {
            let _ = one.stream.shutdown(std::net::Shutdown::Both);
        }
        for one in served {
            let _ = one.thread.join();
        }
        let mut state = self.shared.lock();
        state.serving = false;
        // Once the log is closed, or its lock is lost, the socket may be another owner's.
        if state.lock.is_some() && self.shared.check_owner().is_ok() {
            // A socket that is left over answers no call, and the next owner replaces it.
            let _ = fs::remove_file(self.shared.root.join(SOCKET));
        }
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.into()).spawn(work)
}

/// The listener, and a second handle of it to end it with.
fn listen(shared: &Shared) -> io::Result<(UnixListener, UnixListener)> {
    // This process holds the log's lock, so what is there is left over from a dead one.
    match fs::remove_file(shared.root.join(SOCKET)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let directory = File::open(&shared.root)?;
    // Socket addresses are short, paths of logs may be long.
    let listener = UnixListener::bind(format!("/proc/self/fd/{}/{SOCKET}", directory.as_raw_fd()))?;
    let copy = listener.try_clone()?;
    Ok((listener, copy))
}

fn accept(shared: &Arc<Shared>, listener: &UnixListener, stop: &AtomicBool, served: &Mutex<Vec<Served>>) {
    for stream in listener.incoming() {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let mut served = served.lock().unwrap_or_else(PoisonError::into_inner);
        served.retain(|one| !one.thread.is_finished());
        let room = served.len() < PRODUCERS_MAX;
        let begun = stream.and_then(|stream| {
            if !room {
                return Err(io::Error::other(format!("{PRODUCERS_MAX} producers are connected already")));
            }
            stream.set_write_timeout(Some(ANSWER))?;
            // So often, a reservation that its producer holds for too long is looked for.
            let look = shared.options().reservation_deadline.max(Duration::from_millis(1));
            stream.set_read_timeout(Some(look))?;
            let line = Line { shared: Arc::clone(shared), stream: stream.try_clone()?, held: HashMap::new() };
            let thread = spawn("rollout-log-producer", move || line.run())?;
            Ok(Served { stream, thread })
        });
        match begun {
            Ok(one) => served.push(one),
            Err(error) => {
                drop(served);
                tracing::warn!(%error, "could not take a producer of the rollout log");
                std::thread::sleep(AGAIN);
            }
        }
    }
}

/// One producer.
struct Line {
    shared: Arc<Shared>,
    stream: UnixStream,
    /// What it has reserved, by position.
    held: HashMap<u64, Held>,
}

struct Held {
    kind: Kind,
    segment: Arc<Segment>,
    body: Exclusive,
}

impl Drop for Line {
    fn drop(&mut self) {
        // Another handle of the socket is kept to end this thread; the producer is to notice at once.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        // What it has reserved will never be completed.
        for (sequence, held) in self.held.drain() {
            drop(held);
            self.shared.give_up(sequence);
        }
    }
}

impl Line {
    fn run(mut self) {
        let shared = Arc::clone(&self.shared);
        let idle = || {
            shared.reclaim(&mut shared.lock());
            true
        };
        loop {
            let outcome = match Message::read(&mut self.stream, idle) {
                Ok(Some(message)) => {
                    let answer = self.answer(&message).unwrap_or_else(|error| Some(refusal(&error)));
                    answer.map_or(Ok(()), |answer| answer.write(&mut self.stream))
                }
                Ok(None) => return,
                Err(error) => Err(error),
            };
            if let Err(error) = outcome {
                tracing::warn!(%error, "lost a producer of the rollout log");
                return;
            }
        }
    }

    fn answer(&mut self, message: &Message) -> Result<Option<Message>> {
        let done = Some(Message::new(wire::DONE, [0; 3]));
        let [first, second, _] = message.numbers;
        match message.tag {
            wire::HELLO => {
                let options = self.shared.options();
                Ok(Some(welcome(&options.identity, options.wait_deadline)))
            }
            wire::RESERVE => self.reserve(first, second).map(Some),
            wire::COMMIT => self.commit(first).map(|()| done),
            wire::WAIT => self.wait(first).map(|()| done),
            wire::GIVE_UP => {
                // Its bytes come back before its number does.
                if self.held.remove(&first).is_some() {
                    self.shared.give_up(first);
                }
                Ok(None)
            }
            other => Err(Error::invalid("message", "one of protocol 1", other)),
        }
    }

    fn reserve(&mut self, kind: u64, bytes: u64) -> Result<Message> {
        let known = u16::try_from(kind).ok().and_then(Kind::from_code);
        let kind = known.ok_or_else(|| Error::invalid("kind of record", "1 to 3", kind))?;
        let frame = usize::try_from(bytes).unwrap_or(usize::MAX);
        if !frame.is_multiple_of(ALIGN) || frame <= FRAME_HEADER {
            return Err(Error::invalid("frame", "a multiple of 64 bytes, more than its header", bytes));
        }
        let (segment, sequence, body) = self.shared.reserve(kind, frame, false)?;
        if let Err(error) = self.shared.name(&segment) {
            drop(body);
            self.shared.give_up(sequence);
            return Err(error);
        }
        let space = Message::new(wire::SPACE, [segment.header.first, body.offset() as u64, sequence]);
        self.held.insert(sequence, Held { kind, segment, body });
        Ok(space)
    }

    /// The producer has let go of the body; nothing it says about it is taken on trust.
    fn commit(&mut self, sequence: u64) -> Result<()> {
        let Some(Held { kind, segment, body }) = self.held.remove(&sequence) else {
            return Err(Error::invalid("position", "one that this producer has reserved", sequence));
        };
        match body::accept(kind, &body) {
            Ok((fixed, plan)) => {
                let crc = crc32c::crc32c(&body);
                self.shared.commit_body(&segment, Complete { kind, sequence, body, crc }, &fixed, &plan)
            }
            Err(what) => {
                drop(body);
                self.shared.give_up(sequence);
                Err(Error::invalid("record", "one that can be read", what))
            }
        }
    }

    fn wait(&self, sequence: u64) -> Result<()> {
        let committed = {
            let mut state = self.shared.lock();
            sequence < state.ledger.next() && !state.ledger.is_reserved(sequence)
        };
        if !committed {
            return Err(Error::invalid("position", "one that is committed", sequence));
        }
        self.shared.sync_through(sequence)
    }
}
