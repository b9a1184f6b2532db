//! `34+58=`, answered with `29`: the least significant digit comes first.
//!
//! Each digit of such an answer follows from two digits of the problem and one carry. A small model learns that in
//! minutes.

use serde_json::Value;

use super::{Draw, Kind, Problem};

pub(super) const KIND: Kind = Kind {
    name: "arithmetic",
    what: "34+58= answered with 29, least significant digit first: two digits at difficulty 1, one more at each",
    draw,
    right,
};

fn draw(draw: &mut Draw, difficulty: u32) -> Problem {
    let (a, b) = (draw.digits(difficulty + 1), draw.digits(difficulty + 1));
    let answer: String = (a + b).to_string().chars().rev().collect();
    Problem { question: format!("{a}+{b}="), label: answer.as_str().into(), answer }
}

/// Exactly these digits.
fn right(label: &Value, said: &str) -> bool {
    label.as_str() == Some(said)
}
