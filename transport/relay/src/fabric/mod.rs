//! Bytes between two processes by another way than HTTP.
//!
//! A [`Fabric`] is such a way in this process, and a [`Link`] joins it to one peer. Relays and their clients
//! know these two traits, and speak about objects over a TCP connection beside the link. A new fabric is a
//! file here that implements both, and a line in `FABRICS`; it has to pass `tests/fabric/conformance.rs`.
//!
//! | File | Is |
//! |---|---|
//! | `ucx/` | RDMA, TCP and shared memory through UCX (feature `ucx`) |

#[cfg(feature = "ucx")]
pub mod ucx;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::error::Result;

/// A way between processes, opened in this one.
pub trait Fabric: fmt::Debug + Send + Sync {
    /// What the URLs of its relays begin with, such as `ucx`.
    fn scheme(&self) -> &'static str;

    /// A link to `peer`, which is what errors call it.
    ///
    /// # Errors
    /// [`Error::Link`](crate::Error::Link) if there can be none.
    fn link(&self, peer: &str) -> Result<Box<dyn Link>>;
}

/// The way to one peer and back. It has memory of its own, from and to which it transfers, one message at a
/// time.
///
/// A message is sent and received under a tag. To send, a link needs the [address](Link::address) of the
/// peer's link, which travels by other means. After an error of a transfer the link is of no use.
pub trait Link: Send {
    /// What a peer needs in order to [connect](Link::connect) to this link.
    ///
    /// # Errors
    /// [`Error::Link`](crate::Error::Link) if there is none.
    fn address(&self) -> Result<Vec<u8>>;

    /// Makes the peer's link with this [address](Link::address) the one that is sent to. Only a peer that has
    /// shown who it is may bring the address: a fabric may believe what is in it.
    ///
    /// # Errors
    /// [`Error::Link`](crate::Error::Link) if the link has a peer, the address is none, or nothing leads
    /// there.
    fn connect(&mut self, address: &[u8]) -> Result<()>;

    /// The link's memory, of at least `bytes`. What is in it stays unless it has to grow.
    ///
    /// # Errors
    /// [`Error::Link`](crate::Error::Link) if there is no memory, or none that can be transferred from.
    fn memory(&mut self, bytes: usize) -> Result<&mut [u8]>;

    /// Gives the memory back.
    fn release(&mut self);

    /// Sends the first `bytes` of the memory, and waits until they have left it.
    ///
    /// # Errors
    /// [`Error::Link`](crate::Error::Link) without a peer, for more bytes than there are, or if the transfer
    /// fails; [`Error::LinkLost`](crate::Error::LinkLost) when the fabric or the watch says that the peer is
    /// gone; [`Error::LinkTimeout`](crate::Error::LinkTimeout).
    fn send(&mut self, bytes: usize, tag: u64, wait: &mut Wait<'_>) -> Result<()>;

    /// Takes the message that a peer sends under `tag` into the first `bytes` of the memory, and returns how
    /// long it was.
    ///
    /// # Errors
    /// As [`Link::send`], but whoever receives needs no connection; [`Error::Link`](crate::Error::Link) also
    /// for a message longer than that.
    fn receive(&mut self, bytes: usize, tag: u64, wait: &mut Wait<'_>) -> Result<usize>;
}

/// How long a transfer may take, and who else knows whether the peer is there.
pub struct Wait<'a> {
    /// The time from the call on.
    pub deadline: Duration,
    /// Asked every 20 ms; what it fails with says that the peer is gone.
    pub watch: &'a mut dyn FnMut() -> std::result::Result<(), String>,
}

impl fmt::Debug for Wait<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wait").field("deadline", &self.deadline).finish_non_exhaustive()
    }
}

/// What opens a fabric with what its own settings in the environment say.
type Open = fn() -> Result<Arc<dyn Fabric>>;

/// The fabrics by their schemes.
const FABRICS: [(&str, Open); 1] = [("ucx", open_ucx)];

/// Opens the fabric of a scheme; `None` where there is no such fabric.
///
/// # Errors
/// [`Unsupported`](driftless_transport::Error::Unsupported) in a build without it;
/// [`Error::Library`](crate::Error::Library) and [`Error::Link`](crate::Error::Link) where it cannot be used.
pub fn open(scheme: &str) -> Option<Result<Arc<dyn Fabric>>> {
    FABRICS.iter().find(|(known, _)| *known == scheme).map(|(_, open)| open())
}

#[cfg(feature = "ucx")]
fn open_ucx() -> Result<Arc<dyn Fabric>> {
    Ok(Arc::new(ucx::Ucx::open(&ucx::UcxOptions::default())?))
}

#[cfg(not(feature = "ucx"))]
fn open_ucx() -> Result<Arc<dyn Fabric>> {
    let hint = "build with the feature `ucx`, or use relays over http://".to_owned();
    Err(driftless_transport::Error::Unsupported { what: "UCX".to_owned(), hint }.into())
}
