//! Element types of tensors, named as safetensors names them.

use std::fmt;
use std::str::FromStr;

use driftless_delta::Element;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Makes [`Dtype`] from a row for each type: its name here and in headers, its bytes, and how the codec treats it.
macro_rules! dtypes {
    ($($(#[$doc:meta])* $name:ident $text:literal $size:literal $element:ident,)*) => {
        /// Element type of a tensor, with the name that safetensors headers use.
        ///
        /// Types narrower than a byte (`F4`, `F6_E2M3`, …) are refused when a header is read: such tensors are
        /// published as `U8`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(into = "&'static str", try_from = "String")]
        pub enum Dtype {
            $($(#[$doc])* $name,)*
        }

        impl Dtype {
            /// All of them.
            pub const ALL: [Self; 17] = [$(Self::$name,)*];

            /// The name in a safetensors header.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }

            /// Bytes of one element.
            #[must_use]
            pub fn size(self) -> u64 {
                match self { $(Self::$name => $size,)* }
            }

            /// How the delta codec treats the type: floats step in ulps, everything else is opaque bytes
            /// (one codec element per byte, whatever [`Dtype::size`] is).
            #[must_use]
            pub fn element(self) -> Element {
                match self { $(Self::$name => Element::$element,)* }
            }
        }
    };
}

dtypes! {
    /// `BOOL`, one byte.
    Bool "BOOL" 1 Bytes,
    /// `U8`.
    U8 "U8" 1 Bytes,
    /// `I8`.
    I8 "I8" 1 Bytes,
    /// `F8_E4M3`: 4 exponent bits, 3 mantissa bits, no infinities.
    F8E4M3 "F8_E4M3" 1 F8E4M3,
    /// `F8_E5M2`: 5 exponent bits, 2 mantissa bits.
    F8E5M2 "F8_E5M2" 1 F8E5M2,
    /// `F8_E8M0`: a power of two, used for block scales.
    F8E8M0 "F8_E8M0" 1 Bytes,
    /// `I16`.
    I16 "I16" 2 Bytes,
    /// `U16`.
    U16 "U16" 2 Bytes,
    /// `F16`, IEEE binary16.
    F16 "F16" 2 F16,
    /// `BF16`.
    Bf16 "BF16" 2 Bf16,
    /// `I32`.
    I32 "I32" 4 Bytes,
    /// `U32`.
    U32 "U32" 4 Bytes,
    /// `F32`.
    F32 "F32" 4 F32,
    /// `I64`.
    I64 "I64" 8 Bytes,
    /// `U64`.
    U64 "U64" 8 Bytes,
    /// `F64`.
    F64 "F64" 8 Bytes,
    /// `C64`: two `F32`.
    C64 "C64" 8 Bytes,
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
