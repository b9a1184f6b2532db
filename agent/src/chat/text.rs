//! Texts with a bound. What a template repeats is small itself, and may be longer than any memory once it is
//! written.

use std::fmt::{self, Write as _};
use std::io;

use minijinja::{Error, Value};

/// Longest text that a template may render, and that it may make of a list or a map.
pub(super) const TEXT_BYTES_MAX: usize = 64 << 20;

/// A text that refuses to become longer than [`TEXT_BYTES_MAX`].
#[derive(Default)]
pub(super) struct Text(String);

impl Text {
    /// What `{value}` says.
    pub(super) fn of(value: &Value) -> Result<String, Error> {
        let mut text = Text::default();
        write!(text, "{value}")?;
        Ok(text.0)
    }

    pub(super) fn into_string(self) -> String {
        self.0
    }
}

impl fmt::Write for Text {
    fn write_str(&mut self, part: &str) -> fmt::Result {
        if part.len() > TEXT_BYTES_MAX - self.0.len() {
            return Err(fmt::Error);
        }
        self.0.push_str(part);
        Ok(())
    }
}

/// Takes UTF-8 whole: a renderer writes one text after the other.
impl io::Write for Text {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let part =
            std::str::from_utf8(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        self.write_str(part).map_err(|_| io::ErrorKind::FileTooLarge)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
