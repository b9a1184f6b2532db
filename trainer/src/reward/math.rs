//! Whether two mathematical answers say the same.

use super::number::value;

/// What the last `\boxed{…}` or `\fbox{…}` of a text holds.
pub(super) fn boxed(text: &str) -> Option<&str> {
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

/// Whether two answers are the same text once they are written alike, the same number, or lists of the same.
pub(super) fn equal(answer: &str, label: &str) -> bool {
    let (answer, label) = (plain(answer), plain(label));
    if answer.is_empty() || label.is_empty() {
        return false;
    }
    if same(&answer, &label) {
        return true;
    }
    let (ours, theirs) = (parts(&answer), parts(&label));
    match (ours, theirs) {
        (Some((open, ours)), Some((other, theirs))) if open == other && ours.len() == theirs.len() => {
            match open {
                // The order of a set says nothing.
                '{' => {
                    let mut left = theirs;
                    ours.iter().all(|part| {
                        let found = left.iter().position(|other| same(part, other));
                        found.map(|at| left.swap_remove(at)).is_some()
                    })
                }
                _ => ours.iter().zip(&theirs).all(|(part, other)| same(part, other)),
            }
        }
        _ => false,
    }
}

fn same(answer: &str, label: &str) -> bool {
    if answer == label {
        return true;
    }
    let close = |a: f64, b: f64| (a - b).abs() <= 1e-9 * a.abs().max(b.abs()).max(1e-9);
    matches!((value(answer), value(label)), (Some(a), Some(b)) if close(a, b))
}

/// A text as it would be typed: no dollars, spaces, sizes of brackets, units or names of what is equal.
fn plain(text: &str) -> String {
    let mut text = text.trim().trim_end_matches(['.', ',', ';']).to_owned();
    for mark in [
        r"\left",
        r"\right",
        r"\!",
        r"\,",
        r"\;",
        r"\:",
        r"\ ",
        "$",
        r"^\circ",
        r"^{\circ}",
        r"\%",
        "%",
        r"\displaystyle",
    ] {
        text = text.replace(mark, "");
    }
    for (from, to) in [
        (r"\dfrac", r"\frac"),
        (r"\tfrac", r"\frac"),
        (r"\cdot", "*"),
        (r"\times", "*"),
        (r"\div", "/"),
        (r"\lbrace", r"\{"),
        (r"\rbrace", r"\}"),
        ("−", "-"),
        ("π", r"\pi"),
        ("√", r"\sqrt"),
        ("∞", r"\infty"),
    ] {
        text = text.replace(from, to);
    }
    for mark in [r"\text", r"\mathrm", r"\mbox", r"\textbf", r"\mathbf"] {
        text = without_command(&text, mark);
    }
    text.retain(|letter| !letter.is_whitespace());
    // `x=5` and `x\in[0,1]` say what follows.
    let named = |mark: &str| {
        let (name, rest) = text.split_once(mark)?;
        let is_name = name.len() <= 4
            && name.chars().all(|letter| letter.is_alphanumeric() || letter == '(' || letter == ')');
        (is_name && !name.starts_with(|letter: char| letter.is_ascii_digit())).then(|| rest.to_owned())
    };
    let text = named("=").or_else(|| named(r"\in")).unwrap_or(text);
    let text = thousands(&text);
    match text.strip_prefix(r"\{").and_then(|inner| inner.strip_suffix(r"\}")) {
        Some(inner) => format!("{{{inner}}}"),
        None => text,
    }
}

/// `\text{abc}` becomes ` abc`, where it is the whole text, else what stands before it: `5 \text{ cm}` is 5.
fn without_command(text: &str, command: &str) -> String {
    let Some((before, rest)) = text.split_once(&format!("{command}{{")) else { return text.to_owned() };
    let Some((inner, after)) = rest.split_once('}') else { return text.to_owned() };
    if before.trim().is_empty() { format!("{inner}{after}") } else { format!("{before}{after}") }
}

/// `1,234,567` becomes `1234567`; other commas stay.
fn thousands(text: &str) -> String {
    let digits = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    let (whole, fraction) = text.split_once('.').map_or((text, None), |(whole, rest)| (whole, Some(rest)));
    let (sign, number) = whole.strip_prefix('-').map_or(("", whole), |rest| ("-", rest));
    let mut groups = number.split(',');
    let first = groups.next().unwrap_or_default();
    let rest: Vec<_> = groups.collect();
    let grouped = !rest.is_empty()
        && digits(first)
        && first.len() <= 3
        && rest.iter().all(|group| digits(group) && group.len() == 3)
        && fraction.is_none_or(digits);
    if !grouped {
        return text.to_owned();
    }
    let fraction = fraction.map_or_else(String::new, |digits| format!(".{digits}"));
    format!("{sign}{first}{}{fraction}", rest.concat())
}

/// The parts of `(a,b)`, `[a,b]` or `{a,b}`, with the bracket that opens them.
fn parts(text: &str) -> Option<(char, Vec<&str>)> {
    let open = text.chars().next()?;
    let close = [('(', ')'), ('[', ']'), ('{', '}')].iter().find(|(known, _)| *known == open)?.1;
    // A half-open interval ends with another bracket, and is compared as text.
    let inner = text.strip_prefix(open)?.strip_suffix(close)?;
    let (mut parts, mut depth, mut start) = (Vec::new(), 0, 0);
    for (at, letter) in inner.char_indices() {
        match letter {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&inner[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&inner[start..]);
    Some((open, parts))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_boxed_last_is_found_with_its_braces() {
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
