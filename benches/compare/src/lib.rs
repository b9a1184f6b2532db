//! What the codec is measured against: the peers' formats restated from their descriptions, the information
//! bound, and data.

pub mod bound;
pub mod data;
pub mod peers;
pub mod receiver;
