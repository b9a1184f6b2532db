//! What moves the bytes of a push.

use std::net::SocketAddr;

use driftless_transport::Snapshot;

use super::Rendezvous;
use crate::error::Result;
use crate::push::Bucket;

/// Where and as whom a group's ranks meet.
#[derive(Debug)]
pub struct Meeting<'a> {
    /// Name of the group.
    pub group: &'a str,
    /// Number of ranks, this one included.
    pub world: u32,
    /// The group's store, already listening.
    pub rendezvous: &'a Rendezvous,
}

impl Meeting<'_> {
    /// Address at which this process reaches the store.
    pub fn local(&self) -> SocketAddr {
        let mut address = self.rendezvous.address();
        if address.ip().is_unspecified() {
            address.set_ip(std::net::Ipv4Addr::LOCALHOST.into());
        }
        address
    }
}

/// Rank 0's end of a group: it has the weights, every other rank receives. Nothing here waits for a peer;
/// waiting is the [`Group`](super::Group)'s, which watches the engines' replies meanwhile.
pub trait Root: Send {
    /// The name engines know it by: `nccl` or `gloo`.
    fn backend(&self) -> &'static str;

    /// Whether it has `NCCL_CUMEM_ENABLE` on; `None` where that does not matter. The engines must have it the
    /// same way.
    fn cumem(&self) -> Option<bool> {
        None
    }

    /// Leaves what was before, puts into the store what the other ranks will ask for, and begins to join.
    ///
    /// # Errors
    /// [`Error::Root`](crate::Error::Root).
    fn open(&mut self, meeting: &Meeting<'_>) -> Result<()>;

    /// Whether every rank has joined.
    ///
    /// # Errors
    /// [`Error::Root`](crate::Error::Root) when they never will.
    fn joined(&mut self) -> Result<bool>;

    /// Lays the bytes of a bucket into one of two slots, 0 or 1, once what was broadcast from it has been
    /// received ([`Root::sent`]).
    ///
    /// # Errors
    /// [`Error::Root`](crate::Error::Root) when there is no room or the weights cannot be read.
    fn gather(&mut self, slot: usize, weights: &dyn Snapshot, bucket: &Bucket) -> Result<()>;

    /// Begins to broadcast a slot: one broadcast of each of these numbers of bytes, one after the other,
    /// after those of the other slot.
    ///
    /// # Errors
    /// [`Error::Root`](crate::Error::Root).
    fn broadcast(&mut self, slot: usize, lengths: &[u64]) -> Result<()>;

    /// Whether what was broadcast from a slot has been received.
    ///
    /// # Errors
    /// [`Error::Root`](crate::Error::Root) when it never will be.
    fn sent(&mut self, slot: usize) -> Result<bool>;

    /// Gives up whatever is under way, and the group with it.
    fn abort(&mut self);
}
