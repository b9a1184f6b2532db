//! Reservation, publication and group commit through every interleaving that loom finds.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p driftless-buffer --lib interleavings --release`

use std::time::Duration;

use loom::thread;

use super::image::Medium;
use super::options;
use crate::sample::Shape;
use crate::{Error, Log, Options, Position, Sample, Scalars, SyncPolicy};

/// Forced switches of thread per run. A lost wake-up or a double publication needs one or two.
const PREEMPTIONS: usize = 3;

fn explore(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS);
    builder.check(model);
}

fn open(medium: &Medium, options: Options) -> Log {
    Log::open_on(Box::new(medium.clone()), "medium".into(), options, None).unwrap()
}

fn sample(id: u64) -> Sample<'static> {
    Sample { scalars: Scalars { sample_id: id, ..Scalars::default() }, ..Sample::default() }
}

/// The sample ids that survive if the power goes now.
fn durable(medium: &Medium) -> Vec<u64> {
    let log = open(&medium.crash().leave(|_, _| 0), options());
    log.reader().iter(Position(0)).map(|record| record.unwrap().scalars().sample_id).collect()
}

fn visible(log: &Log) -> Vec<u64> {
    log.reader().iter(Position(0)).map(|record| record.unwrap().scalars().sample_id).collect()
}

#[test]
fn an_acknowledged_record_is_durable_whoever_synced_it() {
    explore(|| {
        let medium = Medium::new();
        let log = open(&medium, Options { sync: SyncPolicy::EachRecord, ..options() });
        let other = {
            let (log, medium) = (log.clone(), medium.clone());
            thread::spawn(move || {
                log.append(&sample(1)).unwrap().wait().unwrap();
                assert!(durable(&medium).contains(&1));
            })
        };
        log.append(&sample(2)).unwrap().wait().unwrap();
        assert!(durable(&medium).contains(&2));
        other.join().unwrap();
        let mut all = visible(&log);
        all.sort_unstable();
        assert_eq!(all, [1, 2]);
    });
}

#[test]
fn a_waiting_reader_never_misses_its_wake_up() {
    explore(|| {
        let medium = Medium::new();
        let log = open(&medium, options());
        let reader = log.reader();
        let waiter = thread::spawn(move || {
            let end = reader.wait(Position(0), Duration::from_secs(3600)).unwrap();
            assert_eq!(end, Position(1));
            assert_eq!(reader.get(Position(0)).unwrap().unwrap().scalars().sample_id, 1);
        });
        log.append(&sample(1)).unwrap().wait().unwrap();
        waiter.join().unwrap();
    });
}

#[test]
fn a_reservation_given_up_beside_a_commit_hides_nothing() {
    explore(|| {
        let medium = Medium::new();
        let log = open(&medium, Options { sync: SyncPolicy::EachRecord, ..options() });
        let space = log.reserve(&Shape::default()).unwrap();
        let other = thread::spawn(move || drop(space));
        log.append(&sample(2)).unwrap().wait().unwrap();
        other.join().unwrap();
        assert_eq!(visible(&log), [2]);
        assert_eq!(durable(&medium), [2]);
    });
}

#[test]
fn a_reservation_is_either_committed_or_reclaimed() {
    explore(|| {
        let medium = Medium::new();
        let log = open(&medium, Options { reservation_deadline: Duration::ZERO, ..options() });
        let mut space = log.reserve(&Shape::default()).unwrap();
        space.set_scalars(Scalars { sample_id: 7, ..Scalars::default() });
        let other = thread::spawn(move || space.commit().map(|pending| pending.wait().unwrap()));
        log.sync().unwrap();
        let outcome = other.join().unwrap();
        log.sync().unwrap();
        match outcome {
            Ok(_) => assert_eq!((visible(&log), durable(&medium)), (vec![7], vec![7])),
            Err(Error::Expired { .. }) => assert!(visible(&log).is_empty() && durable(&medium).is_empty()),
            Err(other) => panic!("{other}"),
        }
    });
}
