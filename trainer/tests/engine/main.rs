//! The embedded engine over HTTP: what it generates, and what it promises about pausing, updating and refusing.

mod client;
mod conformance;
mod generation;
mod lifecycle;
mod model;
mod surface;
mod updates;
