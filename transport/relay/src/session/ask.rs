//! The follower's side of a session.

use std::net::{TcpStream, ToSocketAddrs as _};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use driftless_store::wait::lock;
use driftless_store::{Object, chain_text};

use super::control::Control;
use super::{Answer, Ask, Hello, PROTOCOL, WORD_DEADLINE, patience};
use crate::error::{Error, Result};
use crate::fabric::{Fabric, Link, Wait};

/// How long a connection may take to be made.
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);
/// Sessions that are kept for the next request: as many as a follower has requests under way when each has
/// just begun.
const IDLE_MAX: usize = 16;

/// A relay that is asked over a fabric.
pub(crate) struct Remote {
    fabric: Arc<dyn Fabric>,
    /// `host:port`.
    host: String,
    token: Option<String>,
    idle: Mutex<Vec<Session>>,
}

struct Session {
    control: Control,
    link: Box<dyn Link>,
    tag: u64,
}

/// What came of a request.
enum Outcome {
    Bytes(Vec<u8>),
    /// The relay has said why not; the session goes on.
    Refused(String),
}

impl Remote {
    pub(crate) fn new(fabric: Arc<dyn Fabric>, host: &str, token: Option<&str>) -> Self {
        let (host, token) = (host.trim_end_matches('/').to_owned(), token.map(str::to_owned));
        Self { fabric, host, token, idle: Mutex::default() }
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Session>> {
        lock(&self.idle)
    }

    /// A range of an object, of which the relay may have to get all first, for which it has `wait`.
    ///
    /// # Errors
    /// A text for people: what the relay says, or what became of it.
    pub(crate) fn get(
        &self,
        object: &Object,
        range: Range<u64>,
        wait: Duration,
    ) -> std::result::Result<Vec<u8>, String> {
        let kept = self.idle().pop();
        if let Some(mut session) = kept {
            match session.get(object, &range, wait) {
                Ok(outcome) => return self.keep(session, outcome),
                // The relay may have been started again since; a new session shows it. Those of the same age
                // are no better.
                Err(Error::LinkLost { .. }) => self.idle().clear(),
                Err(error) => return Err(chain_text(&error)),
            }
        }
        let mut session = self.connect().map_err(|error| chain_text(&error))?;
        let outcome = session.get(object, &range, wait).map_err(|error| chain_text(&error))?;
        self.keep(session, outcome)
    }

    fn keep(&self, session: Session, outcome: Outcome) -> std::result::Result<Vec<u8>, String> {
        let mut idle = self.idle();
        if idle.len() < IDLE_MAX {
            idle.push(session);
        }
        match outcome {
            Outcome::Bytes(bytes) => Ok(bytes),
            Outcome::Refused(words) => Err(words),
        }
    }

    fn connect(&self) -> Result<Session> {
        let mut control = Control::new(self.dial()?, self.host.clone())?;
        let link = self.fabric.link(&self.host)?;
        let address = hex::encode(link.address()?);
        let hello = Hello { driftless_ucx: PROTOCOL, token: self.token.clone(), address };
        control.tell(&hello, WORD_DEADLINE)?;
        let answer: Answer = control.hear(WORD_DEADLINE, &|| true)?;
        match answer.error {
            None => Ok(Session { control, link, tag: 0 }),
            Some(error) => {
                let status = format!("{}: {}", error.kind, error.message);
                Err(Error::Link { peer: self.host.clone(), action: "begin a session with", status })
            }
        }
    }

    fn dial(&self) -> Result<TcpStream> {
        let lost = |reason| Error::LinkLost { peer: self.host.clone(), action: "connect to", reason };
        let addresses = self.host.to_socket_addrs().map_err(|error| lost(error.to_string()))?;
        let mut reason = "it has no address".to_owned();
        for address in addresses {
            match TcpStream::connect_timeout(&address, CONNECT_DEADLINE) {
                Ok(stream) => return Ok(stream),
                Err(error) => reason = error.to_string(),
            }
        }
        Err(lost(reason))
    }
}

impl Session {
    fn get(&mut self, object: &Object, range: &Range<u64>, wait: Duration) -> Result<Outcome> {
        let length = range.end - range.start;
        self.link.memory(length as usize)?;
        self.tag += 1;
        let ask = Ask {
            key: object.key.to_string(),
            size: object.size,
            blake3: object.blake3.to_string(),
            start: range.start,
            bytes: length,
            tag: self.tag,
        };
        self.control.tell(&ask, WORD_DEADLINE)?;
        let answer: Answer = self.control.hear(wait, &|| true)?;
        if let Some(error) = answer.error {
            return Ok(Outcome::Refused(format!("{}: {}", error.kind, error.message)));
        }
        let control = &self.control;
        let mut wait = Wait { deadline: patience(length), watch: &mut || control.check() };
        let came = self.link.receive(length as usize, self.tag, &mut wait)?;
        if came as u64 != length {
            return Err(Error::Link {
                peer: self.control.peer().to_owned(),
                action: "receive from",
                status: format!("{came} bytes instead of {length}"),
            });
        }
        Ok(Outcome::Bytes(self.link.memory(came)?[..came].to_vec()))
    }
}
