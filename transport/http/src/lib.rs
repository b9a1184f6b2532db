#![doc = include_str!("../README.md")]

#[cfg(feature = "client")]
mod client;
mod error;
#[cfg(feature = "serve")]
pub mod listen;
pub mod metrics;
#[cfg(feature = "client")]
mod notify;
#[cfg(feature = "serve")]
mod origin;
#[cfg(feature = "client")]
pub mod runtime;
#[cfg(feature = "serve")]
mod server;

#[cfg(feature = "client")]
pub use client::{Answer, Client, client_builder, parse_url};
#[cfg(feature = "client")]
pub use error::Lost;
pub use error::{Error, Result};
#[cfg(feature = "client")]
pub use notify::Followers;
#[cfg(feature = "serve")]
pub use origin::is_ours;
#[cfg(feature = "serve")]
pub use server::{Server, Threads, Token, check_exposure, refuse};
