//! Sessions over scripted engines: what clients are told, what engines read, what is kept and what is trained.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod basic;
mod broken;
mod families;
mod oracle;
mod parity;
mod random;
mod rested;
mod toy;
mod trained;
