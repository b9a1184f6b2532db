//! Reads and writes slime's delta directories (slime 0.3.1, `--update-weight-mode delta`).
//!
//! A trainer writes `weight_v000001/`, `weight_v000002/`, … below one directory: safetensors files with a
//! zstd frame per changed tensor, and an index, written last. `docs/format/slime.md` describes the bytes.
//! They carry no run identity, no full version and no digest of an unchanged tensor. The reader pins what it
//! can and refuses the rest.
//!
//! [`Publisher`] writes such a directory, [`Follower::open_slime`](crate::Follower::open_slime) follows one.
//!
//! | File | Does |
//! |---|---|
//! | `release`, `json` | read one version's directory up to the headers of its files |
//! | `identity` | derives the identities that the versions lack |
//! | `feed` | moves a replica along the directory |
//! | `plan` | says what following would do, without doing it |
//! | `frame`, `checksum` | one tensor's zstd frame, and slime's checksums |
//! | `publish` | writes a directory for slime's receiver |

mod checksum;
mod feed;
mod frame;
mod identity;
mod json;
mod plan;
mod publish;
mod release;

use std::fmt;

use driftless_store::Key;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::ids::Version;

pub use checksum::Checksum;
pub(crate) use feed::Feed;
pub(crate) use plan::plan;
pub use publish::{Publisher, PublisherOptions};

/// File that commits a version.
const INDEX: &str = "model.safetensors.index.json";

/// How a changed tensor is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Encoding {
    /// All bytes, exclusive-or with the version in front.
    #[default]
    Xor,
    /// Positions and new values of the bytes that changed. Positions have 32 bits, so tensors are below 4 GiB.
    Overwrite,
}

impl fmt::Display for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Xor => "xor",
            Self::Overwrite => "overwrite",
        })
    }
}

/// The directory of a version.
fn version_key(version: Version) -> Result<Key> {
    Ok(Key::new(format!("weight_v{:06}", version.0))?)
}

fn index_key(version: Version) -> Result<Key> {
    Ok(version_key(version)?.join(INDEX)?)
}

/// Something in a version's directory that is not as it must be.
fn corrupt(
    subject: impl fmt::Display,
    what: &'static str,
    expected: impl fmt::Display,
    found: impl fmt::Display,
) -> Error {
    Error::Corrupt {
        subject: subject.to_string(),
        what,
        expected: expected.to_string(),
        found: found.to_string(),
    }
}
