//! `driftless verify`, on runs made by the crates.

use crate::common::{code, driftless, output};
use driftless_bridge::Rid;
use driftless_bridge::engine::{Digester, ReplyDigest, context};
use driftless_buffer::sample::{ColumnId, Element};
use driftless_buffer::{Identity, Log, Options, Sample, Scalars, VersionSpan};
use std::path::Path;

/// A run of a step that learned from two samples of two tokens, of which the second has this log-probability.
fn run(dir: &Path, log_prob: f32) {
    let identity = Identity { run_id: [1; 16], model: "policy".into(), tokenizer_digest: [0; 32] };
    let log = Log::open(dir.join("log"), Options::new(identity)).expect("a log");
    for (number, log_prob) in [(0, -0.5), (1, log_prob)] {
        let (rid, before) = (Rid::new(1, number), context(0, &[5]));
        let mut digester = Digester::new(rid, before);
        [7, 8].into_iter().for_each(|id| digester.push(id, -0.5, Some(0)));
        let reply = ReplyDigest { rid, start: 0, end: 2, context: before, digest: digester.digest() };
        let sample = Sample {
            scalars: Scalars { sample_id: number, group_id: number, status: 1, ..Scalars::default() },
            prompt_len: 1,
            tokens: &[5, 7, 8],
            log_probs: &[-0.5, log_prob],
            loss_mask: &[1; 2],
            spans: &[VersionSpan { version: 0, start: 0, end: 2 }],
            extra: &[(ColumnId::REPLIES, Element::U8, &reply.to_bytes())],
            ..Sample::default()
        };
        log.append(&sample).expect("room").wait().expect("a disk");
    }
    log.close().expect("a disk");
    std::fs::write(dir.join("ledger.jsonl"), "{\"step\":0,\"groups\":[0,1]}\n").expect("a file");
}

#[test]
fn verify_names_what_is_not_an_engines() {
    let dir = tempfile::tempdir().expect("a directory");
    let [good, bad, none] = ["good", "bad", "none"].map(|name| dir.path().join(name));
    run(&good, -0.5);
    run(&bad, -0.25);
    std::fs::create_dir(&none).expect("a directory");
    let sound = output(driftless().arg("verify").arg(&good));
    let told = String::from_utf8_lossy(&sound.stdout).into_owned();
    assert_eq!(sound.status.code(), Some(0), "{told}");
    assert!(told.contains("2 answers, 2 samples: 4 trained tokens in 2 replies checked"), "{told}");
    assert!(told.contains("not checked: 1 steps whose newest version is unknown"), "{told}");
    let damaged = output(driftless().args(["verify", "--json"]).arg(&bad));
    let report: serde_json::Value = serde_json::from_slice(&damaged.stdout).expect("JSON");
    assert_eq!((damaged.status.code(), &report["faults"]), (Some(3), &1.into()));
    let first = &report["first"][0];
    assert_eq!((&first["position"], &first["tokens"]), (&1.into(), &serde_json::json!([0, 2])));
    let (status, words) = code(driftless().arg("verify").arg(&none));
    assert!(status == Some(2) && words.contains("ledger.jsonl"), "{words}");
}
