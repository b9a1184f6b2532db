#![doc = include_str!("../README.md")]
//!
//! # Where things are
//!
//! | File | Does |
//! |---|---|
//! | `release`, `json` | read one version's directory up to the headers of its files |
//! | `identity` | derives the identities that the versions lack |
//! | `feed` | moves a replica along the directory |
//! | `follow` | the directory as a follower's source, and the call of slime's trainer |
//! | `plan` | says what following would do, without doing it |
//! | `frame`, `checksum` | one tensor's zstd frame, and slime's checksums |
//! | `publish` | writes a directory for slime's receiver |

mod checksum;
mod feed;
mod follow;
mod frame;
mod identity;
mod json;
mod plan;
mod publish;
mod release;

use std::fmt;

use driftless_store::Key;
use driftless_transport::{Result, Version};
use serde::{Deserialize, Serialize};

pub use checksum::Checksum;
pub use follow::{SlimeFeed, open, plan, routes};
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
    /// Positions and new values of the bytes that changed. Positions have 32 bits, so tensors are below 4
    /// GiB.
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
