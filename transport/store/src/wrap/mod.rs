//! Stores around other stores: [`Count`] counts requests and bytes, [`Fault`] fails on command, [`Throttle`]
//! is slow.
//!
//! [`Count`] also feeds a follower's metrics. The other two serve tests and measurements.

mod count;
mod fault;
mod throttle;

pub use count::{Count, Counts};
pub use fault::{Fault, When};
pub use throttle::Throttle;
