//! The bridge's own suite, which SGLang passes too, in every dialect.

use driftless_bridge::ClientOptions;
use driftless_bridge::sglang::Client;
use driftless_bridge::sglang::conformance::{self, Subject};
use driftless_torch::Family;
use driftless_torch::engine::Dialect;

use crate::model::Fixture;

fn run(fixture: &Fixture, dialect: Dialect) {
    let client = Client::new(&fixture.server.url(), ClientOptions::default()).unwrap();
    let subject = Subject {
        client,
        first: fixture.dir.path().join("a"),
        second: fixture.dir.path().join("b"),
        dialect,
        long_tokens: 1800,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let report = runtime.block_on(conformance::run(&subject)).unwrap_or_else(|failure| panic!("{failure}"));
    assert!(report.passed.len() > 20, "{:?}", report.passed);
}

#[test]
fn speaks_0_5_23() {
    run(&Fixture::of(Dialect::V0_5_23), Dialect::V0_5_23);
}

#[test]
fn speaks_0_5_17() {
    run(&Fixture::of(Dialect::V0_5_17), Dialect::V0_5_17);
}

#[test]
fn speaks_0_5_12() {
    run(&Fixture::of(Dialect::V0_5_12), Dialect::V0_5_12);
}

#[test]
fn serves_the_other_families() {
    for family in [Family::Llama, Family::Qwen2] {
        println!("{}", family.architecture());
        run(&Fixture::of_family(family), Dialect::V0_5_23);
    }
}
