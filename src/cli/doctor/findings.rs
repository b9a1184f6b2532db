//! What was found and what to do, and how it is shown. Texts may be others': no terminal obeys them.

use crate::cli::shared::output::{columns, cut, folded};
use serde::Serialize;

/// Before what was found: the name and the state.
const INDENT: usize = 22;
/// Columns below which what was found has lines of its own, and what these begin with.
const NARROW: usize = 60;
const NARROW_INDENT: usize = 4;
/// Most characters of one text.
const CHARS: usize = 800;

/// How bad it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum State {
    Ok,
    /// A run works, but something is slow or cannot be used.
    Note,
    /// A run that needs this does not work.
    Problem,
}

/// One line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    group: &'static str,
    name: &'static str,
    pub(super) state: State,
    pub(super) found: String,
    /// What to do; of all that is not ok.
    pub(super) advice: Option<String>,
}

/// A heading, which makes the findings below it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Group(pub(super) &'static str);

impl Group {
    pub(super) fn ok(self, name: &'static str, found: impl Into<String>) -> Finding {
        Finding { group: self.0, name, state: State::Ok, found: found.into(), advice: None }
    }

    pub(super) fn note(
        self,
        name: &'static str,
        found: impl Into<String>,
        advice: impl Into<String>,
    ) -> Finding {
        Finding { state: State::Note, advice: Some(advice.into()), ..self.ok(name, found) }
    }

    pub(super) fn problem(
        self,
        name: &'static str,
        found: impl Into<String>,
        advice: impl Into<String>,
    ) -> Finding {
        Finding { state: State::Problem, advice: Some(advice.into()), ..self.ok(name, found) }
    }
}

/// All that was found.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) findings: Vec<Finding>,
    pub(super) problems: usize,
    pub(super) notes: usize,
}

impl Report {
    pub(super) fn new(findings: Vec<Finding>) -> Report {
        let count = |state| findings.iter().filter(|finding| finding.state == state).count();
        let (problems, notes) = (count(State::Problem), count(State::Note));
        Report { findings, problems, notes }
    }

    /// Lines under headings, and a sum.
    pub(super) fn text(&self) -> String {
        self.text_in(columns())
    }

    fn text_in(&self, columns: usize) -> String {
        let mut lines = Vec::new();
        let mut group = "";
        for finding in &self.findings {
            if finding.group != group {
                group = finding.group;
                lines.extend((!lines.is_empty()).then(String::new));
                lines.push(group.to_owned());
            }
            lines.append(&mut finding.lines(columns));
        }
        let sum = format!("{}, {}", counted(self.problems, "problem"), counted(self.notes, "note"));
        lines.extend([String::new(), sum]);
        lines.join("\n")
    }
}

impl Finding {
    fn lines(&self, columns: usize) -> Vec<String> {
        let state = match self.state {
            State::Ok => "ok",
            State::Note => "note",
            State::Problem => "problem",
        };
        let advice = self.advice.as_ref().map(|advice| format!("do: {advice}"));
        let texts = std::iter::once(&self.found).chain(&advice);
        if columns < NARROW {
            let texts = texts.flat_map(|text| wrapped(&cut(text, CHARS), NARROW_INDENT, columns));
            let texts = texts.flat_map(|line| folded(&line, columns));
            return std::iter::once(format!("  {} {state}", self.name)).chain(texts).collect();
        }
        let mut lines: Vec<_> = texts.flat_map(|text| wrapped(&cut(text, CHARS), INDENT, columns)).collect();
        if let Some(first) = lines.first_mut() {
            first.replace_range(..INDENT, &format!("  {:<11}{state:<9}", self.name));
        }
        lines
    }
}

/// A text in lines of at most so many columns, unless a word is longer.
fn wrapped(text: &str, indent: usize, columns: usize) -> Vec<String> {
    let length = indent;
    let indent = " ".repeat(length);
    let mut lines = vec![indent.clone()];
    for word in text.split_whitespace() {
        let room = columns.saturating_sub(lines.last().map_or(0, |line| line.chars().count()));
        let is_first = lines.last().is_some_and(|line| line.len() == length);
        if !is_first && room <= word.chars().count() {
            lines.push(indent.clone());
        }
        if let Some(line) = lines.last_mut() {
            if line.len() > length {
                line.push(' ');
            }
            line.push_str(word);
        }
    }
    lines
}

fn counted(number: usize, what: &str) -> String {
    match number {
        0 => format!("no {what}"),
        1 => format!("1 {what}"),
        number => format!("{number} {what}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_stand_under_headings_with_what_to_do() {
        let (build, store) = (Group("build"), Group("store"));
        let report = Report::new(vec![
            build.ok("release", "1"),
            build.note("libtorch", "none", "install it"),
            store.problem("reach", "a\u{1b}[2Jb", "x ".repeat(60)),
        ]);
        assert_eq!((report.problems, report.notes), (1, 1));
        let text = report.text_in(100);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(
            lines[..6],
            [
                "build",
                "  release    ok       1",
                "  libtorch   note     none",
                "                      do: install it",
                "",
                "store",
            ]
        );
        assert_eq!(lines[6], "  reach      problem  a [2Jb");
        assert!(lines[7].starts_with("                      do: x x") && lines[8].ends_with("x"), "{text}");
        assert!(lines.iter().all(|line| line.chars().count() <= 100), "{text}");
        assert_eq!(lines.last(), Some(&"1 problem, 1 note"));
    }

    #[test]
    fn long_words_stay_whole_and_long_texts_end() {
        let url = "u".repeat(120);
        assert_eq!(wrapped(&format!("a {url} b"), INDENT, 100).len(), 3);
        let finding = Group("g").ok("n", "y".repeat(CHARS + 1));
        assert!(finding.lines(100)[0].ends_with("y…"));
    }

    #[test]
    fn narrow_terminal_has_findings_below_their_names() {
        let found =
            Group("engines").problem("engine", format!("http://{}", "u".repeat(60)), "start it ".repeat(9));
        let text = Report::new(vec![found]).text_in(40);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[..2], ["engines", "  engine problem"]);
        assert!(lines[2].starts_with("    http://u") && text.contains("    do: start it"), "{text}");
        assert!(lines.iter().all(|line| line.chars().count() <= 40), "{text}");
    }
}
