//! Makes errors, and classifies them: whether a retry can help, whether bytes were refused.

use std::fmt::Display;
use std::io;
use std::path::Path;

use super::Error;

impl Error {
    /// Wraps an I/O error of the file system, as [`driftless_store::Error::io`] does.
    pub fn io(action: &'static str, path: impl AsRef<Path>, source: io::Error) -> Self {
        Self::Store(driftless_store::Error::io(action, path, source))
    }

    /// Something that came from a store or a disk is not what it must be.
    pub fn corrupt(
        subject: impl Display,
        what: &'static str,
        expected: impl Display,
        found: impl Display,
    ) -> Self {
        let (expected, found) = (expected.to_string(), found.to_string());
        Self::Corrupt { subject: subject.to_string(), what, expected, found }
    }

    /// Something about a tensor is not what it must be.
    pub(crate) fn mismatch(
        tensor: impl Into<String>,
        what: &'static str,
        expected: impl Display,
        found: impl Display,
    ) -> Self {
        let (expected, found) = (expected.to_string(), found.to_string());
        Self::TensorMismatch { tensor: tensor.into(), what, expected, found }
    }

    /// True if the same call may succeed later with the same arguments.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Store(error) => error.is_retryable(),
            Self::CommitUnknown { .. }
            | Self::Busy { .. }
            | Self::Collected { .. }
            | Self::Engine { .. }
            | Self::EngineTimeout { .. } => true,
            _ => false,
        }
    }

    /// True if bytes that came from a store are not what they must be, or lack a trusted signature; nothing
    /// of them was used.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        matches!(
            self,
            Self::Corrupt { .. }
                | Self::Parse { .. }
                | Self::Store(
                    driftless_store::Error::DigestMismatch { .. } | driftless_store::Error::WrongSize { .. }
                )
                | Self::TensorMismatch { .. }
                | Self::Codec { .. }
                | Self::Unsigned { .. }
                | Self::BadSignature { .. }
        )
    }

    /// True if the object asked for is not there.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Store(error) if error.is_not_found())
    }
}
