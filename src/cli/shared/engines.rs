//! What `follow` and `train` take of engines.

use driftless::bridge::activate::Compare;

/// Whether engines are taken whose live weights cannot be compared.
pub(crate) const COMPARES: [(&str, Compare); 2] = [("auto", Compare::Auto), ("require", Compare::Require)];
