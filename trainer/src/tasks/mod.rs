//! What there is to learn: prompts, how answers to them are made, and what answers are worth.

pub mod arithmetic;
mod generated;
mod hooked;
pub mod problems;
mod prompts;
mod sourced;

pub use generated::Generated;
pub use hooked::{Filter, Hooked, Hooks};
pub use prompts::Prompts;
pub(crate) use prompts::vocabulary;
pub use sourced::Sourced;

use std::fmt;
use std::path::Path;

use async_trait::async_trait;
use driftless_bridge::{Fleet, GenerateRequest, Generation, Label, Rid, SamplingParams};
use driftless_buffer as buffer;
use serde_json::value::RawValue;

use crate::data::Example;
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

impl From<Example> for Prompt {
    fn from(example: Example) -> Self {
        let Example { place, text, tokens, label, metadata, loss_mask: _ } = example;
        Prompt { tokens, text, label, metadata, source: place.to_string() }
    }
}

/// What a sample is made of: a prompt and a response, token by token.
#[derive(Debug, Clone)]
pub struct Trajectory {
    /// Prompt and response.
    pub tokens: Vec<i32>,
    /// Tokens of the prompt.
    pub prompt_len: usize,
    /// Per response token: its log-probability when it was sampled; 0 where no engine sampled it.
    pub log_probs: Vec<f32>,
    /// Per response token: 1 to train on it, 0 not to.
    pub loss_mask: Vec<u8>,
    /// Which versions made which response tokens.
    pub spans: Vec<buffer::VersionSpan>,
    /// Why it ended.
    pub finish: buffer::Finish,
    /// URL of the engine that wrote its end.
    pub engine: String,
    /// What rewards are given in place of the prompt's metadata, as a JSON object.
    pub metadata: Option<Box<RawValue>>,
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
    /// Number of the sample.
    pub sample: u64,
    /// Id of its requests, which are made one after another.
    pub rid: Rid,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// Tokens that prompt and response may have together.
    pub max_context_len: Option<usize>,
    /// Ids are below it, where that is known.
    pub vocabulary: Option<u64>,
    /// Whether the sample is measured, and not learned from.
    pub evaluation: bool,
}

impl Turn<'_> {
    /// Sends the prompt once and takes what comes back.
    ///
    /// # Errors
    /// [`crate::Error::Bridge`].
    pub async fn single(&self, prompt: &Prompt) -> Result<Trajectory> {
        let generation = self.generate(0, prompt.tokens.clone(), self.sampling.clone()).await?;
        Ok(Trajectory {
            prompt_len: prompt.tokens.len(),
            loss_mask: vec![1; generation.output_ids.len()],
            spans: spans(&generation).collect(),
            finish: finish(&generation.finish),
            tokens: [prompt.tokens.as_slice(), &generation.output_ids].concat(),
            log_probs: generation.log_probs,
            engine: generation.engine,
            metadata: None,
        })
    }

    /// The `nth` generation of this sample, from 0. Where `input_ids` leave no room in the context, it has no
    /// tokens, and no engine is asked.
    ///
    /// # Errors
    /// [`crate::Error::Bridge`].
    pub async fn generate(
        &self,
        nth: u64,
        input_ids: Vec<i32>,
        mut sampling: SamplingParams,
    ) -> Result<Generation> {
        let room = self.max_context_len.map(|context| context.saturating_sub(input_ids.len()));
        let room = room.and_then(|room| u32::try_from(room).ok()).unwrap_or(u32::MAX);
        sampling.max_new_tokens = sampling.max_new_tokens.min(room);
        // Each generation has draws of its own, and the same ones whenever it is asked for. SGLang keeps seeds
        // in signed 64-bit tensors.
        let seed_of = |seed: u64| if nth == 0 { seed } else { mix(seed ^ mix(nth)) >> 1 };
        sampling.sampling_seed = sampling.sampling_seed.map(seed_of);
        if sampling.max_new_tokens == 0 {
            return Ok(Generation {
                rid: self.rid,
                engine: String::new(),
                output_ids: Vec::new(),
                log_probs: Vec::new(),
                spans: Vec::new(),
                spans_reported: true,
                finish: driftless_bridge::engine::Finish::Length,
                retractions: 0,
            });
        }
        let request = GenerateRequest { rid: self.rid, input_ids, sampling };
        Ok(self.engines.generate(request, self.minimum).await?)
    }
}

/// Which versions wrote which tokens of a generation.
pub(crate) fn spans(generation: &Generation) -> impl Iterator<Item = buffer::VersionSpan> + '_ {
    generation.spans.iter().filter_map(|span| {
        // Engines that nobody updates serve weights that are no version of ours, and only debugging asks them.
        let label: Label = span.label.parse().ok()?;
        Some(buffer::VersionSpan { version: label.version(), start: span.start, end: span.end })
    })
}

/// Why a generation ended, as the log has it.
pub(crate) fn finish(finish: &driftless_bridge::engine::Finish) -> buffer::Finish {
    match finish {
        driftless_bridge::engine::Finish::Stop => buffer::Finish::Stop,
        driftless_bridge::engine::Finish::Length => buffer::Finish::Length,
        _ => buffer::Finish::Abort,
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

    /// Finds out whether it can be asked for prompts and rewards, before anything is generated.
    ///
    /// # Errors
    /// What keeps it from answering.
    async fn ready(&self) -> Result<()> {
        Ok(())
    }

    /// Prompt `number` of a run: a function of the number alone.
    ///
    /// # Errors
    /// Whatever it is read from.
    async fn prompt(&self, number: u64) -> Result<Prompt>;

    /// Tokens that end an answer, besides the model's own.
    fn stop_token_ids(&self) -> Vec<i32> {
        Vec::new()
    }

    /// Makes one answer: by default, a single turn. It may become several samples, which count as one in
    /// advantages and in the loss; rewards see the last.
    ///
    /// # Errors
    /// Whatever made it fail; the sample's group is then left out.
    async fn generate(&self, prompt: &Prompt, turn: &Turn<'_>) -> Result<Vec<Trajectory>> {
        Ok(vec![turn.single(prompt).await?])
    }

    /// The text of a response.
    ///
    /// # Errors
    /// What its tokenizer says.
    fn decode(&self, response: &[i32]) -> Result<String>;

    /// Ids of a text, nothing put before or after it.
    ///
    /// # Errors
    /// What its tokenizer says.
    fn encode(&self, text: &str) -> Result<Vec<i32>>;

    /// One finite number for each answer of a group, in order.
    ///
    /// # Errors
    /// [`crate::Error::Reward`]; the group is then left out.
    async fn reward(&self, group: &[Answer]) -> Result<Vec<f32>>;

    /// Why a group with these rewards is not learned from; by default, every group is.
    ///
    /// # Errors
    /// What the filter says; the group is then left out as one that failed.
    async fn leave_out(&self, _group: &[Answer], _rewards: &[f32]) -> Result<Option<String>> {
        Ok(None)
    }

    /// Which samples count for the advantages of their group, but are not trained on: one value for each, or
    /// none at all.
    ///
    /// # Errors
    /// As [`Task::leave_out`].
    async fn remove(&self, _group: &[Answer], _rewards: &[f32]) -> Result<Vec<bool>> {
        Ok(Vec::new())
    }

    /// The rewards of a group that is kept, as they are logged and learned from.
    ///
    /// # Errors
    /// As [`Task::leave_out`].
    async fn post_process(&self, _group: &[Answer], rewards: Vec<f32>) -> Result<Vec<f32>> {
        Ok(rewards)
    }
}

/// Mixes 64 bits: SplitMix64's finaliser (Steele, Lea and Flood 2014).
#[must_use]
pub fn mix(value: u64) -> u64 {
    let z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
