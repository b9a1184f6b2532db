//! The greatest common divisor.

use super::{Draw, Kind, Problem, is_integer};

pub(super) const KIND: Kind = Kind {
    name: "gcd",
    what: "the greatest common divisor of two numbers: up to 64 at difficulty 1, up to 1,936 at 10",
    draw,
    right: is_integer,
};

fn draw(draw: &mut Draw, difficulty: u32) -> Problem {
    // A common factor, so that the answer is not 1 most of the time.
    let most = 4 + 4 * i64::from(difficulty);
    let factor = draw.number(1..=most);
    let (a, b) = (factor * draw.number(1..=most), factor * draw.number(1..=most));
    let answer = divisor(a, b);
    Problem {
        question: format!("What is the greatest common divisor of {a} and {b}? Answer with a number only."),
        label: answer.into(),
        answer: answer.to_string(),
    }
}

/// Euclid's algorithm.
fn divisor(a: i64, b: i64) -> i64 {
    if b == 0 { a } else { divisor(b, a % b) }
}
