//! Facts on their way to sinks.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use super::{Event, Fact, Observer};
use crate::error::{Result, io};

/// Facts that wait for the sinks; those behind them are counted, and not told.
const WAITING_MAX: usize = 1024;

/// Takes facts, in the order in which they happened; called from one thread.
pub trait Sink: Send {
    /// Takes one. What it cannot keep is its own to tell of.
    fn take(&mut self, fact: &Fact);
}

impl<F: FnMut(&Fact) + Send> Sink for F {
    fn take(&mut self, fact: &Fact) {
        self(fact);
    }
}

/// Hands facts to sinks, and never waits for them. Nor do they wait for each other: each has a thread of its own.
#[derive(Debug)]
pub struct Bus {
    lanes: Mutex<Vec<Lane>>,
    /// Closed once the sinks have all.
    ended: Mutex<Receiver<()>>,
}

/// What goes to one sink.
#[derive(Debug)]
struct Lane {
    facts: SyncSender<Fact>,
    missed: Arc<AtomicU64>,
}

impl Bus {
    /// Starts the threads.
    ///
    /// # Errors
    /// [`crate::Error::Io`] if one cannot be started.
    pub fn start(sinks: Vec<Box<dyn Sink>>) -> Result<Arc<Self>> {
        let (alive, ended) = channel::<()>();
        let lane = |mut sink: Box<dyn Sink>| {
            let (alive, (facts, queue)) = (alive.clone(), sync_channel(WAITING_MAX));
            let missed = Arc::new(AtomicU64::new(0));
            let lost = missed.clone();
            let started = std::thread::Builder::new().name("events".to_owned()).spawn(move || {
                let _alive = alive;
                drain(&queue, &lost, &mut *sink);
            });
            started.map_err(io("start a thread for", "what is told of the run"))?;
            Ok(Lane { facts, missed })
        };
        let lanes = sinks.into_iter().map(lane).collect::<Result<Vec<_>>>()?;
        Ok(Arc::new(Bus { lanes: lanes.into(), ended: ended.into() }))
    }

    /// What the loop is to tell.
    #[must_use]
    pub fn observer(self: &Arc<Self>) -> Observer {
        let bus = self.clone();
        Arc::new(move |fact| bus.tell(&fact))
    }

    fn tell(&self, fact: &Fact) {
        for Lane { facts, missed } in &*self.lanes.lock().unwrap_or_else(PoisonError::into_inner) {
            if let Err(TrySendError::Full(_)) = facts.try_send(fact.clone()) {
                missed.fetch_add(1, Relaxed);
            }
        }
    }

    /// Takes no more facts, and waits until the sinks have those that came, but not longer than `patience`.
    pub fn end(&self, patience: Duration) {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner).clear();
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        if ended.recv_timeout(patience) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!(
                "what is told of the run is not written after {patience:?}; the rest of it is lost"
            );
        }
    }
}

fn drain(queue: &Receiver<Fact>, missed: &AtomicU64, sink: &mut dyn Sink) {
    for fact in queue {
        let events = missed.swap(0, Relaxed);
        let lost = (events > 0).then(|| Fact::new(SystemTime::now(), Event::Missed { events }));
        std::iter::once(&fact).chain(&lost).for_each(|fact| sink.take(fact));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::sync::mpsc::Sender;

    use super::*;

    /// Takes a fact when it is let, and says which.
    struct Slow {
        let_go: Receiver<()>,
        taken: Sender<String>,
    }

    impl Sink for Slow {
        fn take(&mut self, fact: &Fact) {
            let _ = self.let_go.recv();
            self.taken.send(serde_json::to_string(&fact.event).unwrap()).unwrap();
        }
    }

    fn begin(step: u64) -> Fact {
        Fact::new(SystemTime::UNIX_EPOCH, Event::Begin { step, of: 0 })
    }

    #[test]
    fn slow_sink_holds_up_nobody_and_what_it_missed_is_told() {
        let ((go, let_go), (taken, told)) = (channel(), channel());
        let bus = Bus::start(vec![Box::new(Slow { let_go, taken })]).unwrap();
        let observer = bus.observer();
        let more = 10;
        // One is with the sink by and by.
        (0..(WAITING_MAX as u64 + 1 + more)).for_each(|step| observer(begin(step)));
        drop(go);
        bus.end(Duration::from_secs(60));
        observer(begin(9));
        let told: Vec<String> = told.iter().collect();
        let missed: Vec<_> = told.iter().filter(|event| event.contains("missed")).collect();
        let begun = told.len() - missed.len();
        let lost = WAITING_MAX as u64 + 1 + more - begun as u64;
        assert!(lost == more || lost == more + 1, "{lost}");
        assert_eq!(missed, [&format!(r#"{{"event":"missed","events":{lost}}}"#)]);
        assert_eq!(told[0], r#"{"event":"begin","step":0,"of":0}"#);
    }

    #[test]
    fn sink_that_panics_or_hangs_ends_nothing() {
        struct Bad(Option<Receiver<()>>);
        impl Sink for Bad {
            fn take(&mut self, _: &Fact) {
                match &self.0 {
                    Some(hang) => drop(hang.recv()),
                    None => panic!("a sink's mistake"),
                }
            }
        }
        let (alive, hang) = channel();
        for sink in [Bad(None), Bad(Some(hang))] {
            let bus = Bus::start(vec![Box::new(sink)]).unwrap();
            (0..3).for_each(|step| bus.observer()(begin(step)));
            bus.end(Duration::from_millis(50));
            bus.observer()(begin(4));
        }
        drop(alive);
    }
}
