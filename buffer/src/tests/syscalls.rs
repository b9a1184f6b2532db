//! On a real directory: the k-th call on the file system fails, or a write stores only a part.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use super::options;
use crate::lock::LockFile;
use crate::storage::Directory;
use crate::{Error, Log, Position, Result, Retention, Sample, Scalars};

thread_local! {
    static CALLS: Cell<usize> = const { Cell::new(0) };
    /// The call that fails, and how.
    static FAIL: Cell<Option<(usize, io::ErrorKind)>> = const { Cell::new(None) };
    static SHORT: Cell<bool> = const { Cell::new(false) };
    static LOSES_GROWTH: Cell<bool> = const { Cell::new(false) };
}

/// Before every call of this thread.
pub(crate) fn called() -> io::Result<()> {
    CALLS.set(CALLS.get() + 1);
    match FAIL.get() {
        Some((k, kind)) if k == CALLS.get() => Err(kind.into()),
        _ => Ok(()),
    }
}

/// What a write stores of these bytes.
pub(crate) fn shortened(bytes: &[u8]) -> &[u8] {
    if SHORT.get() { &bytes[..bytes.len().div_ceil(3)] } else { bytes }
}

/// Whether a file is as short as before when it was grown, and nobody is told.
pub(crate) fn loses_growth() -> bool {
    LOSES_GROWTH.get()
}

/// Two kilobytes that depend on the id.
fn tokens(id: u64) -> Vec<i32> {
    (0..500).map(|at| at ^ ((id as i32) << 10)).collect()
}

/// A log without a thread of its own, so that the calls of this one are all there are.
fn open(dir: &Path) -> Result<Log> {
    let lock = LockFile::take(dir)?;
    Log::open_on(Box::new(Directory::new(dir)), dir.to_owned(), options(), Some(lock))
}

/// Appends through several segments, syncs, moves a cursor, removes what is old; notes what was acknowledged.
fn work(dir: &Path, acknowledged: &mut BTreeMap<u64, u64>) -> Result<()> {
    let log = open(dir)?;
    let mut cursor = log.cursor("consumer")?;
    for round in 0..20 {
        let mut pending = Vec::new();
        for id in round * 10..round * 10 + 10 {
            let scalars = Scalars { sample_id: id, ..Scalars::default() };
            let tokens = tokens(id);
            pending.push((
                id,
                log.append(&Sample { scalars, prompt_len: 500, tokens: &tokens, ..Sample::default() })?,
            ));
        }
        for (id, pending) in pending {
            acknowledged.insert(pending.wait()?.position().0, id);
        }
        log.make_ahead()?;
        cursor.commit(Position(round * 5))?;
        if round % 7 == 6 {
            log.retain(&Retention { consumed_by: vec!["consumer".into()], ..Retention::default() })?;
        }
    }
    log.close()
}

/// Everything acknowledged and not retired is there, as it was written, and nothing else is torn into sight.
fn check(dir: &Path, acknowledged: &BTreeMap<u64, u64>, what: &str) {
    let log = Log::open(dir, options()).unwrap_or_else(|error| panic!("{what}: {error}"));
    let reader = log.reader();
    for (position, id) in acknowledged.range(reader.oldest().0..) {
        let record =
            reader.get(Position(*position)).unwrap().unwrap_or_else(|| panic!("{what}: lost {position}"));
        assert_eq!((record.scalars().sample_id, record.tokens()), (*id, &tokens(*id)[..]), "{what}");
    }
    for record in reader.iter(reader.oldest()) {
        let record = record.unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(record.tokens(), tokens(record.scalars().sample_id), "{what}");
    }
    let consumed = log.cursor("consumer").unwrap().position();
    assert!(reader.oldest() <= consumed, "{what}: {} was removed before it was consumed", reader.oldest());
}

#[test]
#[cfg_attr(miri, ignore = "maps files")]
fn failed_call_on_the_file_system_loses_nothing_acknowledged() {
    for kind in [io::ErrorKind::StorageFull, io::ErrorKind::Other] {
        let mut failed = 0;
        for k in 1.. {
            let dir = tempfile::tempdir().unwrap();
            let mut acknowledged = BTreeMap::new();
            CALLS.set(0);
            FAIL.set(Some((k, kind)));
            let outcome = work(dir.path(), &mut acknowledged);
            FAIL.set(None);
            let Err(error) = outcome else { break };
            failed += 1;
            assert!(matches!(error, Error::Io { .. }), "call {k}: {error}");
            check(dir.path(), &acknowledged, &format!("call {k} failed with {kind}"));
        }
        println!("{failed} calls failed with {kind}");
        assert!(failed > 60, "only {failed} calls were reached");
    }
}

#[test]
#[cfg_attr(miri, ignore = "maps files")]
fn a_write_that_stores_a_part_is_gone_on_with() {
    let dir = tempfile::tempdir().unwrap();
    let mut acknowledged = BTreeMap::new();
    SHORT.set(true);
    let outcome = work(dir.path(), &mut acknowledged);
    SHORT.set(false);
    outcome.unwrap();
    assert_eq!(acknowledged.len(), 200);
    check(dir.path(), &acknowledged, "short writes");
}

#[test]
#[cfg_attr(miri, ignore = "maps files")]
fn append_medium_that_loses_the_growth_of_files_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let log = open(dir.path()).unwrap();
    let sample = Sample { prompt_len: 1, tokens: &[1], ..Sample::default() };
    LOSES_GROWTH.set(true);
    let outcome = log.append(&sample);
    LOSES_GROWTH.set(false);
    let error = outcome.unwrap_err();
    let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
    assert!(
        matches!(error, Error::Io { .. }) && cause.contains("of 65536 bytes, found 0"),
        "{error}: {cause}"
    );
    log.append(&sample).unwrap().wait().unwrap();
}
