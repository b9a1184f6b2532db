#![doc = include_str!("../README.md")]

#[cfg(target_endian = "big")]
compile_error!(
    "driftless-buffer hands out little-endian columns without copying them and needs a little-endian machine"
);

mod append;
mod beacon;
mod cursor;
mod damage;
mod error;
#[cfg(feature = "arrow")]
mod export;
mod files;
mod index;
mod inspect;
mod layout;
mod ledger;
mod lock;
mod locks;
mod log;
mod map;
mod options;
mod position;
mod producer;
mod query;
mod reader;
mod record;
mod recover;
mod regular;
mod reservation;
mod retain;
mod sample;
mod scan;
mod segments;
mod serve;
mod shared;
mod storage;
mod sync;
#[cfg(test)]
mod tests;
mod wire;

pub use cursor::Cursor;
pub use damage::{Damage, Recovery, Severity};
pub use error::{Error, Result};
#[cfg(feature = "arrow")]
pub use export::{Exported, export_arrow, export_parquet};
pub use inspect::{Report, Stat, stat, verify};
pub use log::Log;
pub use options::{Options, SyncPolicy};
pub use position::{Identity, Position};
pub use producer::{Producer, Producers};
pub use query::{Group, GroupQuery, Order};
pub use reader::{Reader, Records};
pub use record::Record;
pub use reservation::{Ack, Pending, Reservation};
pub use retain::{Retention, Retired};
pub use sample::{ColumnId, Element, Finish, Kind, PromptState, Sample, Scalars, Shape, VersionSpan};

/// Unix time in microseconds, for information only: nothing is ever ordered by it.
fn clock_us() -> u64 {
    let elapsed = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    elapsed.map_or(0, |elapsed| u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX))
}
