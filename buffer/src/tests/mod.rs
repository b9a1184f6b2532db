//! Crash, fault and interleaving tests on a simulated medium.

#[cfg(not(loom))]
mod crash;
#[cfg(not(loom))]
mod faults;
pub(crate) mod image;
#[cfg(loom)]
mod interleavings;
#[cfg(not(loom))]
pub(crate) mod syscalls;
#[cfg(not(loom))]
mod work;

use crate::{Identity, Options, SyncPolicy};

/// Small segments, no sync unless asked for.
fn options() -> Options {
    let identity = Identity { run_id: [7; 16], model: "policy".into(), tokenizer_digest: [1; 32] };
    Options { segment_bytes: 64 << 10, sync: SyncPolicy::Manual, ..Options::new(identity) }
}
