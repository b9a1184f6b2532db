//! Records that tests can make again from their ids alone.

pub mod model;

use driftless_buffer::{Identity, Kind, Options, Record, Sample, Scalars, VersionSpan};

/// Small segments, one sync per record.
pub fn options() -> Options {
    let identity = Identity { run_id: [7; 16], model: "policy".into(), tokenizer_digest: [1; 32] };
    Options::new(identity).with_segment_bytes(1 << 20)
}

/// A record with its own memory.
pub struct Owned {
    /// Ids, reward and the like.
    pub scalars: Scalars,
    /// Tokens of the prompt.
    pub prompt_len: usize,
    /// Prompt and response.
    pub tokens: Vec<i32>,
    /// Of each token of the response.
    pub log_probs: Vec<f32>,
    /// Of each token of the response.
    pub loss_mask: Vec<u8>,
    /// Which version drew which token.
    pub spans: Vec<VersionSpan>,
    /// Anything.
    pub metadata: Vec<u8>,
}

/// The record of these ids: always the same content.
pub fn sample(sample_id: u64, group_id: u64, rollout_id: u64) -> Owned {
    let seed = sample_id.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    let (prompt_len, response) = (1 + (seed % 5) as usize, 1 + (seed / 7 % 40) as usize);
    let scalars = Scalars {
        sample_id,
        group_id,
        rollout_id,
        reward: seed as f32,
        status: 1,
        clock_us: seed,
        ..Scalars::default()
    };
    Owned {
        scalars,
        prompt_len,
        tokens: (0..prompt_len + response).map(|at| (seed as i32).wrapping_add(at as i32)).collect(),
        log_probs: (0..response).map(|at| -(at as f32) - seed as f32).collect(),
        loss_mask: (0..response).map(|at| u8::from((at as u64 ^ seed) & 3 > 0)).collect(),
        spans: vec![VersionSpan { version: rollout_id, start: 0, end: response as u32 }],
        metadata: seed.to_le_bytes()[..(seed % 9) as usize].to_vec(),
    }
}

impl Owned {
    /// As the log takes it.
    pub fn as_sample(&self) -> Sample<'_> {
        Sample {
            kind: Kind::Sample,
            scalars: self.scalars,
            prompt_len: self.prompt_len,
            tokens: &self.tokens,
            log_probs: &self.log_probs,
            loss_mask: &self.loss_mask,
            spans: &self.spans,
            engine: "engine",
            metadata: &self.metadata,
            extra: &[],
        }
    }

    /// The record is this one.
    pub fn assert_equals(&self, record: &Record) {
        assert_eq!(*record.scalars(), self.scalars);
        assert_eq!(record.prompt_len(), self.prompt_len);
        assert_eq!(record.tokens(), self.tokens);
        assert_eq!(record.log_probs(), self.log_probs);
        assert_eq!(record.loss_mask(), self.loss_mask);
        assert_eq!(record.spans(), self.spans);
        assert_eq!(record.metadata(), self.metadata);
    }
}
