//! Answers that are durable before their scores: what is in a group, and from when on.
#![allow(clippy::unwrap_used, reason = "in a test, a failed expectation is the answer")]

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

use driftless_buffer::check::{stat, verify};
use driftless_buffer::sample::{ColumnId, Element, Verdict};
use driftless_buffer::{
    Finish, GroupQuery, Kind, Log, Options, Position, Reader, Record, Retention, Sample, Scalars, SyncPolicy,
    VersionSpan,
};
use driftless_testkit::log::{options, sample};
use proptest::prelude::*;

fn manual() -> Options {
    options().with_segment_bytes(64 << 10).with_sync(SyncPolicy::Manual)
}

/// Appends a sample of an answer of so many, whose reward comes later.
fn answer(log: &Log, answer: u64, part: u16, parts: u16, group: u64) -> Position {
    let mut owned = sample(Scalars::sample_id_of(answer, part), group, 0);
    owned.scalars = Scalars { parts, score_follows: true, reward: 0.0, ..owned.scalars };
    let times = [1_i64, 2, 3];
    let extra = [(ColumnId::TIMES, Element::I64, bytemuck::cast_slice(&times))];
    log.append(&Sample { extra: &extra, ..owned.as_sample() }).unwrap().position()
}

fn score(log: &Log, answer: u64, group: u64, reward: f32, verdict: Verdict) -> Position {
    let scalars =
        Scalars { sample_id: answer, group_id: group, reward, status: verdict.code(), ..Scalars::default() };
    let rewards = [reward, 2.0 * reward];
    let extra = [(ColumnId::REWARDS, Element::F32, bytemuck::cast_slice(&rewards))];
    let sample = Sample { kind: Kind::Score, scalars, extra: &extra, ..Sample::default() };
    log.append(&sample).unwrap().position()
}

/// The groups of `answers` answers and where each became complete.
fn complete(reader: &Reader, answers: usize) -> Vec<(u64, u64)> {
    let groups = reader.find(&GroupQuery::complete(answers));
    groups.iter().map(|group| (group.group_id, group.completed.0)).collect()
}

#[test]
fn group_is_complete_with_its_last_sample_or_score() {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::open(dir.path(), manual()).unwrap();
    let reader = log.reader();
    answer(&log, 4, 1, 2, 7);
    answer(&log, 5, 0, 1, 7);
    score(&log, 4, 7, 1.5, Verdict::Kept);
    score(&log, 5, 7, 0.5, Verdict::Masked);
    log.sync().unwrap();
    assert_eq!(complete(&reader, 2), [], "the first sample of answer 4 lacks");
    assert_eq!(complete(&reader, 1), [(7, 3)]);
    let early = reader.get(Position(0)).unwrap().unwrap();
    assert!(early.is_scored(), "its score is there");
    answer(&log, 4, 0, 2, 7);
    // Answers of another group: one of three samples without a score, and one that is scored before it is there.
    for part in 0..3 {
        answer(&log, 6, part, 3, 8);
    }
    score(&log, 7, 8, 1.0, Verdict::Kept);
    answer(&log, 7, 0, 1, 8);
    log.sync().unwrap();
    assert_eq!(complete(&reader, 2), [(7, 4)], "three samples are one answer");
    assert_eq!(complete(&reader, 1), [(7, 3), (8, 9)]);
    let unscored = reader.sample(6).unwrap().unwrap();
    assert_eq!((unscored.is_scored(), unscored.scalars().reward), (false, 0.0));

    let check = |reader: &Reader| {
        let group = &reader.find(&GroupQuery::complete(2))[0];
        let said = |record: &Record| {
            let Scalars { sample_id, reward, .. } = *record.scalars();
            let trained = record.loss_mask().contains(&1);
            assert_eq!(trained, record.verdict() == Verdict::Kept, "{:?}", record.loss_mask());
            (sample_id, reward, record.verdict(), record.rewards().to_vec(), record.times().to_vec())
        };
        let (kept, masked) = (vec![1.5, 3.0], vec![0.5, 1.0]);
        let expected = [
            (4, 1.5, Verdict::Kept, kept.clone(), vec![1, 2, 3]),
            (5, 0.5, Verdict::Masked, masked, vec![1, 2, 3]),
            (Scalars::sample_id_of(4, 1), 1.5, Verdict::Kept, kept, vec![1, 2, 3]),
        ];
        assert_eq!(group.records.iter().map(said).collect::<Vec<_>>(), expected);
    };
    check(&reader);
    log.close().unwrap();
    check(&Reader::open(dir.path()).unwrap());
    let stat = stat(dir.path()).unwrap();
    assert_eq!((stat.samples, stat.scores, stat.prompts, stat.evaluations), (7, 3, 0, 0));
    assert!(verify(dir.path()).unwrap().is_clean());
}

#[test]
fn newest_score_counts_and_brings_no_group_back() {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::open(dir.path(), manual()).unwrap();
    answer(&log, 0, 0, 1, 0);
    let first = score(&log, 0, 0, 1.0, Verdict::Kept);
    score(&log, 0, 0, 3.0, Verdict::LeftOut);
    log.sync().unwrap();
    let reader = log.reader();
    assert_eq!(complete(&reader, 1), [], "it is left out");
    let record = reader.get(Position(0)).unwrap().unwrap();
    assert_eq!((record.scalars().reward, record.verdict()), (3.0, Verdict::LeftOut));
    assert_eq!(record.score().unwrap().position(), Position(2));
    score(&log, 0, 0, 2.0, Verdict::Kept);
    log.sync().unwrap();
    assert_eq!(complete(&reader, 1), [(0, first.0)]);
    let later = GroupQuery { completed_from: first.next(), ..GroupQuery::complete(1) };
    assert!(reader.find(&later).is_empty());
}

#[test]
fn samples_of_an_evaluation_are_in_no_group() {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::open(dir.path(), manual()).unwrap();
    for id in 0..2 {
        let mut owned = sample(id, 5, 3);
        owned.scalars.evaluation = id == 0;
        let _ = log.append(&owned.as_sample()).unwrap();
    }
    log.sync().unwrap();
    let check = |reader: &Reader| {
        assert_eq!(reader.groups(3, 1)[0].records.len(), 1);
        assert!(reader.sample(0).unwrap().is_none());
        let evaluated = reader.get(Position(0)).unwrap().unwrap();
        assert!(evaluated.scalars().evaluation && evaluated.finish() == Finish::Stop);
    };
    check(&log.reader());
    log.close().unwrap();
    check(&Reader::open(dir.path()).unwrap());
    let stat = stat(dir.path()).unwrap();
    assert_eq!((stat.samples, stat.evaluations), (1, 1));
}

/// The segments, the oldest first.
fn segments(dir: &Path) -> Vec<std::path::PathBuf> {
    let mut paths: Vec<_> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "log"));
    paths.sort();
    paths
}

#[test]
fn damaged_score_leaves_its_answer_without_one() {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::open(dir.path(), manual()).unwrap();
    answer(&log, 0, 0, 1, 0);
    score(&log, 0, 0, 1.0, Verdict::Kept);
    log.close().unwrap();
    let path = segments(dir.path()).remove(0);
    let bytes = fs::read(&path).unwrap();
    let mut frames = (4096..bytes.len()).step_by(64).filter(|at| bytes[*at..].starts_with(b"dlrF"));
    let at = frames.next_back().unwrap() as u64 + 116;
    OpenOptions::new().write(true).open(&path).unwrap().write_all_at(&[9], at).unwrap();
    let reader = Reader::open(dir.path()).unwrap();
    assert_eq!(complete(&reader, 1), []);
    assert!(!reader.get(Position(0)).unwrap().unwrap().is_scored());
    assert_eq!(verify(dir.path()).unwrap().damage.len(), 1);
}

/// Makes the unsealed segments of a log such as the release before wrote: nothing but the header's number differs where
/// no record uses what is new.
fn as_format_1(dir: &Path) {
    for path in segments(dir) {
        let mut page = fs::read(&path).unwrap()[..2048].to_vec();
        page[8] = 1;
        let crc = crc32c::crc32c(&page[..2044]).to_le_bytes();
        page[2044..].copy_from_slice(&crc);
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        file.write_all_at(&page.repeat(2), 0).unwrap();
    }
}

#[test]
fn log_of_format_1_goes_on_in_format_2() {
    let dir = tempfile::tempdir().unwrap();
    let format = |path: &Path| fs::read(path).unwrap()[8];
    let log = Log::open(dir.path(), manual()).unwrap();
    let _ = log.append(&sample(0, 5, 0).as_sample()).unwrap();
    let _ = log.append(&sample(1, 5, 0).as_sample()).unwrap();
    log.sync().unwrap();
    drop(log);
    as_format_1(dir.path());
    let log = Log::open(dir.path(), manual()).unwrap();
    answer(&log, 8, 0, 1, 6);
    answer(&log, 9, 0, 1, 6);
    score(&log, 8, 6, 1.0, Verdict::Kept);
    score(&log, 9, 6, 1.0, Verdict::Kept);
    log.sync().unwrap();
    assert_eq!(complete(&log.reader(), 2), [(5, 1), (6, 5)]);
    log.close().unwrap();
    assert_eq!(segments(dir.path()).iter().map(|path| format(path)).collect::<Vec<_>>(), [1, 2]);
    let reader = Reader::open(dir.path()).unwrap();
    assert_eq!(complete(&reader, 2), [(5, 1), (6, 5)]);
    sample(1, 5, 0).assert_equals(&reader.get(Position(1)).unwrap().unwrap());
    assert!(verify(dir.path()).unwrap().is_clean());
}

#[test]
fn retention_takes_answers_and_scores_apart() {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::open(dir.path(), manual()).unwrap();
    answer(&log, 0, 0, 1, 0);
    // The score comes to lie in a later segment than its answer.
    while segments(dir.path()).len() < 3 {
        answer(&log, 1, 0, 1, 1);
        log.sync().unwrap();
    }
    score(&log, 0, 0, 1.0, Verdict::Kept);
    log.sync().unwrap();
    assert_eq!(complete(&log.reader(), 1).len(), 1);
    let mut cursor = log.cursor("all").unwrap();
    cursor.commit(log.reader().end()).unwrap();
    let retention = Retention { consumed_by: vec!["all".into()], ..Retention::default() };
    assert!(log.retain(&retention).unwrap().segments > 0);
    assert_eq!(complete(&log.reader(), 1), []);
    assert!(log.reader().sample(0).unwrap().is_none());
}

proptest! {
    /// Whatever the order in which samples and scores come, a group is given once all is there, and not again.
    #[test]
    fn each_group_is_given_exactly_once(
        order in Just((0..12_u64).collect::<Vec<_>>()).prop_shuffle(),
        cuts in prop::collection::vec(any::<bool>(), 12),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let log = Log::open(dir.path(), manual()).unwrap();
        let reader = log.reader();
        // Two groups of two answers: the even ones of two samples; each has a score. Written in any order.
        let (mut given, mut next) = (Vec::new(), Position(0));
        for (at, cut) in order.iter().zip(cuts) {
            let (number, group) = (at / 3, at / 6);
            match at % 3 {
                2 => score(&log, number, group, 1.0, Verdict::Kept),
                part if number % 2 == 0 => answer(&log, number, part as u16, 2, group),
                _ => answer(&log, number, 0, 1, group),
            };
            log.sync().unwrap();
            if cut {
                for group in reader.find(&GroupQuery { completed_from: next, ..GroupQuery::complete(2) }) {
                    given.push((group.group_id, group.records.len()));
                    next = group.completed.next();
                }
            }
        }
        for group in reader.find(&GroupQuery { completed_from: next, ..GroupQuery::complete(2) }) {
            given.push((group.group_id, group.records.len()));
        }
        given.sort_unstable();
        prop_assert_eq!(given, [(0, 3), (1, 3)]);
    }
}

#[test]
fn outlines_are_what_the_records_say_once_their_table_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::open(dir.path(), manual()).unwrap();
    // Of two samples, the second of which has a span; one that is not scored; one that says its reward by itself.
    answer(&log, 4, 0, 2, 7);
    let mut second = sample(Scalars::sample_id_of(4, 1), 7, 0);
    second.scalars = Scalars { parts: 2, score_follows: true, reward: 0.0, ..second.scalars };
    second.spans = vec![VersionSpan { version: 9, start: 0, end: second.log_probs.len() as u32 }];
    let _ = log.append(&second.as_sample()).unwrap();
    score(&log, 4, 7, 0.25, Verdict::Kept);
    score(&log, 4, 7, 0.75, Verdict::LeftOut);
    answer(&log, 5, 0, 1, 7);
    let _ = log.append(&sample(1 << 20, 8, 3).as_sample()).unwrap();
    let _ = log.append(&Sample { kind: Kind::Partial, ..sample(1 << 21, 8, 3).as_sample() }).unwrap();
    log.sync().unwrap();
    let check = |reader: &Reader| {
        let mut found = Vec::new();
        reader.outlines(|outline| found.push(*outline));
        let records: Vec<_> = found.iter().map(|it| reader.get(it.position).unwrap().unwrap()).collect();
        for (outline, record) in found.iter().zip(&records) {
            let scalars = record.scalars();
            assert_eq!((outline.rollout_id, outline.group_id), (scalars.rollout_id, scalars.group_id));
            assert_eq!(outline.reward, record.is_scored().then_some(scalars.reward));
            assert_eq!((outline.finish, outline.tokens), (record.finish(), record.response().len()));
            assert_eq!(outline.versions, record.versions());
        }
        let rewards: Vec<_> = found.iter().map(|outline| (outline.group_id, outline.reward)).collect();
        let own = sample(1 << 20, 8, 3).scalars.reward;
        assert_eq!(rewards, [(7, Some(0.75)), (7, None), (7, Some(0.75)), (8, Some(own))]);
        assert_eq!(found[2].versions, Some((9, 9)));
    };
    check(&log.reader());
    log.close().unwrap();
    check(&Reader::open(dir.path()).unwrap());
}
