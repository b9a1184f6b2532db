//! `json.dumps` and `repr` of Python, byte for byte.

use std::fmt::{self, Write as _};

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

use super::text::Text;

/// Levels of lists and maps within each other, at most.
pub(super) const DEPTH_MAX: usize = 128;

/// Arguments of `json.dumps`.
#[derive(Default)]
pub(super) struct Style {
    pub(super) ensure_ascii: bool,
    /// Spaces, or the text itself, to indent by.
    pub(super) indent: Option<Value>,
    /// What stands between elements, and between a key and its value.
    pub(super) separators: Option<Value>,
    pub(super) sort_keys: bool,
}

impl Style {
    pub(super) fn dumps(&self, value: &Value) -> Result<String, Error> {
        let indent = match self.indent.as_ref().filter(|indent| !indent.is_none()) {
            None => None,
            Some(indent) => match (indent.as_str(), indent.as_i64()) {
                (Some(text), _) => Some(text.to_owned()),
                (_, Some(spaces)) => Some(" ".repeat(spaces.clamp(0, 64) as usize)),
                _ => return Err(refused(format!("tojson: indent is {indent}"))),
            },
        };
        let (item, key) = match self.separators.as_ref().filter(|pair| !pair.is_none()) {
            None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
            None => (", ".to_owned(), ": ".to_owned()),
            Some(pair) => match pair.try_iter()?.collect::<Vec<_>>().as_slice() {
                [item, key] => (item.to_string(), key.to_string()),
                _ => return Err(refused(format!("tojson: separators are {pair}"))),
            },
        };
        let mut writer = Writer { style: self, indent, item, key, out: Text::default() };
        writer.write(value, 0)?;
        Ok(writer.out.into_string())
    }
}

struct Writer<'a> {
    style: &'a Style,
    indent: Option<String>,
    item: String,
    key: String,
    out: Text,
}

impl Writer<'_> {
    fn write(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > DEPTH_MAX {
            return Err(refused("tojson: too many levels".into()));
        }
        match value.kind() {
            ValueKind::None => self.out.write_str("null")?,
            ValueKind::Bool => self.out.write_str(if value.is_true() { "true" } else { "false" })?,
            ValueKind::Number => self.out.write_str(&float(value).unwrap_or_else(|| value.to_string()))?,
            ValueKind::String => self.text(value.as_str().unwrap_or_default())?,
            ValueKind::Seq | ValueKind::Iterable => {
                // One after the other: a repeated list is small itself.
                let elements = value.try_iter()?;
                self.block('[', ']', depth, elements, |writer, value| writer.write(&value, depth + 1))?;
            }
            ValueKind::Map => {
                let mut members = Vec::new();
                for key in value.try_iter()? {
                    members.push((key_of(&key)?, value.get_item(&key)?));
                }
                if self.style.sort_keys {
                    members.sort_by(|a, b| a.0.cmp(&b.0));
                }
                self.block('{', '}', depth, members, |writer, (key, value)| {
                    writer.text(&key)?;
                    writer.out.write_str(&writer.key)?;
                    writer.write(&value, depth + 1)
                })?;
            }
            kind => return Err(refused(format!("a value of type {kind} is not JSON serializable"))),
        }
        Ok(())
    }

    fn block<T>(
        &mut self,
        open: char,
        close: char,
        depth: usize,
        elements: impl IntoIterator<Item = T>,
        mut element: impl FnMut(&mut Self, T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.write_char(open)?;
        let mut filled = false;
        for value in elements {
            if std::mem::replace(&mut filled, true) {
                self.out.write_str(&self.item)?;
            }
            self.line(depth + 1)?;
            element(self, value)?;
        }
        if filled {
            self.line(depth)?;
        }
        Ok(self.out.write_char(close)?)
    }

    fn line(&mut self, depth: usize) -> Result<(), Error> {
        if let Some(indent) = &self.indent {
            self.out.write_char('\n')?;
            for _ in 0..depth {
                self.out.write_str(indent)?;
            }
        }
        Ok(())
    }

    fn text(&mut self, text: &str) -> Result<(), Error> {
        if !self.style.ensure_ascii {
            return quote(text, &mut self.out);
        }
        let mut quoted = Text::default();
        quote(text, &mut quoted)?;
        for character in quoted.into_string().chars() {
            if (' '..='~').contains(&character) {
                self.out.write_char(character)?;
                continue;
            }
            for unit in character.encode_utf16(&mut [0; 2]) {
                write!(self.out, "\\u{unit:04x}")?;
            }
        }
        Ok(())
    }
}

/// The text in quotes, with the escapes that Python and `serde_json` both have.
fn quote(text: &str, out: &mut Text) -> Result<(), Error> {
    // Only a text that is too long is not written.
    serde_json::to_writer(out, text).map_err(|_| fmt::Error.into())
}

/// What Python makes of a key that is no text.
fn key_of(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::String => Ok(key.as_str().unwrap_or_default().to_owned()),
        ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.to_owned()),
        ValueKind::None => Ok("null".to_owned()),
        ValueKind::Number => Ok(float(key).unwrap_or_else(|| key.to_string())),
        kind => Err(refused(format!("keys must be str, int, float, bool or None, not {kind}"))),
    }
}

/// `repr` of a float; none for whatever is no float.
pub(super) fn float(value: &Value) -> Option<String> {
    if value.kind() != ValueKind::Number || value.is_integer() {
        return None;
    }
    Some(repr(f64::try_from(value.clone()).ok()?))
}

/// The shortest digits that read back as the same number; an exponent below 1e-4 and from 1e16 on.
fn repr(number: f64) -> String {
    match number {
        n if n.is_nan() => return "NaN".into(),
        n if n.is_infinite() => return if n > 0.0 { "Infinity" } else { "-Infinity" }.into(),
        n if n == 0.0 || (1e-4..1e16).contains(&n.abs()) => {
            let plain = format!("{n}");
            return if plain.contains('.') { plain } else { plain + ".0" };
        }
        _ => {}
    }
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |rest| ('-', rest));
    format!("{digits}e{sign}{exponent:0>2}")
}

fn refused(what: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_written_as_python_writes_them() {
        let cases = [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (-2.5, "-2.5"),
            (1e-7, "1e-07"),
            (1.5e-5, "1.5e-05"),
            (0.0001, "0.0001"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.25e300, "1.25e+300"),
            (-0.0, "-0.0"),
            (f64::NAN, "NaN"),
        ];
        for (number, expected) in cases {
            assert_eq!(repr(number), expected);
        }
    }
}
