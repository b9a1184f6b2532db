//! Everything that only vLLM has. What it is asked, and what was not tried, is in `docs/wire/vllm.md`.

mod client;
mod engine;
mod generate;

pub use client::Client;
