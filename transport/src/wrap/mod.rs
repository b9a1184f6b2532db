//! Stores around other stores, for tests and measurements: [`Count`], [`Fault`] and [`Throttle`].

mod count;
mod fault;
mod throttle;

pub use count::{Count, Counts};
pub use fault::{Fault, When};
pub use throttle::Throttle;
