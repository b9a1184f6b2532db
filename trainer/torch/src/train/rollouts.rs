//! Rollouts: asks the fleet for every sample of a step that is not in the log yet, and appends what comes back.

use std::collections::BTreeSet;
use std::sync::Arc;

use driftless_bridge::{Finish, Fleet, GenerateRequest, Generation, Label, Rid, SamplingParams};
use driftless_buffer as buffer;
use tokio::task::JoinSet;

use super::{Event, Observer};
use crate::error::{Error, Result};
use driftless_trainer::metrics::EvalMetrics;
use driftless_trainer::tasks::arithmetic::{EOS, Problem, Split};

/// Everything a rollout is made from. Prompt number `n` is a function of the seed and `n`, and the log says which samples
/// are done: there is no other state.
pub(super) struct Rollouts {
    pub(super) fleet: Arc<Fleet>,
    pub(super) log: buffer::Log,
    pub(super) observer: Observer,
    /// Keeps request ids of two runs apart on a shared engine.
    pub(super) scope: u64,
    pub(super) seed: u64,
    pub(super) groups: u64,
    pub(super) samples_per_group: u64,
    pub(super) max_new_tokens: u32,
    pub(super) temperature: f64,
}

/// One sample to be generated.
#[derive(Clone, Copy)]
struct Wanted {
    sample_id: u64,
    group_id: u64,
    problem: Problem,
}

impl Rollouts {
    /// Completes `rollout` in the log. On return all its samples are durable.
    ///
    /// No engine whose weights are older than `minimum` is asked; without one, any engine is.
    pub(super) async fn generate(self: Arc<Self>, rollout: u64, minimum: Option<Label>) -> Result<()> {
        let wanted = self.missing(rollout);
        let total = self.groups * self.samples_per_group;
        let mut done = total - wanted.len() as u64;
        let mut running = JoinSet::new();
        for sample in wanted {
            let (rollouts, minimum) = (self.clone(), minimum.clone());
            running.spawn(async move {
                let request = rollouts.request(sample.sample_id, sample.problem, rollouts.temperature);
                Ok::<_, Error>((sample, rollouts.fleet.generate(request, minimum.as_ref()).await?))
            });
        }
        while let Some(first) = running.join_next().await {
            // What has arrived meanwhile shares the sync.
            let mut arrived = vec![finished(first)?];
            while let Some(next) = running.try_join_next() {
                arrived.push(finished(next)?);
            }
            tokio::task::block_in_place(|| self.append(rollout, &arrived))?;
            done += arrived.len() as u64;
            (self.observer)(Event::Generating { rollout, done, total });
        }
        Ok(())
    }

    /// Success rates on held-out problems, sampled as the rollouts are and greedily. Nothing is logged.
    pub(super) async fn evaluate(
        self: Arc<Self>,
        problems: u64,
        minimum: Option<Label>,
    ) -> Result<EvalMetrics> {
        let held_out: Vec<_> = Problem::all(Split::HeldOut).into_iter().take(problems as usize).collect();
        let mut solved = [0.0; 2];
        for (temperature, solved) in [self.temperature, 0.0].into_iter().zip(&mut solved) {
            let mut running = JoinSet::new();
            for (index, problem) in held_out.iter().copied().enumerate() {
                let (rollouts, minimum) = (self.clone(), minimum.clone());
                running.spawn(async move {
                    // Ids from the top down: no rollout reaches them.
                    let request = rollouts.request(u64::MAX - index as u64, problem, temperature);
                    let generation = rollouts.fleet.generate(request, minimum.as_ref()).await?;
                    Ok::<_, Error>(f64::from(problem.reward(&generation.output_ids)))
                });
            }
            while let Some(reward) = running.join_next().await {
                *solved += finished(reward)?;
            }
        }
        let share = |solved: f64| solved / held_out.len().max(1) as f64;
        Ok(EvalMetrics {
            problems: held_out.len() as u64,
            sampled: share(solved[0]),
            greedy: share(solved[1]),
        })
    }

    /// The samples of `rollout` that are not in the log.
    fn missing(&self, rollout: u64) -> Vec<Wanted> {
        let logged = self.log.reader().groups(rollout, 1);
        let logged: BTreeSet<u64> =
            logged.iter().flat_map(|group| &group.records).map(|record| record.scalars().sample_id).collect();
        let groups = rollout * self.groups..(rollout + 1) * self.groups;
        let wanted = groups.flat_map(|group_id| {
            let problem = Problem::draw(Split::Rl, group_id, self.seed);
            let samples = group_id * self.samples_per_group..(group_id + 1) * self.samples_per_group;
            samples.map(move |sample_id| Wanted { sample_id, group_id, problem })
        });
        wanted.filter(|sample| !logged.contains(&sample.sample_id)).collect()
    }

    fn request(&self, sample_id: u64, problem: Problem, temperature: f64) -> GenerateRequest {
        let sampling = SamplingParams {
            temperature,
            max_new_tokens: self.max_new_tokens,
            stop_token_ids: vec![EOS],
            sampling_seed: Some(sampling_seed(self.seed, sample_id)),
            ..SamplingParams::default()
        };
        GenerateRequest { rid: Rid::new(self.scope, sample_id), input_ids: problem.prompt(), sampling }
    }

    /// Appends samples with their rewards and makes them durable together.
    fn append(&self, rollout: u64, arrived: &[(Wanted, Generation)]) -> Result<()> {
        let columns: Vec<_> =
            arrived.iter().map(|(wanted, generation)| Columns::of(wanted, generation)).collect();
        let records: Vec<_> =
            arrived.iter().zip(&columns).map(|(arrived, columns)| columns.record(rollout, arrived)).collect();
        self.log.append_all(&records)?;
        Ok(())
    }
}

/// The columns of a record that a generation does not hold in the log's form.
struct Columns {
    tokens: Vec<i32>,
    loss_mask: Vec<u8>,
    spans: Vec<buffer::VersionSpan>,
}

impl Columns {
    fn of(wanted: &Wanted, generation: &Generation) -> Self {
        let mut tokens = wanted.problem.prompt();
        tokens.extend(&generation.output_ids);
        let spans = generation.spans.iter().filter_map(|span| {
            // Engines that nobody updates serve weights that are no version of ours, and only debugging asks them.
            let label: Label = span.label.parse().ok()?;
            Some(buffer::VersionSpan { version: label.version(), start: span.start, end: span.end })
        });
        Columns { spans: spans.collect(), tokens, loss_mask: vec![1; generation.output_ids.len()] }
    }

    fn record<'a>(
        &'a self,
        rollout: u64,
        (wanted, generation): &'a (Wanted, Generation),
    ) -> buffer::Sample<'a> {
        let finish = match generation.finish {
            Finish::Stop => buffer::Finish::Stop,
            Finish::Length => buffer::Finish::Length,
            _ => buffer::Finish::Abort,
        };
        buffer::Sample {
            scalars: buffer::Scalars {
                sample_id: wanted.sample_id,
                group_id: wanted.group_id,
                rollout_id: rollout,
                reward: wanted.problem.reward(&generation.output_ids),
                status: finish.code(),
                clock_us: 0,
            },
            prompt_len: self.tokens.len() - generation.output_ids.len(),
            tokens: &self.tokens,
            log_probs: &generation.log_probs,
            loss_mask: &self.loss_mask,
            spans: &self.spans,
            engine: &generation.engine,
            ..buffer::Sample::default()
        }
    }
}

/// The result of a task; a panic in it goes on here.
fn finished<T>(joined: std::result::Result<Result<T>, tokio::task::JoinError>) -> Result<T> {
    joined.unwrap_or_else(|error| match error.try_into_panic() {
        Ok(panic) => std::panic::resume_unwind(panic),
        Err(_) => Err(Error::Cancelled),
    })
}

/// A sample is drawn with the same seed whenever it is asked for, so that what a crash lost comes back as it was.
fn sampling_seed(seed: u64, sample_id: u64) -> u64 {
    let digest = blake3::hash(&[seed.to_le_bytes(), sample_id.to_le_bytes()].concat());
    let mut first = [0; 8];
    first.copy_from_slice(&digest.as_bytes()[..8]);
    // SGLang keeps seeds in signed 64-bit tensors.
    u64::from_le_bytes(first) >> 1
}
