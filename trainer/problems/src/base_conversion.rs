//! A number in another base.

use serde_json::Value;

use super::{Draw, Kind, Problem};

pub(super) const KIND: Kind = Kind {
    name: "base_conversion",
    what: "a number in base 2, then in bases up to 16; of three more bits at each difficulty",
    draw,
    right,
};

fn draw(draw: &mut Draw, difficulty: u32) -> Problem {
    let number = draw.number(2..=(1 << (3 * difficulty)) - 1);
    let base = if difficulty == 1 { 2 } else { draw.number(2..=16) };
    let answer = digits(number, base);
    Problem {
        question: format!("Write the decimal number {number} in base {base}. Answer with its digits only."),
        label: answer.clone().into(),
        answer,
    }
}

fn digits(number: i64, base: i64) -> String {
    let digit = |value: i64| char::from_digit((value % base) as u32, base as u32).unwrap_or('?');
    if number < base {
        digit(number).into()
    } else {
        format!("{}{}", digits(number / base, base), digit(number))
    }
}

/// The last word, without `0b`, `0x` and leading zeros.
fn right(label: &Value, said: &str) -> bool {
    let word = said.split_whitespace().next_back().unwrap_or_default().to_ascii_lowercase();
    let word = word.trim_matches(|letter: char| !letter.is_ascii_alphanumeric());
    let word = word.strip_prefix("0b").or_else(|| word.strip_prefix("0x")).unwrap_or(word);
    Some(word.trim_start_matches('0')) == label.as_str()
}
