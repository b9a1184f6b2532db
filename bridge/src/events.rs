//! Replies that come event by event: `data: …` lines, as servers of `text/event-stream` send them.

use std::ops::ControlFlow;

use serde::Deserialize;

use crate::error::{Error, Result};
use crate::http::{Call, Connection, Reply};

/// What ends a stream, in place of an event.
const DONE: &[u8] = b"[DONE]";

/// Why a stream ends before its request does, in an event of its own.
#[derive(Debug, Deserialize)]
pub(crate) struct Failure {
    code: Option<u16>,
}

impl Connection {
    /// The error of an event that is a failure.
    pub(crate) fn failed(&self, call: Call<'_>, failure: &Failure, data: &[u8]) -> Error {
        self.status_error(call, &Reply { status: failure.code.unwrap_or(500), body: data.to_vec() })
    }

    /// Sends a call and hands out the data of each event, up to the end of the reply or until `take` breaks. The bound on a
    /// reply is one on an event.
    pub(crate) async fn events(
        &self,
        call: Call<'_>,
        take: impl FnMut(&[u8]) -> Result<ControlFlow<()>> + Send,
    ) -> Result<()> {
        self.in_time(call, self.each_event(call, take)).await
    }

    async fn each_event(
        &self,
        call: Call<'_>,
        mut take: impl FnMut(&[u8]) -> Result<ControlFlow<()>> + Send,
    ) -> Result<()> {
        let mut reply = self.begin(call).await?;
        if reply.status().as_u16() != 200 {
            let reply = self.rest(call, reply).await?;
            return Err(self.status_error(call, &reply));
        }
        let mut lines = Lines::default();
        while let Some(chunk) = reply.chunk().await.map_err(|error| self.lost(call, error))? {
            lines.bytes.extend_from_slice(&chunk);
            while let Some(line) = lines.next() {
                let Some(data) = data(&line) else { continue };
                if data == DONE || take(data)?.is_break() {
                    return Ok(());
                }
            }
            if lines.bytes.len() > self.reply_bytes_max {
                return Err(self.too_large(call));
            }
        }
        Ok(())
    }
}

/// The data of a line; other lines are comments, and fields that say nothing here.
fn data(line: &[u8]) -> Option<&[u8]> {
    line.strip_prefix(b"data:").map(<[u8]>::trim_ascii)
}

/// Bytes that come in any pieces, by line.
#[derive(Debug, Default)]
struct Lines {
    /// Those that were not handed out.
    bytes: Vec<u8>,
    /// How many of them are no end of a line.
    searched: usize,
}

impl Lines {
    fn next(&mut self) -> Option<Vec<u8>> {
        let Some(end) = self.bytes[self.searched..].iter().position(|byte| *byte == b'\n') else {
            self.searched = self.bytes.len();
            return None;
        };
        let end = std::mem::take(&mut self.searched) + end;
        let rest = self.bytes.split_off(end + 1);
        let mut line = std::mem::replace(&mut self.bytes, rest);
        line.truncate(end);
        Some(line)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn lines_are_the_same_in_whatever_pieces_they_come(
            text in "[ab:\r\n]{0,40}",
            cuts in proptest::collection::vec(1usize..6, 0..40),
        ) {
            let (mut lines, mut found, mut rest) = (Lines::default(), Vec::new(), text.as_bytes());
            for cut in cuts.into_iter().chain([text.len()]) {
                let (piece, behind) = rest.split_at(cut.min(rest.len()));
                rest = behind;
                lines.bytes.extend_from_slice(piece);
                found.extend(std::iter::from_fn(|| lines.next()));
            }
            let mut expected: Vec<_> = text.as_bytes().split(|byte| *byte == b'\n').collect();
            let open = expected.pop().unwrap_or_default();
            prop_assert_eq!(found, expected);
            prop_assert_eq!(lines.bytes, open);
        }
    }

    #[test]
    fn data_of_a_line_is_behind_its_name() {
        assert_eq!(data(b"data: {}\r"), Some(&b"{}"[..]));
        assert_eq!(data(b"data:[DONE]"), Some(DONE));
        assert_eq!((data(b": ping"), data(b"event: x"), data(b"")), (None, None, None));
    }
}
