//! Random operations against a plain map.
#![allow(clippy::unwrap_used, reason = "in a test, a failed expectation is the answer")]

mod common;

use std::collections::BTreeMap;

use common::{Owned, options, sample};
use driftless_buffer::{Log, Options, Pending, Reader, Reservation, Retention, Shape, SyncPolicy};
use proptest::prelude::*;

#[derive(Debug, Clone)]
enum Op {
    Append { sample: u64, group: u64, rollout: u64 },
    Hold { size: usize },
    DropHeld,
    CommitHeld,
    Wait,
    Sync,
    Cursor,
    Retain { bytes: u64 },
    Reopen { close: bool },
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (0..30u64, 0..4u64, 0..3u64).prop_map(|(sample, group, rollout)| Op::Append { sample, group, rollout }),
        2 => (0..3000usize).prop_map(|size| Op::Hold { size }),
        1 => Just(Op::DropHeld),
        2 => Just(Op::CommitHeld),
        2 => Just(Op::Wait),
        2 => Just(Op::Sync),
        1 => Just(Op::Cursor),
        1 => (0..400u64 << 10).prop_map(|bytes| Op::Retain { bytes }),
        2 => any::<bool>().prop_map(|close| Op::Reopen { close }),
    ]
}

/// A log and what it should hold.
struct Run {
    dir: tempfile::TempDir,
    log: Option<Log>,
    held: Vec<Reservation>,
    pending: Vec<Pending>,
    /// Every committed record by position; `None` for one written in place, all zeros.
    records: BTreeMap<u64, Option<Owned>>,
    cursor: u64,
}

impl Run {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let log = Some(open(&dir));
        Self { dir, log, held: Vec::new(), pending: Vec::new(), records: BTreeMap::new(), cursor: 0 }
    }

    fn log(&self) -> &Log {
        self.log.as_ref().unwrap()
    }

    fn apply(&mut self, op: Op) {
        match op {
            Op::Append { sample: id, group, rollout } => {
                let owned = sample(id, group, rollout);
                let pending = self.log().append(&owned.as_sample()).unwrap();
                assert_eq!(self.records.insert(pending.position().0, Some(owned)).map(|_| ()), None);
                self.pending.push(pending);
            }
            Op::Hold { size } => {
                let shape = Shape { response: size, ..Shape::default() };
                self.held.push(self.log().reserve(&shape).unwrap());
            }
            Op::DropHeld => drop(self.held.pop()),
            Op::CommitHeld => {
                if let Some(space) = self.held.pop() {
                    let pending = space.commit().unwrap();
                    self.records.insert(pending.position().0, None);
                    self.pending.push(pending);
                }
            }
            Op::Wait => {
                if let Some(pending) = self.pending.pop() {
                    pending.wait().unwrap();
                }
            }
            Op::Sync => {
                let end = self.log().sync().unwrap();
                let open = self.held.iter().map(|space| space.position()).min();
                assert!(
                    open.is_none_or(|open| end == open),
                    "everything up to the first open reservation is visible"
                );
            }
            Op::Cursor => {
                let end = self.log().reader().end();
                self.log().cursor("model").unwrap().commit(end).unwrap();
                self.cursor = end.0;
            }
            Op::Retain { bytes } => {
                let retention = Retention { bytes_max: Some(bytes), ..Retention::default() };
                let oldest = self.log().retain(&retention).unwrap().oldest.0;
                self.records = self.records.split_off(&oldest);
            }
            Op::Reopen { close } => {
                self.held.clear();
                self.pending.clear();
                if close {
                    self.log.take().unwrap().close().unwrap();
                }
                self.log = None;
                self.log = Some(open(&self.dir));
                assert_eq!(self.log().cursor("model").unwrap().position().0, self.cursor);
            }
        }
        self.compare(&self.log().reader());
    }

    /// What the reader shows is the model up to the reader's end.
    fn compare(&self, reader: &Reader) {
        let end = reader.end().0;
        let mut found = reader.iter(reader.oldest());
        let visible: Vec<_> = self.records.range(..end).collect();
        for (position, owned) in &visible {
            let record = found.next().unwrap().unwrap();
            assert_eq!(record.position().0, **position);
            match owned {
                Some(owned) => owned.assert_equals(&record),
                None => assert!(record.tokens().iter().all(|&token| token == 0)),
            }
        }
        assert!(found.next().is_none());
        for rollout in 0..3 {
            let mut groups: BTreeMap<u64, BTreeMap<u64, u64>> = BTreeMap::new();
            for (position, owned) in &visible {
                let scalars = owned.as_ref().map(|owned| owned.scalars).unwrap_or_default();
                if scalars.rollout_id == rollout {
                    groups.entry(scalars.group_id).or_default().insert(scalars.sample_id, **position);
                }
            }
            for samples in [1, 3] {
                let expected: Vec<_> = groups
                    .iter()
                    .filter(|(_, members)| members.len() >= samples)
                    .map(|(id, m)| (*id, m.clone()))
                    .collect();
                let members = |group: &driftless_buffer::Group| {
                    group.records.iter().map(|r| (r.scalars().sample_id, r.position().0)).collect()
                };
                let actual: Vec<(u64, BTreeMap<u64, u64>)> = reader
                    .groups(rollout, samples)
                    .iter()
                    .map(|group| (group.group_id, members(group)))
                    .collect();
                assert_eq!(actual, expected);
            }
        }
    }
}

fn open(dir: &tempfile::TempDir) -> Log {
    let options = Options { segment_bytes: 64 << 10, sync: SyncPolicy::Manual, ..options() };
    Log::open(dir.path(), options).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_log_behaves_like_a_map(ops in prop::collection::vec(op(), 1..60)) {
        let mut run = Run::new();
        for op in ops {
            run.apply(op);
        }
        run.apply(Op::Reopen { close: true });
        let records = run.records.len();
        let reader = Reader::open(run.dir.path()).unwrap();
        prop_assert_eq!(reader.iter(reader.oldest()).count(), records);
    }
}
