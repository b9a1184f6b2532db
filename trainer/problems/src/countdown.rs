//! Numbers that have to make another one.

use serde_json::{Value, json};

use super::{Draw, Kind, Problem};
use crate::math::value;

pub(super) const KIND: Kind = Kind {
    name: "countdown",
    what: "an expression of given numbers, each used once, that makes another one: three at difficulty 1, up to six",
    draw,
    right,
};

fn draw(draw: &mut Draw, difficulty: u32) -> Problem {
    let count = 3 + (difficulty as usize - 1) / 3;
    let most = 9 + 10 * i64::from(difficulty - 1);
    let mut numbers: Vec<i64> = (0..count).map(|_| draw.number(1..=most)).collect();
    let mut answer = numbers[0].to_string();
    let mut target = numbers[0];
    for number in &numbers[1..] {
        let (sign, result) = match draw.number(0..=2) {
            0 if target.abs() <= 100 => ('*', target * number),
            1 => ('-', target - number),
            _ => ('+', target + number),
        };
        answer = format!("({answer}) {sign} {number}");
        target = result;
    }
    // Shown in an order that does not give the answer away.
    for last in (1..numbers.len()).rev() {
        let other = draw.number(0..=last as i64) as usize;
        numbers.swap(last, other);
    }
    let shown = numbers.iter().map(i64::to_string).collect::<Vec<_>>().join(", ");
    numbers.sort_unstable();
    Problem {
        question: format!(
            "Use the numbers {shown}, each exactly once, with +, -, * and / to make {target}. Answer with the expression only."
        ),
        label: json!({ "numbers": numbers, "target": target }),
        answer,
    }
}

/// Whether the expression, as far as it stands before `=`, has these numbers and this value.
fn right(label: &Value, said: &str) -> bool {
    let wanted: Option<Vec<i64>> =
        label["numbers"].as_array().and_then(|all| all.iter().map(Value::as_i64).collect());
    let (Some(mut wanted), Some(target)) = (wanted, label["target"].as_f64()) else { return false };
    let expression: String = said.split('=').next().unwrap_or_default().split_whitespace().collect();
    let expression = expression.replace(['×', '·'], "*").replace('÷', "/").replace('−', "-");
    if !expression.bytes().all(|letter| letter.is_ascii_digit() || b"+-*/()".contains(&letter)) {
        return false;
    }
    let numbers =
        expression.split(|letter: char| !letter.is_ascii_digit()).filter(|number| !number.is_empty());
    let Ok(mut used) = numbers.map(str::parse::<i64>).collect::<Result<Vec<_>, _>>() else { return false };
    used.sort_unstable();
    wanted.sort_unstable();
    used == wanted && value(&expression).is_some_and(|value| (value - target).abs() < 1e-6)
}
