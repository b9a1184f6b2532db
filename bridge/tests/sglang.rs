//! The conformance suite against a running engine. Set `DRIFTLESS_SGLANG` to its URL, and `DRIFTLESS_SGLANG_FIRST` and
//! `DRIFTLESS_SGLANG_SECOND` to two checkpoint directories of one shape, the first of them the one it was started with.
#![cfg(feature = "conformance")]

use std::path::PathBuf;

use driftless_bridge::conformance::{self, Dialect, Subject};
use driftless_bridge::{Client, ClientOptions};

/// The engine that the environment names, or the reason why there is none.
fn subject() -> Result<Subject, String> {
    let variable = |name: &str| std::env::var(name).map_err(|_| format!("{name} is not set"));
    let client = Client::new(&variable("DRIFTLESS_SGLANG")?, ClientOptions::default())
        .map_err(|error| error.to_string())?;
    Ok(Subject {
        client,
        first: PathBuf::from(variable("DRIFTLESS_SGLANG_FIRST")?),
        second: PathBuf::from(variable("DRIFTLESS_SGLANG_SECOND")?),
        dialect: Dialect::of_release(23),
        long_tokens: 400,
    })
}

#[tokio::test]
async fn sglang_passes_the_conformance_suite() {
    let subject = match subject() {
        Ok(subject) => subject,
        Err(reason) => return eprintln!("skipped: {reason}"),
    };
    match conformance::run(&subject).await {
        Ok(report) => println!("{} checks passed", report.passed.len()),
        Err(failure) => panic!("{failure}"),
    }
}
