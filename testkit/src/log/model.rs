//! A log beside a plain map: any bytes are a sequence of operations, and after each of them the two must
//! agree.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use driftless_buffer::check::verify;
use driftless_buffer::reservation::{Pending, Reservation};
use driftless_buffer::sample::Shape;
use driftless_buffer::{Group, Log, Reader, Retention, SyncPolicy};

use super::{Owned, options, sample};

/// A log and what it should hold.
pub struct Run {
    dir: PathBuf,
    log: Option<Log>,
    held: Vec<Reservation>,
    pending: Vec<Pending>,
    /// Every committed record by position; `None` for one written in place, all zeros.
    records: BTreeMap<u64, Option<Owned>>,
    cursor: u64,
}

impl Run {
    /// An empty log in an empty directory.
    pub fn new(dir: &Path) -> Self {
        let (held, pending, records) = (Vec::new(), Vec::new(), BTreeMap::new());
        Self { dir: dir.to_owned(), log: Some(open(dir)), held, pending, records, cursor: 0 }
    }

    /// Does what the bytes say, then closes the log and looks at it once more.
    pub fn all(mut self, bytes: impl IntoIterator<Item = u8>) {
        let mut bytes = bytes.into_iter();
        while let Some(which) = bytes.next() {
            self.apply(which, || bytes.next().unwrap_or(0));
            self.compare(&self.log().reader());
        }
        self.leave(true);
        self.reopen();
        self.compare(&self.log().reader());
        let reader = Reader::open(&self.dir).unwrap();
        assert_eq!(reader.iter(reader.oldest()).count(), self.records.len());
    }

    fn log(&self) -> &Log {
        self.log.as_ref().unwrap()
    }

    /// Does one thing with the log; `byte` is the next of the numbers that it wants.
    fn apply(&mut self, which: u8, mut byte: impl FnMut() -> u8) {
        match which % 24 {
            // A record is appended.
            0..=7 => {
                let (id, group) = (u64::from(byte() % 30), u64::from(byte() % 4));
                let owned = sample(id, group, u64::from(which / 24 % 3));
                let pending = self.log().append(&owned.as_sample()).unwrap();
                assert_eq!(self.records.insert(pending.position().0, Some(owned)).map(|_| ()), None);
                self.pending.push(pending);
            }
            // Space is reserved, and then dropped or committed.
            8 | 9 => {
                let shape = Shape { response: usize::from(byte()) * 12, ..Shape::default() };
                self.held.push(self.log().reserve(&shape).unwrap());
            }
            10 => drop(self.held.pop()),
            11 | 12 => {
                if let Some(space) = self.held.pop() {
                    let pending = space.commit().unwrap();
                    self.records.insert(pending.position().0, None);
                    self.pending.push(pending);
                }
            }
            13 | 14 => {
                if let Some(pending) = self.pending.pop() {
                    pending.wait().unwrap();
                }
            }
            15 | 16 => {
                let end = self.log().sync().unwrap();
                let open = self.held.iter().map(|space| space.position()).min();
                assert!(
                    open.is_none_or(|open| end == open),
                    "everything up to the first open reservation is visible"
                );
            }
            17 | 18 => {
                let end = self.log().reader().end();
                self.log().cursor("model").unwrap().commit(end).unwrap();
                self.cursor = end.0;
            }
            19 => {
                let bytes_max = Some(u64::from(byte()) << 11);
                let retention = Retention { bytes_max, ..Retention::default() };
                let oldest = self.log().retain(&retention).unwrap().oldest.0;
                self.records = self.records.split_off(&oldest);
            }
            20 | 21 => {
                self.leave(which & 1 == 0);
                self.reopen();
            }
            // A byte of a segment is changed, or the segment is cut there; then it is put back.
            _ => {
                let (file, at, how) = (byte(), u16::from_le_bytes([byte(), byte()]), byte());
                self.leave(true);
                self.damage(file, at, how);
                self.reopen();
            }
        }
    }

    /// Lets go of the log, in order or as a process that dies.
    fn leave(&mut self, close: bool) {
        self.held.clear();
        self.pending.clear();
        let log = self.log.take().unwrap();
        if close {
            log.close().unwrap();
        }
    }

    fn reopen(&mut self) {
        self.log = Some(open(&self.dir));
        assert_eq!(self.log().cursor("model").unwrap().position().0, self.cursor);
    }

    /// Damages one place of one segment of a log that was closed: it is told, costs at most the record it
    /// hits (a cut: those behind it), and nothing is read that was not written.
    fn damage(&self, file: u8, at: u16, how: u8) {
        let files = fs::read_dir(&self.dir).unwrap().map(|entry| entry.unwrap().path());
        let mut segments: Vec<PathBuf> =
            files.filter(|path| path.extension().is_some_and(|end| end == "log")).collect();
        segments.sort();
        let Some(path) = segments.get(usize::from(file) % segments.len().max(1)) else { return };
        let whole = fs::read(path).unwrap();
        let (at, cut) = (usize::from(at) % whole.len(), how >= 192);
        let mut bad = whole.clone();
        if cut {
            bad.truncate(at);
        } else {
            bad[at] ^= 1 << (how % 8);
        }
        fs::write(path, &bad).unwrap();
        let reader = Reader::open(&self.dir).unwrap();
        let found: Vec<_> = reader.iter(reader.oldest()).filter_map(Result::ok).collect();
        for record in &found {
            match &self.records[&record.position().0] {
                Some(owned) => owned.assert_equals(record),
                None => assert!(record.tokens().iter().all(|&token| token == 0)),
            }
        }
        let lost = self.records.len() - found.len();
        assert!(cut || lost <= 1, "bit {} of byte {at} cost {lost} records", how % 8);
        assert!(lost == 0 || !verify(&self.dir).unwrap().is_clean(), "{lost} records are lost in silence");
        // No map of the file may be left when its bytes change.
        drop((found, reader));
        fs::write(path, whole).unwrap();
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
                let members = |group: &Group| {
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

fn open(dir: &Path) -> Log {
    let options = options().with_segment_bytes(64 << 10).with_sync(SyncPolicy::Manual);
    Log::open(dir, options).unwrap()
}
