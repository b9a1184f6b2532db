//! Rows of data files, each a map from field names to JSON text.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use driftless_store::os::regular;
use serde_json::value::RawValue;

use super::parquet;
use super::source::Source;
use crate::error::{Result, input, io};

/// Most bytes of a line.
const LINE_BYTES_MAX: u64 = 64 << 20;

/// A row's fields, as the JSON text they are in: order and spelling of what is in them are kept.
pub(super) type Fields = BTreeMap<String, Box<RawValue>>;

/// Why a row is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fault {
    pub(super) expected: String,
    pub(super) found: String,
}

impl Fault {
    pub(super) fn new(expected: impl ToString, found: impl ToString) -> Self {
        Fault { expected: expected.to_string(), found: found.to_string() }
    }
}

/// A row as it was read; `line` counts from 1.
pub(super) struct Row {
    pub(super) line: u64,
    pub(super) fields: Result<Fields, Fault>,
}

/// Calls `take` for each row that `source` names, in order. Only the fields in `wanted` are read where the
/// format allows it.
pub(super) fn each(source: &Source, wanted: &[&str], take: impl FnMut(Row) -> Result<()>) -> Result<()> {
    let file = regular::open(&source.path).map_err(io("open", &source.path))?;
    match source.path.extension().is_some_and(|name| name == "parquet") {
        true => parquet::each(source, file, wanted, take),
        false => lines(source, file, take),
    }
}

fn lines(source: &Source, file: File, mut take: impl FnMut(Row) -> Result<()>) -> Result<()> {
    let mut reader = BufReader::with_capacity(1 << 20, file);
    let mut bytes = Vec::new();
    for number in 0..source.rows.end {
        bytes.clear();
        let read = (&mut reader).take(LINE_BYTES_MAX).read_until(b'\n', &mut bytes);
        if read.map_err(io("read", &source.path))? == 0 {
            break;
        }
        if bytes.len() as u64 == LINE_BYTES_MAX && bytes.last() != Some(&b'\n') {
            return Err(long_line(&source.path, number + 1));
        }
        if number >= source.rows.start {
            take(Row { line: number + 1, fields: fields(&bytes) })?;
        }
    }
    Ok(())
}

fn long_line(path: &Path, line: u64) -> crate::error::Error {
    let what = format!("{}:{line}", path.display());
    input(what, format!("a line of fewer than {LINE_BYTES_MAX} bytes"), "a longer one")
}

/// The fields of a row of JSON.
pub(super) fn fields(line: &[u8]) -> Result<Fields, Fault> {
    let expected = "a JSON object";
    let text = std::str::from_utf8(line).map_err(|error| Fault::new("UTF-8", error))?;
    match text.trim_start().bytes().next() {
        None => Err(Fault::new(expected, "an empty line")),
        Some(b'{') => serde_json::from_str(text).map_err(|error| Fault::new(expected, error)),
        Some(_) => Err(Fault::new(expected, format!("`{}`", start_of(text.trim())))),
    }
}

/// Enough of a text to recognise it by.
pub(super) fn start_of(text: &str) -> String {
    let mut start: String = text.chars().take(40).collect();
    if start.len() < text.len() {
        start.push('…');
    }
    start
}
