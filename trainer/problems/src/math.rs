//! Whether two mathematical answers say the same.

use std::sync::LazyLock;

use regex::Regex;

pub use crate::number::value;
use crate::number::value_at;

/// Values of variables at which two expressions are compared.
const POINTS: u64 = 3;

/// What the last `\boxed{…}` or `\fbox{…}` of a text holds.
#[must_use]
pub fn boxed(text: &str) -> Option<&str> {
    let marks = [r"\boxed", r"\fbox"];
    let start = marks.iter().filter_map(|mark| text.rfind(mark).map(|at| at + mark.len())).max()?;
    let rest = text[start..].trim_start();
    // `\boxed 7` holds one word.
    let Some(inner) = rest.strip_prefix('{') else {
        return rest.split([' ', '$', '\n', '.']).next().filter(|word| !word.is_empty());
    };
    let mut depth = 1;
    for (at, letter) in inner.char_indices() {
        match letter {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(inner[..at].trim());
        }
    }
    None
}

/// Whether two answers are the same text once they are written alike, expressions of one value, or lists of
/// the same. Variables are compared at some values of theirs.
#[must_use]
pub fn equal(answer: &str, label: &str) -> bool {
    let (answer, label) = (plain(answer), plain(label));
    !answer.is_empty() && !label.is_empty() && alike(&answer, &label)
}

fn alike(answer: &str, label: &str) -> bool {
    if same(answer, label) {
        return true;
    }
    let (Some(ours), Some(theirs)) = (List::of(answer), List::of(label)) else { return false };
    if ours.parts.len() != theirs.parts.len() {
        return false;
    }
    let ordered = |list: &List<'_>| matches!(list.brackets, Some(('(' | '[', _)));
    match (ordered(&ours), ordered(&theirs)) {
        (true, true) => {
            let same_brackets = ours.brackets == theirs.brackets;
            same_brackets && ours.parts.iter().zip(&theirs.parts).all(|(part, other)| alike(part, other))
        }
        // The order of a set says nothing.
        (false, false) => {
            let mut left = theirs.parts;
            ours.parts.iter().all(|part| {
                let found = left.iter().position(|other| alike(part, other));
                found.map(|at| left.swap_remove(at)).is_some()
            })
        }
        _ => false,
    }
}

fn same(answer: &str, label: &str) -> bool {
    if answer == label {
        return true;
    }
    let (ours, our_percent) = unit_of(answer);
    let (theirs, their_percent) = unit_of(label);
    let close = |a: f64, b: f64| {
        let larger = a.abs().max(b.abs());
        // Six decimals, as math-verify compares; fewer where numbers are small, and what f64 loses.
        (a - b).abs() <= (2e-6 * larger).min(5e-7).max(1e-12 * larger)
    };
    (0..POINTS).all(|point| {
        let (Some(a), Some(b)) = (value_at(ours, point), value_at(theirs, point)) else { return false };
        // Labels use `50%` for 50 and for 0.5.
        close(a, b) || our_percent && close(a / 100.0, b) || their_percent && close(a, b / 100.0)
    })
}

/// An expression without a percent sign or a unit behind it, and whether there was that sign.
fn unit_of(text: &str) -> (&str, bool) {
    if let Some(number) = text.strip_suffix('%') {
        return (number, true);
    }
    // A word behind a number is a unit; one or two letters are variables.
    let number = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let is_unit =
        text.len() - number.len() > 2 && number.ends_with(|last: char| last.is_ascii_digit() || last == '}');
    (if is_unit { number } else { text }, false)
}

/// The parts of `(a,b)`, `[a,b)`, `{a,b}`, or of a list without brackets.
struct List<'a> {
    /// None where there are none, and for unions of intervals.
    brackets: Option<(char, char)>,
    parts: Vec<&'a str>,
}

impl<'a> List<'a> {
    fn of(text: &'a str) -> Option<Self> {
        let union = split(text, r"\cup");
        if union.len() > 1 {
            return Some(List { brackets: None, parts: union });
        }
        let bare = split(text, ",");
        if bare.len() > 1 {
            return Some(List { brackets: None, parts: bare });
        }
        let (open, close) = (text.chars().next()?, text.chars().next_back()?);
        let inner = text.get(open.len_utf8()..text.len().checked_sub(close.len_utf8())?)?;
        let list = matches!((open, close), ('(' | '[', ')' | ']') | ('{', '}'));
        list.then(|| List { brackets: Some((open, close)), parts: split(inner, ",") })
    }
}

/// Splits at a mark that stands in no bracket. Half-open intervals close with another one.
fn split<'a>(text: &'a str, mark: &str) -> Vec<&'a str> {
    let (mut parts, mut depth, mut start, mut at) = (Vec::new(), 0_i32, 0, 0);
    while let Some(letter) = text[at..].chars().next() {
        match letter {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            _ if depth == 0 && text[at..].starts_with(mark) => {
                parts.push(&text[start..at]);
                start = at + mark.len();
            }
            _ => {}
        }
        at += letter.len_utf8();
    }
    parts.push(&text[start.min(text.len())..]);
    parts
}

/// A text as it would be typed: no dollars, spaces, sizes of brackets or names of what is equal.
fn plain(text: &str) -> String {
    let mut text = text.trim().trim_end_matches(['.', ',', ';']).to_owned();
    for gone in
        [r"\left", r"\right", r"\!", r"\,", r"\;", r"\:", r"\ ", r"\$", "$", r"^\circ", r"^{\circ}", "°"]
    {
        text = text.replace(gone, "");
    }
    for (from, to) in [
        (r"\%", "%"),
        (r"\displaystyle", ""),
        (r"\dfrac", r"\frac"),
        (r"\tfrac", r"\frac"),
        (r"\cdot", "*"),
        (r"\times", "*"),
        (r"\div", "/"),
        (r"\lbrace", r"\{"),
        (r"\rbrace", r"\}"),
        (r"\lvert", "|"),
        (r"\rvert", "|"),
        ("−", "-"),
        ("π", r"\pi"),
        ("√", r"\sqrt"),
        ("∞", r"\infty"),
        ("∪", r"\cup"),
        (r"\text{ or }", ","),
        (r"\text{ and }", ","),
        (" or ", ","),
        (" and ", ","),
    ] {
        text = text.replace(from, to);
    }
    for mark in [r"\text", r"\mathrm", r"\mbox", r"\textbf", r"\mathbf"] {
        text = without_command(&text, mark);
    }
    text.retain(|letter| !letter.is_whitespace());
    let text = text.replace(r"\{", "{").replace(r"\}", "}");
    let named: Vec<String> = split(&thousands(&text), ",").into_iter().map(unnamed).collect();
    let text = named.join(",");
    match text.strip_prefix(r"\pm") {
        Some(number) => format!("{number},-{number}"),
        None => text,
    }
}

/// `5` of `x=5`, `5=x` and `x\in5`.
fn unnamed(text: &str) -> String {
    let is_name = |name: &str| {
        (1..=4).contains(&name.len())
            && name.starts_with(|letter: char| letter.is_ascii_alphabetic())
            && name.chars().all(|letter| letter.is_alphanumeric() || "()_".contains(letter))
    };
    for mark in ["=", r"\in"] {
        match text.split_once(mark) {
            // `\infty` begins with `\in`.
            Some((name, rest)) if is_name(name) && !(mark == r"\in" && rest.starts_with("fty")) => {
                return rest.to_owned();
            }
            Some((rest, name)) if mark == "=" && is_name(name) => return rest.to_owned(),
            _ => {}
        }
    }
    text.to_owned()
}

/// `\text{abc}` becomes ` abc`, where it is the whole text, else what stands before it: `5 \text{ cm}` is 5.
fn without_command(text: &str, command: &str) -> String {
    let Some((before, rest)) = text.split_once(&format!("{command}{{")) else { return text.to_owned() };
    let Some((inner, after)) = rest.split_once('}') else { return text.to_owned() };
    if before.trim().is_empty() { format!("{inner}{after}") } else { format!("{before}{after}") }
}

/// A number with commas between its thousands.
static GROUPED: LazyLock<Option<Regex>> =
    LazyLock::new(|| Regex::new(r"^-?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]+)?$").ok());

/// `1,234,567` becomes `1234567`; other commas stay.
fn thousands(text: &str) -> String {
    let grouped = GROUPED.as_ref().is_some_and(|grouped| grouped.is_match(text));
    if grouped { text.replace(',', "") } else { text.to_owned() }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn last_boxed_text_is_found_with_its_braces() {
        assert_eq!(boxed(r"\boxed{1} \boxed{\frac{1}{2}}."), Some(r"\frac{1}{2}"));
        assert_eq!(boxed(r"$\boxed 7$"), Some("7"));
        assert_eq!(boxed(r"\fbox{a}"), Some("a"));
        assert_eq!(boxed(r"\boxed{1"), None);
        assert_eq!(boxed("none"), None);
    }

    #[test]
    fn answers_that_say_the_same_are_equal() {
        let pairs = [
            ("0.5", r"\frac{1}{2}"),
            (r"\dfrac12", "1/2"),
            ("1,234,567", "1234567"),
            ("$-3$", "−3"),
            ("x = 5", "5"),
            (r"5\text{ cm}", "5"),
            (r"\text{Monday}", "Monday"),
            (r"\sqrt{8}", r"2\sqrt{2}"),
            (r"2\pi", r"\pi*2"),
            ("(1, 2)", r"\left(1,\frac{4}{2}\right)"),
            (r"\{1,2\}", r"\{2,1\}"),
            ("50%", r"50\%"),
            ("2^{10}", "1024"),
            ("90^\\circ", "90"),
            ("007", "7"),
            ("1e3", "1000"),
            ("[0,1)", "[0, 1)"),
        ];
        for (a, b) in pairs {
            assert!(equal(a, b) && equal(b, a), "{a} and {b}");
        }
    }

    /// Made and checked by `tests/math/pairs.py`.
    #[test]
    fn verdicts_are_those_of_math_verify() {
        let (mut pairs, mut other) = (0, Vec::new());
        for line in include_str!("../../tests/math/pairs.jsonl").lines() {
            let pair: serde_json::Value = serde_json::from_str(line).unwrap();
            let text = |name: &str| pair[name].as_str().unwrap();
            let ours = equal(text("answer"), text("label"));
            pairs += 1;
            if Some(ours) != pair["equal"].as_bool() {
                other.push(format!("{line}, here {ours}"));
            }
        }
        assert!(pairs >= 1000 && other.is_empty(), "{} of {pairs}:\n{}", other.len(), other.join("\n"));
    }

    #[test]
    fn answers_that_differ_are_not_equal() {
        let pairs = [
            ("0.5", "0.51"),
            ("", ""),
            ("12", "1,2"),
            ("(1,2)", "(2,1)"),
            ("(1,2)", "[1,2]"),
            ("(1,2)", "(1,2,3)"),
            ("1/0", "1/0.0"),
            ("x", "y"),
            (r"\sqrt{2}", "1.41"),
            ("1/3", "0.333"),
            (r"\{1,1\}", r"\{1,2\}"),
        ];
        for (a, b) in pairs {
            assert!(!equal(a, b), "{a} and {b}");
        }
    }
}
