//! What there is to learn: prompts, how answers to them are made, and what answers are worth.

pub mod arithmetic;
mod generated;
pub mod problems;
mod prompts;

pub use generated::Generated;
pub use prompts::Prompts;
pub(crate) use prompts::vocabulary;

use std::fmt;
use std::path::Path;

use async_trait::async_trait;
use driftless_bridge::{Fleet, GenerateRequest, Generation, Label, Rid, SamplingParams};

use crate::error::Result;
use crate::sample::{Answer, Prompt, Trajectory, finish, spans};
use crate::seed::mix;

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
