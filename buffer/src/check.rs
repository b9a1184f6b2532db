//! Looking at a log from outside. Read-only, and safe beside a writing process.

use std::path::Path;

use crate::cursor;
use crate::damage::Faults;
pub use crate::damage::{Damage, Recovery, Severity};
use crate::error::Result;
use crate::files::read_mode;
use crate::index::Loaded;
use crate::layout::frame::{FrameState, Peek};
use crate::layout::segment::{ENTRY, Entry, EntryState, HEADER_PAGE, TRAILER};
use crate::learned;
use crate::position::Position;
use crate::position::hex;
use crate::reader::Reader;
use crate::recover::{self, Mode, Opened};
use crate::sample::Kind;
use crate::scan;
use crate::segment::{self, End, Segment};
use crate::storage::{Directory, Storage};

/// Figures about a log.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize)]
pub struct Stat {
    /// The run, in hex; empty for a log without segments.
    pub run_id: String,
    /// The model.
    pub model: String,
    /// Digest of the tokenizer, in hex.
    pub tokenizer_digest: String,
    /// A process is writing it now.
    pub live: bool,
    /// Segment files.
    pub segments: usize,
    /// Those among them that are sealed.
    pub sealed: usize,
    /// Bytes of records and their framing.
    pub bytes: u64,
    /// The first position kept, and one past the last.
    pub oldest: Position,
    /// One past the last position.
    pub end: Position,
    /// Finished samples.
    pub samples: u64,
    /// Partial samples.
    pub partials: u64,
    /// Prompt records.
    pub prompts: u64,
    /// Scores of answers.
    pub scores: u64,
    /// Samples of evaluations.
    pub evaluations: u64,
    /// Positions without a record: given up, or lost in a crash before they were acknowledged.
    pub empty: u64,
    /// Acknowledged records that were found damaged.
    pub corrupt: u64,
    /// Tokens of all samples, prompts included.
    pub tokens: u64,
    /// Smallest and largest rollout id among the samples.
    pub rollouts: Option<(u64, u64)>,
    /// Oldest and newest version among the samples' spans.
    pub versions: Option<(u64, u64)>,
    /// Durable cursors; one without a position is damaged.
    pub cursors: Vec<(String, Option<Position>)>,
}

/// What [`verify`] found.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize)]
pub struct Report {
    /// Records whose every byte was checked.
    pub records: u64,
    /// Bytes checked.
    pub bytes: u64,
    /// Every place that is not what was written, by file and offset.
    pub damage: Vec<Damage>,
}

impl Report {
    /// Is every acknowledged byte what was written?
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.damage.iter().all(|damage| damage.severity == Severity::Torn)
    }
}

/// Counts what is in the log, from its index: the records themselves are not read, except in segments that
/// are not sealed.
///
/// # Errors
///
/// As [`crate::Reader::open`].
pub fn stat(dir: impl AsRef<Path>) -> Result<Stat> {
    let root = dir.as_ref();
    let storage = Directory::new(root);
    let mode = read_mode(root)?;
    let mut opened = recover::read(&storage, mode)?;
    opened.index.complete();
    let mut stat = Stat {
        live: matches!(mode, Mode::Live { .. }),
        segments: opened.index.segments().count(),
        sealed: opened.index.segments().filter(|loaded| loaded.sealed_us.is_some()).count(),
        bytes: opened.bytes,
        oldest: Position(opened.index.oldest()),
        end: Position(opened.index.end()),
        cursors: cursor::all(&storage)?,
        ..Stat::default()
    };
    if let Some(identity) = opened.identity {
        stat.run_id = hex(&identity.run_id);
        stat.model = identity.model;
        stat.tokenizer_digest = hex(&identity.tokenizer_digest);
    }
    for entry in opened.index.segments().flat_map(|loaded| &loaded.entries) {
        stat.count(entry);
    }
    Ok(stat)
}

impl Stat {
    fn count(&mut self, entry: &Entry) {
        match (entry.state, Kind::from_code(entry.kind)) {
            (EntryState::Record, Some(Kind::Prompt)) => self.prompts += 1,
            (EntryState::Record, Some(Kind::Partial)) => self.partials += 1,
            (EntryState::Record, Some(Kind::Score)) => self.scores += 1,
            (EntryState::Record, Some(Kind::Sample)) if !entry.is_of_group() => self.evaluations += 1,
            (EntryState::Record, _) => {
                self.samples += 1;
                self.tokens += u64::from(entry.tokens);
                self.rollouts = Some(widen(self.rollouts, entry.rollout, entry.rollout));
                if entry.oldest_version <= entry.newest_version {
                    self.versions = Some(widen(self.versions, entry.oldest_version, entry.newest_version));
                }
            }
            (EntryState::Void | EntryState::Torn, _) => self.empty += 1,
            (EntryState::Corrupt, _) => self.corrupt += 1,
        }
    }
}

fn widen(range: Option<(u64, u64)>, low: u64, high: u64) -> (u64, u64) {
    range.map_or((low, high), |(a, b)| (a.min(low), b.max(high)))
}

/// Checks every byte of the log.
///
/// # Errors
///
/// As [`crate::Reader::open`]; damage is not an error but the answer.
pub fn verify(dir: impl AsRef<Path>) -> Result<Report> {
    let root = dir.as_ref();
    let storage = Directory::new(root);
    let mut report = verify_on(&storage, read_mode(root)?)?;
    report.damage.append(&mut learned::verify(&Reader::open(root)?)?);
    Ok(report)
}

/// As [`verify`], on any storage.
pub(crate) fn verify_on(storage: &dyn Storage, mode: Mode) -> Result<Report> {
    let Opened { mut index, recovery, .. } = recover::read(storage, mode)?;
    index.complete();
    let mut report = Report { damage: recovery.damage, ..Report::default() };
    for loaded in index.segments() {
        if loaded.sealed_us.is_some() {
            let mut faults = Faults::of(storage.path(&loaded.segment.name));
            verify_sealed(loaded, &mut faults);
            report.damage.append(&mut faults.found);
            loaded.segment.map.let_go();
        }
        let records = loaded.entries.iter().filter(|entry| entry.state == EntryState::Record);
        for entry in records {
            report.records += 1;
            report.bytes += entry.bytes;
        }
    }
    for (name, position) in cursor::all(storage)? {
        if position.is_none() {
            let mut faults = Faults::of(storage.path(&format!("cursor-{name}")));
            faults.note(0, None, Severity::Corrupt, "cursor");
            report.damage.append(&mut faults.found);
        }
    }
    Ok(report)
}

/// Checks the frames of a sealed segment against its table, and that nothing was written where nothing
/// belongs.
fn verify_sealed(loaded: &Loaded, faults: &mut Faults) {
    let segment = &loaded.segment;
    let first = segment.header.first;
    if let End::Sealed(trailer) = segment::read_end(&segment.map, &segment.header)
        && segment::table(segment, &trailer).is_none()
    {
        let what = "index table; the segment was scanned instead";
        faults.note(trailer.table as usize, None, Severity::Redundant, what);
    }
    for (index, entry) in loaded.entries.iter().enumerate() {
        let sequence = first + index as u64;
        if let Err(what) = verify_entry(segment, sequence, entry) {
            faults.note(entry.offset as usize, Some(sequence), Severity::Corrupt, what);
        }
    }
    let end = loaded.entries.last().map_or(HEADER_PAGE, |last| (last.offset + last.bytes) as usize);
    let unused = end + loaded.entries.len() * ENTRY;
    let trailer = (segment.header.capacity as usize).saturating_sub(TRAILER);
    if unused < trailer && !segment.map.is_zero(unused..trailer) {
        faults.note(unused, None, Severity::Redundant, "unused bytes before the trailer");
    }
}

fn verify_entry(segment: &Segment, sequence: u64, entry: &Entry) -> std::result::Result<(), &'static str> {
    match entry.state {
        EntryState::Torn => return Ok(()),
        EntryState::Corrupt => return Err("record that was lost when the segment was sealed"),
        EntryState::Void | EntryState::Record => {}
    }
    let (salt, limit) = (segment.header.salt, scan::frames_end(&segment.map, &segment.header));
    let Peek::Frame(frame) = segment.map.header(entry.offset as usize, salt, limit) else {
        return Err("record header");
    };
    let committed = frame.state == FrameState::Committed;
    // A header that gives a record up need not have been stored: see the ledger.
    let expected = entry.state == EntryState::Record;
    if frame.sequence != sequence || frame.bytes != entry.bytes || committed != expected {
        return Err("record header");
    }
    if committed { scan::entry_of(&segment.map, salt, &frame).map(drop) } else { Ok(()) }
}
