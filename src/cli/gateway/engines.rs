//! The engines behind the sessions.

use crate::cli::shared::error::Result;
use async_trait::async_trait;
use driftless::agent::message::Refusal;
use driftless::agent::sessions::Draw;
use driftless::bridge::engine::{Expected, Rid};
use driftless::bridge::fleet::FleetOptions;
use driftless::bridge::{Fleet, GenerateRequest, Generation, Keys, SamplingParams};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// A fleet, and what its draws follow from.
pub(super) struct Engines {
    fleet: Fleet,
    seed: u64,
    /// Keeps requests apart from those of a process before this one, which engines may still have.
    begun: u128,
}

impl Engines {
    /// Attaches all of them, which have to be of the checkpoint's model.
    pub(super) async fn attach(
        addresses: &[String],
        keys: &Keys,
        checkpoint: &Path,
        options: FleetOptions,
        seed: u64,
    ) -> Result<Self> {
        let expected = Expected::from_checkpoint(checkpoint)?;
        let fleet = Fleet::attach(addresses, keys, &expected, options).await?;
        let begun = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        Ok(Self { fleet, seed, begun })
    }
}

/// A number that follows from these parts.
fn number(parts: &[&[u8]]) -> u64 {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
    }
    hasher.finalize().as_bytes().first_chunk().copied().map_or(0, u64::from_le_bytes)
}

#[async_trait]
impl Draw for Engines {
    async fn draw(
        &self,
        session: &str,
        nth: u64,
        input_ids: Vec<i32>,
        mut sampling: SamplingParams,
    ) -> Result<Generation, Refusal> {
        let name = session.as_bytes();
        sampling.sampling_seed = Some(number(&[&self.seed.to_le_bytes(), name, &nth.to_le_bytes()]) >> 1);
        let rid = Rid::new(number(&[&self.begun.to_le_bytes(), name]), nth);
        let mut request = GenerateRequest::new(rid, input_ids, sampling);
        request.conversation = Some(number(&[name]));
        self.fleet.generate(request, None).await.map_err(|error| {
            match error.is_transient() || error.is_no_engine() {
                true => Refusal::Busy(error.to_string()),
                false => Refusal::Broken(error.to_string()),
            }
        })
    }
}

/// Draws nothing, where sessions are only read.
pub(super) struct Nobody;

#[async_trait]
impl Draw for Nobody {
    async fn draw(&self, _: &str, _: u64, _: Vec<i32>, _: SamplingParams) -> Result<Generation, Refusal> {
        Err(Refusal::Busy("there are no engines".to_owned()))
    }
}
