//! For tests and benches: a network link in user space, and a small S3 server that errs on command.
#![allow(clippy::unwrap_used, reason = "support for tests: a failed step is a failed test")]

pub mod link;
pub mod s3;
