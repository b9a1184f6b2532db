//! Tensors made from the rollout log lie in its map: no byte of a batch is copied.
#![allow(clippy::unwrap_used, reason = "in a test, a failed expectation is the answer")]

use std::ops::Range;

use driftless_buffer::{GroupQuery, Identity, Log, Options, Retention, Sample, Scalars};
use driftless_torch::libtorch::borrow;

/// Where the kernel has mapped segments of the log in `dir`.
fn maps(dir: &std::path::Path) -> Vec<Range<usize>> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let segment = |line: &&str| line.contains(dir.to_str().unwrap()) && line.contains("segment-");
    let range = |line: &str| {
        let (start, end) = line.split_once(' ')?.0.split_once('-')?;
        Some(usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?)
    };
    maps.lines().filter(segment).filter_map(range).collect()
}

#[test]
fn tensors_of_a_batch_lie_in_the_map_of_the_log() {
    let dir = tempfile::tempdir().unwrap();
    let identity = Identity { run_id: [1; 16], model: "policy".into(), tokenizer_digest: [0; 32] };
    let log = Log::open(dir.path(), Options::new(identity).with_segment_bytes(1 << 20)).unwrap();
    let tokens: Vec<i32> = (0..8192).collect();
    for id in 0..64 {
        let scalars = Scalars { sample_id: id, group_id: id / 8, ..Scalars::default() };
        let (log_probs, loss_mask) = (vec![-0.5; 8192], vec![1; 8192]);
        let sample = Sample {
            scalars,
            tokens: &tokens,
            log_probs: &log_probs,
            loss_mask: &loss_mask,
            ..Sample::default()
        };
        log.append(&sample).unwrap().wait().unwrap();
    }
    let groups = log.reader().find(&GroupQuery::complete(8));
    let records: Vec<_> = groups.iter().flat_map(|group| &group.records).collect();
    assert_eq!(records.len(), 64);
    // Also of segments that are no longer in the log.
    let retention = Retention { bytes_max: Some(1 << 20), ..Retention::default() };
    assert!(log.retain(&retention).unwrap().segments > 2);
    let maps = maps(dir.path());
    for record in records {
        let columns = [
            (borrow(record.tokens()).unwrap(), 4),
            (borrow(record.log_probs()).unwrap(), 4),
            (borrow(record.loss_mask()).unwrap(), 1),
        ];
        for (tensor, size) in &columns {
            let start = tensor.data_ptr() as usize;
            let end = start + tensor.numel() * size;
            assert_eq!(tensor.numel(), 8192);
            assert!(maps.iter().any(|map| map.start <= start && end <= map.end), "{start:#x} is in no map");
        }
        assert_eq!(columns[0].0.int64_value(&[8191]), 8191);
    }
}
