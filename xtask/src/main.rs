//! Set-up and lanes.
fn main() {}
