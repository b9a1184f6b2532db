#![doc = include_str!("../README.md")]

#[cfg(not(target_os = "linux"))]
compile_error!(
    "driftless-buffer needs Linux: its readers wait on futexes, and its segments are allocated by fallocate"
);
#[cfg(target_endian = "big")]
compile_error!(
    "driftless-buffer hands out little-endian columns without copying them and needs a little-endian machine"
);

mod append;
pub mod check;
mod clock;
mod connection;
mod cursor;
mod damage;
mod durable_end;
mod error;
#[cfg(feature = "arrow")]
pub mod export;
mod files;
mod index;
mod layout;
pub mod learned;
mod ledger;
mod lock;
mod locks;
mod log;
mod map;
mod options;
mod position;
pub mod producer;
pub mod query;
pub mod reader;
mod record;
mod recover;
mod regular;
pub mod reservation;
pub mod retain;
pub mod sample;
mod scan;
mod segment;
mod serve;
mod shared;
mod spare;
mod storage;
mod sync;
#[cfg(test)]
mod tests;
mod wire;

pub use cursor::Cursor;
pub use error::{Error, Result};
pub use log::Log;
pub use options::{Options, SyncPolicy};
pub use position::{Identity, Position};
pub use producer::Producer;
pub use query::{Group, GroupQuery};
pub use reader::Reader;
pub use record::Record;
pub use retain::Retention;
pub use sample::{Finish, Kind, PromptState, Sample, Scalars, VersionSpan};
