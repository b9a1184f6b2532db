//! How results are printed: for people, or as one JSON document a line for scripts.

use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::logs;
use driftless::store::redact;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::io::Write as _;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use tracing::Level;

/// Whether errors are JSON: a signal's thread has to know, too.
static JSON: AtomicBool = AtomicBool::new(false);

/// Where results go.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Output {
    /// JSON instead of text.
    pub(crate) json: bool,
}

impl Output {
    /// For the whole process.
    pub(crate) fn new(json: bool) -> Output {
        JSON.store(json, Relaxed);
        Output { json }
    }

    /// Prints `value` as JSON, or what `text` makes of it.
    pub(crate) fn print<T: Serialize>(self, value: &T, text: impl FnOnce(&T) -> String) -> Result<()> {
        let line = if self.json {
            let line = serde_json::to_string(value)
                .map_err(|source| Error::Json { what: "result".to_owned(), source })?;
            json_escaped(&line)
        } else {
            text(value)
        };
        line_out(line.trim_end())
    }
}

/// Writes a line of results.
pub(crate) fn line_out(line: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).map_err(Error::Output)
}

/// Says why the command ends, with the error's causes, and returns the exit code.
pub(crate) fn fail(error: &Error) -> u8 {
    logs::flush();
    let code = error.exit_code();
    if error.is_closed_pipe() {
        return code;
    }
    let mut causes = Vec::new();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        causes.push(error.to_string());
        cause = error.source();
    }
    let (message, hint) = (error.to_string(), error.hint());
    if JSON.load(Relaxed) {
        write_err(&error_json(code, &message, &causes, hint.as_deref()));
        return code;
    }
    if logs::is_json() {
        tell_error(code, &message, &causes, hint.as_deref());
        return code;
    }
    say(&format!("error: {message}"));
    causes.iter().for_each(|cause| say(&format!("  because: {cause}")));
    hint.iter().for_each(|hint| say(&format!("  hint: {hint}")));
    code
}

/// An error as one line of JSON.
pub(crate) fn error_json(code: u8, message: &str, because: &[String], hint: Option<&str>) -> String {
    json!({ "error": { "code": code, "message": message, "because": because, "hint": hint } }).to_string()
}

/// An error as a line of a log in JSON.
pub(crate) fn tell_error(code: u8, message: &str, because: &[String], hint: Option<&str>) {
    let because: Vec<_> = because.iter().map(|cause| without_secrets(cause)).collect();
    let fields =
        [("code", json!(code)), ("because", json!(because)), ("hint", json!(hint.map(without_secrets)))];
    let fields = fields.map(|(name, value)| (name.to_owned(), value)).into_iter().collect();
    tell(Level::ERROR, message, &fields);
}

/// Says something to whoever still reads standard error.
pub(crate) fn say(line: &str) {
    if logs::is_json() {
        tell(Level::INFO, line, &Map::new());
    } else {
        write_err(line);
    }
}

fn tell(level: Level, message: &str, fields: &Map<String, Value>) {
    let line = logs::object(level, &without_secrets(message), fields);
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// Writes a line to standard error as it is, but for secrets.
pub(crate) fn write_err(line: &str) {
    let _ = writeln!(std::io::stderr(), "{}", without_secrets(line));
}

/// Whether colours are wanted, where there is a terminal: <https://no-color.org>.
pub(crate) fn has_colours() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|no| no.is_empty())
}

/// A text that may repeat what was given, with no URL in it that may hold a secret. Stores name themselves
/// with parameters that hold none.
pub(crate) fn without_secrets(text: &str) -> String {
    let ends = |end: char| end.is_whitespace() || ['\'', '`', '"', ','].contains(&end);
    let is_plain = |url: &str| ["?endpoint=", "?region=", "?account="].iter().any(|name| url.contains(name));
    let may_hold = |url: &str| url.contains('@') || (url.contains('?') && !is_plain(url));
    let word = |word: &str| {
        let url = word.trim_end_matches(ends);
        if url.contains("://") && may_hold(url) { redact(url) + &word[url.len()..] } else { word.to_owned() }
    };
    text.split_inclusive(ends).map(word).collect()
}

/// The text of a line, without what moves a terminal's cursor or turns its writing around.
pub(crate) fn printable(line: &str) -> String {
    escaped(line, |letter| letter.escape_default().to_string())
}

/// JSON that says the same, without what a terminal would obey: such characters stand in its strings alone.
pub(crate) fn json_escaped(line: &str) -> String {
    escaped(line, |letter| format!("\\u{:04x}", u32::from(letter)))
}

/// Characters of what an engine said that go into a line.
const REASON_CHARS: usize = 200;

/// What an engine said, in one line that no terminal obeys.
pub(crate) fn short(text: &str) -> String {
    cut(text, REASON_CHARS)
}

/// At most `chars` characters of a text, in one line that no terminal obeys.
pub(crate) fn cut(text: &str, chars: usize) -> String {
    let shown = text.chars().take(chars).map(|letter| if is_order(letter) { ' ' } else { letter });
    let mut plain: String = shown.collect();
    if text.chars().nth(chars).is_some() {
        plain.pop();
        plain.push('…');
    }
    plain
}

/// A line in which `escape` writes what a terminal would obey.
fn escaped(line: &str, escape: impl Fn(char) -> String) -> String {
    let mut shown = String::with_capacity(line.len());
    for letter in line.chars() {
        if is_order(letter) { shown += &escape(letter) } else { shown.push(letter) }
    }
    shown
}

/// Whether a terminal obeys a character: it moves the cursor or turns the writing around.
fn is_order(letter: char) -> bool {
    let turns = matches!(letter, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    letter.is_control() || turns
}

/// A table with a header and aligned columns.
pub(crate) fn table(header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let header = header.iter().map(|name| (*name).to_owned()).collect();
    let rows: Vec<Vec<String>> = std::iter::once(header).chain(rows).collect();
    let mut widths = vec![0; rows[0].len()];
    for row in &rows {
        widths.iter_mut().zip(row).for_each(|(width, text)| *width = text.chars().count().max(*width));
    }
    let line = |row: &Vec<String>| {
        let padded = row.iter().zip(&widths).map(|(text, width)| format!("{text:width$}"));
        padded.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// Columns of what is printed: as many as its terminal has, and at most as many as a line has off one.
pub(crate) fn columns() -> usize {
    const MOST: usize = 100;
    const LEAST: usize = 20;
    let size = rustix::termios::tcgetwinsize(std::io::stdout());
    size.map_or(
        MOST,
        |size| if size.ws_col == 0 { MOST } else { usize::from(size.ws_col).clamp(LEAST, MOST) },
    )
}

/// A line in lines of at most so many columns; those behind the first are indented a little further than it.
pub(crate) fn folded(line: &str, columns: usize) -> Vec<String> {
    if line.chars().count() <= columns {
        return vec![line.to_owned()];
    }
    let text = line.trim_start_matches(' ');
    let indent = (line.len() - text.len()).min(columns / 2);
    let mut lines = wrapped(text.split_whitespace(), columns - indent, 2);
    lines.iter_mut().for_each(|line| line.insert_str(0, &" ".repeat(indent)));
    lines
}

/// Parts that belong together in lines of at most so many columns; all lines but the first are indented. A part that has
/// no room in one is taken apart at its spaces, and a word that has none anywhere.
pub(crate) fn wrapped<'a>(
    parts: impl IntoIterator<Item = &'a str>,
    columns: usize,
    indent: usize,
) -> Vec<String> {
    let room = columns.saturating_sub(indent).max(1);
    let is_long = |text: &str| text.chars().count() > room;
    let words = |part: &'a str| part.split(if is_long(part) { &[' '][..] } else { &[] });
    let (mut lines, mut length) = (vec![String::new()], 0);
    for part in parts.into_iter().flat_map(words) {
        for piece in pieces(part, room) {
            let more = piece.chars().count();
            let is_first = length == 0;
            if !is_first && length + 1 + more > columns {
                lines.push(" ".repeat(indent) + &piece);
                length = indent + more;
            } else if let Some(line) = lines.last_mut() {
                line.push_str(if is_first { "" } else { " " });
                line.push_str(&piece);
                length += usize::from(!is_first) + more;
            }
        }
    }
    lines
}

/// A word in pieces of at most so many characters.
fn pieces(word: &str, chars: usize) -> Vec<String> {
    let letters: Vec<char> = word.chars().collect();
    letters.chunks(chars).map(|piece| piece.iter().collect()).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn parts_that_have_no_room_go_into_indented_lines() {
        let parts = ["one two", "three", "four five six seven", "abcdefghijklmno"];
        let lines = super::wrapped(parts, 12, 2);
        assert_eq!(lines, ["one two", "  three four", "  five six", "  seven", "  abcdefghij", "  klmno"]);
        assert_eq!(super::wrapped(["a b", "c"], 100, 4), ["a b c"]);
        assert_eq!(super::wrapped(["ab"], 1, 4), ["a", "    b"]);
        assert_eq!(super::wrapped([], 10, 2), [""]);
    }

    #[test]
    fn urls_with_secrets_are_cut_and_others_are_not() {
        let cut =
            super::without_secrets("a `http://u:hidden@h:1`: 'http://h/?k=hidden'\n s3://b?region=r, c@d?");
        assert_eq!(cut, "a `http://…@h:1`: 'http://h/'\n s3://b?region=r, c@d?");
    }

    #[test]
    fn printable_has_no_controls() {
        let line = super::printable("a\u{1b}[2Jé\t\u{202e}b");
        assert_eq!(line, "a\\u{1b}[2Jé\\t\\u{202e}b");
    }

    #[test]
    fn cut_text_has_its_length_and_no_controls() {
        assert_eq!(super::cut("a\u{1b}[2J\nb\u{202e}", 7), "a [2J …");
        assert_eq!(super::cut("héllo", 5), "héllo");
        assert_eq!(super::short(&"x".repeat(201)), "x".repeat(199) + "…");
    }

    #[test]
    fn json_escapes_what_a_terminal_obeys_and_stays_the_same_text() {
        let said = "a\u{9b}2J\u{7f}é\u{202e}b";
        let line = serde_json::to_string(said).expect("JSON");
        let line = super::json_escaped(&line);
        assert_eq!(line, r#""a\u009b2J\u007fé\u202eb""#);
        assert_eq!(serde_json::from_str::<String>(&line).expect("JSON"), said);
    }

    #[test]
    fn columns_line_up() {
        let rows = [vec!["1".to_owned(), "full".to_owned()], vec!["1000".to_owned(), "delta".to_owned()]];
        let table = super::table(&["version", "kind"], rows);
        assert_eq!(table, "version  kind\n1        full\n1000     delta");
    }
}
