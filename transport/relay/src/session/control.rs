//! The TCP connection of a session: JSON documents, each behind its length, and whether the peer is still
//! there.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, Result};

/// Longest document: an address of a host with many network devices, in hex.
pub(super) const DOCUMENT_BYTES_MAX: usize = 256 << 10;
/// How long a read goes on before it is asked whether it should.
const SLICE: Duration = Duration::from_millis(200);

/// A document behind its length.
pub(super) fn frame(document: &impl Serialize) -> serde_json::Result<Vec<u8>> {
    let body = serde_json::to_vec(document)?;
    Ok([&(body.len() as u32).to_le_bytes()[..], &body].concat())
}

#[derive(Debug)]
pub(super) struct Control {
    stream: TcpStream,
    peer: String,
}

impl Control {
    /// # Errors
    /// [`Error::LinkLost`] if the connection is gone already.
    pub(super) fn new(stream: TcpStream, peer: String) -> Result<Self> {
        let control = Self { stream, peer };
        // Requests are small and waited for.
        let ready = control.stream.set_nodelay(true).and_then(|()| control.stream.set_nonblocking(false));
        ready.map_err(|error| control.lost("talk to", error.to_string()))?;
        Ok(control)
    }

    pub(super) fn peer(&self) -> &str {
        &self.peer
    }

    /// Says something.
    ///
    /// # Errors
    /// [`Error::LinkLost`] if the other side is gone or takes nothing until `deadline`.
    pub(super) fn tell(&mut self, document: &impl Serialize, deadline: Duration) -> Result<()> {
        let lost = |control: &Self, error: String| control.lost("tell", error);
        let frame = frame(document).map_err(|error| lost(self, error.to_string()))?;
        let sent = self.stream.set_write_timeout(Some(deadline)).and_then(|()| self.stream.write_all(&frame));
        sent.map_err(|error| lost(self, error.to_string()))
    }

    /// Waits for a document.
    ///
    /// # Errors
    /// [`Error::LinkLost`] if the other side is gone, says something else, or `going` is false;
    /// [`Error::LinkTimeout`].
    pub(super) fn hear<T: DeserializeOwned>(
        &mut self,
        deadline: Duration,
        going: &dyn Fn() -> bool,
    ) -> Result<T> {
        let end = Instant::now() + deadline;
        let mut length = [0; 4];
        self.read(&mut length, deadline, end, going)?;
        let length = u32::from_le_bytes(length) as usize;
        if length > DOCUMENT_BYTES_MAX {
            return Err(self.lost("hear", format!("a document of {length} bytes")));
        }
        let mut body = vec![0; length];
        self.read(&mut body, deadline, end, going)?;
        serde_json::from_slice(&body).map_err(|error| self.lost("hear", error.to_string()))
    }

    fn read(
        &mut self,
        mut into: &mut [u8],
        waited: Duration,
        end: Instant,
        going: &dyn Fn() -> bool,
    ) -> Result<()> {
        while !into.is_empty() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::LinkTimeout { peer: self.peer.clone(), action: "hear", waited });
            }
            if !going() {
                return Err(self.lost("hear", "this side ends".to_owned()));
            }
            let timeout = self.stream.set_read_timeout(Some(left.min(SLICE)));
            match timeout.and_then(|()| self.stream.read(into)) {
                Ok(0) => return Err(self.lost("hear", "it closed the connection".to_owned())),
                Ok(read) => into = into.get_mut(read..).unwrap_or_default(),
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                    ) => {}
                Err(error) => return Err(self.lost("hear", error.to_string())),
            }
        }
        Ok(())
    }

    /// Whether the other side still has the connection.
    pub(super) fn check(&self) -> std::result::Result<(), String> {
        let mut one = [0];
        let peeked = self.stream.set_nonblocking(true).and_then(|()| self.stream.peek(&mut one));
        let restored = self.stream.set_nonblocking(false);
        match (peeked, restored) {
            (Ok(0), _) => Err("it closed the connection".to_owned()),
            (Ok(_), Ok(())) => Ok(()),
            (Err(error), Ok(())) if error.kind() == ErrorKind::WouldBlock => Ok(()),
            (Err(error), _) | (_, Err(error)) => Err(error.to_string()),
        }
    }

    fn lost(&self, action: &'static str, reason: String) -> Error {
        Error::LinkLost { peer: self.peer.clone(), action, reason }
    }
}
