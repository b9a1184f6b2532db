//! How results are printed: for people, or as one JSON document a line for scripts.

use crate::cli::error::{Error, Result};
use serde::Serialize;

/// Where results go.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Output {
    /// JSON instead of text.
    pub(crate) json: bool,
}

impl Output {
    /// Prints `value` as JSON, or what `text` makes of it.
    pub(crate) fn print<T: Serialize>(self, value: &T, text: impl FnOnce(&T) -> String) -> Result<()> {
        let line = if self.json {
            serde_json::to_string(value)
                .map_err(|source| Error::Json { what: "result".to_owned(), source })?
        } else {
            text(value)
        };
        println!("{}", line.trim_end());
        Ok(())
    }
}

/// A table with a header and aligned columns.
pub(crate) fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let cell = |row: &[String], column: usize| row.get(column).map_or(0, |text| text.chars().count());
    let widths: Vec<usize> = (0..header.len())
        .map(|column| {
            rows.iter().map(|row| cell(row, column)).chain([header[column].len()]).max().unwrap_or(0)
        })
        .collect();
    let line = |cells: Vec<&str>| {
        let padded: Vec<_> =
            cells.iter().zip(&widths).map(|(text, width)| format!("{text:width$}")).collect();
        padded.join("  ").trim_end().to_owned()
    };
    let mut lines = vec![line(header.to_vec())];
    lines.extend(rows.iter().map(|row| line(row.iter().map(String::as_str).collect())));
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    #[test]
    fn columns_line_up() {
        let rows = [vec!["1".to_owned(), "full".to_owned()], vec!["1000".to_owned(), "delta".to_owned()]];
        let table = super::table(&["version", "kind"], &rows);
        assert_eq!(table, "version  kind\n1        full\n1000     delta");
    }
}
