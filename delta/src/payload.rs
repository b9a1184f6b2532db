//! Frame of a payload: the header, and the tokens that say how each run of blocks is coded.

use crate::bits::{ByteReader, put_varint};
use crate::{BLOCK_ELEMENTS, Element, Error, Result};

const FORMAT_VERSION: u8 = 1;
const FLAG_FULL: u8 = 0x10;
const FLAG_UNCHANGED: u8 = 0x20;
const ELEMENT_MASK: u8 = 0x0f;

/// What a payload is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// All elements, without a base.
    Full,
    /// Nothing changed: the result's check is the base's.
    Unchanged,
    /// Changes against the base with this check.
    Delta(u32),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) element: Element,
    pub(crate) elements: u64,
    pub(crate) kind: Kind,
    pub(crate) result: u64,
}

impl Header {
    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        let flags = match self.kind {
            Kind::Full => FLAG_FULL,
            Kind::Unchanged => FLAG_UNCHANGED,
            Kind::Delta(_) => 0,
        };
        out.extend([FORMAT_VERSION, self.element.code() | flags]);
        put_varint(out, self.elements);
        if let Kind::Delta(base) = self.kind {
            out.extend(base.to_le_bytes());
        }
        out.extend(self.result.to_le_bytes());
    }

    pub(crate) fn read(bytes: &mut ByteReader<'_>) -> Result<Self> {
        let version = bytes.byte()?;
        if version != FORMAT_VERSION {
            return Err(Error::Unsupported { what: "delta format version", found: version.into() });
        }
        let flags = bytes.byte()?;
        let element = Element::from_code(flags & ELEMENT_MASK)?;
        let elements = bytes.varint()?;
        let kind = match flags & !ELEMENT_MASK {
            FLAG_FULL => Kind::Full,
            FLAG_UNCHANGED => Kind::Unchanged,
            0 => Kind::Delta(u32::from_le_bytes(bytes.array()?)),
            found => return Err(Error::Unsupported { what: "payload flags", found: found.into() }),
        };
        let result = u64::from_le_bytes(bytes.array()?);
        Ok(Self { element, elements, kind, result })
    }

    /// Refuses a payload for other elements or another length than the tensor at hand.
    pub(crate) fn expect(&self, element: Element, elements: usize) -> Result<()> {
        if self.element != element {
            return Err(Error::ElementMismatch { expected: element, found: self.element });
        }
        if self.elements != elements as u64 {
            return Err(Error::LengthMismatch {
                what: "tensor",
                expected: self.elements,
                found: elements as u64,
            });
        }
        Ok(())
    }
}

/// What comes next in the body of a payload. The number on disk is `value << 3 | mode`; modes not listed are free for later coders.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Token {
    /// This many blocks are the base's.
    Same(u64),
    /// This many blocks follow as they are.
    Raw(u64),
    /// A block of changes in so many bytes, in the classes of the table in force.
    Changes(u64),
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
        };
        put_varint(out, value << 3 | mode);
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
            mode => return Err(Error::Unsupported { what: "block mode", found: mode }),
        })
    }
}

/// Elements in block `block` of a tensor of `elements`.
pub(crate) fn block_elements(elements: usize, block: usize) -> usize {
    (elements - block * BLOCK_ELEMENTS).min(BLOCK_ELEMENTS)
}
