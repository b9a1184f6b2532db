//! Objects over a fabric, as `docs/wire/fabric.md` describes.
//!
//! A session is a TCP connection and a link. The follower asks and is answered over the connection; the bytes
//! come over the link. The end of the connection tells each side that the other has ended, whatever the
//! link's transport notices.

mod ask;
mod control;
mod serve;

use std::time::Duration;

use serde::{Deserialize, Serialize};

pub(super) use ask::Remote;
pub(crate) use serve::Sessions;

/// The number in a [`Hello`].
const PROTOCOL: u32 = 1;
/// How long one side may take to say a few words.
const WORD_DEADLINE: Duration = Duration::from_secs(10);
/// Slowest transfer that is waited for, in bytes a second, beyond [`WORD_DEADLINE`].
const BYTES_PER_SECOND_MIN: u64 = 2 << 20;

/// What a follower says first.
#[derive(Debug, Serialize, Deserialize)]
struct Hello {
    driftless_ucx: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    token: Option<String>,
    /// Of its link, in hex.
    address: String,
}

/// A request for `bytes` bytes of an object from `start`, to be sent under `tag`.
#[derive(Debug, Serialize, Deserialize)]
struct Ask {
    key: String,
    size: u64,
    blake3: String,
    start: u64,
    bytes: u64,
    tag: u64,
}

/// What a relay answers to either; without an error it is yes.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Answer {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    error: Option<Failure>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Failure {
    kind: String,
    message: String,
}

/// How long so many bytes may take.
fn patience(bytes: u64) -> Duration {
    WORD_DEADLINE + Duration::from_secs(bytes / BYTES_PER_SECOND_MIN)
}
