//! `What is 12 + 7 - 5?`

use super::{Draw, Kind, Problem, is_integer};

pub(super) const KIND: Kind = Kind {
    name: "chain_sum",
    what: "sums and differences: two numbers of one digit at difficulty 1, two of two digits at 2, then more and longer ones",
    draw,
    right: is_integer,
};

fn draw(draw: &mut Draw, difficulty: u32) -> Problem {
    let (terms, digits) = (2 + (difficulty - 1) / 2, 1 + difficulty / 2);
    let mut sum = draw.digits(digits);
    let mut text = sum.to_string();
    for _ in 1..terms {
        let (sign, term) = (draw.one_of(&['+', '-']), draw.digits(digits));
        sum += if sign == '+' { term } else { -term };
        text.push_str(&format!(" {sign} {term}"));
    }
    Problem {
        question: format!("What is {text}? Answer with a number only."),
        label: sum.into(),
        answer: sum.to_string(),
    }
}
