//! Event files as TensorBoard reads them: records of `TFRecord`, each a message `Event` of
//! `tensorboard/compat/proto/event.proto`.

use std::fs::File;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use driftless_trainer::events::{Event, Fact, Sink};
use driftless_trainer::metrics::StepMetrics;

use crate::scalars;

/// How the name of an event file begins; the seconds since 1970 follow, by which TensorBoard orders files.
const PREFIX: &str = "events.out.tfevents.";
/// What readers know the layout by.
const FILE_VERSION: &str = "brain.Event:2";

/// Appends the scalars of each step to an event file. Each start of a run begins a file, which says from which step on
/// earlier files count no more.
#[derive(Debug)]
pub struct TensorBoard {
    dir: PathBuf,
    /// With the bytes of its whole records; absent before the run begins, and where it could not be mended.
    file: Option<(File, u64)>,
    /// Whether the last step could not be written.
    failed: bool,
}

impl TensorBoard {
    /// Files in `dir`, which is made for the first step.
    #[must_use]
    pub fn new(dir: &Path) -> Self {
        TensorBoard { dir: dir.to_path_buf(), file: None, failed: false }
    }

    /// Begins a file. What earlier ones have of `step` and of those behind it counts no more.
    fn begin(&mut self, step: u64, at_ms: u64) -> io::Result<()> {
        std::fs::create_dir_all(&self.dir)?;
        let seconds = (at_ms / 1000).max(newest(&self.dir)?.map_or(0, |newest| newest.saturating_add(1)));
        let path = self.dir.join(format!("{PREFIX}{seconds:010}.driftless.{}", std::process::id()));
        self.file = Some((File::options().append(true).create_new(true).open(path)?, 0));
        self.write(&[version(at_ms), start(step, at_ms)].concat())
    }

    fn step(&mut self, step: &StepMetrics, at_ms: u64) -> io::Result<()> {
        if self.file.is_none() {
            self.begin(step.rollout_id, at_ms)?;
        }
        self.write(&figures(step, at_ms))
    }

    /// Writes whole records. A reader stops for ever at one that a full disk has cut off: such a piece is taken back.
    fn write(&mut self, records: &[u8]) -> io::Result<()> {
        let Some((mut file, bytes)) = self.file.take() else { return Ok(()) };
        let written = file.write_all(records);
        let bytes = match &written {
            Ok(()) => Some(bytes + records.len() as u64),
            Err(_) => file.set_len(bytes).is_ok().then_some(bytes),
        };
        self.file = bytes.map(|bytes| (file, bytes));
        written
    }
}

impl Sink for TensorBoard {
    fn take(&mut self, fact: &Fact) {
        let written = match &fact.event {
            Event::Begin { step, .. } => self.begin(*step, fact.at_ms),
            Event::Step(step) => self.step(step, fact.at_ms),
            _ => return,
        };
        if let (Err(error), false) = (&written, self.failed) {
            let dir = self.dir.display();
            tracing::warn!(%dir, %error, "a step is not written for TensorBoard; the run goes on");
        }
        self.failed = written.is_err();
    }
}

/// The seconds in the name of the newest event file.
fn newest(dir: &Path) -> io::Result<Option<u64>> {
    let mut newest = None;
    for entry in std::fs::read_dir(dir)? {
        let name = entry?.file_name();
        let seconds =
            name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.split('.').next()?.parse().ok());
        newest = newest.max(seconds);
    }
    Ok(newest)
}

/// The first record of a file.
fn version(at_ms: u64) -> Vec<u8> {
    record(&event(at_ms, 0, |event| event.bytes(3, FILE_VERSION.as_bytes())))
}

/// The record of a run that begins, or goes on, at this step.
fn start(step: u64, at_ms: u64) -> Vec<u8> {
    let mut log = Message::default();
    // `SessionLog.START`.
    log.varint(1, 1);
    record(&event(at_ms, step, |event| event.bytes(7, &log.0)))
}

/// The record of a step.
fn figures(step: &StepMetrics, at_ms: u64) -> Vec<u8> {
    let mut summary = Message::default();
    for (path, number) in scalars::of(step) {
        let mut value = Message::default();
        value.bytes(1, path.join("/").as_bytes());
        value.float(2, number as f32);
        summary.bytes(1, &value.0);
    }
    record(&event(at_ms, step.rollout_id, |event| event.bytes(5, &summary.0)))
}

fn event(at_ms: u64, step: u64, what: impl FnOnce(&mut Message)) -> Vec<u8> {
    let mut event = Message::default();
    event.double(1, Duration::from_millis(at_ms).as_secs_f64());
    event.varint(2, step);
    what(&mut event);
    event.0
}

/// A message of protocol buffers, field by field.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn raw_varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    /// What stands before a field: its number, and how it is written.
    fn key(&mut self, field: u8, wire: u8) {
        self.0.push(field << 3 | wire);
    }

    fn varint(&mut self, field: u8, value: u64) {
        self.key(field, 0);
        self.raw_varint(value);
    }

    fn double(&mut self, field: u8, value: f64) {
        self.key(field, 1);
        self.0.extend(value.to_le_bytes());
    }

    fn bytes(&mut self, field: u8, value: &[u8]) {
        self.key(field, 2);
        self.raw_varint(value.len() as u64);
        self.0.extend(value);
    }

    fn float(&mut self, field: u8, value: f32) {
        self.key(field, 5);
        self.0.extend(value.to_le_bytes());
    }
}

/// A record of `TFRecord`: the length and the data, each with its checksum.
fn record(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    [&length[..], &masked(&length), data, &masked(data)].concat()
}

/// CRC-32C, rotated and moved: the data may hold such checksums itself.
fn masked(data: &[u8]) -> [u8; 4] {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::time::SystemTime;

    use super::*;

    fn fact(event: Event) -> Fact {
        Fact::new(SystemTime::UNIX_EPOCH + Duration::from_millis(1500), event)
    }

    fn begin(step: u64) -> Fact {
        fact(Event::Begin { step, of: 9 })
    }

    fn done(rollout_id: u64, reward: f64) -> Fact {
        fact(Event::Step(StepMetrics { rollout_id, reward, ..StepMetrics::default() }.into()))
    }

    /// The data of each record of each file, in the files' order; every checksum is looked at.
    fn records(dir: &Path) -> Vec<Vec<Vec<u8>>> {
        let mut paths: Vec<_> = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        let read = |path: &PathBuf| {
            let bytes = std::fs::read(path).unwrap();
            let (mut rest, mut records) = (&bytes[..], Vec::new());
            while !rest.is_empty() {
                let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
                let data = rest[12..12 + length].to_vec();
                assert_eq!(rest[..16 + length], record(&data), "a record of {}", path.display());
                records.push(data);
                rest = &rest[16 + length..];
            }
            records
        };
        paths.iter().map(read).collect()
    }

    #[test]
    fn record_of_the_version_is_tensorflows_own() {
        // What TensorFlow's writer makes of this event.
        let data = b"\x09\0\0\0\0\0\0\xf8\x3f\x10\0\x1a\x0dbrain.Event:2";
        let written = version(1500);
        assert_eq!(&written[12..12 + data.len()], data);
        // CRC-32C of "123456789" is known: 0xe3069283.
        let unmasked = u32::from_le_bytes(masked(b"123456789")).wrapping_sub(0xa282_ead8).rotate_left(15);
        assert_eq!(unmasked, 0xe306_9283);
    }

    #[test]
    fn figures_are_values_with_tags_and_a_step() {
        let written = figures(&StepMetrics { rollout_id: 300, reward: 0.5, ..StepMetrics::default() }, 1500);
        let head = b"\x09\0\0\0\0\0\0\xf8\x3f\x10\xac\x02\x2a";
        assert_eq!(&written[12..12 + head.len()], head);
        let value = [&b"\x0a\x0d\x0a\x06reward\x15"[..], &0.5_f32.to_le_bytes()].concat();
        assert!(written.windows(value.len()).any(|window| window == value), "{written:?}");
    }

    #[test]
    fn resumed_run_begins_a_file_behind_the_last() {
        let dir = tempfile::tempdir().unwrap();
        let mut board = TensorBoard::new(dir.path());
        [begin(0), done(0, 1.0), done(1, 2.0)].iter().for_each(|fact| board.take(fact));
        let mut board = TensorBoard::new(dir.path());
        [begin(1), done(1, 3.0)].iter().for_each(|fact| board.take(fact));
        let files = records(dir.path());
        assert_eq!(files.iter().map(Vec::len).collect::<Vec<_>>(), [4, 3]);
        for (file, step) in files.iter().zip([0, 1]) {
            let start = event(1500, step, |event| event.bytes(7, b"\x08\x01"));
            assert_eq!(file[1], start, "the run goes on at {step}");
        }
    }

    #[test]
    fn place_that_cannot_be_written_is_tried_again() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("board");
        std::fs::write(&place, "in the way").unwrap();
        let mut board = TensorBoard::new(&place);
        [begin(0), done(0, 1.0)].iter().for_each(|fact| board.take(fact));
        std::fs::remove_file(&place).unwrap();
        board.take(&done(1, 2.0));
        assert_eq!(records(&place).iter().map(Vec::len).collect::<Vec<_>>(), [3]);
    }

    #[test]
    fn file_that_cannot_be_mended_gives_way_to_another() {
        let dir = tempfile::tempdir().unwrap();
        let mut board = TensorBoard::new(dir.path());
        [begin(0), done(0, 1.0)].iter().for_each(|fact| board.take(fact));
        let path = std::fs::read_dir(dir.path()).unwrap().next().unwrap().unwrap().path();
        let whole = std::fs::metadata(&path).unwrap().len();
        // Writing fails, for the file is open for reading only; what another has left of a record is behind it.
        File::options().append(true).open(&path).unwrap().write_all(b"piece").unwrap();
        board.file = Some((File::open(&path).unwrap(), whole));
        board.take(&done(1, 2.0));
        assert!(board.failed && board.file.is_none(), "a file that cannot be mended is left");
        board.take(&done(2, 3.0));
        let files = std::fs::read_dir(dir.path()).unwrap().count();
        assert_eq!((files, board.failed), (2, false));
    }
}
