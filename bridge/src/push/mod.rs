//! Weights pushed into engines' memory: what a push over a network ([`Group`](nccl::Group)) and one within a device
//! ([`Colocation`](colocate::Colocation)) have in common.
//!
//! [`plan`] says which tensors of a [`Snapshot`] travel together, [`Push`] brings them there, and [`PushActivator`]
//! puts pause, label and a look at the result around it.
//!
//! | File | Is |
//! |---|---|
//! | `activate` | [`PushActivator`]: one follower drives several engines as if they were one |
//! | `bucket` | which tensors travel together |
//! | `calls` | HTTP calls under way at every engine meanwhile |
//! | `occupation` | memory that engines give back for as long as a push takes |
//! | `nccl/` | over a network: rank 0 of SGLang's weight-update group |
//! | `colocate/` | within the GPU that the engine uses |
//! | `device/` | buckets in CUDA memory, which both of these share |

mod activate;
mod bucket;
mod calls;
pub mod colocate;
#[cfg(feature = "cuda")]
pub(crate) mod device;
pub mod nccl;
mod occupation;

use std::time::Duration;

use driftless_transport::Snapshot;
use tokio::runtime::Handle;

pub use activate::{PushActivator, PushOptions};
pub use bucket::{Bucket, plan};
pub(crate) use calls::Calls;

use crate::error::Result;
use crate::sglang::{Client, ServerInfo};

/// An engine that is pushed into.
#[derive(Debug, Clone)]
pub struct Member {
    /// Its client.
    pub engine: Client,
    /// Its tensor-parallel ranks.
    pub ranks: u32,
    /// Whether it wants `begin_weight_update` and `end_weight_update` around updates:
    /// [`Capabilities::sessions`](crate::sglang::Capabilities).
    pub sessions: bool,
}

/// What a push did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pushed {
    /// Bytes that every engine received.
    pub bytes: u64,
    /// Calls that it took.
    pub buckets: usize,
    /// From the first call to the last reply.
    pub took: Duration,
}

/// A way into the memory of engines. Blocking.
pub trait Push: Send {
    /// Refuses an engine that this way would harm, by what it says about itself. Nothing has been posted to
    /// it yet.
    ///
    /// # Errors
    /// [`Error::Refused`](crate::Error::Refused).
    fn admit(&self, engine: &str, server: &ServerInfo) -> Result<()>;

    /// Says which engines are pushed into, and whether all of them are the processes of before.
    fn set_members(&mut self, members: Vec<Member>, same_processes: bool);

    /// Does what is slow the first time and needs no pause.
    ///
    /// # Errors
    /// The implementation's.
    fn form(&mut self) -> Result<()>;

    /// Pushes weights into every engine, which carry `label` afterwards if there is one. Their caches are not
    /// flushed. What lies on the device that is pushed from ([`Snapshot::on_device`]) is read there.
    ///
    /// # Errors
    /// The implementation's. Afterwards the weights of any of the engines may be a mixture.
    fn push(&mut self, weights: &dyn Snapshot, label: Option<&str>) -> Result<Pushed>;
}

/// Opens a session at the engines that have them.
pub(crate) fn begin_sessions(runtime: &Handle, members: &[Member]) -> Result<()> {
    let members: Vec<_> = members.iter().filter(|member| member.sessions).cloned().collect();
    Calls::send(runtime, &members, |_, engine| async move { engine.begin_weight_update().await }).wait()
}

/// Ends the sessions. One that is left open keeps an engine from every other update.
pub(crate) fn end_sessions(runtime: &Handle, members: &[Member]) -> Result<()> {
    let members: Vec<_> = members.iter().filter(|member| member.sessions).cloned().collect();
    Calls::send(runtime, &members, |_, engine| async move { engine.end_weight_update().await }).wait()
}
