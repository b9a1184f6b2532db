//! What the learner computed of the samples that each training step learned from: a file of columns for each step, in a
//! directory of the log. The bytes are described in `docs/format/log.md`.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::damage::{Damage, Severity};
use crate::error::{Error, Result};
use crate::layout::field;
use crate::position::Position;
use crate::reader::Reader;
use crate::regular;
use crate::storage::{Directory, Storage};

/// The directory, below that of the log.
const DIR: &str = "learned";
/// What follows the step in a file's name.
const SUFFIX: &str = ".columns";
const MAGIC: &[u8; 8] = b"dlrlearn";
const FORMAT: u32 = 1;
/// Bytes of the header, and of a row of the table behind it.
const HEADER: usize = 64;
const ROW: usize = 32;

/// What the learner computed of a sample.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Column<'a> {
    /// Of the sample's record.
    pub position: Position,
    /// Of each response token: its log-probability under the weights before the step, in nats; NaN where the token was
    /// not trained on.
    pub log_probs: &'a [f32],
    /// [`crate::Record::log_probs`] of the record: those of the engine.
    pub engine_log_probs: &'a [f32],
}

/// What a step's table says of a sample.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Row {
    /// Of the sample's record.
    pub position: Position,
    /// The furthest that the learner's log-probability of a token was from the engine's, in nats; `None` if no token was
    /// trained on.
    pub mismatch: Option<f32>,
    /// Where the log-probabilities lie in the file, how many there are, and their crc.
    offset: u64,
    count: u32,
    crc: u32,
}

/// What the learner computed in a step.
#[derive(Debug)]
pub struct Learned {
    path: PathBuf,
    file: File,
    rows: Vec<Row>,
}

impl Learned {
    /// A row for each sample, by position.
    #[must_use]
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// The row of a sample, if the step learned from it.
    #[must_use]
    pub fn row(&self, position: Position) -> Option<&Row> {
        let at = self.rows.binary_search_by_key(&position, |row| row.position).ok()?;
        self.rows.get(at)
    }

    /// The learner's log-probabilities of a sample's response tokens, as [`Column::log_probs`] has them; `None` if the
    /// step did not learn from it.
    ///
    /// # Errors
    ///
    /// [`Error::Damaged`] when their bytes have changed, [`Error::Io`].
    pub fn log_probs(&self, position: Position) -> Result<Option<Vec<f32>>> {
        let Some(row) = self.row(position) else { return Ok(None) };
        let damaged = || damaged(&self.path, row.offset, "column: its CRC does not match");
        let length = 4 * u64::from(row.count);
        let end = self.file.metadata().map_err(Error::io("read", &self.path))?.len();
        // A length that the file does not have gets no memory.
        if row.offset.checked_add(length).is_none_or(|last| last > end) {
            return Err(damaged());
        }
        let bytes = read_at(&self.file, row.offset, length).map_err(Error::io("read", &self.path))?;
        match crc32c::crc32c(&bytes) == row.crc {
            true => Ok(Some(
                bytes.chunks_exact(4).map(|value| f32::from_le_bytes(field::array(value, 0))).collect(),
            )),
            false => Err(damaged()),
        }
    }
}

impl Reader {
    /// Makes durable what the learner computed of the samples that a training step learned from: [`Reader::learned`] has
    /// it then. A step that is done again replaces what it wrote before. One process trains: it need not be the log's owner.
    ///
    /// # Errors
    ///
    /// [`Error::LockLost`] beside the log's own handles, [`Error::Io`] (nothing was written, or what was there before is
    /// left).
    pub fn write_learned(&self, step: u64, columns: &[Column<'_>]) -> Result<()> {
        self.check_owner()?;
        write(&self.path(""), step, columns)
    }

    /// What the learner computed in a step; `None` if the log has nothing of it: the learner does not tell, retention
    /// removed it, or an earlier release wrote the log.
    ///
    /// # Errors
    ///
    /// [`Error::Damaged`] when its bytes have changed, [`Error::Unsupported`] when a newer program wrote it,
    /// [`Error::Io`].
    pub fn learned(&self, step: u64) -> Result<Option<Learned>> {
        let path = self.path(DIR).join(name(step));
        let file = match regular::open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file.map_err(Error::io("open", &path))?,
        };
        let Header { rows, crc, .. } = Header::read(&file, &path)?;
        let length = file.metadata().map_err(Error::io("read", &path))?.len();
        let table = rows.checked_mul(ROW as u64).filter(|table| *table <= length - HEADER as u64);
        let table = table.ok_or_else(|| damaged(&path, 24, "number of columns"))?;
        let bytes = read_at(&file, HEADER as u64, table).map_err(Error::io("read", &path))?;
        if crc32c::crc32c(&bytes) != crc {
            return Err(damaged(&path, HEADER as u64, "table of columns: its CRC does not match"));
        }
        let rows = bytes.chunks_exact(ROW).map(Row::decode).collect();
        Ok(Some(Learned { path, file, rows }))
    }

    /// The steps that [`Reader::learned`] has something of, with the time at which each was written last: a run that
    /// goes on from a checkpoint does the steps behind it again.
    ///
    /// # Errors
    ///
    /// [`Error::Io`].
    pub fn learned_steps(&self) -> Result<BTreeMap<u64, SystemTime>> {
        let dir = self.path(DIR);
        let failed = |error| Error::io("list", &dir)(error);
        let entries = match fs::read_dir(&dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
            entries => entries.map_err(failed)?,
        };
        let mut steps = BTreeMap::new();
        for entry in entries {
            let entry = entry.map_err(failed)?;
            let Some(step) = entry.file_name().to_str().and_then(step_of) else { continue };
            // One that retention removes meanwhile is no step any more.
            let written = entry.metadata().and_then(|metadata| metadata.modified());
            steps.extend(written.ok().map(|at| (step, at)));
        }
        Ok(steps)
    }
}

/// Checks every byte of what steps learned.
pub(crate) fn verify(reader: &Reader) -> Result<Vec<Damage>> {
    let mut damage = Vec::new();
    for step in reader.learned_steps()?.into_keys() {
        let columns = |learned: Learned| {
            learned.rows().iter().try_for_each(|row| learned.log_probs(row.position).map(drop))
        };
        match reader.learned(step).and_then(|learned| learned.map_or(Ok(()), columns)) {
            Err(Error::Damaged { path, offset, what }) => {
                // No record needs it.
                let severity = Severity::Redundant;
                damage.push(Damage { path, offset, position: None, severity, what });
            }
            checked => checked?,
        }
    }
    Ok(damage)
}

/// Finds what was learned from a record, whichever step learned from it.
#[cfg(feature = "arrow")]
#[derive(Debug, Default)]
pub(crate) struct Finder {
    steps: BTreeMap<Position, u64>,
    /// The step that was asked for last.
    open: Option<(u64, Learned)>,
}

#[cfg(feature = "arrow")]
impl Finder {
    /// Looks at all steps. Those that are damaged are left out and counted.
    pub(crate) fn of(reader: &Reader) -> Result<(Self, u64)> {
        let (mut finder, mut damaged) = (Finder::default(), 0);
        for step in reader.learned_steps()?.into_keys() {
            match reader.learned(step) {
                Ok(learned) => {
                    let rows = learned.iter().flat_map(Learned::rows);
                    finder.steps.extend(rows.map(|row| (row.position, step)));
                }
                Err(Error::Damaged { .. }) => damaged += 1,
                Err(error) => return Err(error),
            }
        }
        Ok((finder, damaged))
    }

    /// As [`Learned::log_probs`].
    pub(crate) fn log_probs(&mut self, reader: &Reader, position: Position) -> Result<Option<Vec<f32>>> {
        let Some(step) = self.steps.get(&position).copied() else { return Ok(None) };
        if self.open.as_ref().is_none_or(|(open, _)| *open != step) {
            self.open = reader.learned(step)?.map(|learned| (step, learned));
        }
        self.open.as_ref().map_or(Ok(None), |(_, learned)| learned.log_probs(position))
    }
}

/// Makes durable what the learner computed in a step of the log in `root`: all of it, or nothing. What an earlier attempt
/// at the step computed is replaced.
fn write(root: &Path, step: u64, columns: &[Column<'_>]) -> Result<()> {
    let dir = root.join(DIR);
    let files = Directory::new(&dir);
    match fs::create_dir(&dir) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        made => made.and_then(|()| Directory::new(root).sync_root()).map_err(Error::io("create", &dir))?,
    }
    let name = name(step);
    files.replace(&name, &encode(step, columns)).map_err(Error::io("write", files.path(&name)))
}

/// Removes the files of steps that learned from nothing at or behind `oldest`, from the first step on.
pub(crate) fn retain(root: &Path, oldest: Position) -> Result<()> {
    let files = Directory::new(&root.join(DIR));
    let mut names = match files.names() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        names => names.map_err(Error::io("list", files.path("")))?,
    };
    names.retain(|name| step_of(name).is_some());
    names.sort();
    for name in names {
        let path = files.path(&name);
        let header = regular::open(&path)
            .map_err(Error::io("open", &path))
            .and_then(|file| Header::read(&file, &path));
        match header {
            Ok(header) if header.newest >= oldest.0 => break,
            Ok(_) => files.remove(&name).map_err(Error::io("remove", &path))?,
            // It keeps those behind it from being removed as little as a damaged record does.
            Err(error) => tracing::warn!(%error, "a step's columns cannot be read, and are left there"),
        }
    }
    Ok(())
}

struct Header {
    rows: u64,
    /// The last position of a sample.
    newest: u64,
    /// Of the table.
    crc: u32,
}

impl Header {
    fn read(file: &File, path: &Path) -> Result<Self> {
        let mut bytes = [0; HEADER];
        let short = |error: io::Error| match error.kind() {
            io::ErrorKind::UnexpectedEof => damaged(path, 0, "header of columns: the file ends in it"),
            _ => Error::io("read", path)(error),
        };
        file.read_exact_at(&mut bytes, 0).map_err(short)?;
        if bytes[..8] != *MAGIC || crc32c::crc32c(&bytes[..60]) != field::u32(&bytes, 60) {
            return Err(damaged(path, 0, "header of columns"));
        }
        let format = field::u32(&bytes, 8);
        if format != FORMAT {
            let (found, known) = (format.to_string(), FORMAT.to_string());
            return Err(Error::Unsupported { path: path.to_owned(), what: "format", found, known });
        }
        Ok(Header {
            rows: field::u64(&bytes, 24),
            newest: field::u64(&bytes, 32),
            crc: field::u32(&bytes, 40),
        })
    }
}

impl Row {
    fn decode(bytes: &[u8]) -> Self {
        let mismatch = f32::from_le_bytes(field::array(bytes, 20));
        Row {
            position: Position(field::u64(bytes, 0)),
            mismatch: (!mismatch.is_nan()).then_some(mismatch),
            offset: field::u64(bytes, 8),
            count: field::u32(bytes, 16),
            crc: field::u32(bytes, 24),
        }
    }

    fn encode(&self) -> [u8; ROW] {
        let mut bytes = [0; ROW];
        field::put(&mut bytes, 0, &self.position.0.to_le_bytes());
        field::put(&mut bytes, 8, &self.offset.to_le_bytes());
        field::put(&mut bytes, 16, &self.count.to_le_bytes());
        field::put(&mut bytes, 20, &self.mismatch.unwrap_or(f32::NAN).to_le_bytes());
        field::put(&mut bytes, 24, &self.crc.to_le_bytes());
        bytes
    }
}

fn encode(step: u64, columns: &[Column<'_>]) -> Vec<u8> {
    let mut columns: Vec<_> = columns.iter().collect();
    columns.sort_by_key(|column| column.position);
    let table = HEADER + ROW * columns.len();
    let mut bytes = vec![0; table];
    for (at, column) in columns.iter().enumerate() {
        let values: &[u8] = bytemuck::cast_slice(column.log_probs);
        let pairs = column.log_probs.iter().zip(column.engine_log_probs);
        let apart = pairs.map(|(learner, engine)| (learner - engine).abs());
        let row = Row {
            position: column.position,
            mismatch: apart.filter(|apart| !apart.is_nan()).reduce(f32::max),
            offset: bytes.len() as u64,
            count: column.log_probs.len() as u32,
            crc: crc32c::crc32c(values),
        };
        bytes.extend_from_slice(values);
        field::put(&mut bytes, HEADER + at * ROW, &row.encode());
    }
    let newest = columns.last().map_or(0, |column| column.position.0);
    field::put(&mut bytes, 0, MAGIC);
    field::put(&mut bytes, 8, &FORMAT.to_le_bytes());
    for (at, number) in [(16, step), (24, columns.len() as u64), (32, newest)] {
        field::put(&mut bytes, at, &number.to_le_bytes());
    }
    for (at, range) in [(40, HEADER..table), (60, 0..60)] {
        let crc = crc32c::crc32c(&bytes[range]);
        field::put(&mut bytes, at, &crc.to_le_bytes());
    }
    bytes
}

/// The name of a step's file. Names sort as steps do.
fn name(step: u64) -> String {
    format!("{step:020}{SUFFIX}")
}

fn step_of(name: &str) -> Option<u64> {
    name.strip_suffix(SUFFIX)?.parse().ok()
}

fn damaged(path: &Path, offset: u64, what: &'static str) -> Error {
    Error::Damaged { path: path.to_owned(), offset, what }
}

fn read_at(file: &File, offset: u64, length: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(length).map_err(io::Error::other)?];
    file.read_exact_at(&mut bytes, offset)?;
    Ok(bytes)
}
