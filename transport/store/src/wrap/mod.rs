//! Stores around other stores: [`Count`] counts requests and bytes, [`Fault`] fails on command.
//!
//! [`Count`] also feeds a follower's metrics. [`Fault`] serves tests.

mod count;
mod fault;

pub use count::{Count, Counts};
pub use fault::{Fault, When};
