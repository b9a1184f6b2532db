//! The value of an arithmetic expression, typed plainly or in LaTeX.

/// Brackets within each other, at most.
const DEPTH_MAX: u32 = 64;

/// The value of `text`, or none if it is anything but numbers, `π`, roots, fractions, powers and the four
/// operations.
pub(super) fn value(text: &str) -> Option<f64> {
    let mut parser = Parser { rest: text, depth: 0 };
    let value = parser.sum()?;
    (parser.rest.is_empty() && value.is_finite()).then_some(value)
}

struct Parser<'a> {
    rest: &'a str,
    depth: u32,
}

impl Parser<'_> {
    fn take(&mut self, token: &str) -> bool {
        match self.rest.strip_prefix(token) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
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
            } else if self.take("/") {
                value /= self.signed()?;
            } else if self.rest.starts_with(['(', '\\']) {
                // `2\sqrt{3}` and `2(3)` are products. A number does not stand directly behind another.
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
        let base = self.atom()?;
        if !self.take("^") {
            return Some(base);
        }
        let exponent =
            if self.rest.starts_with('{') { self.group('{', '}')? } else { self.deeper(Self::signed)? };
        Some(base.powf(exponent))
    }

    fn atom(&mut self) -> Option<f64> {
        if self.rest.starts_with('(') {
            return self.group('(', ')');
        }
        if self.rest.starts_with('{') {
            return self.group('{', '}');
        }
        if self.take(r"\pi") {
            return Some(std::f64::consts::PI);
        }
        if self.take(r"\frac") {
            let above = self.argument()?;
            return Some(above / self.argument()?);
        }
        if self.take(r"\sqrt") {
            let root = if self.rest.starts_with('[') { self.group('[', ']')? } else { 2.0 };
            return Some(self.argument()?.powf(1.0 / root));
        }
        self.number()
    }

    /// What a LaTeX command takes: a group, or one digit.
    fn argument(&mut self) -> Option<f64> {
        if self.rest.starts_with('{') {
            return self.group('{', '}');
        }
        let digit = self.rest.chars().next()?.to_digit(10)?;
        self.rest = &self.rest[1..];
        Some(f64::from(digit))
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
        let digits = |text: &str| text.bytes().take_while(u8::is_ascii_digit).count();
        let mut end = digits(self.rest);
        if self.rest[end..].starts_with('.') {
            end += 1 + digits(&self.rest[end + 1..]);
        }
        let exponent = self.rest[end..].strip_prefix(['e', 'E']);
        if let Some(exponent) = exponent.filter(|_| end > 0) {
            let sign = usize::from(exponent.starts_with(['-', '+']));
            let length = digits(&exponent[sign..]);
            if length > 0 {
                end += 1 + sign + length;
            }
        }
        let value = self.rest[..end].parse().ok()?;
        self.rest = &self.rest[end..];
        Some(value)
    }
}
