//! The value of a mathematical expression, typed plainly or in LaTeX.

use std::sync::LazyLock;

use regex::Regex;

use crate::seed::mix;

/// Brackets within each other, at most.
const DEPTH_MAX: u32 = 64;
/// Letters side by side that are variables, and no word.
const VARIABLES_MAX: usize = 2;

/// A number without a sign.
static NUMBER: LazyLock<Option<Regex>> =
    LazyLock::new(|| Regex::new(r"^[0-9]*(\.[0-9]*)?([eE][-+]?[0-9]+)?").ok());

/// The value of `text`, or none if it is anything but an expression without variables.
#[must_use]
pub fn value(text: &str) -> Option<f64> {
    // A variable has another value at each point.
    let values = [value_at(text, 0)?, value_at(text, 1)?];
    (values[0] == values[1]).then_some(values[0])
}

/// The value of `text` where its variables have the values of `point`. None for what is no expression of
/// numbers, variables, the four operations, powers, factorials, absolute values, fractions, roots, binomials,
/// logarithms and the functions of angles, or has no finite value.
pub(crate) fn value_at(text: &str, point: u64) -> Option<f64> {
    let mut parser = Parser { rest: text, depth: 0, point };
    let value = parser.sum()?;
    (parser.rest.is_empty() && value.is_finite()).then_some(value)
}

struct Parser<'a> {
    rest: &'a str,
    depth: u32,
    point: u64,
}

type Function = fn(f64) -> f64;
const FUNCTIONS: [(&str, Function); 9] = [
    (r"\sin", f64::sin),
    (r"\cos", f64::cos),
    (r"\tan", f64::tan),
    (r"\ln", f64::ln),
    (r"\exp", f64::exp),
    ("sin", f64::sin),
    ("cos", f64::cos),
    ("tan", f64::tan),
    ("ln", f64::ln),
];

impl Parser<'_> {
    fn take(&mut self, token: &str) -> bool {
        let rest = self.rest.strip_prefix(token);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn sum(&mut self) -> Option<f64> {
        let mut value = self.product()?;
        loop {
            if self.take("+") {
                value += self.product()?;
            } else if self.take("-") {
                value -= self.product()?;
            } else {
                return Some(value);
            }
        }
    }

    fn product(&mut self) -> Option<f64> {
        let mut value = self.signed()?;
        loop {
            if self.take("*") {
                value *= self.signed()?;
            } else if self.take("/") || self.take(":") {
                value /= self.signed()?;
            } else if self.rest.starts_with(|next: char| "(\\".contains(next) || next.is_ascii_alphabetic()) {
                // `2\sqrt{3}`, `2(3)` and `2x` are products. A number does not stand directly behind another.
                value *= self.power()?;
            } else {
                return Some(value);
            }
        }
    }

    fn signed(&mut self) -> Option<f64> {
        if self.take("-") {
            return self.deeper(Self::signed).map(|value| -value);
        }
        self.take("+");
        self.power()
    }

    fn power(&mut self) -> Option<f64> {
        let mut base = self.atom()?;
        while self.take("!") {
            base = factorial(base)?;
        }
        if !self.take("^") {
            return Some(base);
        }
        let exponent =
            if self.rest.starts_with('{') { self.group('{', '}')? } else { self.deeper(Self::signed)? };
        Some(base.powf(exponent))
    }

    fn atom(&mut self) -> Option<f64> {
        for (open, close) in [('(', ')'), ('{', '}'), ('|', '|')] {
            if self.rest.starts_with(open) {
                let value = self.group(open, close)?;
                return Some(if open == '|' { value.abs() } else { value });
            }
        }
        if self.take(r"\pi") {
            return Some(std::f64::consts::PI);
        }
        if self.take(r"\frac") {
            return self.fraction();
        }
        if self.take(r"\sqrt") || self.take("sqrt") {
            let root = if self.rest.starts_with('[') { self.group('[', ']')? } else { 2.0 };
            let of = self.argument()?;
            // An odd root of a negative number is real.
            let odd = root.rem_euclid(2.0) == 1.0;
            return Some(if of < 0.0 && odd { -(-of).powf(1.0 / root) } else { of.powf(1.0 / root) });
        }
        if self.take(r"\binom") {
            let (n, k) = (self.argument()?, self.argument()?);
            return Some(factorial(n)? / (factorial(k)? * factorial(n - k)?));
        }
        if self.take(r"\log") || self.take("log") {
            let base = if self.take("_") { self.argument()? } else { 10.0 };
            return Some(self.deeper(Self::power)?.ln() / base.ln());
        }
        if let Some((name, function)) = FUNCTIONS.iter().find(|(name, _)| self.rest.starts_with(name)) {
            self.rest = &self.rest[name.len()..];
            return Some(function(self.deeper(Self::power)?));
        }
        if self.rest.starts_with(|next: char| next.is_ascii_alphabetic() || next == '\\') {
            return self.variable();
        }
        self.number()
    }

    fn fraction(&mut self) -> Option<f64> {
        let above = self.argument()?;
        Some(above / self.argument()?)
    }

    /// What a LaTeX command takes: a group, or one digit or letter.
    fn argument(&mut self) -> Option<f64> {
        for (open, close) in [('{', '}'), ('(', ')')] {
            if self.rest.starts_with(open) {
                return self.group(open, close);
            }
        }
        match self.rest.chars().next()?.to_digit(10) {
            Some(digit) => {
                self.rest = &self.rest[1..];
                Some(f64::from(digit))
            }
            None => self.variable(),
        }
    }

    /// A letter, Latin or by its LaTeX name. `e` is Euler's number.
    fn variable(&mut self) -> Option<f64> {
        let letters = |text: &str| text.bytes().take_while(u8::is_ascii_alphabetic).count();
        let length = match self.rest.strip_prefix('\\') {
            Some(name) => Some(1 + letters(name)).filter(|length| *length > 1)?,
            None => Some(1).filter(|_| (1..=VARIABLES_MAX).contains(&letters(self.rest)))?,
        };
        let (name, rest) = self.rest.split_at(length);
        self.rest = rest;
        if name == "e" {
            return Some(std::f64::consts::E);
        }
        if self.rest.starts_with('_') {
            return None;
        }
        let seed = name.bytes().fold(mix(self.point), |seed, letter| mix(seed ^ u64::from(letter)));
        // Between 1 and 2, where roots and logarithms of differences exist often enough.
        Some(1.0 + (seed >> 11) as f64 / (1_u64 << 53) as f64)
    }

    fn group(&mut self, open: char, close: char) -> Option<f64> {
        self.rest = self.rest.strip_prefix(open)?;
        let value = self.deeper(Self::sum)?;
        self.rest = self.rest.strip_prefix(close)?;
        Some(value)
    }

    fn deeper(&mut self, inner: fn(&mut Self) -> Option<f64>) -> Option<f64> {
        self.depth += 1;
        let value = if self.depth > DEPTH_MAX { None } else { inner(self) };
        self.depth -= 1;
        value
    }

    fn number(&mut self) -> Option<f64> {
        let end = NUMBER.as_ref()?.find(self.rest)?.end();
        let (number, rest) = self.rest.split_at(end);
        let value: f64 = number.parse().ok()?;
        self.rest = rest;
        // `3\frac{1}{2}` is three and a half.
        if number.bytes().all(|letter| letter.is_ascii_digit()) && self.take(r"\frac") {
            return Some(value + self.fraction()?);
        }
        Some(value)
    }
}

fn factorial(of: f64) -> Option<f64> {
    let whole = of.fract() == 0.0 && (0.0..=170.0).contains(&of);
    whole.then(|| (1..=of as u64).map(|factor| factor as f64).product())
}
