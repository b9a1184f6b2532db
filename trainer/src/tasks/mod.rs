//! Verifiable tasks that need no data from outside.

pub mod arithmetic;
