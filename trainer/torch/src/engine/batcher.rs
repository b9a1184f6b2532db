//! Continuous batching: a model, its key-value cache, and the requests that wait and run.

use std::collections::{BTreeSet, VecDeque};

use driftless_bridge::engine::{Fusing, ModelConfig};
use driftless_bridge::sglang::{Dialect, Feature};
use driftless_server::Ended;
use tch::{Device, Kind, Tensor};

use super::EngineOptions;
use super::sampler::{Row, sample};
use super::sequence::Sequence;
use crate::error::{Result, io};
use crate::models::{KvCache, Model};
use crate::ops::log_softmax;

/// Most tokens, padding included, that one prefill pass computes: bounds its activations.
const PREFILL_TOKENS_MAX: usize = 8192;
/// Smallest length a cache row is laid out for.
const ROW_TOKENS_MIN: usize = 32;

/// Runs requests on a model, batching all that are in progress.
pub(super) struct Batcher {
    pub(super) model: Model,
    /// How SGLang fuses the model's tensors, as checksums have it, or why that is not known.
    pub(super) fusing: Result<Fusing, String>,
    pub(super) running: Vec<Sequence>,
    pub(super) waiting: VecDeque<Sequence>,
    /// Name of the weights.
    pub(super) version: String,
    pub(super) dialect: Dialect,
    pub(super) paused: bool,
    pub(super) in_session: bool,
    /// Seed of the next request that brings none.
    pub(super) next_seed: i64,
    /// Why the weights cannot be trusted, after a load that failed half-way.
    pub(super) torn: Option<String>,
    cache: KvCache,
    /// Tokens that a row of the cache may come to hold; the number of rows follows from it.
    row_tokens: usize,
    /// Lowest first: rows that lie side by side are read without a copy.
    free: BTreeSet<usize>,
    /// Most requests that run at once.
    running_max: usize,
    /// Most tokens that the cache holds.
    tokens_max: usize,
}

impl Batcher {
    pub(super) fn new(model: Model, options: &EngineOptions) -> Result<Self> {
        let path = options.model_path.join("config.json");
        let bytes = std::fs::read(&path).map_err(io("read", &path))?;
        let config = ModelConfig::parse(&path, &bytes).map_err(|error| error.to_string());
        Ok(Self {
            fusing: config.and_then(|config| config.fusing().cloned().map_err(str::to_owned)),
            cache: model.cache(0)?,
            model,
            running: Vec::new(),
            waiting: VecDeque::new(),
            version: options.weight_version.clone(),
            dialect: options.dialect,
            paused: false,
            in_session: false,
            next_seed: options.seed,
            torn: None,
            row_tokens: 0,
            free: BTreeSet::new(),
            running_max: options.max_running_requests,
            tokens_max: options.max_total_tokens,
        })
    }

    /// Tokens held in the cache.
    pub(super) fn used_tokens(&self) -> usize {
        self.running.iter().map(|sequence| self.cache.length(sequence.slot)).sum()
    }

    /// One pass: the prompts of newly admitted requests, or else the next token of all running ones.
    ///
    /// # Errors
    /// When libtorch fails. The requests stay as they were; see [`Batcher::fail_all`].
    pub(super) fn pass(&mut self) -> Result<()> {
        fail::fail_point!("engine.generate");
        self.drop_aborted();
        let admitted = self.admit()?;
        if admitted > 0 {
            return self.prefill(self.running.len() - admitted);
        }
        if self.running.is_empty() { Ok(()) } else { self.decode() }
    }

    /// Moves waiting requests into free rows, in order, as far as they fit. Returns how many.
    fn admit(&mut self) -> Result<usize> {
        let (mut admitted, mut width) = (0, 0);
        while let Some(next) = self.waiting.front() {
            let length = next.tokens.len();
            // Most tokens that it can come to hold.
            let longest = next.prompt_tokens + next.sampling.max_new_tokens;
            if self.running.is_empty() {
                self.lay_out(longest)?;
            }
            width = width.max(length);
            let crowded = admitted > 0 && (admitted + 1) * width > PREFILL_TOKENS_MAX;
            if crowded || longest > self.row_tokens {
                break;
            }
            let Some(slot) = self.free.pop_first() else { break };
            if let Some(mut sequence) = self.waiting.pop_front() {
                sequence.slot = slot;
                self.running.push(sequence);
                admitted += 1;
            }
        }
        Ok(admitted)
    }

    /// Gives the empty cache rows of `longest` tokens, and as many of them as the limits allow.
    fn lay_out(&mut self, longest: usize) -> Result<()> {
        let positions = usize::try_from(self.model.config().max_position_embeddings).unwrap_or(usize::MAX);
        let row_tokens = longest.max(ROW_TOKENS_MIN).next_power_of_two().min(positions).max(longest);
        if row_tokens == self.row_tokens {
            return Ok(());
        }
        let rows = (self.tokens_max / row_tokens).clamp(1, self.running_max);
        self.cache = self.model.cache(rows)?;
        self.row_tokens = row_tokens;
        self.free = (0..rows).collect();
        Ok(())
    }

    /// Computes the cache of `running[first..]` from their tokens, and their next tokens.
    fn prefill(&mut self, first: usize) -> Result<()> {
        let batch = &self.running[first..];
        let lengths: Vec<usize> = batch.iter().map(|sequence| sequence.tokens.len()).collect();
        let slots: Vec<usize> = batch.iter().map(|sequence| sequence.slot).collect();
        let tokens = batch.iter().map(|sequence| sequence.tokens.as_slice());
        let tokens = padded(tokens, &lengths, self.model.device())?;
        let hidden = self.model.extend(&tokens, &lengths, &slots, &mut self.cache)?;
        let device = hidden.device();
        let rows = Tensor::f_arange(lengths.len() as i64, (Kind::Int64, device))?;
        let last: Vec<i64> = lengths.iter().map(|length| *length as i64 - 1).collect();
        let last = Tensor::f_from_slice(&last)?.f_to_device(device)?;
        let logits = self.model.logits(&hidden.f_index(&[Some(rows), Some(last)])?)?;
        for (row, sequence) in self.running[first..].iter_mut().enumerate() {
            if let Some(from) = sequence.prompt_log_probs_from
                && sequence.prompt_log_probs.is_empty()
            {
                let prompt = &sequence.tokens[..sequence.prompt_tokens];
                let hidden = hidden.f_get(row as i64)?;
                sequence.prompt_log_probs = prompt_log_probs(&self.model, &hidden, prompt, from)?;
            }
        }
        self.take(first, &logits)
    }

    /// The next token of every running request.
    fn decode(&mut self) -> Result<()> {
        self.running.sort_unstable_by_key(|sequence| sequence.slot);
        let slots: Vec<usize> = self.running.iter().map(|sequence| sequence.slot).collect();
        let last = self.running.iter().map(|sequence| &sequence.tokens[sequence.tokens.len() - 1..]);
        let lengths = vec![1; slots.len()];
        let tokens = padded(last, &lengths, self.model.device())?;
        let hidden = self.model.extend(&tokens, &lengths, &slots, &mut self.cache)?;
        let logits = self.model.logits(&hidden.f_select(1, 0)?)?;
        self.take(0, &logits)
    }

    /// Samples the next token of `running[first..]`, and answers those that are done.
    fn take(&mut self, first: usize, logits: &Tensor) -> Result<()> {
        let stop_beats_length = self.dialect.has(Feature::StopBeatsLength);
        let rows: Vec<Row> = self.running[first..].iter().map(Sequence::row).collect();
        let (ids, log_probs) = sample(logits, &rows)?;
        let mut finished = Vec::new();
        for (index, (id, log_prob)) in ids.into_iter().zip(log_probs).enumerate() {
            let sequence = &mut self.running[first + index];
            if let Some(finish) = sequence.push(id, log_prob, stop_beats_length) {
                finished.push((first + index, finish));
            }
        }
        for (index, finish) in finished.into_iter().rev() {
            self.end(index, finish);
        }
        Ok(())
    }

    /// Answers a running request and frees its row.
    fn end(&mut self, index: usize, finish: Ended) {
        let sequence = self.running.remove(index);
        self.cache.truncate(sequence.slot, 0);
        self.free.insert(sequence.slot);
        sequence.finish(finish, &self.version);
    }

    /// Marks requests that `matches` to end before the next pass; those that wait end at once.
    pub(super) fn abort_matching(&mut self, matches: impl Fn(&str) -> bool) {
        for sequence in self.running.iter_mut().filter(|sequence| matches(&sequence.rid)) {
            sequence.aborted = true;
        }
        let waiting = std::mem::take(&mut self.waiting);
        for sequence in waiting {
            match matches(&sequence.rid) {
                true => sequence.finish(Ended::AbortedWaiting, &self.version),
                false => self.waiting.push_back(sequence),
            }
        }
    }

    /// Ends running requests that were aborted, and drops those whose client has gone.
    pub(super) fn drop_aborted(&mut self) {
        for index in (0..self.running.len()).rev() {
            if self.running[index].aborted || self.running[index].is_abandoned() {
                self.end(index, Ended::Aborted);
            }
        }
        self.waiting.retain(|sequence| !sequence.is_abandoned());
    }

    /// Sends all running requests back to the queue. Their cache is recomputed when they run again.
    pub(super) fn retract_all(&mut self) {
        for mut sequence in std::mem::take(&mut self.running) {
            self.cache.truncate(sequence.slot, 0);
            self.free.insert(sequence.slot);
            sequence.retractions += 1;
            self.waiting.push_back(sequence);
        }
    }

    /// Answers every request with a failure, and starts over with an empty cache.
    pub(super) fn fail_all(&mut self, reason: &str) {
        for sequence in std::mem::take(&mut self.running).into_iter().chain(std::mem::take(&mut self.waiting))
        {
            sequence.finish(Ended::Failed(reason.to_owned()), &self.version);
        }
        self.row_tokens = 0;
    }
}

/// Rows of these lengths as `[R, T]` token ids, padded with 0.
fn padded<'a>(rows: impl Iterator<Item = &'a [i64]>, lengths: &[usize], device: Device) -> Result<Tensor> {
    let width = lengths.iter().copied().max().unwrap_or(1).max(1);
    let mut tokens = vec![0_i64; width * lengths.len()];
    for (place, row) in tokens.chunks_exact_mut(width).zip(rows) {
        place[..row.len()].copy_from_slice(row);
    }
    let shape = [lengths.len() as i64, width as i64];
    Ok(Tensor::f_from_slice(&tokens)?.f_view(shape)?.f_to_device(device)?)
}

/// `(log-probability, id)` of `prompt[from..]` given what stands before each, from the prompt's hidden states
/// `[T, hidden]`. The first entry has no log-probability, as in SGLang.
fn prompt_log_probs(
    model: &Model,
    hidden: &Tensor,
    prompt: &[i64],
    from: usize,
) -> Result<Vec<(Option<f32>, i64)>> {
    let Some((first, rest)) = prompt.get(from..).and_then(<[i64]>::split_first) else {
        return Ok(Vec::new());
    };
    let mut entries = vec![(None, *first)];
    if !rest.is_empty() {
        let logits = model.logits(&hidden.f_narrow(0, from as i64, rest.len() as i64)?)?;
        let ids = Tensor::f_from_slice(rest)?.f_to_device(logits.device())?.f_unsqueeze(1)?;
        let one = Tensor::f_ones([1], (Kind::Float, logits.device()))?;
        let log_probs = log_softmax(&logits, &one)?.f_gather(-1, &ids, false)?;
        let log_probs: Vec<f32> = Vec::try_from(log_probs.f_flatten(0, -1)?)?;
        entries.extend(log_probs.into_iter().map(Some).zip(rest.iter().copied()));
    }
    Ok(entries)
}
