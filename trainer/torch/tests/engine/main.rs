//! The embedded engine over HTTP: what it generates, and what it promises about pausing, updating and
//! refusing.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as the tests do")]

mod client;
mod conformance;
mod generation;
mod lifecycle;
mod model;
mod strangers;
mod surface;
mod updates;
