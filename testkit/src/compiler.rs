//! Tests of kernels that a C++ compiler makes for this processor.

use std::fmt::Display;

/// Says why a test does nothing, for want of a compiler. Where `DRIFTLESS_CXX_REQUIRED` is set, as
/// `cargo xtask test --ci` does, that is a failure.
///
/// # Panics
/// Where a compiler is required.
pub fn missing(why: &dyn Display) {
    assert!(std::env::var_os("DRIFTLESS_CXX_REQUIRED").is_none(), "{why}");
    eprintln!("skipped: {why}");
}
