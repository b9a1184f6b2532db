//! The bridge against an engine that hangs, lies, refuses and dies.

mod activation;
mod calls;
mod fake;
mod fleet;
