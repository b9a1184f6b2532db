//! The meeting place of a weight-update group: the part of torch's TCPStore that the ranks of one need,
//! served without torch.
//!
//! A client that breaks the protocol, sends part of a request and stops, or does not read its replies loses
//! its connection and nothing else; how many there are, and what they may store, is bounded.

mod state;
mod wire;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use derive_setters::Setters;
use driftless_http::listen::{Admission, Limits, accept};
use driftless_http::{Error as HttpError, Server, Threads};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::error::{Error, Result};
use state::{Client, Reply, Table};
use wire::{Request, Violation};

/// Most replies that lie ready for a client. A client has one request under way; only one that does not read
/// gets here.
const REPLIES_MAX: usize = 64;
/// Its threads; nothing in it blocks.
const THREADS: Threads = Threads { io: 1, blocking: 1 };
/// Descriptors that are left to the rest of the process.
const FILES_KEPT: u64 = 256;

/// Bounds of a [`Rendezvous`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Setters)]
#[setters(prefix = "with_", strip_option)]
#[non_exhaustive]
pub struct RendezvousOptions {
    /// Most connections at a time, fewer where the process may open few files. For a further one, the oldest
    /// that has asked for nothing is closed; where all have, it waits.
    pub connections_max: usize,
    /// How long a client may take to greet, to finish a request it began, or to read a reply. Between
    /// requests it may be silent.
    pub deadline: Duration,
}

impl Default for RendezvousOptions {
    /// 1024 connections, 10 s.
    fn default() -> Self {
        Self { connections_max: 1024, deadline: Duration::from_secs(10) }
    }
}

/// A TCPStore server on threads of its own; dropping it closes every connection.
#[derive(Debug)]
pub struct Rendezvous {
    server: Server,
    shared: Arc<Mutex<Shared>>,
}

impl Rendezvous {
    /// Listens at `address`; clients are served when this returns. Port 0 takes a free one.
    ///
    /// # Errors
    /// [`Error::Listen`] when the address cannot be listened at, or its threads cannot be had.
    pub fn start(address: SocketAddr, options: RendezvousOptions) -> Result<Self> {
        let shared = Arc::<Mutex<Shared>>::default();
        let served = shared.clone();
        let mut limits = Limits::default();
        (limits.connections, limits.files_kept) = (options.connections_max, FILES_KEPT);
        let server = Server::start("rendezvous", address, THREADS, |listener, _| {
            Ok(accept(listener, limits, move |stream, admission| {
                attend(stream, admission, options.deadline, served.clone())
            }))
        });
        let failed = |error| match error {
            HttpError::Listen { addr, source } => Error::Listen { address: addr, source },
            error => Error::set_up("the rendezvous")(error),
        };
        Ok(Self { server: server.map_err(failed)?, shared })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.server.addr()
    }

    /// Sets a key, and wakes the clients that wait for it. torch puts a `/` before the names of its keys.
    ///
    /// # Errors
    /// [`Error::Rendezvous`] when there is no room for it.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let mut shared = lock(&self.shared);
        let woken = shared.state.set(key.into(), value.into());
        let woken =
            woken.map_err(|violation| Error::Rendezvous { key: key.into(), why: violation.to_string() })?;
        shared.send(woken);
        Ok(())
    }

    /// The keys that clients wait for now: what a group that does not come together is missing.
    pub fn waited_for(&self) -> Vec<String> {
        lock(&self.shared).state.waited_for()
    }

    /// How many clients are connected.
    pub fn clients(&self) -> usize {
        lock(&self.shared).outboxes.len()
    }
}

#[derive(Debug, Default)]
struct Shared {
    state: Table,
    outboxes: BTreeMap<Client, mpsc::Sender<Vec<u8>>>,
    next: Client,
}

impl Shared {
    /// Puts replies into their clients' outboxes. A client whose outbox is full loses it, and thereby its
    /// connection.
    fn send(&mut self, replies: Vec<Reply>) {
        for (client, bytes) in replies {
            let full = self.outboxes.get(&client).is_some_and(|outbox| outbox.try_send(bytes).is_err());
            if full {
                self.outboxes.remove(&client);
            }
        }
    }
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn attend(stream: TcpStream, admission: Admission, deadline: Duration, shared: Arc<Mutex<Shared>>) {
    let (client, outbox) = {
        let mut shared = lock(&shared);
        let (sender, outbox) = mpsc::channel(REPLIES_MAX);
        shared.next += 1;
        let client = shared.next;
        shared.outboxes.insert(client, sender);
        (client, outbox)
    };
    let _leave = Leave { shared: &shared, client };
    let peer = stream.peer_addr().ok();
    match serve(stream, &admission, deadline, &shared, client, outbox).await {
        Ok(()) => tracing::debug!(?peer, "left the rendezvous"),
        Err(error) => tracing::warn!(?peer, %error, "the rendezvous closed a connection"),
    }
}

/// Forgets a client however its task ends.
struct Leave<'a> {
    shared: &'a Mutex<Shared>,
    client: Client,
}

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        let mut shared = lock(self.shared);
        shared.outboxes.remove(&self.client);
        shared.state.forget(self.client);
    }
}

#[derive(Debug, thiserror::Error)]
enum Closed {
    #[error("{0}")]
    Violation(#[from] Violation),
    #[error("{0}")]
    Io(#[from] std::io::Error),
    #[error("it {0} within {1:?}")]
    Deadline(&'static str, Duration),
}

/// Serves a client until it leaves.
async fn serve(
    mut stream: TcpStream,
    admission: &Admission,
    deadline: Duration,
    shared: &Mutex<Shared>,
    client: Client,
    mut outbox: mpsc::Receiver<Vec<u8>>,
) -> Result<(), Closed> {
    stream.set_nodelay(true)?;
    let mut received = Vec::new();
    // When what was begun, the greeting at first, must be whole. Between requests silence is allowed.
    let mut due = Some(Instant::now() + deadline);
    loop {
        let overdue = async {
            match due {
                Some(due) => tokio::time::sleep_until(due).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            reply = outbox.recv() => {
                let reply = reply.ok_or(Violation::NotReading)?;
                let written = tokio::time::timeout(deadline, stream.write_all(&reply)).await;
                written.map_err(|_| Closed::Deadline("did not read a reply", deadline))??;
            }
            read = read_some(&mut stream, &mut received) => {
                if read? == 0 {
                    return Ok(());
                }
                while let Some((request, length)) = wire::decode(&received)? {
                    received.drain(..length);
                    due = None;
                    // There are no passwords here; whoever asks for nothing is no rank.
                    if !matches!(request, Request::Validate(_) | Request::Ping(_)) {
                        admission.grant();
                    }
                    let mut shared = lock(shared);
                    let replies = shared.state.handle(client, request)?;
                    shared.send(replies);
                }
                due = if received.is_empty() { None } else { due.or(Some(Instant::now() + deadline)) };
            }
            () = overdue => return Err(Closed::Deadline("finished no request", deadline)),
        }
    }
}

/// Reads what there is, never more than a request may have.
async fn read_some(stream: &mut TcpStream, received: &mut Vec<u8>) -> std::io::Result<usize> {
    let mut part = [0; 16 << 10];
    let room = (wire::REQUEST_BYTES_MAX - received.len().min(wire::REQUEST_BYTES_MAX)).min(part.len());
    let count = stream.read(&mut part[..room.max(1)]).await?;
    received.extend_from_slice(&part[..count]);
    Ok(count)
}
