//! A request on its way to a generator, and how it ended.

use tokio::sync::{mpsc, oneshot};

use driftless_bridge::engine::VersionSpan;

/// What a request asks of the sampler, checked and with defaults filled in.
#[derive(Clone, Debug)]
pub struct Sampling {
    /// Above 0; SGLang turns 0 into 1 with `top_k` 1.
    pub temperature: f64,
    /// In (0, 1].
    pub top_p: f64,
    /// At least 1.
    pub top_k: i64,
    /// In [0, 1].
    pub min_p: f64,
    /// Tokens after which the request ends.
    pub max_new_tokens: usize,
    /// Ids that end the request: the request's and the model's, or none with `ignore_eos`.
    pub stop: Vec<i64>,
    /// Seed of the request; the generator has one for those that bring none.
    pub seed: Option<i64>,
}

/// One checked request: a prompt of one sample.
#[derive(Debug)]
pub struct Request {
    /// The request's id.
    pub rid: String,
    /// Token ids, at least one.
    pub prompt: Vec<i64>,
    /// How to sample.
    pub sampling: Sampling,
    /// First prompt position whose log-probability is wanted; `None` for those of the output only.
    pub prompt_log_probs_from: Option<usize>,
}

/// A request and where its completion goes.
#[derive(Debug)]
pub struct Job {
    /// The request.
    pub request: Request,
    /// Takes the completion. It is closed once the client is gone: the generator may then drop the request.
    pub reply: oneshot::Sender<Completion>,
    /// Takes tokens before that, if the client wants them as they come.
    pub progress: Option<Progress>,
}

/// Tokens that a client has not been told of.
#[derive(Debug)]
pub(super) struct Tokens {
    pub(super) output_ids: Vec<i64>,
    pub(super) log_probs: Vec<f32>,
}

/// Takes the tokens of a request as they come.
#[derive(Debug)]
pub struct Progress {
    interval: usize,
    told: usize,
    pieces: mpsc::Sender<Tokens>,
}

impl Progress {
    pub(super) fn new(interval: usize, pieces: mpsc::Sender<Tokens>) -> Self {
        Self { interval, told: 0, pieces }
    }

    /// Takes all tokens of a request that goes on. The client is told of the first one, and then of `stream_interval` at a
    /// time; one that does not keep up is told of more at a time.
    pub fn tell(&mut self, output_ids: &[i64], log_probs: &[f32]) {
        let new = output_ids.len().saturating_sub(self.told);
        if new == 0 || (self.told > 0 && new < self.interval) {
            return;
        }
        let (ids, log_probs) = (output_ids[self.told..].to_vec(), log_probs[self.told..].to_vec());
        if self.pieces.try_send(Tokens { output_ids: ids, log_probs }).is_ok() {
            self.told = output_ids.len();
        }
    }
}

/// Why a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The token that is among the stop ids.
    Stop(i64),
    /// All allowed tokens were generated.
    Length,
    /// Aborted while generating; what was generated is returned.
    Aborted,
    /// Aborted before it ran, or while retracted: SGLang returns no tokens then.
    AbortedWaiting,
    /// The engine could not go on.
    Failed(String),
}

/// The end of a request.
#[derive(Debug)]
pub struct Completion {
    /// The request's id.
    pub rid: String,
    /// Why it ended.
    pub finish: Ended,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Sampled ids.
    pub output_ids: Vec<i64>,
    /// Their log-probabilities; NaN goes out as null.
    pub log_probs: Vec<f32>,
    /// `(log-probability, id)` of the wanted prompt positions; the first has none.
    pub prompt_log_probs: Vec<(Option<f32>, i64)>,
    /// Which of `output_ids` came from which weights, without gaps; one empty span for an empty output.
    pub spans: Vec<VersionSpan>,
    /// How often the request lost its cache and was put back into the queue.
    pub retractions: u32,
    /// Tokens that it was allowed.
    pub max_new_tokens: usize,
}
