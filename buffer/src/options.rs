//! How a log is opened.

use std::time::Duration;

use derive_setters::Setters;

use crate::position::Identity;

/// When committed records are brought to stable storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SyncPolicy {
    /// Every commit returns only when its record is durable. Producers that commit at the same time share a
    /// sync.
    EachRecord,
    /// The commit that makes `n` records wait for a sync performs it.
    EveryRecords(usize),
    /// A background thread syncs at the latest this long after a commit.
    Within(Duration),
    /// Only [`crate::Log::sync`] and [`crate::reservation::Pending::wait`] sync.
    Manual,
}

/// How a log is opened for writing.
#[derive(Debug, Clone, PartialEq, Eq, Setters)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct Options {
    /// What the log belongs to; must equal what its segments say.
    pub identity: Identity,
    /// Size of new segments in bytes, rounded up to whole pages. A record must fit into one.
    pub segment_bytes: u64,
    /// When committed records become durable.
    pub sync: SyncPolicy,
    /// How long a producer may hold a reservation before it is reclaimed. Readers do not see past an open
    /// reservation.
    pub reservation_deadline: Duration,
    /// Most bytes that may be reserved or committed without being durable; [`crate::Log::reserve`] waits
    /// above it.
    pub unsynced_bytes_max: u64,
    /// How long any call waits for room, or for another thread's sync, before it gives up.
    pub wait_deadline: Duration,
}

impl Options {
    /// Segments of 64 MiB, a sync for every record, reservations of 30 s, 1 GiB unsynced, waits of 60 s.
    #[must_use]
    pub fn new(identity: Identity) -> Self {
        Self {
            identity,
            segment_bytes: 64 << 20,
            sync: SyncPolicy::EachRecord,
            reservation_deadline: Duration::from_secs(30),
            unsynced_bytes_max: 1 << 30,
            wait_deadline: Duration::from_secs(60),
        }
    }
}
