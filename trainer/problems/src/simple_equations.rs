//! `3*x + 5 = 20`

use super::{Draw, Kind, Problem, is_integer};

pub(super) const KIND: Kind = Kind {
    name: "simple_equations",
    what: "one unknown in a linear equation, whose solution is a whole number of up to 5 times the difficulty",
    draw,
    right: is_integer,
};

fn draw(draw: &mut Draw, difficulty: u32) -> Problem {
    let most = 5 * i64::from(difficulty);
    let x = draw.number(-most..=most);
    let (factor, term) = (draw.number(2..=most + 4), draw.number(1..=most + 4));
    let (sign, right) = draw.one_of(&[('+', factor * x + term), ('-', factor * x - term)]);
    Problem {
        question: format!("Solve for x: {factor}*x {sign} {term} = {right}. Answer with a number only."),
        label: x.into(),
        answer: x.to_string(),
    }
}
