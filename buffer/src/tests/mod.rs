//! Crash and fault tests on a simulated medium.

pub(crate) mod image;
