//! For tests and benches: a network link in user space, a flood of connections, and small S3 and vLLM servers
//! and a learner that err on command.
#![allow(clippy::unwrap_used, reason = "support for tests: a failed step is a failed test")]

pub mod flood;
pub mod learner;
pub mod link;
pub mod s3;
pub mod vllm;
