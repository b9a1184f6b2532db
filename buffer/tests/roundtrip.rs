//! What goes in comes out, in place, across restarts.
#![allow(clippy::unwrap_used, reason = "in a test, a failed expectation is the answer")]

use driftless_buffer::check::{stat, verify};
use driftless_buffer::reservation::Pending;
use driftless_buffer::sample::{ColumnId, Element, Shape};
use driftless_buffer::{
    Error, Finish, Identity, Kind, Log, Options, Position, Reader, Sample, Scalars, SyncPolicy, VersionSpan,
};
use driftless_testkit::log::{options, sample};

#[test]
fn a_record_written_in_place_is_read_in_place() {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::open(dir.path(), options()).unwrap();
    let shape = Shape {
        prompt: 3,
        response: 5,
        spans: 2,
        engine: 4,
        metadata: 2,
        extra: vec![(ColumnId::REWARDS, Element::F32, 2), (ColumnId(0x8001), Element::U8, 7)],
        ..Shape::default()
    };
    let mut space = log.reserve(&shape).unwrap();
    let scalars = Scalars {
        sample_id: 11,
        group_id: 2,
        rollout_id: 1,
        reward: 0.75,
        status: Finish::Stop.code(),
        clock_us: 9,
        ..Scalars::default()
    };
    space.set_scalars(scalars);
    space.tokens_mut().copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, -8]);
    space.log_probs_mut().copy_from_slice(&[-0.5, -1.0, -0.25, -0.125, -2.0]);
    space.loss_mask_mut().copy_from_slice(&[1, 1, 0, 1, 1]);
    let spans = [VersionSpan { version: 4, start: 0, end: 2 }, VersionSpan { version: 5, start: 2, end: 5 }];
    space.spans_mut().copy_from_slice(&spans);
    space.engine_mut().copy_from_slice(b"gpu7");
    space.metadata_mut().copy_from_slice(b"{}");
    space.column_mut(ColumnId(0x8001)).copy_from_slice(b"payload");
    let ack = space.commit().unwrap().wait().unwrap();
    assert_eq!(ack.position(), Position(0));
    log.close().unwrap();

    let reader = Reader::open(dir.path()).unwrap();
    let record = reader.get(ack.position()).unwrap().unwrap();
    assert_eq!(record.kind(), Kind::Sample);
    assert_eq!(*record.scalars(), scalars);
    assert_eq!(record.tokens(), [1, 2, 3, 4, 5, 6, 7, -8]);
    assert_eq!(record.response(), [4, 5, 6, 7, -8]);
    assert_eq!(record.log_probs(), [-0.5, -1.0, -0.25, -0.125, -2.0]);
    assert_eq!(record.loss_mask(), [1, 1, 0, 1, 1]);
    assert_eq!(record.spans(), spans);
    assert_eq!((record.versions(), record.finish()), (Some((4, 5)), Finish::Stop));
    assert_eq!((record.engine(), record.metadata()), ("gpu7", &b"{}"[..]));
    assert_eq!(record.column(ColumnId(0x8001)), Some((Element::U8, &b"payload"[..])));
    assert_eq!(record.column(ColumnId::REWARDS), Some((Element::F32, &[0; 8][..])));
    assert_eq!(record.column(ColumnId::IMAGES), None);
}

#[test]
fn columns_are_aligned_in_memory_and_never_copied() {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::open(dir.path(), options()).unwrap();
    for id in 0..40 {
        log.append(&sample(id, 0, 0).as_sample()).unwrap().wait().unwrap();
    }
    let reader = log.reader();
    let mut last = 0;
    for record in reader.iter(Position(0)).map(Result::unwrap) {
        let (tokens, log_probs) = (record.tokens().as_ptr() as usize, record.log_probs().as_ptr() as usize);
        assert!(tokens.is_multiple_of(64) && log_probs.is_multiple_of(64));
        assert!(tokens < log_probs && log_probs < tokens + record.log_bytes(), "columns lie in one frame");
        assert!(tokens > last, "records follow each other in the map");
        last = tokens;
        let again = reader.get(record.position()).unwrap().unwrap();
        assert_eq!(again.tokens().as_ptr() as usize, tokens, "a second read gives the same memory");
    }
}

#[test]
fn a_dropped_reservation_leaves_its_position_empty() {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::open(dir.path(), options().with_sync(SyncPolicy::Manual)).unwrap();
    let given_up = log.reserve(&Shape { response: 4, ..Shape::default() }).unwrap();
    let kept = log.append(&sample(1, 0, 0).as_sample()).unwrap();
    assert_eq!((given_up.position(), kept.position()), (Position(0), Position(1)));
    drop(given_up);
    assert_eq!(log.sync().unwrap(), Position(2));
    let read = |reader: &Reader| -> Vec<u64> {
        reader.iter(Position(0)).map(|record| record.unwrap().scalars().sample_id).collect()
    };
    assert_eq!(read(&log.reader()), [1]);
    assert!(log.reader().get(Position(0)).unwrap().is_none());
    drop((log, kept));
    let log = Log::open(dir.path(), options()).unwrap();
    assert_eq!(read(&log.reader()), [1]);
    assert!(log.recovery().damage.is_empty(), "{:?}", log.recovery());
}

#[test]
fn readers_see_what_is_durable_up_to_an_open_reservation() {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::open(dir.path(), options().with_sync(SyncPolicy::Manual)).unwrap();
    let reader = log.reader();
    let first = log.append(&sample(1, 0, 0).as_sample()).unwrap();
    assert_eq!(reader.end(), Position(0));
    first.wait().unwrap();
    assert_eq!(reader.end(), Position(1));
    let open = log.reserve(&Shape { response: 4, ..Shape::default() }).unwrap();
    let behind = log.append(&sample(2, 0, 0).as_sample()).unwrap().wait().unwrap();
    assert_eq!(reader.end(), Position(1), "acknowledged, but an earlier position is open");
    assert!(reader.get(behind.position()).unwrap().is_none());
    open.commit().unwrap().wait().unwrap();
    assert_eq!(reader.end(), Position(3));
}

#[test]
fn records_span_segments_and_restarts_and_positions_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let mut expected = Vec::new();
    for round in 0..3u64 {
        let log = Log::open(dir.path(), options().with_segment_bytes(64 << 10)).unwrap();
        assert!(log.recovery().damage.is_empty(), "{:?}", log.recovery());
        for id in round * 300..(round + 1) * 300 {
            let owned = sample(id, id / 4, round);
            let ack = log.append(&owned.as_sample()).unwrap().wait().unwrap();
            assert_eq!(ack.position(), Position(id));
            expected.push(owned);
        }
        if round != 1 {
            log.close().unwrap();
        }
    }
    let reader = Reader::open(dir.path()).unwrap();
    let mut records = reader.iter(Position(0));
    for owned in &expected {
        owned.assert_equals(&records.next().unwrap().unwrap());
    }
    assert!(records.next().is_none());
    let stat = stat(dir.path()).unwrap();
    assert_eq!((stat.samples, stat.end, stat.rollouts), (900, Position(900), Some((0, 2))));
    assert!(stat.segments > 3 && stat.sealed == stat.segments && !stat.live, "{stat:?}");
    let report = verify(dir.path()).unwrap();
    assert_eq!((report.records, report.damage.len()), (900, 0), "{:?}", report.damage);
}

#[test]
fn groups_are_complete_or_absent_repeated_samples_count_once() {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::open(dir.path(), options().with_sync(SyncPolicy::Manual)).unwrap();
    let ids = [(0, 10, 1), (1, 10, 1), (2, 11, 1), (2, 11, 1), (3, 10, 2), (0, 10, 1)];
    for (id, group, rollout) in ids {
        let _ = log.append(&sample(id, group, rollout).as_sample()).unwrap();
    }
    log.sync().unwrap();
    let check = |reader: &Reader| {
        assert_eq!(reader.rollouts(), [1, 2]);
        let groups = reader.groups(1, 2);
        assert_eq!(groups.len(), 1);
        assert_eq!((groups[0].rollout_id, groups[0].group_id), (1, 10));
        let members: Vec<(u64, Position)> =
            groups[0].records.iter().map(|record| (record.scalars().sample_id, record.position())).collect();
        assert_eq!(members, [(0, Position(5)), (1, Position(1))], "the newest record of a sample counts");
        assert_eq!(reader.groups(1, 1).len(), 2);
        assert_eq!(reader.sample(2).unwrap().unwrap().position(), Position(3));
    };
    check(&log.reader());
    log.close().unwrap();
    check(&Reader::open(dir.path()).unwrap());
}

#[test]
fn owner_without_its_lock_file_acknowledges_nothing_more() {
    for (sync, replaced) in
        [(SyncPolicy::EachRecord, true), (SyncPolicy::Manual, true), (SyncPolicy::EachRecord, false)]
    {
        let dir = tempfile::tempdir().unwrap();
        let first = Log::open(dir.path(), options().with_sync(sync)).unwrap();
        first.append(&sample(1, 1, 0).as_sample()).unwrap().wait().unwrap();
        std::fs::remove_file(dir.path().join("lock")).unwrap();
        let second = replaced.then(|| Log::open(dir.path(), options()).unwrap());
        if let Some(second) = &second {
            second.append(&sample(2, 2, 0).as_sample()).unwrap().wait().unwrap();
        }
        let refused = first.append(&sample(3, 3, 0).as_sample()).and_then(Pending::wait).unwrap_err();
        assert!(matches!(refused, Error::LockLost { .. }), "{refused}");
        let refused = first.append(&sample(3, 3, 0).as_sample()).unwrap_err();
        assert!(matches!(refused, Error::Poisoned { .. }), "{refused}");
        let refused = first.cursor("trainer").unwrap().commit(Position(1)).unwrap_err();
        assert!(matches!(refused, Error::LockLost { .. }), "{refused}");
        assert!(first.close().is_err());
        // What either of them acknowledged is there, the second one's behind the first one's.
        let log = second.unwrap_or_else(|| Log::open(dir.path(), options()).unwrap());
        log.append(&sample(4, 4, 0).as_sample()).unwrap().wait().unwrap();
        let found = |id| log.reader().sample(id).unwrap().map(|record| record.position());
        assert!(found(1) < found(4) && found(1).is_some());
        assert!(!replaced || found(1) < found(2) && found(2) < found(4));
    }
}

#[test]
fn owner_without_its_lock_file_makes_no_segment() {
    let dir = tempfile::tempdir().unwrap();
    let options = options().with_sync(SyncPolicy::Manual).with_segment_bytes(64 << 10);
    let log = Log::open(dir.path(), options).unwrap();
    std::fs::remove_file(dir.path().join("lock")).unwrap();
    let refused = log.append(&sample(1, 1, 0).as_sample()).unwrap_err();
    assert!(matches!(refused, Error::LockLost { .. }), "{refused}");
    let names = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(names.filter(|name| name == "spare.new").count(), 0);
}

#[test]
fn reader_of_no_directory_says_that_there_is_no_log() {
    let dir = tempfile::tempdir().unwrap();
    let refused = Reader::open(dir.path().join("nolog")).unwrap_err();
    assert!(matches!(refused, Error::NoLog { .. }), "{refused}");
    assert!(refused.to_string().contains("nolog") && refused.to_string().contains("no such directory"));
}

#[test]
fn another_run_model_or_tokenizer_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::open(dir.path(), options()).unwrap();
    let locked = Log::open(dir.path(), options()).unwrap_err();
    assert!(
        matches!(&locked, Error::Locked { holder: Some(pid), .. } if *pid == std::process::id()),
        "{locked}"
    );
    let words = locked.to_string();
    assert!(words.contains("another handle of this process") && words.contains("`Reader::open`"), "{words}");
    log.append(&sample(0, 0, 0).as_sample()).unwrap().wait().unwrap();
    drop(log);
    let ours = options().identity;
    let others = [
        ("run id", Identity { run_id: [9; 16], ..ours.clone() }),
        ("model", Identity { model: "critic".into(), ..ours.clone() }),
        ("tokenizer digest", Identity { tokenizer_digest: [9; 32], ..ours.clone() }),
    ];
    for (field, identity) in others {
        match Log::open(dir.path(), Options::new(identity)).unwrap_err() {
            Error::Identity { what, expected, found, .. } => assert!(what == field && expected != found),
            other => panic!("{other}"),
        }
    }
    assert_eq!(Reader::open(dir.path()).unwrap().identity(), Some(&ours));
}

#[test]
fn cursors_are_durable_and_stay_within_what_is_durable() {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::open(dir.path(), options()).unwrap();
    for id in 0..5 {
        log.append(&sample(id, 0, 0).as_sample()).unwrap().wait().unwrap();
    }
    let mut cursor = log.cursor("trainer").unwrap();
    assert_eq!(cursor.position(), Position(0));
    cursor.commit(Position(4)).unwrap();
    assert!(matches!(cursor.commit(Position(6)), Err(Error::Invalid { what: "cursor position", .. })));
    assert!(matches!(log.cursor("../x"), Err(Error::Invalid { what: "cursor name", .. })));
    drop((log, cursor));
    let log = Log::open(dir.path(), options()).unwrap();
    let position = log.cursor("trainer").unwrap().position();
    assert_eq!(position, Position(4));
    let rest: Vec<Position> = log.reader().iter(position).map(|record| record.unwrap().position()).collect();
    assert_eq!(rest, [Position(4)]);
    assert_eq!(stat(dir.path()).unwrap().cursors, [("trainer".to_owned(), Some(Position(4)))]);
}

#[test]
fn contradictory_records_are_refused_and_cost_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::open(dir.path(), options()).unwrap();
    let base = Sample {
        tokens: &[1, 2, 3],
        prompt_len: 1,
        log_probs: &[0.0; 2],
        loss_mask: &[1; 2],
        ..Sample::default()
    };
    let bad = [
        ("prompt length", Sample { prompt_len: 4, ..base }),
        ("log-probs", Sample { log_probs: &[0.0], ..base }),
        ("loss mask", Sample { loss_mask: &[], ..base }),
        ("version spans", Sample { spans: &[VersionSpan { version: 1, start: 1, end: 3 }], ..base }),
        ("extra column", Sample { extra: &[(ColumnId::REWARDS, Element::F32, &[0; 3])], ..base }),
        ("record shape", Sample { extra: &[(ColumnId::TOKENS, Element::I32, &[0; 4])], ..base }),
    ];
    for (field, sample) in bad {
        match log.append(&sample).unwrap_err() {
            Error::Invalid { what, .. } => assert_eq!(what, field),
            other => panic!("{other}"),
        }
    }
    let huge = Shape { metadata: 2 << 20, ..Shape::default() };
    assert!(matches!(log.reserve(&huge), Err(Error::TooLarge { .. })));
    log.append(&base).unwrap().wait().unwrap();
    assert_eq!(log.reader().iter(Position(0)).count(), 1);
}

#[test]
fn many_producers_share_the_log() {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::open(dir.path(), options().with_segment_bytes(64 << 10)).unwrap();
    std::thread::scope(|scope| {
        for producer in 0..4u64 {
            let log = log.clone();
            scope.spawn(move || {
                for n in 0..50 {
                    let id = producer * 1000 + n;
                    log.append(&sample(id, producer, 0).as_sample()).unwrap().wait().unwrap();
                }
            });
        }
    });
    let groups = log.reader().groups(0, 50);
    assert_eq!(groups.len(), 4);
    for record in groups.iter().flat_map(|group| &group.records) {
        let ids = record.scalars();
        sample(ids.sample_id, ids.group_id, 0).assert_equals(record);
    }
}

#[test]
fn a_reader_beside_the_writer_follows_it() {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::open(dir.path(), options()).unwrap();
    let reader = Reader::open(dir.path()).unwrap();
    assert_eq!(reader.end(), Position(0));
    log.append(&sample(0, 0, 0).as_sample()).unwrap().wait().unwrap();
    let open = log.reserve(&Shape { response: 2, ..Shape::default() }).unwrap();
    reader.refresh().unwrap();
    assert_eq!(reader.end(), Position(1), "the open reservation is not read");
    assert!(verify(dir.path()).unwrap().damage.is_empty(), "nor is it damage");
    assert!(stat(dir.path()).unwrap().live);
    drop(open);
    reader.refresh().unwrap();
    sample(0, 0, 0).assert_equals(&reader.get(Position(0)).unwrap().unwrap());
}

#[test]
fn wide_columns_go_in_and_out_in_place() {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::open(dir.path(), options()).unwrap();
    let response = 100;
    // 48 layers of 8 experts for each token; 5 likeliest tokens at each place; a teacher; an image; the
    // user's own.
    let experts: Vec<u8> = (0..response * 48 * 8u32).flat_map(|at| (at as u16 % 128).to_le_bytes()).collect();
    let likeliest: Vec<u8> = (0..response * 5).flat_map(|at| (-(at as f32)).to_le_bytes()).collect();
    let teacher: Vec<u8> = (0..response).flat_map(|at| (at as f32 / 7.0).to_le_bytes()).collect();
    let image: Vec<u8> = (0..10_001u32).map(|at| (at * 31) as u8).collect();
    let extra: &[(ColumnId, Element, &[u8])] = &[
        (ColumnId::ROUTED_EXPERTS, Element::U16, &experts),
        (ColumnId::TOP_LOG_PROBS, Element::F32, &likeliest),
        (ColumnId::TEACHER_LOG_PROBS, Element::F32, &teacher),
        (ColumnId::IMAGES, Element::U8, &image),
        (ColumnId(ColumnId::USER.0 + 3), Element::I64, &[7; 16]),
    ];
    let n = response as usize;
    let (tokens, log_probs, loss_mask) = (vec![1; n], vec![0.0; n], vec![1; n]);
    let sample = Sample {
        tokens: &tokens,
        log_probs: &log_probs,
        loss_mask: &loss_mask,
        metadata: b"{\"task\": \"math\"}",
        extra,
        ..Sample::default()
    };
    let ack = log.append(&sample).unwrap().wait().unwrap();
    log.close().unwrap();
    let record = Reader::open(dir.path()).unwrap().get(ack.position()).unwrap().unwrap();
    for &(id, element, bytes) in extra {
        let (found, column) = record.column(id).unwrap();
        assert_eq!((found, column), (element, bytes), "column {}", id.0);
        assert!((column.as_ptr() as usize).is_multiple_of(64), "column {}", id.0);
    }
    assert_eq!(record.metadata(), b"{\"task\": \"math\"}");
    assert_eq!(record.columns().filter(|id| extra.iter().any(|(wide, ..)| wide == id)).count(), 5);
}

/// How many maps of segments this process has, as the kernel counts them.
fn maps(dir: &std::path::Path) -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains(dir.to_str().unwrap()) && line.contains("segment-")).count()
}

#[test]
fn map_of_a_removed_segment_goes_with_its_last_held_record() {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::open(dir.path(), options().with_segment_bytes(64 << 10)).unwrap();
    for id in 0..400 {
        log.append(&sample(id, 0, 0).as_sample()).unwrap().wait().unwrap();
    }
    let before = maps(dir.path());
    let held = log.reader().get(Position(0)).unwrap().unwrap();
    let copy = held.clone();
    let retention = driftless_buffer::Retention { bytes_max: Some(1), ..Default::default() };
    let removed = log.retain(&retention).unwrap().segments;
    assert!(removed > 2 && before > removed);
    assert_eq!(maps(dir.path()), before - removed + 1, "one is held");
    drop(held);
    sample(0, 0, 0).assert_equals(&copy);
    drop(copy);
    assert_eq!(maps(dir.path()), before - removed);
}
