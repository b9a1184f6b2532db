//! Keeps a follower's lease, and with it its acknowledgement, in the store.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use driftless_store::{Key, PutMode};

use crate::error::{Error, Result};
use crate::gc::{Ack, Record};
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
}

impl LeaseRenewal {
    /// A lease that is not written yet.
    pub(super) fn new(run: &Run, model: &str, follower: &str, renew: Duration) -> Result<Self> {
        let record = Record { model: model.to_owned(), needs: Version(0), ack: None };
        let key = run.follower_key(follower)?;
        Ok(Self { run: run.clone(), key, renew, current: Mutex::new(Current { record, stored: None }) })
    }

    /// Acknowledges what is on the host; what is needed from here on is what lies behind it.
    pub(super) fn acknowledge(&self, ack: Ack) {
        self.update(|record| (record.needs, record.ack) = (ack.version, Some(ack)));
    }

    fn update(&self, change: impl FnOnce(&mut Record)) {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        let mut record = current.record.clone();
        change(&mut record);
        let fresh = current.stored.is_some_and(|stored| stored.elapsed() < self.renew);
        if fresh && record == current.record {
            return;
        }
        current.record = record;
        current.stored = match self.put(&current.record) {
            Ok(()) => Some(Instant::now()),
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(error, "the store does not take the acknowledgement");
                None
            }
        };
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
