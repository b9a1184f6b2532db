//! A producer in another process than the one that owns the log.
//!
//! The owner keeps all the bookkeeping. A producer asks it for space, writes its columns in place through its
//! own map of the segment, and asks the owner to commit. Frame headers, CRCs and syncs are the owner's. The
//! kernel closes the socket of a producer that dies, and with that its reservations end.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::append;
use crate::connection::Connection;
use crate::error::{Error, Result};
use crate::position::Identity;
use crate::reservation::{Ack, Home, Pending, Reservation};
use crate::sample::{Sample, Shape};
pub use crate::serve::Producers;
use crate::wire::SOCKET;

/// How often a producer looks for an owner that is not there yet.
const RETRY: Duration = Duration::from_millis(10);

/// Writes to a log that another process has open and serves (see [`crate::Log::serve`]).
///
/// Calls of one producer take turns. A thread that should not wait for another one's sync connects for
/// itself.
#[derive(Debug)]
pub struct Producer {
    connection: Arc<Connection>,
}

impl Producer {
    /// Connects to the process that serves the log in `dir`; waits for one up to `deadline`.
    ///
    /// # Errors
    ///
    /// [`Error::Owner`] when no process answers in time, [`Error::Identity`] when its log belongs to another
    /// run, model or tokenizer, [`Error::Io`] when there is no such directory.
    pub fn connect(dir: impl AsRef<Path>, identity: &Identity, deadline: Duration) -> Result<Self> {
        let until = Instant::now() + deadline;
        loop {
            match Self::try_connect(&dir, identity, deadline) {
                Err(Error::Owner { .. }) if Instant::now() < until => std::thread::sleep(RETRY),
                connected => return connected,
            }
        }
    }

    /// The same, without waiting for a process that serves the log; `deadline` bounds each answer of one that does.
    ///
    /// # Errors
    ///
    /// As [`Producer::connect`].
    pub fn try_connect(dir: impl AsRef<Path>, identity: &Identity, deadline: Duration) -> Result<Self> {
        let root = dir.as_ref();
        let (connection, found) = Connection::open(root, deadline)?;
        if let Some((what, expected, found)) = identity.difference(&found) {
            return Err(Error::Identity { path: root.join(SOCKET), what, expected, found });
        }
        Ok(Self { connection: Arc::new(connection) })
    }

    /// Takes space for a record, to be written in place.
    ///
    /// # Errors
    ///
    /// As [`crate::Log::reserve`]; and [`Error::Owner`] when the owner is gone or does not answer. Then
    /// nothing that was not acknowledged is certain: connect again.
    pub fn reserve(&self, shape: &Shape) -> Result<Reservation> {
        let plan = append::plan(shape)?;
        let (sequence, body) = self.connection.reserve(shape.kind, &plan)?;
        Ok(Reservation::new(Home::There(Arc::clone(&self.connection)), sequence, body, plan, shape))
    }

    /// Copies a record into the log: `reserve`, write, `commit`.
    ///
    /// # Errors
    ///
    /// As [`Producer::reserve`] and [`Reservation::commit`].
    pub fn append(&self, sample: &Sample<'_>) -> Result<Pending> {
        append::fill(self.reserve(&append::shape(sample)?)?, sample)
    }

    /// Appends several records and makes them durable together. The answer has one [`Ack`] per record, in
    /// order.
    ///
    /// # Errors
    ///
    /// As [`Producer::append`]; the records before the one that failed are in the log, unacknowledged.
    pub fn append_all(&self, samples: &[Sample<'_>]) -> Result<Vec<Ack>> {
        append::all(samples, |sample| self.append(sample))
    }
}
