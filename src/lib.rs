//! Facade.
#[cfg(feature = "bridge")]
pub use driftless_bridge as bridge;
#[cfg(feature = "buffer")]
pub use driftless_buffer as buffer;
#[cfg(feature = "delta")]
pub use driftless_delta as delta;
#[cfg(feature = "torch")]
pub use driftless_trainer as trainer;
#[cfg(feature = "transport")]
pub use driftless_transport as transport;
