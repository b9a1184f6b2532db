//! What a journal keeps of sessions, as bytes.

use driftless_bridge::SamplingParams;
use serde::{Deserialize, Serialize};

use crate::session::Turn;

/// One step of a session.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Step {
    /// It was opened.
    Opened { key: Option<String>, sampling: Sampling },
    /// The model answered.
    Turned(Box<Turn>),
    /// Nobody asked for it, and it left memory.
    Rested,
    /// It was closed.
    Closed,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) session: String,
    pub(super) step: Step,
    /// Seconds since 1970. Older journals do not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) at: Option<u64>,
    /// Tokens that were given, behind the JSON.
    given: usize,
    /// Tokens that were sampled, behind these, and then their log-probabilities.
    sampled: usize,
}

/// [`SamplingParams`], every bit of them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Sampling {
    temperature: u64,
    top_p: u64,
    top_k: i64,
    max_new_tokens: u32,
    stop_token_ids: Vec<i32>,
    stop: Vec<String>,
    ignore_eos: bool,
    sampling_seed: Option<u64>,
}

impl Record {
    pub(super) fn new(session: &str, step: Step, at: u64) -> Self {
        Record { session: session.to_owned(), step, at: Some(at), given: 0, sampled: 0 }
    }

    /// Its JSON's length, its JSON, and the tokens of a turn.
    pub(super) fn into_bytes(mut self) -> Result<Vec<u8>, serde_json::Error> {
        if let Step::Turned(turn) = &self.step {
            (self.given, self.sampled) = (turn.given.len(), turn.sampled.len());
        }
        let mut bytes = framed(&self)?;
        let Step::Turned(turn) = &self.step else { return Ok(bytes) };
        let Turn { given, sampled, log_probs, .. } = turn.as_ref();
        for ids in [given, sampled] {
            bytes.extend_from_slice(ids.iter().map(|id| id.to_le_bytes()).collect::<Vec<_>>().as_flattened());
        }
        bytes.extend(log_probs.iter().flat_map(|log_prob| log_prob.to_le_bytes()));
        Ok(bytes)
    }

    /// # Errors
    /// What is wrong with bytes that [`Record::into_bytes`] did not make.
    pub(super) fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        let other = || "expected a record of a session, found other bytes".to_owned();
        let (length, rest) = bytes.split_first_chunk().ok_or_else(other)?;
        let (json, tail) = rest.split_at_checked(u32::from_le_bytes(*length) as usize).ok_or_else(other)?;
        let mut record: Record =
            serde_json::from_slice(json).map_err(|error| format!("a record: {error}"))?;
        let (words, odd) = tail.as_chunks::<4>();
        let (given, sampled) = (record.given, record.sampled);
        let counted = sampled.checked_mul(2).and_then(|sampled| sampled.checked_add(given));
        if !odd.is_empty() || counted != Some(words.len()) {
            return Err(other());
        }
        if let Step::Turned(turn) = &mut record.step {
            let ids = |words: &[[u8; 4]]| words.iter().map(|word| i32::from_le_bytes(*word)).collect();
            turn.given = ids(&words[..given]);
            turn.sampled = ids(&words[given..given + sampled]);
            turn.log_probs = words[given + sampled..].iter().map(|word| f32::from_le_bytes(*word)).collect();
        }
        Ok(record)
    }
}

fn framed(record: &Record) -> Result<Vec<u8>, serde_json::Error> {
    let mut bytes = vec![0; 4];
    serde_json::to_writer(&mut bytes, record)?;
    let length = (bytes.len() - 4) as u32;
    bytes[..4].copy_from_slice(&length.to_le_bytes());
    Ok(bytes)
}

impl From<&SamplingParams> for Sampling {
    fn from(sampling: &SamplingParams) -> Self {
        let SamplingParams { top_k, max_new_tokens, ignore_eos, sampling_seed, .. } = *sampling;
        Sampling {
            temperature: sampling.temperature.to_bits(),
            top_p: sampling.top_p.to_bits(),
            top_k,
            max_new_tokens,
            stop_token_ids: sampling.stop_token_ids.clone(),
            stop: sampling.stop.clone(),
            ignore_eos,
            sampling_seed,
        }
    }
}

impl From<Sampling> for SamplingParams {
    fn from(sampling: Sampling) -> Self {
        let Sampling { top_k, max_new_tokens, stop_token_ids, stop, ignore_eos, sampling_seed, .. } =
            sampling;
        SamplingParams {
            temperature: f64::from_bits(sampling.temperature),
            top_p: f64::from_bits(sampling.top_p),
            top_k,
            max_new_tokens,
            stop_token_ids,
            stop,
            ignore_eos,
            sampling_seed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_of_before_there_were_times_are_read_on() {
        let older = br#"{"session":"s","step":"closed","given":0,"sampled":0}"#;
        let bytes = [&(older.len() as u32).to_le_bytes()[..], older].concat();
        let expected = Record { at: None, ..Record::new("s", Step::Closed, 7) };
        assert_eq!(Record::from_bytes(&bytes), Ok(expected.clone()));
        let newer = Record { at: Some(7), ..expected };
        assert_eq!(Record::from_bytes(&newer.clone().into_bytes().unwrap()), Ok(newer));
    }
}
