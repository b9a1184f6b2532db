//! Any flipped or missing byte is told with its file and offset, costs one record, and never reaches a
//! reader.
#![allow(clippy::unwrap_used, reason = "in a test, a failed expectation is the answer")]

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use driftless_buffer::check::{Severity, verify};
use driftless_buffer::sample::Shape;
use driftless_buffer::{Error, Log, Position, Reader, Record};
use driftless_testkit::log::{Owned, options, sample};

/// Two segments, the first sealed, the second as a crash leaves it; four records in each, and a cursor.
fn small_log(dir: &Path) -> Vec<Owned> {
    let mut records = Vec::new();
    for round in 0..2u64 {
        let log = Log::open(dir, options().with_segment_bytes(64 << 10)).unwrap();
        for id in round * 4..round * 4 + 4 {
            let owned = sample(id, id / 2, round);
            log.append(&owned.as_sample()).unwrap().wait().unwrap();
            records.push(owned);
        }
        log.cursor("trainer").unwrap().commit(Position(2)).unwrap();
        if round == 0 {
            log.close().unwrap();
        }
    }
    records
}

fn segments(dir: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "log"));
    paths.sort();
    paths
}

/// Reads everything; each record must be as written. Answers the positions that could not be read.
fn unreadable(reader: &Reader, expected: &[Owned], what: &str) -> Vec<u64> {
    let mut found: BTreeMap<u64, Record> = BTreeMap::new();
    for item in reader.iter(Position(0)) {
        match item {
            Ok(record) => drop(found.insert(record.position().0, record)),
            Err(Error::Damaged { .. }) => {}
            Err(other) => panic!("{what}: {other}"),
        }
    }
    for (position, record) in &found {
        expected[*position as usize].assert_equals(record);
    }
    (0..expected.len() as u64).filter(|position| !found.contains_key(position)).collect()
}

/// Offsets worth flipping: everything that is written, and a few places in the unused end.
fn places(path: &Path) -> Vec<usize> {
    let bytes = fs::read(path).unwrap();
    let used =
        |at: &usize| *at < 4096 || bytes[at / 64 * 64..at / 64 * 64 + 64].iter().any(|&byte| byte != 0);
    (0..bytes.len()).filter(|at| used(at) || at.is_multiple_of(4099)).collect()
}

#[test]
fn every_flipped_byte_is_told_and_costs_at_most_its_record() {
    let dir = tempfile::tempdir().unwrap();
    let expected = small_log(dir.path());
    assert!(verify(dir.path()).unwrap().damage.is_empty());
    let mut costs = [0usize; 2];
    for path in segments(dir.path()) {
        let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        for at in places(&path) {
            let mut byte = [0];
            file.read_exact_at(&mut byte, at as u64).unwrap();
            file.write_all_at(&[byte[0] ^ 1 << (at % 8)], at as u64).unwrap();
            let what = format!("{} byte {at}", path.display());

            let report = verify(dir.path()).unwrap();
            let damage: Vec<_> = report.damage.iter().filter(|damage| damage.path == path).collect();
            assert!(!damage.is_empty() && damage.len() == report.damage.len(), "{what}: {:?}", report.damage);
            let near = |offset: u64| offset as usize <= at && at - (offset as usize) < 64 << 10;
            assert!(damage.iter().any(|damage| near(damage.offset)), "{what}: {damage:?}");
            let lost = unreadable(&Reader::open(dir.path()).unwrap(), &expected, &what);
            assert!(lost.len() <= 1, "{what}: lost {lost:?}");
            if let Some(position) = lost.first() {
                let named = damage.iter().any(|damage| damage.position == Some(Position(*position)));
                assert!(named, "{what}: lost {position}, told {damage:?}");
            }
            costs[lost.len()] += 1;

            file.write_all_at(&byte, at as u64).unwrap();
        }
    }
    println!("{} flips cost no record, {} cost one", costs[0], costs[1]);
    assert!(costs[0] > 8000 && costs[1] > 2000, "{costs:?}");
    assert!(verify(dir.path()).unwrap().damage.is_empty());
}

#[test]
fn every_truncation_is_told_and_costs_only_what_is_cut_off() {
    let dir = tempfile::tempdir().unwrap();
    let expected = small_log(dir.path());
    for (segment, path) in segments(dir.path()).into_iter().enumerate() {
        let whole = fs::read(&path).unwrap();
        let used = whole.iter().rposition(|&byte| byte != 0).unwrap().min(8192);
        let lengths =
            (0..used + 70).step_by(13).chain((0..whole.len()).step_by(4096)).chain([whole.len() - 1]);
        for length in lengths {
            fs::write(&path, &whole[..length]).unwrap();
            let what = format!("{} cut to {length}", path.display());
            let report = verify(dir.path()).unwrap();
            let told = |offset: u64| offset as usize == length || length < 4096 && offset == 0;
            assert!(
                report.damage.iter().any(|damage| damage.path == path && told(damage.offset)),
                "{what}: {:?}",
                report.damage
            );
            // Whatever is lost is the end of this segment, and nothing else.
            let lost = unreadable(&Reader::open(dir.path()).unwrap(), &expected, &what);
            let end = segment as u64 * 4 + 4;
            assert!(
                lost.len() <= 4 && lost == (end - lost.len() as u64..end).collect::<Vec<_>>(),
                "{what}: {lost:?}"
            );
        }
        fs::write(&path, &whole).unwrap();
    }
    assert!(unreadable(&Reader::open(dir.path()).unwrap(), &expected, "restored").is_empty());
}

#[test]
fn damaged_log_opens_for_writing_and_stays_as_it_was_found() {
    let pristine = tempfile::tempdir().unwrap();
    let expected = small_log(pristine.path());
    for segment in 0..2 {
        for at in (0..8192).step_by(97) {
            let dir = tempfile::tempdir().unwrap();
            for entry in fs::read_dir(pristine.path()).unwrap() {
                let path = entry.unwrap().path();
                fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
            }
            let path = &segments(dir.path())[segment];
            let mut bytes = fs::read(path).unwrap();
            bytes[at] ^= 0x10;
            fs::write(path, &bytes).unwrap();
            let what = format!("segment {segment} byte {at}");

            let before = unreadable(&Reader::open(dir.path()).unwrap(), &expected, &what);
            let log = Log::open(dir.path(), options().with_segment_bytes(64 << 10)).unwrap();
            let after = unreadable(&log.reader(), &expected, &what);
            assert_eq!(before, after, "{what}");
            let owned = sample(100, 0, 0);
            let ack = log.append(&owned.as_sample()).unwrap().wait().unwrap();
            assert!(ack.position().0 >= 8 - after.len() as u64, "{what}");
            owned.assert_equals(&log.reader().get(ack.position()).unwrap().unwrap());
            drop(log);
            let reader = Reader::open(dir.path()).unwrap();
            owned.assert_equals(&reader.get(ack.position()).unwrap().unwrap());
        }
    }
}

#[test]
fn flipped_byte_in_an_acknowledged_record_is_corrupt_not_torn() {
    let dir = tempfile::tempdir().unwrap();
    let expected = small_log(dir.path());
    let path = &segments(dir.path())[1];
    let mut bytes = fs::read(path).unwrap();
    // A token of the first record of the unsealed segment; the records behind it attest that it was durable.
    bytes[4096 + 64 + 250] ^= 1;
    fs::write(path, &bytes).unwrap();
    let damage = verify(dir.path()).unwrap().damage;
    assert_eq!(
        (damage.len(), damage[0].severity, damage[0].offset),
        (1, Severity::Corrupt, 4096),
        "{damage:?}"
    );
    assert_eq!(damage[0].position, Some(Position(4)));
    let log = Log::open(dir.path(), options()).unwrap();
    assert!(matches!(log.reader().get(Position(4)), Err(Error::Damaged { offset: 4096, .. })));
    assert_eq!(unreadable(&log.reader(), &expected, "after recovery"), [4]);
    assert_eq!(log.reader().groups(1, 2).len(), 1, "the other group is complete");
}

#[test]
fn a_missing_segment_and_a_foreign_file_are_told() {
    let dir = tempfile::tempdir().unwrap();
    for round in 0..3 {
        let log = Log::open(dir.path(), options()).unwrap();
        log.append(&sample(round, 0, 0).as_sample()).unwrap().wait().unwrap();
        log.close().unwrap();
    }
    let paths = segments(dir.path());
    fs::write(&paths[0], b"not a segment at all").unwrap();
    fs::remove_file(&paths[1]).unwrap();
    let damage = verify(dir.path()).unwrap().damage;
    assert_eq!(damage.len(), 1, "the header is unreadable, so what follows it is unknown: {damage:?}");
    assert_eq!(damage[0].path, paths[0]);
    let log = Log::open(dir.path(), options()).unwrap();
    assert_eq!(log.reader().iter(Position(0)).filter(Result::is_ok).count(), 1);
}

/// Records behind such a position could not be counted.
#[test]
fn open_segment_named_beyond_every_position_is_refused_by_name() {
    for first in [u64::MAX, u64::MAX - 5, (1 << 62) + 1] {
        let dir = tempfile::tempdir().unwrap();
        small_log(dir.path());
        let path = dir.path().join(format!("segment-{first:020}.log"));
        for bytes in [&[][..], &[7; 64 << 10]] {
            fs::write(&path, bytes).unwrap();
            let refused = Log::open(dir.path(), options());
            assert!(
                matches!(&refused, Err(Error::Damaged { path: named, .. }) if *named == path),
                "{refused:?}"
            );
            assert!(verify(dir.path()).unwrap().damage.iter().any(|damage| damage.path == path));
        }
        fs::remove_file(&path).unwrap();
        Log::open(dir.path(), options()).unwrap();
    }
}

/// Appended to, as a copy that went wrong may be: the segment ends where its header says.
#[test]
fn open_segment_longer_than_its_capacity_is_sealed_there() {
    for more in [1, 8, 4096] {
        let dir = tempfile::tempdir().unwrap();
        let expected = small_log(dir.path());
        let path = &segments(dir.path())[1];
        let whole = fs::read(path).unwrap();
        fs::write(path, [&whole[..], &vec![7; more]].concat()).unwrap();
        let log = Log::open(dir.path(), options()).unwrap();
        assert!(unreadable(&log.reader(), &expected, "while it is open").is_empty());
        log.close().unwrap();
        let again = Log::open(dir.path(), options()).unwrap();
        assert_eq!(
            again.recovery().scanned,
            0,
            "{more} bytes more: the trailer is where readers look for it"
        );
        assert!(unreadable(&again.reader(), &expected, "sealed").is_empty());
    }
}

/// Nothing that this crate writes has such a capacity, and a checksum is no proof of who wrote it.
#[test]
fn open_segment_of_a_capacity_that_no_segment_has_is_damage() {
    let dir = tempfile::tempdir().unwrap();
    small_log(dir.path());
    let path = &segments(dir.path())[1];
    let mut bytes = fs::read(path).unwrap();
    for copy in [0, 2048] {
        bytes[copy + 32] = 1;
        let crc = crc32c::crc32c(&bytes[copy..copy + 2044]).to_le_bytes();
        bytes[copy + 2044..copy + 2048].copy_from_slice(&crc);
    }
    bytes.push(0);
    fs::write(path, bytes).unwrap();
    let damage = verify(dir.path()).unwrap().damage;
    assert!(damage.len() == 1 && damage[0].what.starts_with("segment header"), "{damage:?}");
    Log::open(dir.path(), options()).unwrap();
}

/// A medium that loses what was written to it: the map reads zeros, or what stood there before, or rubbish.
#[test]
fn log_whose_file_changes_under_it_errs_and_opens_again() {
    let fill =
        |byte: u8| move |file: &fs::File, at: u64, bytes: usize| file.write_all_at(&vec![byte; bytes], at);
    let hole = |file: &fs::File, at: u64, bytes: usize| {
        use rustix::fs::{FallocateFlags, fallocate};
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(file, flags, at, bytes as u64).map_err(Into::into)
    };
    type Change = Box<dyn Fn(&fs::File, u64, usize) -> std::io::Result<()>>;
    let changes: [Change; 3] = [Box::new(fill(0)), Box::new(fill(0xff)), Box::new(hole)];
    for change in changes {
        for (at, bytes) in [(0, 64 << 10), (0, 4096), (4096, 4096), (4096 + 64, 128)] {
            let dir = tempfile::tempdir().unwrap();
            let log = Log::open(dir.path(), options().with_segment_bytes(64 << 10)).unwrap();
            for id in 0..4 {
                log.append(&sample(id, id, 0).as_sample()).unwrap().wait().unwrap();
            }
            let other = Reader::open(dir.path()).unwrap();
            let held = log.reserve(&Shape { response: 300, ..Shape::default() }).unwrap();
            change(&OpenOptions::new().write(true).open(&segments(dir.path())[0]).unwrap(), at, bytes)
                .unwrap();
            for reader in [&log.reader(), &other, &Reader::open(dir.path()).unwrap()] {
                for item in reader.iter(Position(0)) {
                    assert!(matches!(item, Ok(_) | Err(Error::Damaged { .. })), "{item:?}");
                }
            }
            drop(held);
            for id in 10..300 {
                log.append(&sample(id, id, 0).as_sample()).unwrap().wait().unwrap();
            }
            log.close().unwrap();
            verify(dir.path()).unwrap();
            let log = Log::open(dir.path(), options()).unwrap();
            log.append(&sample(9, 9, 0).as_sample()).unwrap().wait().unwrap();
        }
    }
}
