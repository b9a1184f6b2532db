//! What a producer and the process that owns the log say to each other. Fixed-size little-endian messages on
//! a Unix socket.

use std::io::{self, Read, Write};
use std::time::Duration;

use crate::error::Error;
use crate::layout::field;
use crate::position::Identity;

/// Where producers connect.
pub(crate) const SOCKET: &str = "producers";
/// Version of these messages; both sides must agree.
pub(crate) const PROTOCOL: u64 = 1;
/// Bytes of a message in front of its text.
const FIXED: usize = 40;
/// Longest text of a message.
const TEXT_MAX: usize = 4096;

/// One message: what it is, up to three numbers, and a text.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Message {
    pub(crate) tag: u64,
    pub(crate) numbers: [u64; 3],
    pub(crate) text: Vec<u8>,
}

/// Producer: here I am. Numbers: protocol.
pub(crate) const HELLO: u64 = 1;
/// Owner: welcome. Numbers: protocol. Text: run id, digest of the tokenizer, model.
pub(crate) const WELCOME: u64 = 2;
/// Producer: give me space. Numbers: kind of record, bytes of the frame. Answer: `SPACE`.
pub(crate) const RESERVE: u64 = 3;
/// Owner: here it is. Numbers: first position of the segment, offset, position.
pub(crate) const SPACE: u64 = 4;
/// Producer: the body at this position is complete. Answer: `DONE`.
pub(crate) const COMMIT: u64 = 5;
/// Producer: I give this position up. No answer.
pub(crate) const GIVE_UP: u64 = 6;
/// Producer: tell me when this position is durable. Answer: `DONE`.
pub(crate) const WAIT: u64 = 7;
/// Owner: it is so.
pub(crate) const DONE: u64 = 8;
/// Owner: no. Numbers: which refusal, and two of its fields. Text: the reason.
pub(crate) const REFUSED: u64 = 9;

impl Message {
    pub(crate) fn new(tag: u64, numbers: [u64; 3]) -> Self {
        Self { tag, numbers, text: Vec::new() }
    }

    pub(crate) fn write(&self, stream: &mut impl Write) -> io::Result<()> {
        let text = &self.text[..self.text.len().min(TEXT_MAX)];
        let mut bytes = Vec::with_capacity(FIXED + text.len());
        for number in [self.tag].iter().chain(&self.numbers).chain(&[text.len() as u64]) {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(text);
        stream.write_all(&bytes)
    }

    /// Reads one message; `None` at the end of the stream. `idle` is called whenever a read times out, and
    /// says whether to go on.
    pub(crate) fn read(stream: &mut impl Read, mut idle: impl FnMut() -> bool) -> io::Result<Option<Self>> {
        let mut head = [0; FIXED];
        if !fill(stream, &mut head, &mut idle)? {
            return Ok(None);
        }
        let number = |at: usize| field::u64(&head, at * 8);
        let length = usize::try_from(number(4)).unwrap_or(usize::MAX);
        if length > TEXT_MAX {
            return Err(io::Error::from(io::ErrorKind::InvalidData));
        }
        let mut text = vec![0; length];
        if length > 0 && !fill(stream, &mut text, &mut idle)? {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
        }
        Ok(Some(Self { tag: number(0), numbers: [number(1), number(2), number(3)], text }))
    }
}

/// Refusals that are errors of their own on the producer's side.
pub(crate) const FULL: u64 = 1;
pub(crate) const TOO_LARGE: u64 = 2;
pub(crate) const EXPIRED: u64 = 3;
pub(crate) const POISONED: u64 = 4;

/// The owner's side of [`Connection::ask`](crate::connection::Connection::ask).
pub(crate) fn refusal(error: &Error) -> Message {
    let micros = |time: &Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    let (numbers, text) = match error {
        Error::Full { bytes, waited, .. } => ([FULL, *bytes, micros(waited)], String::new()),
        Error::TooLarge { bytes, max } => ([TOO_LARGE, *bytes, *max], String::new()),
        Error::Expired { position, held } => ([EXPIRED, position.0, micros(held)], String::new()),
        Error::Poisoned { cause, .. } => ([POISONED, 0, 0], cause.clone()),
        other => {
            let source = std::error::Error::source(other).map(|source| format!(": {source}"));
            ([0; 3], format!("it refused: {other}{}", source.unwrap_or_default()))
        }
    };
    Message { tag: REFUSED, numbers, text: text.into_bytes() }
}

/// The owner's welcome.
pub(crate) fn welcome(identity: &Identity, wait_deadline: Duration) -> Message {
    let micros = u64::try_from(wait_deadline.as_micros()).unwrap_or(u64::MAX);
    let text = [&identity.run_id[..], &identity.tokenizer_digest, identity.model.as_bytes()].concat();
    Message { tag: WELCOME, numbers: [PROTOCOL, micros, 0], text }
}

/// What the log belongs to, out of the owner's welcome.
pub(crate) fn identity(text: &[u8]) -> Option<Identity> {
    let model = String::from_utf8(text.get(48..)?.to_vec()).ok()?;
    Some(Identity { run_id: field::array(text, 0), tokenizer_digest: field::array(text, 16), model })
}

/// Fills `bytes`; `false` when the stream ends before the first of them.
fn fill(stream: &mut impl Read, bytes: &mut [u8], idle: &mut impl FnMut() -> bool) -> io::Result<bool> {
    let mut at = 0;
    while at < bytes.len() {
        match stream.read(&mut bytes[at..]) {
            Ok(0) if at == 0 => return Ok(false),
            Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
            Ok(count) => at += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                if !idle() {
                    return Err(error);
                }
            }
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_round_trip_and_what_is_cut_or_too_long_is_an_error() {
        let message = Message { text: b"model".to_vec(), ..Message::new(WELCOME, [1, u64::MAX, 3]) };
        let mut bytes = Vec::new();
        message.write(&mut bytes).unwrap();
        assert_eq!(Message::read(&mut &bytes[..], || false).unwrap(), Some(message));
        assert_eq!(Message::read(&mut &bytes[..0], || false).unwrap(), None);
        for cut in 1..bytes.len() {
            assert!(Message::read(&mut &bytes[..cut], || false).is_err(), "cut at {cut}");
        }
        bytes[32..40].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(Message::read(&mut &bytes[..], || false).is_err());
    }
}
