//! What can go wrong, by meaning.

/// Everything the codec refuses, with what an operator needs to act on it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A byte slice is not a whole number of elements.
    #[error("{bytes} bytes of {what} are not a whole number of {size}-byte elements")]
    OddLength {
        /// Which slice.
        what: &'static str,
        /// Its length in bytes.
        bytes: usize,
        /// Bytes of one element.
        size: usize,
    },
    /// Two things that must have the same length do not.
    #[error("{what} has length {found}, expected {expected}")]
    LengthMismatch {
        /// Which thing.
        what: &'static str,
        /// The length it should have.
        expected: u64,
        /// The length it has.
        found: u64,
    },
    /// The payload was made for other element type.
    #[error("payload is for {found:?} elements, the tensor holds {expected:?}")]
    ElementMismatch {
        /// The element type the caller named.
        expected: crate::element::Element,
        /// The element type the payload names.
        found: crate::element::Element,
    },
    /// The delta starts from another base. Nothing was written; fetch the version it needs, or a full one.
    #[error("base has check {found:04x}, the delta starts from {expected:04x}")]
    BaseMismatch {
        /// Check the payload was made for (folded digest).
        expected: u16,
        /// Check of the base at hand.
        found: u16,
    },
    /// The decoded result is not the one that was encoded. Nothing was written.
    #[error("result has check {found:016x}, the payload promises {expected:016x}")]
    ResultMismatch {
        /// Check the payload promises (folded digest).
        expected: u64,
        /// Check of what was decoded.
        found: u64,
    },
    /// The bytes of a block are not those its digest was made of: fetch the tensor again.
    #[error("block {block} (of 65536 elements) has digest {found}, expected {expected}")]
    BlockMismatch {
        /// Number of the block in its tensor.
        block: u64,
        /// The digest in the table.
        expected: crate::digest::Digest,
        /// The digest of the bytes.
        found: crate::digest::Digest,
    },
    /// A full payload was given where a delta is needed, or the reverse.
    #[error("payload is {found}, expected {expected}")]
    KindMismatch {
        /// What the caller asked for.
        expected: &'static str,
        /// What the payload is.
        found: &'static str,
    },
    /// The bytes cannot have been written by an encoder of this format.
    #[error("corrupt {what} at byte {offset}: {why}")]
    Corrupt {
        /// What was being read.
        what: &'static str,
        /// Byte offset in the input, near the place where it stopped making sense.
        offset: usize,
        /// What does not hold.
        why: &'static str,
    },
    /// A version of the format, or a coder, that this build does not know.
    #[error("{what} {found} is not supported by this build; use a newer one")]
    Unsupported {
        /// What is not known.
        what: &'static str,
        /// Its number.
        found: u64,
    },
    /// The payload is coded with the history of earlier steps (motion), a withdrawn part of the format.
    /// Nothing was written; have the tensor encoded again.
    #[error(
        "{what} {found} needs the history of earlier steps (motion), which is not supported; encode the tensor again with this build"
    )]
    UnsupportedMotion {
        /// Which number of the payload asks for it.
        what: &'static str,
        /// The number.
        found: u64,
    },
    /// The tensor tables of base and new differ, so a delta cannot express the change.
    #[error("tensor tables differ at `{name}`: {why}; a full snapshot is needed")]
    TableMismatch {
        /// The first tensor that differs.
        name: String,
        /// How.
        why: &'static str,
    },
    /// The bundle was made for another base. Nothing was decoded.
    #[error("base has {what} with check {found:016x}, the bundle needs {expected:016x}")]
    OtherBase {
        /// What differs: the tensor table, or the contents.
        what: &'static str,
        /// Check the bundle was made for (folded digest).
        expected: u64,
        /// Check of the base at hand.
        found: u64,
    },
    /// Something is wrong with one tensor of a list.
    #[error("tensor `{name}`: {source}")]
    InTensor {
        /// Its name.
        name: String,
        /// What is wrong.
        source: Box<Error>,
    },
    /// The text is not a digest.
    #[error("`{found}` is not a digest of 32 hexadecimal digits")]
    NotADigest {
        /// The text.
        found: String,
    },
}

impl Error {
    pub(crate) fn in_tensor(self, name: &str) -> Self {
        Self::InTensor { name: name.to_owned(), source: Box::new(self) }
    }
}

/// Refuses a length that is not the expected one.
pub(crate) fn expect_length(what: &'static str, expected: u64, found: usize) -> Result<()> {
    let found = found as u64;
    if expected == found { Ok(()) } else { Err(Error::LengthMismatch { what, expected, found }) }
}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;
