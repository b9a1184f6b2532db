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

/// After so long a store that did not take a lease is asked again.
const AGAIN: Duration = Duration::from_secs(5);

/// Writes the lease when it changes and, so that the store dates it anew, every so often while it does not. A
/// store that does not take it is asked again with the next change, or after a pause.
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
    /// When the store was asked last to take the record as it is, and whether it did.
    asked: Option<(Instant, bool)>,
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
        let current = Current { record, asked: None, looked: None, other: None };
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
        let pause = |took| if took { self.renew } else { self.renew.min(AGAIN) };
        let fresh = current.asked.is_some_and(|(at, took)| at.elapsed() < pause(took));
        if fresh && record == current.record {
            return;
        }
        current.record = record;
        // What lies there before is of a process before this one.
        if current.asked.is_some_and(|(_, took)| took)
            && current.looked.is_none_or(|at| at.elapsed() >= self.renew)
        {
            self.look_for_others(&mut current);
        }
        let put = self.put(&current.record);
        current.asked = Some((Instant::now(), put.is_ok()));
        if let Err(error) = put {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "the store does not take the acknowledgement"
            );
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use driftless_store::wrap::{Fault, When};
    use driftless_store::{Memory, Store};
    use std::sync::Arc;

    #[test]
    fn store_that_takes_no_lease_is_asked_once_for_many_objects() {
        let store: Arc<dyn Store> = Arc::new(Memory::new());
        Run::create(store.clone(), "run").unwrap();
        let fault = Arc::new(Fault::new(store));
        let run = Run::open(fault.clone(), "run").unwrap();
        let lease = LeaseRenewal::new(&run, "policy", "host", Duration::from_secs(3600)).unwrap();
        fault.arm(0, u64::MAX, When::Before);
        let before = fault.calls();
        (0..100).for_each(|_| lease.fetching());
        assert_eq!(fault.calls() - before, 1);
        lease.planned(Version(7));
        assert_eq!(fault.calls() - before, 2, "what changed goes at once");
    }
}
