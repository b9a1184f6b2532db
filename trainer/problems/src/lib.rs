#![doc = include_str!("../README.md")]

mod arithmetic;
mod base_conversion;
mod chain_sum;
mod countdown;
mod gcd;
mod letter_counting;
pub mod math;
mod number;
mod number_sorting;
mod prime_factorization;
pub mod seed;
mod simple_equations;

use serde_json::Value;

use seed::mix;

/// A problem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The question, in words.
    pub question: String,
    /// What an answer is checked with.
    pub label: Value,
    /// One right answer.
    pub answer: String,
}

/// A kind of problems.
#[derive(Debug)]
pub struct Kind {
    /// Its name, which is reasoning-gym's where that has such problems.
    pub name: &'static str,
    /// What has to be done.
    pub what: &'static str,
    draw: fn(&mut Draw, u32) -> Problem,
    right: fn(&Value, &str) -> bool,
}

impl Kind {
    /// All kinds.
    pub const ALL: [&'static Kind; 9] = [
        &arithmetic::KIND,
        &base_conversion::KIND,
        &chain_sum::KIND,
        &countdown::KIND,
        &gcd::KIND,
        &letter_counting::KIND,
        &number_sorting::KIND,
        &prime_factorization::KIND,
        &simple_equations::KIND,
    ];
    /// The largest difficulty; 1 is the smallest.
    pub const DIFFICULTY_MAX: u32 = 10;

    /// The kind of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<&'static Kind> {
        Self::ALL.into_iter().find(|kind| kind.name == name)
    }

    /// Problem `number` of a seed. Larger `difficulty`, from 1, makes larger problems.
    #[must_use]
    pub fn problem(&self, seed: u64, number: u64, difficulty: u32) -> Problem {
        let mut draw = Draw(mix(seed ^ mix(number)));
        (self.draw)(&mut draw, difficulty.clamp(1, Self::DIFFICULTY_MAX))
    }

    /// Whether `said` answers the problem with this label. What counts is what stands in `<answer>…</answer>`
    /// or `\boxed{…}`, else all that follows `</think>`, else all.
    #[must_use]
    pub fn right(&self, label: &Value, said: &str) -> bool {
        (self.right)(label, final_answer(said))
    }
}

/// Numbers for a problem, one after another.
#[derive(Debug)]
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 = mix(self.0);
        self.0
    }

    /// A number in `range`.
    fn number(&mut self, range: std::ops::RangeInclusive<i64>) -> i64 {
        let count = range.end().abs_diff(*range.start()) + 1;
        range.start() + (self.next() % count) as i64
    }

    /// A number of so many decimal digits.
    fn digits(&mut self, digits: u32) -> i64 {
        let least = 10_i64.pow(digits - 1);
        self.number(least..=10 * least - 1)
    }

    fn one_of<T: Copy>(&mut self, from: &[T]) -> T {
        from[(self.next() % from.len() as u64) as usize]
    }
}

/// The part of a response that is its answer.
fn final_answer(said: &str) -> &str {
    let said = said.rsplit_once("</think>").map_or(said, |(_, rest)| rest);
    let tagged = said.rsplit_once("<answer>").map(|(_, rest)| rest.split("</answer>").next().unwrap_or(rest));
    tagged.or_else(|| math::boxed(said)).unwrap_or(said).trim()
}

/// The whole numbers of a text, in order. Commas between thousands are left out. A minus counts if it does not stand
/// behind a digit, letter or bracket.
fn integers(text: &str) -> Vec<i64> {
    let text = text.replace('−', "-");
    let letters: Vec<char> = text.chars().collect();
    let (mut found, mut at) = (Vec::new(), 0);
    while at < letters.len() {
        if !letters[at].is_ascii_digit() {
            at += 1;
            continue;
        }
        let before = at.checked_sub(1).map(|before| letters[before]);
        let ahead = at.checked_sub(2).map(|ahead| letters[ahead]);
        let negative =
            before == Some('-') && !ahead.is_some_and(|letter| letter.is_alphanumeric() || letter == ')');
        let (mut value, mut inside) = (Some(0_i64), true);
        while inside {
            let digit = letters[at].to_digit(10).map(i64::from);
            value = value.and_then(|value| value.checked_mul(10)?.checked_add(digit?));
            at += 1;
            let thousands = letters.get(at) == Some(&',')
                && (1..=3).all(|next| letters.get(at + next).is_some_and(char::is_ascii_digit))
                && !letters.get(at + 4).is_some_and(char::is_ascii_digit);
            at += usize::from(thousands);
            inside = letters.get(at).is_some_and(char::is_ascii_digit);
        }
        found.extend(value.map(|value| if negative { -value } else { value }));
    }
    found
}

/// Whether the last whole number of an answer is the label.
fn is_integer(label: &Value, said: &str) -> bool {
    label.as_i64().is_some() && integers(said).last().copied() == label.as_i64()
}

#[cfg(test)]
mod tests;
