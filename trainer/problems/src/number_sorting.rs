//! Numbers in ascending order.

use serde_json::Value;

use super::{Draw, Kind, Problem, integers};

pub(super) const KIND: Kind = Kind {
    name: "number_sorting",
    what: "numbers in ascending order: three at difficulty 1, one more at each",
    draw,
    right,
};

fn draw(draw: &mut Draw, difficulty: u32) -> Problem {
    let mut numbers: Vec<i64> = (0..2 + difficulty).map(|_| draw.number(0..=99)).collect();
    let shown = listed(&numbers);
    numbers.sort_unstable();
    Problem {
        question: format!(
            "Sort these numbers in ascending order: {shown}. Answer with the numbers only, separated by commas."
        ),
        label: numbers.clone().into(),
        answer: listed(&numbers),
    }
}

fn listed(numbers: &[i64]) -> String {
    numbers.iter().map(i64::to_string).collect::<Vec<_>>().join(", ")
}

fn right(label: &Value, said: &str) -> bool {
    let wanted: Option<Vec<i64>> = label.as_array().and_then(|all| all.iter().map(Value::as_i64).collect());
    // `1,234` may be two numbers here.
    wanted == Some(integers(&said.replace(',', " ")))
}
