//! What there is to learn: prompts, how answers to them are made, and what answers are worth.

pub mod arithmetic;
mod prompts;

pub use prompts::{Filter, Prompts};

use std::fmt;
use std::path::Path;

use async_trait::async_trait;
use driftless_bridge::{Fleet, GenerateRequest, Generation, Label, Rid, SamplingParams};
use driftless_buffer as buffer;
use serde_json::value::RawValue;

use crate::error::Result;
use crate::reward::Answer;

/// A prompt of a task.
#[derive(Debug, Clone)]
pub struct Prompt {
    /// What the model reads; at least one id.
    pub tokens: Vec<i32>,
    /// The same as text.
    pub text: String,
    /// What rewards compare with, as JSON.
    pub label: Option<Box<RawValue>>,
    /// What else rewards are given, as a JSON object.
    pub metadata: Option<Box<RawValue>>,
    /// Where it is from, for messages and the log.
    pub source: String,
}

/// What a sample is made of: a prompt and a response, token by token.
#[derive(Debug, Clone)]
pub struct Trajectory {
    /// Prompt and response.
    pub tokens: Vec<i32>,
    /// Tokens of the prompt.
    pub prompt_len: usize,
    /// Per response token: its log-probability when it was sampled.
    pub log_probs: Vec<f32>,
    /// Per response token: 1 to train on it, 0 not to.
    pub loss_mask: Vec<u8>,
    /// Which versions made which response tokens.
    pub spans: Vec<buffer::VersionSpan>,
    /// Why it ended.
    pub finish: buffer::Finish,
    /// URL of the engine.
    pub engine: String,
}

/// What generates: a fleet, or what stands in for one in tests.
#[async_trait]
pub trait Engines: Send + Sync {
    /// One generation, all of it with weights of `minimum` or later.
    ///
    /// # Errors
    /// As [`Fleet::generate`].
    async fn generate(
        &self,
        request: GenerateRequest,
        minimum: Option<&Label>,
    ) -> driftless_bridge::Result<Generation>;
}

#[async_trait]
impl Engines for Fleet {
    async fn generate(
        &self,
        request: GenerateRequest,
        minimum: Option<&Label>,
    ) -> driftless_bridge::Result<Generation> {
        Fleet::generate(self, request, minimum).await
    }
}

/// One sample that is to be generated.
pub struct Turn<'a> {
    /// Who generates.
    pub engines: &'a dyn Engines,
    /// The oldest weights that may.
    pub minimum: Option<&'a Label>,
    /// Id of the request.
    pub rid: Rid,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
}

impl Turn<'_> {
    /// Sends the prompt once and takes what comes back.
    ///
    /// # Errors
    /// [`crate::Error::Bridge`].
    pub async fn single(&self, prompt: &Prompt) -> Result<Trajectory> {
        let request = GenerateRequest {
            rid: self.rid,
            input_ids: prompt.tokens.clone(),
            sampling: self.sampling.clone(),
        };
        let generation = self.engines.generate(request, self.minimum).await?;
        let spans = generation.spans.iter().filter_map(|span| {
            // Engines that nobody updates serve weights that are no version of ours, and only debugging asks
            // them.
            let label: Label = span.label.parse().ok()?;
            Some(buffer::VersionSpan { version: label.version(), start: span.start, end: span.end })
        });
        Ok(Trajectory {
            prompt_len: prompt.tokens.len(),
            loss_mask: vec![1; generation.output_ids.len()],
            spans: spans.collect(),
            finish: match generation.finish {
                driftless_bridge::engine::Finish::Stop => buffer::Finish::Stop,
                driftless_bridge::engine::Finish::Length => buffer::Finish::Length,
                _ => buffer::Finish::Abort,
            },
            tokens: [prompt.tokens.as_slice(), &generation.output_ids].concat(),
            log_probs: generation.log_probs,
            engine: generation.engine,
        })
    }
}

/// Something to learn. All of it may be asked for again after a crash, and has to answer the same.
#[async_trait]
pub trait Task: Send + Sync + fmt::Debug {
    /// Refuses a checkpoint whose tokens are not the task's.
    ///
    /// # Errors
    /// Whatever is wrong with it, and what to do.
    fn check(&self, checkpoint: &Path) -> Result<()>;

    /// Prompt `number` of a run: a function of the number alone.
    ///
    /// # Errors
    /// Whatever it is read from.
    fn prompt(&self, number: u64) -> Result<Prompt>;

    /// Tokens that end an answer, besides the model's own.
    fn stop_token_ids(&self) -> Vec<i32> {
        Vec::new()
    }

    /// Makes one answer: by default, a single turn.
    ///
    /// # Errors
    /// Whatever made it fail; the sample's group is then left out.
    async fn generate(&self, prompt: &Prompt, turn: &Turn<'_>) -> Result<Trajectory> {
        turn.single(prompt).await
    }

    /// The text of a response.
    ///
    /// # Errors
    /// What its tokenizer says.
    fn decode(&self, response: &[i32]) -> Result<String>;

    /// One finite number for each answer of a group, in order.
    ///
    /// # Errors
    /// [`crate::Error::Reward`]; the group is then left out.
    async fn reward(&self, group: &[Answer]) -> Result<Vec<f32>>;

    /// Whether to learn from a group with these rewards.
    fn keep(&self, _rewards: &[f32]) -> bool {
        true
    }

    /// Changes the rewards of a group that is kept, before they are logged.
    fn post_process(&self, _rewards: &mut [f32]) {}
}

/// Mixes 64 bits: SplitMix64's finaliser (Steele, Lea and Flood 2014).
#[must_use]
pub fn mix(value: u64) -> u64 {
    let z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
