//! What every Rust file keeps: short functions, parameters with names, short names of tests.

use crate::error::{Error, Result, expect_none};
use crate::process;
use std::path::Path;
use std::process::Command;

/// Lines of code that a function may have, from its `fn` to its last brace; tests may have more.
const FUNCTION_LINES_MAX: usize = 60;
/// Letters that the name of a test may have.
const TEST_NAME_MAX: usize = 60;

/// Checks all tracked Rust files.
pub(crate) fn check(root: &Path) -> Result<()> {
    let tracked =
        process::output(Command::new("git").current_dir(root).args(["ls-files", "--cached", "*.rs"]))?;
    let mut wrong = Vec::new();
    for path in tracked.lines().filter(|path| !path.ends_with("bindings.rs") && root.join(path).exists()) {
        let text = std::fs::read_to_string(root.join(path)).map_err(Error::io(path))?;
        wrong.extend(check_file(path, &text));
    }
    let expected = format!(
        "functions of at most {FUNCTION_LINES_MAX} lines, parameters with names, names of tests of at most \
         {TEST_NAME_MAX} letters"
    );
    expect_none(&wrong, "style", &expected)
}

fn check_file(path: &str, text: &str) -> Vec<String> {
    let lines: Vec<&str> = text.lines().collect();
    // A bench is read from top to bottom, as a test is.
    let in_tests = path.split('/').any(|part| ["tests", "tests.rs", "benches"].contains(&part));
    let tests_begin = lines.windows(2).position(|pair| pair == ["#[cfg(test)]", "mod tests {"]);
    let mut wrong = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        let Some(name) = function(line) else { continue };
        let mut say = |what: String| wrong.push(format!("{path}:{}: `{name}` {what}", index + 1));
        let is_test = index > 0 && lines[..index].iter().rev().take(4).any(|above| above.contains("#[test]"));
        if is_test && name.len() > TEST_NAME_MAX {
            say(format!("has a name of {} letters", name.len()));
        }
        if parameters(&lines[index..]).any(|parameter| parameter.starts_with('(')) {
            say("takes a tuple apart among its parameters: give it a type, or two parameters".to_owned());
        }
        let long = code_lines_of(&lines[index..]);
        if !in_tests && tests_begin.is_none_or(|begin| index < begin) && long > FUNCTION_LINES_MAX {
            say(format!("has {long} lines"));
        }
    }
    wrong
}

/// The name of the function that begins in this line.
fn function(line: &str) -> Option<&str> {
    let code = line.trim_start();
    let at = code.find("fn ")?;
    let words = |word: &str| {
        matches!(word, "pub" | "const" | "async" | "unsafe" | "extern" | "\"C\"") || word.starts_with("pub(")
    };
    if !code[..at].split_whitespace().all(words) {
        return None;
    }
    let name = &code[at + 3..];
    let end = name.find(|letter: char| !letter.is_alphanumeric() && letter != '_')?;
    (end > 0).then(|| &name[..end])
}

/// The parameters of the function that begins in the first line.
fn parameters<'a>(lines: &[&'a str]) -> impl Iterator<Item = String> + use<'a> {
    let text = lines.iter().take(40).flat_map(|line| [line.trim(), " "]).collect::<String>();
    let begin = text.find("fn ").unwrap_or_default();
    let mut found = vec![String::new()];
    let (mut round, mut angle) = (0_i32, 0_i32);
    let mut before = ' ';
    for letter in text[begin..].chars() {
        match letter {
            '<' => angle += 1,
            '>' if before != '-' && before != '=' => angle -= 1,
            '(' | '[' if round > 0 || angle == 0 => round += 1,
            ')' | ']' if round > 0 => round -= 1,
            _ => {}
        }
        if round == 0 && matches!(letter, ')' | '{' | ';') {
            break;
        }
        let opened = round == 1 && letter == '(' && found.len() == 1 && found[0].is_empty();
        if letter == ',' && round == 1 && angle <= 0 {
            found.push(String::new());
        } else if let Some(parameter) = found.last_mut().filter(|_| round > 0 && !opened) {
            parameter.push(letter);
        }
        before = letter;
    }
    found.into_iter().map(|parameter| parameter.trim().to_owned())
}

/// Lines of code of the function that begins in the first line, as rustfmt lays them out.
fn code_lines_of(lines: &[&str]) -> usize {
    let indent = lines[0].len() - lines[0].trim_start().len();
    let ends = |line: &&str| line.len() == indent + 1 && line.trim_start() == "}";
    if lines[0].ends_with(['}', ';']) {
        return 1;
    }
    let Some(end) = lines.iter().position(ends) else { return 1 };
    let is_code = |line: &&&str| !line.trim().is_empty() && !line.trim_start().starts_with("//");
    lines[..=end].iter().filter(is_code).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, text: &str) -> usize {
        check_file(path, text).len()
    }

    #[test]
    fn tuple_parameters_are_found_in_any_place() {
        assert_eq!(found("a.rs", "fn a((b, c): (u8, u8)) {}\n"), 1);
        assert_eq!(
            found("a.rs", "pub(crate) fn a<T: Into<u8>>(\n    b: T,\n    (c, d): (u8, u8),\n) {\n}\n"),
            1
        );
        assert_eq!(found("a.rs", "fn a(b: (u8, u8), c: impl Fn(u8) -> (u8, u8)) -> (u8, u8) {}\n"), 0);
        assert_eq!(found("a.rs", "let a = x.map(|(b, c)| b + c);\nfn d(e: HashMap<u8, (u8, u8)>) {}\n"), 0);
    }

    #[test]
    fn long_functions_are_found_outside_of_tests() {
        let long = format!("    fn a() {{\n{}    }}\n", "        let b = 1;\n".repeat(59));
        assert_eq!(found("src/a.rs", &long), 1);
        assert_eq!(found("tests/a.rs", &long), 0);
        assert_eq!(found("src/a.rs", &format!("#[cfg(test)]\nmod tests {{\n{long}}}\n")), 0);
        let commented = long.replace("        let b = 1;\n", "        // Why.\n\n        let b = 1;\n");
        assert_eq!(check_file("src/a.rs", &commented), ["src/a.rs:1: `a` has 61 lines"]);
        let short = format!("fn a() {{\n{}}}\n", "    let b = 1;\n".repeat(58));
        assert_eq!(found("src/a.rs", &short), 0);
    }

    #[test]
    fn long_names_of_tests_are_found() {
        let text = |letters| format!("    #[test]\n    fn {}() {{}}\n", "a".repeat(letters));
        assert_eq!((found("tests/a.rs", &text(60)), found("tests/a.rs", &text(61))), (0, 1));
        assert_eq!(found("src/a.rs", &format!("fn {}() {{}}\n", "a".repeat(61))), 0);
    }
}
