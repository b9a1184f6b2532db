//! Links within this process: what a fabric does, without a library.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use driftless_relay::fabric::{Fabric, Link, Wait};
use driftless_relay::{Error, Result};
use driftless_store::wait::lock;

/// Between two calls of a watch.
const WATCH: Duration = Duration::from_millis(20);

/// A fabric between the threads of this process. Clones are the same; links of two others never meet.
#[derive(Clone, Debug, Default)]
pub(crate) struct MemoryFabric {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    ends: Mutex<Ends>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Ends {
    next: u64,
    /// By link, the messages that its peer offers it, by tag. A link that has ended is not here.
    offered: BTreeMap<u64, BTreeMap<u64, Offer>>,
}

#[derive(Debug)]
struct Offer {
    message: Vec<u8>,
    /// Its sender learns so that it was received, also if the receiver's link ends then.
    taken: Arc<AtomicBool>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Ends> {
        lock(&self.ends)
    }
}

impl Fabric for MemoryFabric {
    fn scheme(&self) -> &'static str {
        "memory"
    }

    fn link(&self, peer: &str) -> Result<Box<dyn Link>> {
        let mut ends = self.shared.lock();
        ends.next += 1;
        let id = ends.next;
        ends.offered.insert(id, BTreeMap::new());
        let (peer, shared) = (peer.to_owned(), self.shared.clone());
        Ok(Box::new(MemoryLink { shared, id, peer, to: None, memory: Vec::new(), broken: false }))
    }
}

struct MemoryLink {
    shared: Arc<Shared>,
    id: u64,
    peer: String,
    /// The peer's link.
    to: Option<u64>,
    memory: Vec<u8>,
    /// A transfer failed.
    broken: bool,
}

impl MemoryLink {
    fn refused<T>(&self, action: &'static str, status: impl Into<String>) -> Result<T> {
        Err(Error::Link { peer: self.peer.clone(), action, status: status.into() })
    }

    fn lost<T>(&self, action: &'static str, reason: impl Into<String>) -> Result<T> {
        Err(Error::LinkLost { peer: self.peer.clone(), action, reason: reason.into() })
    }

    /// Begins a transfer of so many bytes.
    fn begin(&self, action: &'static str, bytes: usize) -> Result<()> {
        if self.broken {
            return self.lost(action, "an earlier transfer failed");
        }
        if bytes > self.memory.len() {
            return self.refused(action, format!("{bytes} bytes of {} in its memory", self.memory.len()));
        }
        Ok(())
    }

    /// Looks whenever something has changed until `ready` has something.
    fn wait<T>(
        &self,
        action: &'static str,
        wait: &mut Wait<'_>,
        mut ready: impl FnMut(&mut Ends) -> Option<Result<T>>,
    ) -> Result<T> {
        let begin = Instant::now();
        let mut ends = self.shared.lock();
        loop {
            if let Some(ready) = ready(&mut ends) {
                self.shared.changed.notify_all();
                return ready;
            }
            ends = self.shared.changed.wait_timeout(ends, WATCH).unwrap_or_else(PoisonError::into_inner).0;
            if let Err(reason) = (wait.watch)() {
                return self.lost(action, reason);
            }
            if begin.elapsed() >= wait.deadline {
                let (peer, waited) = (self.peer.clone(), begin.elapsed());
                return Err(Error::LinkTimeout { peer, action, waited });
            }
        }
    }

    fn transfer<T>(&mut self, transfer: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let outcome = transfer(self);
        self.broken |= outcome.is_err();
        outcome
    }
}

impl Link for MemoryLink {
    fn address(&self) -> Result<Vec<u8>> {
        Ok(self.id.to_le_bytes().to_vec())
    }

    fn connect(&mut self, address: &[u8]) -> Result<()> {
        if self.to.is_some() {
            return self.refused("connect to", "the link is connected already");
        }
        let id = address.try_into().map(u64::from_le_bytes).ok();
        match id.filter(|id| self.shared.lock().offered.contains_key(id)) {
            None => self.refused("connect to", "the address is none of a link"),
            found => {
                self.to = found;
                Ok(())
            }
        }
    }

    fn memory(&mut self, bytes: usize) -> Result<&mut [u8]> {
        if self.memory.len() < bytes {
            self.memory.resize(bytes, 0);
        }
        Ok(&mut self.memory)
    }

    fn release(&mut self) {
        self.memory = Vec::new();
    }

    fn send(&mut self, bytes: usize, tag: u64, wait: &mut Wait<'_>) -> Result<()> {
        let Some(to) = self.to else { return self.refused("send to", "the link is not connected") };
        self.transfer(|link| {
            link.begin("send to", bytes)?;
            let taken = Arc::<AtomicBool>::default();
            let mut offer = Some(Offer { message: link.memory[..bytes].to_vec(), taken: taken.clone() });
            link.wait("send to", wait, |ends| {
                if taken.load(Relaxed) {
                    return Some(Ok(()));
                }
                let Some(offered) = ends.offered.get_mut(&to) else {
                    return Some(link.lost("send to", "its link has ended"));
                };
                // Another one under this tag has to be taken first.
                if let Entry::Vacant(place) = offered.entry(tag)
                    && let Some(offer) = offer.take()
                {
                    place.insert(offer);
                    link.shared.changed.notify_all();
                }
                None
            })
        })
    }

    fn receive(&mut self, bytes: usize, tag: u64, wait: &mut Wait<'_>) -> Result<usize> {
        self.transfer(|link| {
            link.begin("receive from", bytes)?;
            let from = (link.id, link.to);
            let message = link.wait("receive from", wait, |ends| {
                let offered = ends.offered.get_mut(&from.0).and_then(|offered| offered.remove(&tag));
                let is_gone = |ends: &Ends| from.1.is_some_and(|to| !ends.offered.contains_key(&to));
                match offered {
                    Some(Offer { message, taken }) => {
                        taken.store(true, Relaxed);
                        Some(Ok(message))
                    }
                    None if is_gone(ends) => Some(link.lost("receive from", "its link has ended")),
                    None => None,
                }
            })?;
            let length = message.len();
            match link.memory[..bytes].get_mut(..length) {
                Some(memory) => memory.copy_from_slice(&message),
                None => return link.refused("receive from", format!("truncated: {length} bytes came")),
            }
            Ok(length)
        })
    }
}

impl Drop for MemoryLink {
    fn drop(&mut self) {
        self.shared.lock().offered.remove(&self.id);
        self.shared.changed.notify_all();
    }
}

impl fmt::Debug for MemoryLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryLink").field("id", &self.id).field("peer", &self.peer).finish_non_exhaustive()
    }
}
