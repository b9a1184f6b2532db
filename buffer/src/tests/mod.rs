//! Crash and fault tests on a simulated medium.

mod crash;
mod faults;
pub(crate) mod image;
mod work;
