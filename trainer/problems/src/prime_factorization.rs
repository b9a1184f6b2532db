//! A number as a product of primes.

use serde_json::Value;

use super::{Draw, Kind, Problem, integers};

pub(super) const KIND: Kind = Kind {
    name: "prime_factorization",
    what: "a number as a product of primes: up to 100 at difficulty 1, up to 10,000 at 10",
    draw,
    right,
};

fn draw(draw: &mut Draw, difficulty: u32) -> Problem {
    let most = 100 * i64::from(difficulty * difficulty);
    let (number, factors) = loop {
        let number = draw.number(4..=most);
        let factors = primes_of(number);
        if factors.len() > 1 {
            break (number, factors);
        }
    };
    let answer = factors.iter().map(i64::to_string).collect::<Vec<_>>().join(" * ");
    Problem {
        question: format!(
            "Write {number} as a product of primes, for example 2 * 2 * 3. Answer with the product only."
        ),
        label: factors.into(),
        answer,
    }
}

fn primes_of(mut number: i64) -> Vec<i64> {
    let (mut primes, mut divisor) = (Vec::new(), 2);
    while divisor * divisor <= number {
        if number % divisor == 0 {
            primes.push(divisor);
            number /= divisor;
        } else {
            divisor += 1;
        }
    }
    primes.push(number);
    primes
}

/// All factors, in any order; `2^3` is three of them, and a number and `=` may stand before them.
fn right(label: &Value, said: &str) -> bool {
    let Some(wanted) = label.as_array() else { return false };
    let product = said.rsplit_once('=').map_or(said, |(_, product)| product);
    let mut factors = Vec::new();
    for factor in product.split(['*', '×', '·', 'x']) {
        let (base, power) = factor.split_once('^').unwrap_or((factor, "1"));
        let (Some(base), Some(power)) = (lone(base), lone(power)) else { return false };
        if !(1..=64).contains(&power) {
            return false;
        }
        factors.extend(std::iter::repeat_n(base, power as usize));
    }
    factors.sort_unstable();
    wanted.iter().map(Value::as_i64).eq(factors.into_iter().map(Some))
}

/// The one number of a text.
fn lone(text: &str) -> Option<i64> {
    match integers(text).as_slice() {
        [number] => Some(*number),
        _ => None,
    }
}
