//! Frame of a payload: the header, and the tokens that say how each run of blocks is coded.

use crate::bits::{ByteReader, put_varint, varint_bytes};
use crate::digest::{Digest, short};
use crate::element::{BLOCK_ELEMENTS, Element};
use crate::error::{Error, Result};

/// Upper half of the first byte: format version 1 in its three kinds. Later versions take other numbers than
/// these and [`MOTION`].
const DELTA: u8 = 0x10;
const UNCHANGED: u8 = 0x20;
const FULL: u8 = 0x30;
/// Withdrawn, and reserved for that: a delta coded with the history of earlier steps.
const MOTION: u8 = 0x40;

/// What a payload is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Changes against the base with this check.
    Delta(u16),
    /// Nothing changed: the result's check is the base's.
    Unchanged,
    /// So many elements without a base.
    Full(u64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) element: Element,
    pub(crate) kind: Kind,
    /// Check of the result.
    pub(crate) result: u64,
}

impl Header {
    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        match self.kind {
            Kind::Delta(base) => {
                out.push(DELTA | self.element.code());
                out.extend(base.to_le_bytes());
            }
            Kind::Unchanged => out.push(UNCHANGED | self.element.code()),
            Kind::Full(elements) => {
                out.push(FULL | self.element.code());
                put_varint(out, elements);
            }
        }
        out.extend(self.result.to_le_bytes());
    }

    /// Writes the result over that of a header that [`Header::write`] wrote.
    pub(crate) fn write_over(&self, out: &mut [u8]) {
        let at = match self.kind {
            Kind::Delta(_) => 3,
            Kind::Unchanged => 1,
            Kind::Full(elements) => 1 + varint_bytes(elements),
        };
        out[at..at + 8].copy_from_slice(&self.result.to_le_bytes());
    }

    fn read(bytes: &mut ByteReader<'_>) -> Result<Self> {
        let first = bytes.byte()?;
        let kind = match first & 0xf0 {
            DELTA => Kind::Delta(u16::from_le_bytes(bytes.array()?)),
            UNCHANGED => Kind::Unchanged,
            FULL => Kind::Full(bytes.varint()?),
            MOTION => return Err(Error::UnsupportedMotion { what: "payload kind", found: 4 }),
            found => return Err(Error::Unsupported { what: "payload kind", found: u64::from(found) >> 4 }),
        };
        let element = Element::from_code(first & 0x0f)?;
        Ok(Self { element, kind, result: u64::from_le_bytes(bytes.array()?) })
    }

    /// Reads the header of a delta from a base with this digest. Returns the result's check; `None` if nothing
    /// changed.
    pub(crate) fn of_delta(
        bytes: &mut ByteReader<'_>,
        element: Element,
        base: Digest,
    ) -> Result<Option<u64>> {
        let Self { kind, result, .. } = Self::of(bytes, element)?;
        let mismatch = |expected| Err(Error::BaseMismatch { expected, found: base.short_check() });
        match kind {
            Kind::Full(_) => Err(Error::KindMismatch { expected: "a delta", found: "full" }),
            Kind::Unchanged if result != base.check() => mismatch(short(result)),
            Kind::Unchanged => Ok(None),
            Kind::Delta(check) if check != base.short_check() => mismatch(check),
            Kind::Delta(_) => Ok(Some(result)),
        }
    }

    /// Reads the header of a full payload. Returns its number of elements, and the result's check.
    pub(crate) fn of_full(bytes: &mut ByteReader<'_>, element: Element) -> Result<(u64, u64)> {
        match Self::of(bytes, element)? {
            Self { kind: Kind::Full(elements), result, .. } => Ok((elements, result)),
            _ => Err(Error::KindMismatch { expected: "full", found: "a delta" }),
        }
    }

    /// Reads a header and refuses a payload for other elements than the tensor's.
    fn of(bytes: &mut ByteReader<'_>, element: Element) -> Result<Self> {
        let header = Self::read(bytes)?;
        if header.element == element {
            Ok(header)
        } else {
            Err(Error::ElementMismatch { expected: element, found: header.element })
        }
    }
}

/// Refuses a result with another check than its header promises.
pub(crate) fn expect_result(expected: u64, found: u64) -> Result<()> {
    if expected == found { Ok(()) } else { Err(Error::ResultMismatch { expected, found }) }
}

/// What comes next in the body of a payload. The number on disk is `value << 3 | mode`.
/// Modes 5 and 6 were motion's and stay reserved; mode 7 is free for later coders.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Token {
    /// This many blocks are the base's.
    Same(u64),
    /// This many blocks follow as they are.
    Raw(u64),
    /// A block of changes in so many bytes, in the classes of the table in force.
    Changes(u64),
    /// A whole block in so many bytes, without reference to the base.
    Entropy(u64),
    /// A coder table in so many bytes: in force from here on.
    Table(u64),
}

impl Token {
    pub(crate) fn write(self, out: &mut Vec<u8>) {
        let (mode, value) = match self {
            Self::Same(blocks) => (0, blocks),
            Self::Raw(blocks) => (1, blocks),
            Self::Changes(bytes) => (2, bytes),
            Self::Table(bytes) => (3, bytes),
            Self::Entropy(bytes) => (4, bytes),
        };
        put_varint(out, value << 3 | mode);
    }

    /// Ends a run of so many unchanged blocks, if there are any.
    pub(crate) fn run_of_same(blocks: &mut u64, out: &mut Vec<u8>) {
        let blocks = std::mem::take(blocks);
        if blocks > 0 {
            Self::Same(blocks).write(out);
        }
    }

    pub(crate) fn read(bytes: &mut ByteReader<'_>) -> Result<Self> {
        let number = bytes.varint()?;
        let value = number >> 3;
        if value == 0 {
            return Err(bytes.corrupt("empty token"));
        }
        Ok(match number & 7 {
            0 => Self::Same(value),
            1 => Self::Raw(value),
            2 => Self::Changes(value),
            3 => Self::Table(value),
            4 => Self::Entropy(value),
            found @ (5 | 6) => return Err(Error::UnsupportedMotion { what: "block mode", found }),
            mode => return Err(Error::Unsupported { what: "block mode", found: mode }),
        })
    }
}

/// Elements in block `block` of a tensor of `elements`.
pub(crate) fn block_elements(elements: usize, block: usize) -> usize {
    (elements - block * BLOCK_ELEMENTS).min(BLOCK_ELEMENTS)
}
