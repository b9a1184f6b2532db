//! Random operations against a plain map.
#![allow(clippy::unwrap_used, reason = "in a test, a failed expectation is the answer")]

use driftless_testkit::log::model::Run;
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_log_behaves_like_a_map(bytes in prop::collection::vec(any::<u8>(), 1..150)) {
        let dir = tempfile::tempdir().unwrap();
        Run::new(dir.path()).all(bytes);
    }
}
