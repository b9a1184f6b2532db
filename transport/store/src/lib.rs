#![doc = include_str!("../README.md")]
//!
//! # Where things are
//!
//! | Module | Is |
//! |---|---|
//! | `store`, `open` | the [`Store`] trait, what its calls take and give; from a URL to a store |
//! | `key`, `digest` | names, and digests of content |
//! | `memory`, `disk`, `object` | the stores |
//! | [`download`] | ranges of objects that have arrived, kept until they are whole |
//! | [`wrap`], [`probe`], `conformance` | wrappers, the test at a publisher's start, the suite of all stores |
//! | [`os`], [`wait`], [`pool`] | files and locks; threads that wait; work on threads, with results in order |

#[cfg(feature = "conformance")]
pub mod conformance;
mod digest;
mod disk;
pub mod download;
mod error;
mod key;
mod memory;
#[cfg(feature = "object")]
mod object;
mod open;
pub mod os;
pub mod pool;
pub mod probe;
mod store;
pub mod wait;
pub mod wrap;

pub use digest::ContentDigest;
pub use disk::Disk;
pub use error::{BoxError, Error, Result, chain_text, if_found};
pub use key::Key;
pub use memory::Memory;
pub use open::{directory, open, open_with};
pub use probe::probe_conditional_put;
pub use store::{Entry, Object, OnBytes, PutMode, Store, no_progress, redact};
