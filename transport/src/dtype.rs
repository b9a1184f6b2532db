//! Element types of tensors, named as safetensors names them.

use std::fmt;
use std::str::FromStr;

use driftless_delta::Element;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Element type of a tensor, with the name that safetensors headers use.
///
/// Types narrower than a byte (`F4`, `F6_E2M3`, …) are refused when a header is read: such tensors are
/// published as `U8`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "&'static str", try_from = "String")]
pub enum Dtype {
    /// `BOOL`, one byte.
    Bool,
    /// `U8`.
    U8,
    /// `I8`.
    I8,
    /// `F8_E4M3`: 4 exponent bits, 3 mantissa bits, no infinities.
    F8E4M3,
    /// `F8_E5M2`: 5 exponent bits, 2 mantissa bits.
    F8E5M2,
    /// `F8_E8M0`: a power of two, used for block scales.
    F8E8M0,
    /// `I16`.
    I16,
    /// `U16`.
    U16,
    /// `F16`, IEEE binary16.
    F16,
    /// `BF16`.
    Bf16,
    /// `I32`.
    I32,
    /// `U32`.
    U32,
    /// `F32`.
    F32,
    /// `I64`.
    I64,
    /// `U64`.
    U64,
    /// `F64`.
    F64,
    /// `C64`: two `F32`.
    C64,
}

impl Dtype {
    /// All of them.
    pub const ALL: [Self; 17] = [
        Self::Bool,
        Self::U8,
        Self::I8,
        Self::F8E4M3,
        Self::F8E5M2,
        Self::F8E8M0,
        Self::I16,
        Self::U16,
        Self::F16,
        Self::Bf16,
        Self::I32,
        Self::U32,
        Self::F32,
        Self::I64,
        Self::U64,
        Self::F64,
        Self::C64,
    ];

    /// The name in a safetensors header.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Bool => "BOOL",
            Self::U8 => "U8",
            Self::I8 => "I8",
            Self::F8E4M3 => "F8_E4M3",
            Self::F8E5M2 => "F8_E5M2",
            Self::F8E8M0 => "F8_E8M0",
            Self::I16 => "I16",
            Self::U16 => "U16",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::I32 => "I32",
            Self::U32 => "U32",
            Self::F32 => "F32",
            Self::I64 => "I64",
            Self::U64 => "U64",
            Self::F64 => "F64",
            Self::C64 => "C64",
        }
    }

    /// Bytes of one element.
    #[must_use]
    pub fn size(self) -> u64 {
        match self {
            Self::Bool | Self::U8 | Self::I8 | Self::F8E4M3 | Self::F8E5M2 | Self::F8E8M0 => 1,
            Self::I16 | Self::U16 | Self::F16 | Self::Bf16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 | Self::C64 => 8,
        }
    }

    /// How the delta codec treats the type: floats step in ulps, everything else is opaque bytes
    /// (one codec element per byte, whatever [`Dtype::size`] is).
    #[must_use]
    pub fn element(self) -> Element {
        match self {
            Self::F8E4M3 => Element::F8E4M3,
            Self::F8E5M2 => Element::F8E5M2,
            Self::F16 => Element::F16,
            Self::Bf16 => Element::Bf16,
            Self::F32 => Element::F32,
            _ => Element::Bytes,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl From<Dtype> for &'static str {
    fn from(dtype: Dtype) -> Self {
        dtype.name()
    }
}

impl FromStr for Dtype {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name).ok_or_else(|| Error::Unsupported {
            what: format!("tensor element type `{}`", name.escape_default()),
            hint: "publish such tensors as U8".into(),
        })
    }
}

impl TryFrom<String> for Dtype {
    type Error = Error;

    fn try_from(name: String) -> Result<Self> {
        name.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for dtype in Dtype::ALL {
            assert_eq!(dtype.name().parse::<Dtype>().unwrap(), dtype);
            let json = serde_json::to_string(&dtype).unwrap();
            assert_eq!(serde_json::from_str::<Dtype>(&json).unwrap(), dtype);
        }
    }

    #[test]
    fn narrow_types_are_refused() {
        let error = "F4".parse::<Dtype>().unwrap_err();
        assert!(error.to_string().contains("F4"), "{error}");
    }

    #[test]
    fn floats_keep_their_width_in_the_codec() {
        for dtype in Dtype::ALL {
            if dtype.element() != Element::Bytes {
                assert_eq!(dtype.element().size() as u64, dtype.size(), "{dtype}");
            }
        }
    }
}
