//! The k-th call to the medium fails.

use std::io::ErrorKind;

use super::image::Medium;
use super::work::{Work, check, open};
use crate::sample::Shape;
use crate::storage::{SPARE, Storage};
use crate::{Error, Sample};

const STEPS: usize = 100;

/// Runs until the first error; answers it, with the log it happened on.
fn run(medium: &Medium, seed: u64) -> (Work, Option<crate::Log>, Option<Error>) {
    let mut work = Work::new(medium, seed);
    let log = match open(medium) {
        Ok(log) => log,
        Err(error) => return (work, None, Some(error)),
    };
    for _ in 0..STEPS {
        if let Err(error) = work.step(&log) {
            return (work, Some(log), Some(error));
        }
    }
    (work, Some(log), None)
}

#[test]
#[cfg_attr(miri, ignore = "hours, for code that the other tests reach")]
fn whichever_call_fails_nothing_acknowledged_is_lost() {
    for kind in [ErrorKind::StorageFull, ErrorKind::Other] {
        let mut failed = 0;
        for k in 1.. {
            let medium = Medium::new();
            medium.fail(k, kind);
            let (work, log, error) = run(&medium, 3);
            let Some(error) = error else { break };
            failed += 1;
            assert!(matches!(error, Error::Io { .. }), "call {k}: {error}");
            // The process goes on to its end, then the machine loses power.
            let after = log
                .as_ref()
                .map(|log| log.append(&Sample::default()).and_then(crate::reservation::Pending::wait));
            let written = work.abandon();
            drop(log);
            let promised = medium.crash().promised;
            if matches!(after, None | Some(Err(Error::Poisoned { .. }))) {
                // A restart of the process alone sees the page cache, whatever reached the medium.
                check(
                    &medium.crash().leave(|_, states| states - 1),
                    &written,
                    &promised,
                    &format!("call {k} failed"),
                );
                let durable = medium.crash().leave(|_, _| 0);
                check(&durable, &written, &promised, &format!("call {k} failed, then the power"));
            }
        }
        assert!(failed > 30, "only {failed} calls were reached");
    }
}

/// Records that can be read.
fn whole(log: &crate::Log) -> usize {
    log.reader().iter(crate::Position(0)).filter(Result::is_ok).count()
}

#[test]
fn a_failed_sync_poisons_the_log_until_it_is_opened_again() {
    let medium = Medium::new();
    let log = open(&medium).unwrap();
    log.append(&Sample::default()).unwrap().wait().unwrap();
    // Pages of its own: sealing, which rewrites the page where the records end, must not be what saves it.
    let long = Sample { prompt_len: 3000, tokens: &[7; 3000], ..Sample::default() };
    let pending = log.append(&long).unwrap();
    medium.fail(1, ErrorKind::Other);
    assert!(matches!(pending.wait(), Err(Error::Io { action: "sync", .. })));
    assert!(matches!(log.append(&Sample::default()), Err(Error::Poisoned { .. })));
    assert!(matches!(log.sync(), Err(Error::Poisoned { .. })));
    assert_eq!(log.reader().end().0, 1, "what was durable can still be read");
    drop(log);
    let log = open(&medium).unwrap();
    assert_eq!(whole(&log), 2, "the page cache still had the record");
    drop(log);
    let log = open(&medium.crash().leave(|_, _| 0)).unwrap();
    assert_eq!(whole(&log), 2, "and recovery stored it, though the failed sync had marked its pages clean");
}

#[test]
fn give_up_during_a_sync_leaves_the_log_clean() {
    let medium = Medium::new();
    let log = open(&medium).unwrap();
    let space = log.reserve(&Shape::default()).unwrap();
    let pending = log.append(&Sample::default()).unwrap();
    assert!(!log.is_clean());
    medium.meanwhile(move || drop(space));
    pending.wait().unwrap();
    assert!(log.is_clean(), "or the thread of the log would sync nothing for ever, and hold up the others");
    assert_eq!((log.reader().end().0, whole(&log)), (2, 1));
}

#[test]
fn spare_with_records_becomes_a_segment_an_unused_one_goes() {
    let medium = Medium::new();
    let log = open(&medium).unwrap();
    drop(log.append(&Sample::default()).unwrap());
    // The process ends, and no sync has given the segment its name.
    drop(log);
    assert!(medium.names().unwrap().is_empty());
    let log = open(&medium).unwrap();
    assert_eq!(whole(&log), 1);
    let long = Sample { prompt_len: 9000, tokens: &[7; 9000], ..Sample::default() };
    log.append(&long).unwrap().wait().unwrap();
    log.make_ahead().unwrap();
    drop(log);
    assert!(medium.open(SPARE, None).is_ok(), "more than half of the segment was taken");
    let log = open(&medium).unwrap();
    assert!(medium.open(SPARE, None).is_err());
    assert_eq!(whole(&log), 2);
}

#[test]
fn full_disk_refuses_a_segment_until_there_is_room() {
    let medium = Medium::new();
    let log = open(&medium).unwrap();
    medium.fail(1, ErrorKind::StorageFull);
    let refused = log.append(&Sample::default()).unwrap_err();
    assert!(matches!(refused, Error::Io { action: "create a segment in", .. }), "{refused}");
    log.append(&Sample::default()).unwrap().wait().unwrap();
    assert_eq!(log.reader().end().0, 1);
}
