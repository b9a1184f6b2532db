//! A random but repeatable use of a log, and the check of what is left of it.

use std::collections::BTreeMap;
use std::path::PathBuf;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::image::Medium;
use super::options;
use crate::check::Severity;
use crate::check::verify_on;
use crate::recover::Mode;
use crate::reservation::{Pending, Reservation};
use crate::sample::Shape;
use crate::{Error, Log, Position, Result, Sample, Scalars};

pub(super) fn open(medium: &Medium) -> Result<Log> {
    Log::open_on(Box::new(medium.clone()), PathBuf::from("medium"), options(), None)
}

/// Response of the record with this id: from a few bytes to several pages.
fn response(id: u64) -> Vec<i32> {
    let seed = id.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    let length = if seed.is_multiple_of(5) { seed % 1500 } else { seed % 60 };
    (0..length as i32).map(|at| at ^ seed as i32).collect()
}

/// Runs random operations on a log; remembers what was written and promised.
pub(super) struct Work {
    medium: Medium,
    rng: StdRng,
    /// Sample id by position, of everything ever committed.
    pub(super) written: BTreeMap<u64, u64>,
    open: Vec<(Reservation, u64)>,
    pending: Vec<Pending>,
    next_id: u64,
}

impl Work {
    pub(super) fn new(medium: &Medium, seed: u64) -> Self {
        let (written, open, pending) = (BTreeMap::new(), Vec::new(), Vec::new());
        Self { medium: medium.clone(), rng: StdRng::seed_from_u64(seed), written, open, pending, next_id: 0 }
    }

    /// One random operation.
    pub(super) fn step(&mut self, log: &Log) -> Result<()> {
        match self.rng.random_range(0..11) {
            0..=3 => self.append(log)?,
            4 => self.reserve(log)?,
            5 if !self.open.is_empty() => {
                let (space, id) = self.open.swap_remove(0);
                self.commit(space, id)?;
            }
            6 if !self.open.is_empty() => drop(self.open.pop()),
            7 if !self.pending.is_empty() => {
                let pending = self.pending.swap_remove(self.rng.random_range(0..self.pending.len()));
                self.medium.promise(pending.wait()?.position().0);
            }
            8 => {
                log.sync()?;
                for pending in self.pending.drain(..) {
                    self.medium.promise(pending.wait()?.position().0);
                }
            }
            9 => {
                let end = log.reader().end();
                log.cursor("consumer")?.commit(end)?;
            }
            10 => log.make_ahead()?,
            _ => {}
        }
        self.medium.observe();
        Ok(())
    }

    fn append(&mut self, log: &Log) -> Result<()> {
        self.reserve(log)?;
        let (space, id) = self.open.pop().unwrap();
        self.commit(space, id)
    }

    fn reserve(&mut self, log: &Log) -> Result<()> {
        let id = self.next_id;
        self.next_id += 1;
        let mut space = log.reserve(&Shape { response: response(id).len(), ..Shape::default() })?;
        space.set_scalars(Scalars { sample_id: id, ..Scalars::default() });
        space.tokens_mut().copy_from_slice(&response(id));
        self.open.push((space, id));
        self.medium.observe();
        Ok(())
    }

    fn commit(&mut self, space: Reservation, id: u64) -> Result<()> {
        self.written.insert(space.position().0, id);
        self.pending.push(space.commit()?);
        Ok(())
    }

    /// Lets go of everything that is open, as a crash does.
    pub(super) fn abandon(self) -> BTreeMap<u64, u64> {
        self.open.into_iter().for_each(|(space, _)| std::mem::forget(space));
        self.written
    }
}

/// Opens what a crash left and checks it: every promised record, in order, unchanged; besides them only whole
/// records that were written; nothing called corrupt; and the log goes on from there.
pub(super) fn check(medium: &Medium, written: &BTreeMap<u64, u64>, promised: &[u64], what: &str) {
    let log = open(medium).unwrap_or_else(|error| panic!("{what}: {error}"));
    let corrupt = log.recovery().damage.iter().find(|damage| damage.severity != Severity::Torn);
    assert!(corrupt.is_none(), "{what}: {corrupt:?}");
    let found = contents(&log, what);
    for position in promised {
        assert!(found.contains_key(position), "{what}: record {position} was acknowledged and is lost");
    }
    for (position, id) in &found {
        assert_eq!(written.get(position), Some(id), "{what}: record {position} was never written");
    }
    let sample =
        Sample { scalars: Scalars { sample_id: u64::MAX, ..Scalars::default() }, ..Sample::default() };
    let ack = log.append(&sample).unwrap().wait().unwrap();
    assert!(found.keys().all(|&position| position < ack.position().0), "{what}: a position was used twice");
    drop(log);
    let log = open(medium).unwrap();
    let mut again = contents(&log, what);
    assert_eq!(again.remove(&ack.position().0), Some(u64::MAX), "{what}");
    assert_eq!(again, found, "{what}: a second recovery differs from the first");
    let report = verify_on(medium, Mode::Unwritten).unwrap();
    assert!(report.damage.is_empty(), "{what}: recovery leaves {:?}", report.damage);
}

fn contents(log: &Log, what: &str) -> BTreeMap<u64, u64> {
    let read = |record: Result<crate::Record>| {
        let record = record.unwrap_or_else(|error: Error| panic!("{what}: {error}"));
        let id = record.scalars().sample_id;
        if id != u64::MAX {
            assert_eq!(record.tokens(), response(id), "{what}: record {} changed", record.position());
        }
        (record.position().0, id)
    };
    log.reader().iter(Position(0)).map(read).collect()
}
