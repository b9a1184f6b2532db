//! Weights pushed within a device: into engines on the GPU of whoever pushes (`docs/wire/colocate.md`).
//!
//! A [`Colocation`] lays a bucket into memory and tells each rank of an engine by HTTP where that is; the
//! rank opens the memory and loads from it. Where the bytes are is a [`Share`]'s affair: in CUDA memory that
//! other processes may open (feature `cuda`), or, for an engine on the CPU, in the call itself. No torch is
//! needed: what the ranks are told is a pickle of few kinds of things, which `pickle` writes.

#[cfg(feature = "cuda")]
mod counters;
#[cfg(feature = "cuda")]
mod cuda;
mod payload;
mod pickle;
mod share;
mod tensors;

#[cfg(feature = "cuda")]
pub use cuda::CudaShare;
pub use share::{CudaPlace, Place, Share};
pub use tensors::{Colocation, ColocationOptions};
