//! What steps learned, beside the records that they learned from.
#![allow(clippy::unwrap_used, reason = "in a test, a failed expectation is the answer")]

use std::path::{Path, PathBuf};

use driftless_buffer::check::verify;
use driftless_buffer::learned::Column;
use driftless_buffer::{Error, Log, Position, Reader, Retention, SyncPolicy};
use driftless_testkit::log::{options, sample};

const NAN: f32 = f32::NAN;

fn file(dir: &Path, step: u64) -> PathBuf {
    dir.join("learned").join(format!("{step:020}.columns"))
}

fn column<'a>(position: u64, log_probs: &'a [f32], engine_log_probs: &'a [f32]) -> Column<'a> {
    Column { position: Position(position), log_probs, engine_log_probs }
}

/// A log whose step 7 learned from three samples, the last of which is masked.
fn learned(dir: &Path) -> Log {
    let log = Log::open(dir, options()).unwrap();
    let columns = [
        column(9, &[-1.5, NAN, -0.5], &[-1.0, -9.0, -0.25]),
        column(2, &[-2.0], &[-2.0]),
        column(11, &[NAN, NAN], &[-1.0, -1.0]),
    ];
    log.reader().write_learned(7, &columns).unwrap();
    log
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn columns_of_a_step_come_back_by_position_with_their_mismatch() {
    let dir = tempfile::tempdir().unwrap();
    let log = learned(dir.path());
    for reader in [log.reader(), Reader::open(dir.path()).unwrap()] {
        let found = reader.learned(7).unwrap().unwrap();
        let rows: Vec<_> = found.rows().iter().map(|row| (row.position.0, row.mismatch)).collect();
        assert_eq!(rows, [(2, Some(0.0)), (9, Some(0.5)), (11, None)]);
        let values = found.log_probs(Position(9)).unwrap().unwrap();
        assert_eq!(bits(&values), bits(&[-1.5, NAN, -0.5]));
        assert_eq!(found.log_probs(Position(3)).unwrap(), None);
        assert!(reader.learned(6).unwrap().is_none(), "of a log without columns");
        assert_eq!(reader.learned_steps().unwrap().into_keys().collect::<Vec<_>>(), [7]);
    }
    // Beside the log's owner, as a trainer does that is a process of its own.
    Reader::open(dir.path()).unwrap().write_learned(7, &[column(2, &[-3.0], &[-2.0])]).unwrap();
    let again = log.reader().learned(7).unwrap().unwrap();
    assert_eq!(again.rows().len(), 1, "a step that is done again replaces its columns");
    assert_eq!(again.row(Position(2)).unwrap().mismatch, Some(1.0));
}

#[test]
fn every_flipped_byte_and_every_cut_of_columns_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let reader = learned(dir.path()).reader();
    let path = file(dir.path(), 7);
    let whole = std::fs::read(&path).unwrap();
    let read = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        let found = reader.learned(7)?.unwrap();
        found.rows().iter().try_for_each(|row| found.log_probs(row.position).map(drop))
    };
    read(&whole).unwrap();
    for at in 0..whole.len() {
        let mut bad = whole.clone();
        bad[at] ^= 1;
        assert!(matches!(read(&bad), Err(Error::Damaged { .. })), "byte {at}");
        assert!(matches!(read(&whole[..at]), Err(Error::Damaged { .. })), "cut at {at}");
    }
    let damage = verify(dir.path()).unwrap().damage;
    assert!(damage.len() == 1 && damage[0].path == path, "{damage:?}");
    read(&whole).unwrap();
    assert_eq!(verify(dir.path()).unwrap().damage, []);
}

#[test]
fn columns_of_a_newer_format_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let reader = learned(dir.path()).reader();
    let path = file(dir.path(), 7);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[8] = 2;
    let crc = crc32c::crc32c(&bytes[..60]).to_le_bytes();
    bytes[60..64].copy_from_slice(&crc);
    std::fs::write(&path, bytes).unwrap();
    let error = reader.learned(7).unwrap_err();
    assert!(
        error.to_string().ends_with("needs format 2, this build knows 1; use a newer release"),
        "{error}"
    );
}

#[test]
fn columns_go_with_the_records_that_they_are_of() {
    let dir = tempfile::tempdir().unwrap();
    let options = options().with_segment_bytes(64 << 10).with_sync(SyncPolicy::Manual);
    let log = Log::open(dir.path(), options).unwrap();
    let mut end = 0;
    while std::fs::read_dir(dir.path()).unwrap().count() < 12 {
        end = log.append(&sample(end, end, 0).as_sample()).unwrap().position().0 + 1;
        log.sync().unwrap();
    }
    log.reader().write_learned(0, &[column(0, &[-1.0], &[-1.0])]).unwrap();
    log.reader().write_learned(1, &[column(0, &[-1.0], &[-1.0]), column(end - 1, &[-1.0], &[-1.0])]).unwrap();
    log.reader().write_learned(2, &[column(1, &[-1.0], &[-1.0])]).unwrap();
    let steps = || log.reader().learned_steps().unwrap().into_keys().collect::<Vec<_>>();
    let retain =
        |bytes_max| log.retain(&Retention { bytes_max: Some(bytes_max), ..Retention::default() }).unwrap();
    assert_eq!((retain(1 << 30).segments, steps()), (0, vec![0, 1, 2]), "all records are there");
    assert!(retain(150 << 10).segments > 0);
    assert_eq!(steps(), [1, 2], "a step stays as long as a record of it, and those behind it");
}
