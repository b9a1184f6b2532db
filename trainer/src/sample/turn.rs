//! A sample that is to be generated, and what generates.

use async_trait::async_trait;
use driftless_bridge::engine::{Meter, Piece, Tell};
use driftless_bridge::{Fleet, GenerateRequest, Generation, Label, Rid, SamplingParams};

use super::{Prompt, Read, Trajectory};
use crate::error::Result;
use crate::seed::mix;

/// Measuring is waited for: its requests go before those of training.
const EVALUATION: u8 = 1;

/// What generates: a fleet, or what stands in for one in tests.
#[async_trait]
pub trait Engines: Send + Sync {
    /// One generation, all of it with weights of `minimum` or later; `told` hears of tokens that stay, as they come.
    ///
    /// # Errors
    /// As [`Fleet::generate`].
    async fn generate(
        &self,
        request: GenerateRequest,
        minimum: Option<&Label>,
        told: Tell<'_>,
    ) -> driftless_bridge::Result<Generation>;
}

#[async_trait]
impl Engines for Fleet {
    async fn generate(
        &self,
        request: GenerateRequest,
        minimum: Option<&Label>,
        told: Tell<'_>,
    ) -> driftless_bridge::Result<Generation> {
        Fleet::stream(self, request, minimum, told).await
    }
}

/// Keeps the tokens of an answer before it is finished.
pub trait Underway: Sync {
    /// Lets the generation `nth` of the answer go on behind what was kept of it in the same attempt, unless that is older
    /// than `minimum`. What it returns keeps further tokens.
    fn go_on<'a>(
        &'a self,
        attempt: u64,
        nth: u64,
        request: &mut GenerateRequest,
        minimum: Option<&Label>,
    ) -> Box<dyn FnMut(Piece<'_>) + Send + 'a>;
}

/// One sample that is to be generated.
pub struct Turn<'a> {
    /// Who generates.
    pub engines: &'a dyn Engines,
    /// The oldest weights that may.
    pub minimum: Option<&'a Label>,
    /// Number of the sample.
    pub sample: u64,
    /// Which attempt at it this is, from 0; each has a seed of its own in `sampling`.
    pub attempt: u64,
    /// Shared by the samples of one prompt, whose requests go to one engine while it has room.
    pub group: u64,
    /// Id of its first request, which those of others follow from.
    pub rid: Rid,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// Tokens that prompt and response may have together.
    pub max_context_len: Option<usize>,
    /// Ids are below it, where that is known.
    pub vocabulary: Option<u64>,
    /// Whether the sample is measured, and not learned from.
    pub evaluation: bool,
    /// Counts what its requests take of engines.
    pub meter: Meter,
    /// What keeps its tokens before it is finished; nothing does if `None`.
    pub underway: Option<&'a dyn Underway>,
}

impl Turn<'_> {
    /// Sends the prompt once and takes what comes back.
    ///
    /// # Errors
    /// [`crate::Error::Bridge`].
    pub async fn single(&self, prompt: &Prompt) -> Result<Trajectory> {
        let generation = self.ask(0, prompt.tokens.clone(), self.sampling.clone(), None).await?;
        let tokens = [prompt.tokens.as_slice(), &generation.output_ids].concat();
        let mut trajectory = Trajectory::new(tokens, prompt.tokens.len());
        trajectory.take(&Read::of(&prompt.tokens), &generation);
        Ok(trajectory)
    }

    /// A generation of this sample. `nth` tells it from others: the same one asks for the same draws. Where `input_ids` leave no room in the context, it has no
    /// tokens, and no engine is asked.
    ///
    /// # Errors
    /// [`crate::Error::Bridge`].
    pub async fn generate(
        &self,
        nth: u64,
        input_ids: Vec<i32>,
        sampling: SamplingParams,
    ) -> Result<Generation> {
        // What is measured has numbers of its own.
        let conversation = if self.evaluation { !self.sample } else { self.sample };
        self.ask(nth, input_ids, sampling, Some(conversation)).await
    }

    async fn ask(
        &self,
        nth: u64,
        input_ids: Vec<i32>,
        mut sampling: SamplingParams,
        conversation: Option<u64>,
    ) -> Result<Generation> {
        let room = self.max_context_len.map(|context| context.saturating_sub(input_ids.len()));
        let room = room.and_then(|room| u32::try_from(room).ok()).unwrap_or(u32::MAX);
        sampling.max_new_tokens = sampling.max_new_tokens.min(room);
        // Each generation has draws of its own, and the same ones whenever it is asked for. SGLang keeps seeds
        // in signed 64-bit tensors.
        let seed_of = |seed: u64| if nth == 0 { seed } else { mix(seed ^ mix(nth)) >> 1 };
        sampling.sampling_seed = sampling.sampling_seed.map(seed_of);
        if sampling.max_new_tokens == 0 {
            return Ok(Generation::without_tokens(self.rid));
        }
        let mut request =
            GenerateRequest::new(self.rid.generation(nth), input_ids, sampling).with_affinity(self.group);
        request.conversation = conversation;
        request.meter = self.meter.clone();
        request.priority = if self.evaluation { EVALUATION } else { 0 };
        let generation = match self.underway {
            None => self.engines.generate(request, self.minimum, &mut |_| {}).await,
            Some(underway) => {
                let mut keep = underway.go_on(self.attempt, nth, &mut request, self.minimum);
                self.engines.generate(request, self.minimum, &mut keep).await
            }
        };
        Ok(generation?)
    }
}
