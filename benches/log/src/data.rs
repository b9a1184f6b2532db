//! What all rows share: the records, the options, the arithmetic.

use std::time::{Duration, Instant};

use driftless_buffer::{Identity, Options, Sample, Scalars, SyncPolicy};

/// 8,192 tokens: ids, log-probs and mask take 72 KiB.
pub(crate) const TOKENS: usize = 8192;
pub(crate) const RECORD: usize = TOKENS * 9;
pub(crate) const GROUP: usize = 64;

pub(crate) struct Data {
    pub(crate) tokens: Vec<i32>,
    pub(crate) log_probs: Vec<f32>,
    pub(crate) loss_mask: Vec<u8>,
}

impl Data {
    pub(crate) fn new() -> Self {
        let tokens = (0..TOKENS as i32).map(|at| at.wrapping_mul(2_654_435)).collect();
        Self { tokens, log_probs: vec![-0.5; TOKENS], loss_mask: vec![1; TOKENS] }
    }

    pub(crate) fn sample(&self, id: usize) -> Sample<'_> {
        let (sample_id, group_id) = (id as u64, (id / GROUP) as u64);
        let scalars = Scalars { sample_id, group_id, ..Scalars::default() };
        let Self { tokens, log_probs, loss_mask } = self;
        Sample { scalars, tokens, log_probs, loss_mask, ..Sample::default() }
    }

    /// The columns one after another.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let tokens = self.tokens.iter().flat_map(|value| value.to_le_bytes());
        let log_probs = self.log_probs.iter().flat_map(|value| value.to_le_bytes());
        tokens.chain(log_probs).chain(self.loss_mask.iter().copied()).collect()
    }
}

pub(crate) fn options(sync: SyncPolicy, segment_bytes: u64) -> Options {
    let identity = Identity { run_id: [1; 16], model: "policy".into(), tokenizer_digest: [0; 32] };
    Options::new(identity).with_sync(sync).with_segment_bytes(segment_bytes)
}

pub(crate) fn mib(bytes: usize, elapsed: Duration) -> f64 {
    bytes as f64 / (1 << 20) as f64 / elapsed.as_secs_f64()
}

pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The median of `a[i] / b[i]`: what was measured in the same turn met the same disturbances.
pub(crate) fn ratio(a: &[f64], b: &[f64]) -> f64 {
    median(a.iter().zip(b).map(|(a, b)| a / b).collect())
}

pub(crate) fn timed(work: impl FnOnce()) -> Duration {
    let started = Instant::now();
    work();
    started.elapsed()
}
