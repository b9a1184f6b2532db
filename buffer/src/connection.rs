//! A producer's line to the process that owns the log.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::layout::body::Plan;
use crate::map::{Exclusive, Map};
use crate::position::{Identity, Position};
use crate::sample::Kind;
use crate::segment::segment_name;
use crate::storage::{Directory, Storage};
use crate::wire::{self, Message, SOCKET};

/// The line to the owner.
pub(crate) struct Connection {
    root: PathBuf,
    storage: Directory,
    /// `None` after a failure: an answer that came late would be taken for that of another question.
    stream: Mutex<Option<UnixStream>>,
    /// The segment that the last space was in.
    segment: Mutex<Option<(u64, Arc<Map>)>>,
    deadline: Duration,
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection").field("root", &self.root).finish_non_exhaustive()
    }
}

impl Connection {
    /// Connects, and tells what the log belongs to.
    pub(crate) fn open(root: &Path, deadline: Duration) -> Result<(Self, Identity)> {
        let owner = |cause: String| Error::Owner { path: root.to_owned(), cause };
        let lost = |error: io::Error| owner(error.to_string());
        let directory = File::open(root).map_err(Error::io("open", root))?;
        // Socket addresses are short, paths of logs may be long.
        let address = format!("/proc/self/fd/{}/{SOCKET}", directory.as_raw_fd());
        let mut stream = UnixStream::connect(address).map_err(lost)?;
        let bound = Some(deadline.max(Duration::from_millis(1)));
        stream.set_write_timeout(bound).and_then(|()| stream.set_read_timeout(bound)).map_err(lost)?;
        Message::new(wire::HELLO, [wire::PROTOCOL, 0, 0]).write(&mut stream).map_err(lost)?;
        let welcome = Message::read(&mut stream, || false).map_err(lost)?;
        let welcome = welcome.ok_or_else(|| owner("it closed the connection".into()))?;
        if welcome.tag != wire::WELCOME || welcome.numbers[0] != wire::PROTOCOL {
            return Err(Error::Unsupported {
                path: root.join(SOCKET),
                what: "producer protocol",
                found: welcome.numbers[0].to_string(),
                known: wire::PROTOCOL.to_string(),
            });
        }
        let identity =
            wire::identity(&welcome.text).ok_or_else(|| owner("it did not say what it owns".into()))?;
        // The owner itself waits for room and for the medium before it answers.
        let deadline = deadline.saturating_add(Duration::from_micros(welcome.numbers[1]));
        stream.set_read_timeout(Some(deadline)).map_err(lost)?;
        let (stream, segment, storage) = (Mutex::new(Some(stream)), Mutex::new(None), Directory::new(root));
        Ok((Self { root: root.to_owned(), storage, stream, segment, deadline }, identity))
    }

    /// Sends a message and waits for its answer, if it has one.
    fn say(&self, message: &Message, answered: bool) -> Result<Option<Message>> {
        let owner = |cause: String| Error::Owner { path: self.root.clone(), cause };
        let mut guard = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        let stream = guard.as_mut().ok_or_else(|| owner("the connection was lost".into()))?;
        let mut exchange = || -> io::Result<Option<Message>> {
            message.write(stream)?;
            if !answered {
                return Ok(None);
            }
            let answer = Message::read(stream, || false)?;
            answer
                .map(Some)
                .ok_or_else(|| io::Error::new(io::ErrorKind::UnexpectedEof, "it closed the connection"))
        };
        let outcome = exchange();
        outcome.map_err(|error| {
            *guard = None;
            let late = matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut);
            owner(if late { format!("no answer within {:?}", self.deadline) } else { error.to_string() })
        })
    }

    fn ask(&self, tag: u64, numbers: [u64; 3], expected: u64) -> Result<Message> {
        let answer = self.say(&Message::new(tag, numbers), true)?.unwrap_or_default();
        if answer.tag == expected {
            return Ok(answer);
        }
        let [which, first, second] = answer.numbers;
        let cause = String::from_utf8_lossy(&answer.text).into_owned();
        Err(match which {
            _ if answer.tag != wire::REFUSED => {
                let cause = format!("it answered with message {} instead of {expected}", answer.tag);
                Error::Owner { path: self.root.clone(), cause }
            }
            wire::FULL => Error::Full {
                bytes: first,
                waited: Duration::from_micros(second),
                reason: "open reservations or a slow sync hold it in the process that owns the log",
            },
            wire::TOO_LARGE => Error::TooLarge { bytes: first, max: second },
            wire::EXPIRED => {
                Error::Expired { position: Position(first), held: Duration::from_micros(second) }
            }
            wire::POISONED => Error::Poisoned { path: self.root.clone(), cause },
            _ => Error::Owner { path: self.root.clone(), cause },
        })
    }

    pub(crate) fn reserve(self: &Arc<Self>, kind: Kind, plan: &Plan) -> Result<(u64, Exclusive)> {
        let bytes = plan.frame as u64;
        let space = self.ask(wire::RESERVE, [u64::from(kind.code()), bytes, 0], wire::SPACE)?;
        let [segment, offset, sequence] = space.numbers;
        let map = self.map(segment)?;
        let granted = usize::try_from(offset).ok().and_then(|offset| map.granted(offset, plan.frame));
        let body = granted.ok_or_else(|| Error::Damaged {
            path: self.storage.path(&segment_name(segment)),
            offset,
            what: "segment: too short for the space that its owner gave in it",
        })?;
        Ok((sequence, body))
    }

    fn map(&self, segment: u64) -> Result<Arc<Map>> {
        let mut last = self.segment.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, map)) = last.as_ref().filter(|(first, _)| *first == segment) {
            return Ok(Arc::clone(map));
        }
        let name = segment_name(segment);
        let map = self.storage.open(&name, Some(0)).map_err(Error::io("map", self.storage.path(&name)))?;
        let map = Arc::new(map);
        *last = Some((segment, Arc::clone(&map)));
        Ok(map)
    }

    pub(crate) fn commit(&self, sequence: u64) -> Result<()> {
        self.ask(wire::COMMIT, [sequence, 0, 0], wire::DONE).map(|_| ())
    }

    pub(crate) fn wait(&self, sequence: u64) -> Result<()> {
        self.ask(wire::WAIT, [sequence, 0, 0], wire::DONE).map(|_| ())
    }

    pub(crate) fn give_up(&self, sequence: u64) {
        // An owner that is gone has given it up already.
        let _ = self.say(&Message::new(wire::GIVE_UP, [sequence, 0, 0]), false);
    }
}
