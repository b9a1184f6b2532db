//! Keeps a follower's lease, and with it its acknowledgement, in the store.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use driftless_store::wait::lock;
use driftless_store::{Key, PutMode};

use crate::error::{Error, Result};
use crate::gc::{Ack, Record, writer_of};
use crate::ids::Version;
use crate::replica::Observe;
use crate::run::Run;

/// Writes the lease when it changes and, so that the store dates it anew, every so often while it does not. A
/// store that does not take it is asked again with the next change or round.
#[derive(Debug)]
pub(super) struct LeaseRenewal {
    run: Run,
    key: Key,
    renew: Duration,
    current: Mutex<Current>,
}

#[derive(Debug)]
struct Current {
    record: Record,
    /// When the store took the record as it is.
    stored: Option<Instant>,
    /// When it was last looked who wrote what the store has.
    looked: Option<Instant>,
    /// The other process that was told of.
    other: Option<String>,
}

impl LeaseRenewal {
    /// A lease that is not written yet.
    pub(super) fn new(run: &Run, model: &str, follower: &str, renew: Duration) -> Result<Self> {
        let writer = hex::encode(rand::random::<[u8; 8]>());
        let record = Record { model: model.to_owned(), needs: Version(0), writer, ack: None };
        let key = run.follower_key(follower)?;
        let current = Current { record, stored: None, looked: None, other: None };
        Ok(Self { run: run.clone(), key, renew, current: Mutex::new(current) })
    }

    /// Acknowledges what is on the host; what is needed from here on is what lies behind it.
    pub(super) fn acknowledge(&self, ack: Ack) {
        self.update(|record| (record.needs, record.ack) = (ack.version, Some(ack)));
    }

    fn update(&self, change: impl FnOnce(&mut Record)) {
        let mut current = lock(&self.current);
        let mut record = current.record.clone();
        change(&mut record);
        let fresh = current.stored.is_some_and(|stored| stored.elapsed() < self.renew);
        if fresh && record == current.record {
            return;
        }
        current.record = record;
        // What lies there before is of a process before this one.
        if current.stored.is_some() && current.looked.is_none_or(|at| at.elapsed() >= self.renew) {
            self.look_for_others(&mut current);
        }
        current.stored = match self.put(&current.record) {
            Ok(()) => Some(Instant::now()),
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(error, "the store does not take the acknowledgement");
                None
            }
        };
    }

    /// Tells of another process that has written the lease since this one did. Each of the two hides the other from a
    /// collection, which may then take what it needs.
    fn look_for_others(&self, current: &mut Current) {
        current.looked = Some(Instant::now());
        // What cannot be read now is looked at again.
        let Ok(bytes) = self.run.store().get(&self.key, None) else { return };
        let other = writer_of(&bytes).filter(|writer| *writer != current.record.writer);
        if other.is_some() && other != current.other {
            tracing::warn!(key = %self.key, "another follower has the same id and renews the same lease; give each an id of its own");
            current.other = other;
        }
    }

    fn put(&self, record: &Record) -> Result<()> {
        let bytes = serde_json::to_vec(record)
            .map_err(|source| Error::Parse { subject: "acknowledgement".into(), source })?;
        Ok(self.run.store().put(&self.key, &bytes, PutMode::Overwrite)?)
    }
}

impl Observe for LeaseRenewal {
    /// What is needed begins with this version.
    fn planned(&self, oldest: Version) {
        self.update(|record| record.needs = oldest);
    }

    /// An object is to be fetched: the lease may have to be renewed.
    fn fetching(&self) {
        self.update(|_| {});
    }
}
