//! Rows of data files, each a map from field names to JSON text.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use driftless_store::os::regular;
use serde_json::value::RawValue;

#[cfg(feature = "parquet")]
use super::parquet;
use super::source::Source;
use crate::error::{Result, input, io, short};

/// Most bytes of a line.
const LINE_BYTES_MAX: u64 = 64 << 20;

/// A row's fields, as the JSON text they are in: order and spelling of what is in them are kept.
pub(super) type Fields = BTreeMap<String, Box<RawValue>>;

/// The fields that are read of a row.
#[cfg_attr(not(feature = "parquet"), allow(dead_code, reason = "lines of JSON are read whole"))]
#[derive(Default)]
pub(super) struct Wanted<'a> {
    /// Each row has them.
    pub(super) required: Vec<&'a str>,
    /// Rows may lack them.
    pub(super) optional: Vec<&'a str>,
    /// Whatever they have.
    pub(super) all: bool,
}

/// Why a row is not trained on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Why {
    /// It is no prompt.
    #[error("expected {expected}, found {found}")]
    Bad {
        /// What a row has to be.
        expected: String,
        /// What this one is.
        found: String,
    },
    /// Its prompt has too many tokens.
    #[error("a prompt of {tokens} tokens, of which {limit} are allowed")]
    TooLong {
        /// Tokens of the prompt.
        tokens: usize,
        /// Tokens that it may have.
        limit: usize,
    },
}

impl Why {
    pub(super) fn bad(expected: impl ToString, found: impl ToString) -> Self {
        Why::Bad { expected: expected.to_string(), found: found.to_string() }
    }
}

/// A row as it was read; `line` counts from 1.
pub(super) struct Row {
    pub(super) line: u64,
    pub(super) fields: Result<Fields, Why>,
}

/// Calls `take` for each row that `source` names, in order. Only the fields in `wanted` are read where the
/// format allows it.
pub(super) fn each(source: &Source, wanted: &Wanted<'_>, take: impl FnMut(Row) -> Result<()>) -> Result<()> {
    let file = regular::open(&source.path).map_err(io("open", &source.path))?;
    match source.path.extension().is_some_and(|name| name == "parquet") {
        #[cfg(feature = "parquet")]
        true => parquet::each(source, file, wanted, take),
        #[cfg(not(feature = "parquet"))]
        true => {
            let _ = wanted;
            Err(input(source.path.display(), "JSONL, as this build lacks the feature `parquet`", "Parquet"))
        }
        false => lines(source, file, take),
    }
}

fn lines(source: &Source, file: File, mut take: impl FnMut(Row) -> Result<()>) -> Result<()> {
    let mut reader = BufReader::with_capacity(1 << 20, file);
    let start = reader.fill_buf().map_err(io("read", &source.path))?;
    if let Some(found) = other_format(&source.path, start) {
        return Err(input(source.path.display(), "JSONL or Parquet", found));
    }
    let mut bytes = Vec::new();
    for number in 0..source.rows.end {
        bytes.clear();
        let read = (&mut reader).take(LINE_BYTES_MAX).read_until(b'\n', &mut bytes);
        if read.map_err(io("read", &source.path))? == 0 {
            break;
        }
        if bytes.len() as u64 == LINE_BYTES_MAX && bytes.last() != Some(&b'\n') {
            let what = format!("{}:{}", source.path.display(), number + 1);
            return Err(input(what, format!("a line of fewer than {LINE_BYTES_MAX} bytes"), "a longer one"));
        }
        if number >= source.rows.start {
            take(Row { line: number + 1, fields: fields(&bytes) })?;
        }
    }
    Ok(())
}

/// What a file is by its first bytes and its name, if it is no JSONL.
fn other_format(path: &Path, start: &[u8]) -> Option<String> {
    let is_jsonl = path.extension().is_some_and(|name| name == "jsonl" || name == "ndjson");
    let line = String::from_utf8_lossy(start.split(|byte| *byte == b'\n').next().unwrap_or_default());
    let found = match start {
        [0x1f, 0x8b, ..] => "gzip; unpack it",
        [0x28, 0xb5, 0x2f, 0xfd, ..] => "zstd; unpack it",
        [b'P', b'A', b'R', b'1', ..] => "Parquet; give it a name that ends with .parquet",
        [0xef, 0xbb, 0xbf, ..] => "a byte-order mark before the first line; remove these three bytes",
        _ if line.trim().starts_with('[') => {
            "a JSON list; write its elements one a line, as `jq -c '.[]'` does"
        }
        _ if is_jsonl || line.trim().is_empty() || line.trim().starts_with('{') => return None,
        _ => return Some(format!("`{}`", short(line.trim()))),
    };
    Some(found.to_owned())
}

/// The fields of a row of JSON.
pub(super) fn fields(line: &[u8]) -> Result<Fields, Why> {
    let expected = "a JSON object";
    let text = std::str::from_utf8(line).map_err(|error| Why::bad("UTF-8", error))?;
    match text.trim_start().bytes().next() {
        None => Err(Why::bad(expected, "an empty line")),
        Some(b'{') => serde_json::from_str(text.trim_end()).map_err(|error| Why::bad(expected, said(&error))),
        Some(_) => Err(Why::bad(expected, format!("`{}`", short(text.trim())))),
    }
}

/// What is wrong with the JSON of a row. The row's line stands beside it, so only the column is named.
pub(super) fn said(error: &serde_json::Error) -> String {
    let text = error.to_string();
    match text.rsplit_once(" at line ") {
        Some((what, _)) => format!("{} at column {}", short(what), error.column()),
        None => short(&text),
    }
}
