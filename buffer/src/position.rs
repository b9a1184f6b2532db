//! Positions and the identity of a log.

use std::fmt;

/// The number of a record in its log: 0, 1, 2, … in the order of reservation, never reused.
///
/// A position may stay empty, when its reservation was dropped or its record damaged. As a cursor, a position
/// names the next record to read.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, serde::Serialize, serde::Deserialize,
)]
#[serde(transparent)]
pub struct Position(pub u64);

impl Position {
    /// The position after this one.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What a log belongs to. Written into every segment and compared at every open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// The training run.
    pub run_id: [u8; 16],
    /// The model that generates the rollouts; at most [`Identity::MODEL_BYTES_MAX`] bytes.
    pub model: String,
    /// Digest of the tokenizer that gives the token ids their meaning.
    pub tokenizer_digest: [u8; 32],
}

impl Identity {
    /// Longest model name, in bytes.
    pub const MODEL_BYTES_MAX: usize = 512;

    /// The first field in which `found` differs, as (name, ours, theirs).
    pub(crate) fn difference(&self, found: &Self) -> Option<(&'static str, String, String)> {
        if self.run_id != found.run_id {
            return Some(("run id", hex(&self.run_id), hex(&found.run_id)));
        }
        if self.model != found.model {
            return Some(("model", format!("`{}`", self.model), format!("`{}`", found.model)));
        }
        (self.tokenizer_digest != found.tokenizer_digest)
            .then(|| ("tokenizer digest", hex(&self.tokenizer_digest), hex(&found.tokenizer_digest)))
    }
}

/// Lower-case hex.
pub(crate) fn hex(bytes: &[u8]) -> String {
    use fmt::Write;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}
