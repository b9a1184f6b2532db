//! Lossless delta codec for model weights: bytes in, bytes out. No I/O, no threads, no configuration.
//!
//! A trainer changes few of the elements of a tensor in one step, and those by very few units in the last
//! place. The codec stores which elements changed, within classes of the exponent that both sides know from
//! the base, and by how many ulps. Every bit pattern survives: NaN payloads, signed zeros, opaque bytes.
//!
//! ```
//! use driftless_delta::{DigestTable, Element, Patch, Profile, decode, encode};
//!
//! let base: Vec<u8> = (0..1000_u16).flat_map(|i| (0x3c00 + i).to_le_bytes()).collect();
//! let mut new = base.clone();
//! new[42] ^= 1;
//!
//! let digests = DigestTable::of(Element::Bf16, &base)?;
//! let mut payload = Vec::new();
//! let encoded = encode(Element::Bf16, &base, &new, &digests, Profile::Wire, &mut payload)?;
//! assert_eq!(encoded.changed, 1);
//!
//! let mut patch = Patch::new();
//! decode(Element::Bf16, &base, &digests, &payload, &mut patch)?;
//! let mut tensor = base;
//! patch.apply_to(&mut tensor)?;
//! assert_eq!(tensor, new);
//! assert_eq!(*patch.digests(), encoded.digests);
//! # Ok::<(), driftless_delta::Error>(())
//! ```
//!
//! Tensors are cut into blocks of [`BLOCK_ELEMENTS`], coded and digested on their own. A [`Digest`] is
//! additive, so the digests of a result follow from the base's and the changes. A wrong base is refused
//! before anything is decoded. A result that is not the promised one is never handed out.

mod bits;
pub mod bundle;
mod choose;
mod classes;
mod coder;
#[cfg(feature = "cuda")]
pub mod cuda;
mod decode;
mod digest;
mod element;
pub mod elements;
mod encode;
mod entropy;
mod error;
pub mod patch;
mod payload;
mod pool;
mod scan;
mod segment;
mod source;
mod table;

pub use choose::Profile;
pub use decode::{Decoder, decode, decode_full, full_digest};
pub use digest::{Digest, DigestTable};
pub use element::{BLOCK_ELEMENTS, Element};
pub use encode::{Encoded, Encoder, encode, encode_checked, encode_full};
pub use error::{Error, Result};
pub use patch::Patch;
pub use pool::{Pool, Serial};
pub use source::Source;
