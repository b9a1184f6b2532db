//! The digests of replies and of samples, as `docs/format/log.md` and `docs/proof.md` have them. What writes them has its own
//! code for it: a mistake there is not repeated here.

use driftless_buffer::Record;
use driftless_buffer::sample::ColumnId;

/// What one request of an engine drew, as an entry of the log's column says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Reply {
    /// First of the response tokens, and one past the last.
    pub(crate) start: u32,
    pub(crate) end: u32,
    /// The request: its scope, the number of its answer, its attempt.
    pub(crate) request: [u64; 3],
    /// Context of all ids before the first.
    pub(crate) context: u64,
    pub(crate) digest: u128,
}

impl Reply {
    /// Bytes of an entry.
    pub(crate) const BYTES: usize = 56;

    /// `None` for bytes that are no entry.
    pub(crate) fn from_bytes(entry: &[u8]) -> Option<Self> {
        let (words, []) = entry.as_chunks::<8>() else { return None };
        let words: [u64; 7] = <[_; 7]>::try_from(words).ok()?.map(u64::from_le_bytes);
        let [tokens, scope, answer, attempt, context, low, high] = words;
        (attempt <= u64::from(u16::MAX)).then_some(Reply {
            start: tokens as u32,
            end: (tokens >> 32) as u32,
            request: [scope, answer, attempt],
            context,
            digest: u128::from(high) << 64 | u128::from(low),
        })
    }

    /// The request's id as engines get it.
    pub(crate) fn rid(&self) -> String {
        let [scope, answer, attempt] = self.request;
        format!("{scope:016x}{answer:016x}{attempt:04x}")
    }

    /// Digest of a token that it drew behind such a context; without a version where the weights are none of a run.
    pub(crate) fn of_token(&self, context: u64, id: i32, log_prob: f32, version: Option<u64>) -> u128 {
        let [scope, answer, attempt] = self.request;
        let mut hasher = blake3::Hasher::new();
        for number in [scope, answer] {
            hasher.update(&number.to_le_bytes());
        }
        hasher.update(&(attempt as u16).to_le_bytes());
        hasher.update(&context.to_le_bytes());
        hasher.update(&id.to_le_bytes());
        hasher.update(&log_prob.to_le_bytes());
        hasher.update(&version.unwrap_or(u64::MAX).to_le_bytes());
        let mut first = [0; 16];
        hasher.finalize_xof().fill(&mut first);
        u128::from_le_bytes(first)
    }
}

/// The context of the ids before another one, and of that.
pub(crate) fn behind(context: u64, id: i32) -> u64 {
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    let id = u64::from(u32::from_le_bytes(id.to_le_bytes()));
    (context.rotate_left(5) ^ (id + 1)).wrapping_mul(FACTOR)
}

/// What a line of the ledger says of a sample: the first 16 hex digits of BLAKE3 of what a step learns from.
pub(crate) fn of_sample(record: &Record) -> String {
    let scalars = record.scalars();
    let mut bytes: Vec<u8> = Vec::new();
    for number in [scalars.sample_id, scalars.group_id, record.prompt_len() as u64] {
        bytes.extend(number.to_le_bytes());
    }
    for number in [scalars.reward.to_bits(), u32::from(record.verdict().code())] {
        bytes.extend(u64::from(number).to_le_bytes());
    }
    let mut hasher = blake3::Hasher::new();
    hasher.update(&bytes);
    for column in [
        ColumnId::TOKENS,
        ColumnId::LOG_PROBS,
        ColumnId::LOSS_MASK,
        ColumnId::SPANS,
        ColumnId::TEACHER_LOG_PROBS,
    ] {
        let held = record.column(column).map_or(&[][..], |(_, held)| held);
        hasher.update(&(held.len() as u64).to_le_bytes());
        hasher.update(held);
    }
    let hex = hasher.finalize().to_hex();
    hex.chars().take(16).collect()
}
