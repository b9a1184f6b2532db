//! `--prompt-data`: which rows of which file.

use std::fmt;
use std::ops::Range;
use std::path::PathBuf;
use std::str::FromStr;

use crate::error::{Error, input};

/// `FILE` or `FILE@[a:b]`, as slime writes it: rows `a` to `b - 1`, counted from 0. A file whose name ends
/// with `.parquet` is Parquet, any other is JSONL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// The file.
    pub path: PathBuf,
    /// Its rows that are used.
    pub rows: Range<u64>,
}

impl FromStr for Source {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let Some((path, range)) = text.rsplit_once("@[") else {
            return Ok(Source { path: text.into(), rows: 0..u64::MAX });
        };
        let number = |text: &str, absent| if text.is_empty() { Some(absent) } else { text.parse().ok() };
        let rows =
            range.strip_suffix(']').and_then(|range| range.split_once(':')).and_then(|(start, end)| {
                let rows = number(start, 0)?..number(end, u64::MAX)?;
                (rows.start < rows.end).then_some(rows)
            });
        let rows = rows.ok_or_else(|| input("slice of a file", "@[a:b] with a < b", format!("`{text}`")))?;
        Ok(Source { path: path.into(), rows })
    }
}

/// As it is written: without a slice for all rows.
impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path.display();
        match (self.rows.start, self.rows.end) {
            (0, u64::MAX) => write!(f, "{path}"),
            (start, u64::MAX) => write!(f, "{path}@[{start}:]"),
            (start, end) => write!(f, "{path}@[{start}:{end}]"),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::path::Path;

    use super::*;

    #[test]
    fn source_with_a_slice_names_its_rows() {
        let parse = |text: &str| text.parse::<Source>().map(|source| source.rows).ok();
        assert_eq!(parse("a.jsonl"), Some(0..u64::MAX));
        assert_eq!(parse("a.jsonl@[3:7]"), Some(3..7));
        assert_eq!(parse("a.jsonl@[:7]"), Some(0..7));
        assert_eq!(parse("a.jsonl@[3:]"), Some(3..u64::MAX));
        for wrong in ["a@[7:3]", "a@[3:3]", "a@[-1:3]", "a@[3]", "a@[3:5", "a@[x:y]"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
        for written in ["a.jsonl", "a.jsonl@[3:7]", "a.jsonl@[0:7]", "a.jsonl@[3:]"] {
            assert_eq!(written.parse::<Source>().unwrap().to_string(), written);
        }
        assert_eq!("a@b.jsonl".parse::<Source>().unwrap().path, Path::new("a@b.jsonl"));
    }
}
