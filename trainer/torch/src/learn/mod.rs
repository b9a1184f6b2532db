//! What becomes of a rollout: what is known of its tokens before the first step, advantages, and the steps of critic
//! and policy.

#[cfg(test)]
mod tests;

use std::collections::HashMap;

use driftless_trainer::advantage::{self, Columns};
use driftless_trainer::learner::{self, Sample};
use driftless_trainer::metrics::StepStats;
use driftless_trainer::options::{CriticOptions, LearnOptions};
use tch::{Kind, Tensor};

use crate::apart::Compared;
use crate::batch::{Batch, Reduction, micro_batches, steps, token_weights};
use crate::critic::Critic;
use crate::error::{Error, Result, input};
use crate::loss::kl;
use crate::models::Model;
use crate::optimizer::AdamW;
use crate::policy::Policy;
use crate::ranks::share;

/// Some samples in micro-batches.
pub(crate) struct Packed {
    /// Places of each micro-batch's samples among those that were packed.
    pub(crate) chosen: Vec<Vec<usize>>,
    pub(crate) batches: Vec<Batch>,
}

/// A rollout, cut into optimiser steps.
struct Rollout<'a> {
    samples: &'a [Sample<'a>],
    options: &'a LearnOptions,
    temperature: f64,
    steps: Vec<Packed>,
}

/// What other models say of a micro-batch's trained tokens, as far as advantages need it; see [`Columns`].
#[derive(Default)]
struct Known {
    kl: Vec<f32>,
    reverse_kl: Vec<f32>,
    values: Vec<f32>,
}

impl Known {
    fn columns(&self) -> [&[f32]; 3] {
        [&self.kl, &self.reverse_kl, &self.values]
    }
}

/// What came of a rollout.
#[derive(Debug)]
pub(crate) struct Learned {
    pub(crate) stats: StepStats,
    /// [`learner::Learner::take_log_probs`].
    pub(crate) log_probs: Option<Vec<f32>>,
}

/// Learns from a rollout, in one optimiser step or several. Log-probs are those at `temperature`. Of several ranks
/// each learns from its share of every step, and all return the figures of the whole.
///
/// # Errors
/// [`crate::Error::NotFinite`] for the first step whose loss or gradient is not finite: it and those after it are
/// left out. [`crate::Error::Input`] if the rollout lacks what the options need, and what libtorch answers.
pub(crate) fn learn(
    policy: &mut Policy,
    critic: Option<&mut Critic>,
    batch: &learner::Batch<'_>,
    options: &LearnOptions,
    temperature: f64,
) -> Result<Learned> {
    // Of a rollout that was not learned from to its end.
    policy.take_compared();
    let mut rollout = Rollout::cut(policy, &batch.samples, options, temperature)?;
    let mut stats = StepStats::default();
    rollout.look_back(policy)?;
    if options.per_token() {
        let mut known = rollout.distances(policy, &mut stats)?;
        match (critic, options.critic()) {
            (Some(critic), Some(of_critic)) => {
                // The two take turns on the device.
                policy.trained.offload()?;
                let taught = critic.awake(|critic| rollout.teach(critic, &mut known, of_critic, &mut stats));
                policy.trained.onload()?;
                taught?;
            }
            _ => rollout.advantages(&known, policy.optimizer())?,
        }
    }
    let waits = |critic: &CriticOptions| batch.rollout_id < critic.num_critic_only_steps;
    let is_due = !options.critic().is_some_and(waits);
    if is_due {
        rollout.descend(policy, &mut stats)?;
        let next = batch.rollout_id + 1;
        if options.ref_update_interval.is_some_and(|interval| next.is_multiple_of(interval)) {
            policy.update_reference()?;
        }
    }
    let mut sums = stats.sums().map(|sum| *sum);
    policy.optimizer().sum(&mut sums)?;
    stats.sums().into_iter().zip(sums).for_each(|(own, all)| *own = all);
    stats.log_prob_diff_max = policy.optimizer().largest(stats.log_prob_diff_max)?;
    let Compared { mut apart, log_probs } = policy.take_compared();
    policy.optimizer().sum(apart.counts())?;
    stats.log_prob_diff_p99 = apart.p99().min(stats.log_prob_diff_max);
    let log_probs = is_due.then(|| rollout.in_order(&log_probs, policy.optimizer())).transpose()?;
    Ok(Learned { stats, log_probs })
}

/// [`learn`], and once more in passes of half as many tokens if the device's memory did not suffice before the first
/// step was done. `options` keep the smaller bound: the next rollout would not fit either.
pub(crate) fn learn_within_memory(
    policy: &mut Policy,
    mut critic: Option<&mut Critic>,
    batch: &learner::Batch<'_>,
    options: &mut LearnOptions,
    temperature: f64,
) -> Result<Learned> {
    let steps = |policy: &Policy, critic: Option<&Critic>| {
        (policy.optimizer().steps(), critic.map(|critic| critic.trained.optimizer.steps()))
    };
    let before = steps(policy, critic.as_deref());
    let learned = learn(policy, critic.as_deref_mut(), batch, options, temperature);
    let Err(Error::Memory { tokens, .. }) = learned else { return learned };
    // The others have gone on, and a sample is not divided.
    let alone = policy.optimizer().rank().1 == 1;
    let longest = batch.samples.iter().map(|sample| sample.tokens.len()).max().unwrap_or(0);
    if !alone || tokens <= longest || steps(policy, critic.as_deref()) != before {
        return learned;
    }
    options.max_tokens_per_gpu = (tokens / 2).max(longest);
    tracing::warn!(
        tokens,
        max_tokens_per_gpu = options.max_tokens_per_gpu,
        "the device has not enough memory for a pass; it is made smaller, for the rest of the run"
    );
    learn(policy, critic, batch, options, temperature)
}

impl<'a> Rollout<'a> {
    /// This rank's share of each step.
    fn cut(
        policy: &Policy,
        samples: &'a [Sample<'a>],
        options: &'a LearnOptions,
        temperature: f64,
    ) -> Result<Self> {
        let ids: Vec<u64> = samples.iter().map(|sample| sample.answer).collect();
        let steps = steps(&ids, options.global_batch_size.unwrap_or(usize::MAX));
        let (rank, ranks) = policy.optimizer().rank();
        let steps = steps.into_iter().map(|chosen| {
            let some: Vec<_> = chosen.iter().map(|&index| samples[index]).collect();
            let mut packed = pack_share(policy.model(), &some, options, rank, ranks)?;
            for place in packed.chosen.iter_mut().flatten() {
                *place = chosen[*place];
            }
            Ok(packed)
        });
        Ok(Rollout { samples, options, temperature, steps: steps.collect::<Result<_>>()? })
    }

    /// Weight of a step's figures in those of the rollout.
    fn share(&self) -> f64 {
        1.0 / self.steps.len().max(1) as f64
    }

    /// Every micro-batch, with the places of its samples.
    fn batches(&mut self) -> impl Iterator<Item = (&[usize], &mut Batch)> {
        self.steps.iter_mut().flat_map(|step| {
            let Packed { chosen, batches } = step;
            chosen.iter().map(Vec::as_slice).zip(batches)
        })
    }

    /// Notes the log-probs of the old policy, unless it is the one that a single step differentiates.
    fn look_back(&mut self, policy: &Policy) -> Result<()> {
        let (options, temperature) = (self.options, self.temperature);
        let compared = options.kl_coef > 0.0 || options.use_opd;
        if options.use_rollout_logprobs || (self.steps.len() == 1 && !compared) {
            return Ok(());
        }
        for (_, batch) in self.batches() {
            batch.old_log_probs = Some(policy.log_probs(batch, temperature)?);
        }
        Ok(())
    }

    /// How far the old policy is from the reference and the teacher.
    fn distances(&mut self, policy: &Policy, stats: &mut StepStats) -> Result<Vec<Known>> {
        let (samples, options, temperature) = (self.samples, self.options, self.temperature);
        let share = self.share();
        let known = self.batches().map(|(chosen, batch)| {
            let mut known = Known::default();
            let Some(old) = batch.old(options) else { return Ok(known) };
            let mean = |x: &Tensor| -> Result<f64> {
                Ok(f64::try_from(x.f_mul(&batch.weights)?.f_sum(Kind::Double)?)? * share)
            };
            if options.kl_coef > 0.0 {
                let reference = policy.reference_log_probs(batch, temperature)?;
                let distance = kl(options.kl_loss_type, old, &reference, None)?;
                stats.kl += mean(&distance)?;
                known.kl = Vec::try_from(&distance)?;
            }
            if options.use_opd {
                let teacher = match policy.teacher_log_probs(batch, temperature)? {
                    Some(teacher) => teacher,
                    None => logged(samples, chosen, old)?,
                };
                let distance = old.f_sub(&teacher)?;
                stats.opd_reverse_kl += mean(&distance)?;
                known.reverse_kl = Vec::try_from(&distance)?;
            }
            Ok(known)
        });
        known.collect()
    }

    /// The advantages of every trained token, and its return.
    fn advantages(&mut self, known: &[Known], optimizer: &AdamW) -> Result<()> {
        let options = self.options;
        let (all, returns) = self.of_answers(known, optimizer)?;
        let starts = starts(self.samples.iter().map(Sample::trained));
        let of_sample = |column: &'_ [f32], index: usize| -> Vec<f32> {
            column.get(starts[index]..starts[index + 1]).unwrap_or_default().to_vec()
        };
        // In the order of this rank's passes.
        let own = |column: &[f32], chosen: &[usize]| -> Vec<f32> {
            chosen.iter().flat_map(|&index| of_sample(column, index)).collect()
        };
        let mut columns: Vec<Vec<f32>> = self.batches().map(|(chosen, _)| own(&all, chosen)).collect();
        if options.normalizes() {
            let normal = normalize(&columns.concat(), |sums| optimizer.sum(sums))?;
            let mut rest = normal.as_slice();
            for column in &mut columns {
                let (first, others) = rest.split_at(column.len());
                column.copy_from_slice(first);
                rest = others;
            }
        }
        for ((chosen, batch), column) in self.batches().zip(columns) {
            let device = batch.weights.device();
            let tensor =
                |column: &[f32]| -> Result<Tensor> { Ok(Tensor::f_from_slice(column)?.f_to_device(device)?) };
            batch.advantages = tensor(&column)?;
            batch.returns = (!returns.is_empty()).then(|| tensor(&own(&returns, chosen))).transpose()?;
        }
        Ok(())
    }

    /// Advantages, not normalised, and returns, of all trained tokens in the order of the samples. The samples of an answer
    /// are one episode in their order, whichever ranks have them: its reward comes at its end.
    fn of_answers(&mut self, known: &[Known], optimizer: &AdamW) -> Result<(Vec<f32>, Vec<f32>)> {
        let (samples, options) = (self.samples, self.options);
        let is_wanted = [options.kl_coef > 0.0, options.use_opd, options.critic().is_some()];
        let mut gathered = [Vec::new(), Vec::new(), Vec::new()];
        for (at, all) in gathered.iter_mut().enumerate().filter(|(at, _)| is_wanted[*at]) {
            *all = self.gathered(known, |known| known.columns()[at], optimizer)?;
        }
        let starts = starts(samples.iter().map(Sample::trained));
        let (mut advantages, mut returns) = (vec![0.0; starts[samples.len()]], Vec::new());
        for parts in by_answer(samples) {
            let places: Vec<usize> = parts.iter().flat_map(|&part| starts[part]..starts[part + 1]).collect();
            let of = |column: &[f32]| -> Vec<f32> {
                places.iter().filter_map(|place| column.get(*place)).copied().collect()
            };
            let [kl, reverse_kl, values] = [&gathered[0], &gathered[1], &gathered[2]].map(|all| of(all));
            let columns = Columns { tokens: places.len(), kl: &kl, reverse_kl: &reverse_kl, values: &values };
            let (own, expected) = advantage::of_tokens(options, samples[parts[0]].advantage, &columns);
            if !expected.is_empty() {
                returns.resize(advantages.len(), 0.0);
                places.iter().zip(expected).for_each(|(place, value)| returns[*place] = value);
            }
            places.iter().zip(own).for_each(|(place, value)| advantages[*place] = value);
        }
        Ok((advantages, returns))
    }

    /// A column of what is known, of the trained tokens that all ranks have, in the order of the samples.
    fn gathered(
        &mut self,
        known: &[Known],
        column: impl Fn(&Known) -> &[f32],
        optimizer: &AdamW,
    ) -> Result<Vec<f32>> {
        let starts = starts(self.samples.iter().map(Sample::trained));
        let mut all = vec![0.0; starts[self.samples.len()]];
        for ((chosen, _), known) in self.batches().zip(known) {
            let places = chosen.iter().flat_map(|&index| starts[index]..starts[index + 1]);
            places.zip(column(known)).for_each(|(place, value)| all[place] = f64::from(*value));
        }
        optimizer.sum(&mut all)?;
        Ok(all.into_iter().map(|value| value as f32).collect())
    }

    /// Asks the critic for values, works out advantages, and has it learn their returns.
    fn teach(
        &mut self,
        critic: &mut Critic,
        known: &mut [Known],
        of_critic: &CriticOptions,
        stats: &mut StepStats,
    ) -> Result<()> {
        for ((_, batch), known) in self.batches().zip(known.iter_mut()) {
            let values = critic.values(batch)?;
            known.values = Vec::try_from(&values)?;
            batch.values = Some(values);
        }
        self.advantages(known, &critic.trained.optimizer)?;
        let schedule = of_critic.lr_schedule(self.options);
        for step in &self.steps {
            let lr = schedule.at(critic.trained.optimizer.steps());
            stats.add(critic.step(&step.batches, of_critic, lr)?, self.share());
        }
        Ok(())
    }

    /// Log-probs of this rank's trained tokens, in the order of the passes, as those of all ranks in the order of the
    /// samples: one for each response token, NaN where it is not trained on.
    fn in_order(&mut self, log_probs: &[f32], optimizer: &AdamW) -> Result<Vec<f32>> {
        let samples = self.samples;
        let starts = starts(samples.iter().map(Sample::response_len));
        let mut all = vec![0.0; starts[samples.len()]];
        let mut values = log_probs.iter();
        for (chosen, _) in self.batches() {
            for &index in chosen {
                let places = (starts[index]..starts[index + 1]).zip(trained(&samples[index]));
                let places = places.filter(|(_, is_trained)| *is_trained);
                places.zip(values.by_ref()).for_each(|((place, _), value)| all[place] = f64::from(*value));
            }
        }
        optimizer.sum(&mut all)?;
        let trained = samples.iter().flat_map(trained);
        Ok(all.iter().zip(trained).map(|(value, is)| if is { *value as f32 } else { f32::NAN }).collect())
    }

    /// The policy's steps.
    fn descend(&self, policy: &mut Policy, stats: &mut StepStats) -> Result<()> {
        for step in &self.steps {
            let lr = self.options.lr_schedule().at(policy.optimizer().steps());
            let own = policy.policy_step(&step.batches, self.options, self.temperature, lr)?;
            stats.add(own, self.share());
        }
        Ok(())
    }
}

/// Where each of several columns begins that lie one behind the other, and where the last ends.
fn starts(lengths: impl Iterator<Item = usize>) -> Vec<usize> {
    let ends = lengths.scan(0, |end, length| {
        *end += length;
        Some(*end)
    });
    std::iter::once(0).chain(ends).collect()
}

/// Places of the samples of each answer, in their order.
fn by_answer(samples: &[Sample<'_>]) -> Vec<Vec<usize>> {
    let (mut answers, mut known) = (Vec::<Vec<usize>>::new(), HashMap::new());
    for (place, sample) in samples.iter().enumerate() {
        let at = *known.entry(sample.answer).or_insert(answers.len());
        match answers.get_mut(at) {
            Some(parts) => parts.push(place),
            None => answers.push(vec![place]),
        }
    }
    answers
}

/// Of each response token, whether it is trained on.
fn trained<'a>(sample: &'a Sample<'_>) -> impl Iterator<Item = bool> + use<'a> {
    (0..sample.response_len()).map(|place| sample.is_trained(place))
}

/// As [`advantage::normalize`] over the tokens of all ranks; `add_up` makes sums of all of this rank's.
fn normalize(advantages: &[f32], add_up: impl Fn(&mut [f64]) -> Result<()>) -> Result<Vec<f32>> {
    let sum = |f: &dyn Fn(f64) -> f64| advantages.iter().map(|&a| f(f64::from(a))).sum::<f64>();
    let mut moments = [advantages.len() as f64, sum(&|a| a)];
    add_up(&mut moments)?;
    let [count, total] = moments;
    let mean = total / count.max(1.0);
    let mut squares = [sum(&|a| (a - mean) * (a - mean))];
    add_up(&mut squares)?;
    let scale = 1.0 / (squares[0] / (count - 1.0).max(1.0) + 1e-8).sqrt();
    Ok(advantages.iter().map(|&a| ((f64::from(a) - mean) * scale) as f32).collect())
}

/// The teacher's log-probs `[M]` of a micro-batch's trained tokens, from the log.
fn logged(samples: &[Sample<'_>], chosen: &[usize], like: &Tensor) -> Result<Tensor> {
    let mut column = Vec::new();
    for sample in chosen.iter().map(|&index| &samples[index]) {
        let found = sample.teacher_log_probs;
        if found.len() != sample.response_len() {
            let expected = format!(
                "{} teacher's log-probs in record {} of the log, or an `opd_teacher_load`",
                sample.response_len(),
                sample.position.0
            );
            return Err(input("on-policy distillation", expected, found.len()));
        }
        let kept = |place: &usize| sample.is_trained(*place);
        column.extend((0..found.len()).filter(kept).map(|place| found[place]));
    }
    Ok(Tensor::f_from_slice(&column)?.f_to_device(like.device())?)
}

/// Samples as packed micro-batches of one optimiser step. Columns are read where they lie.
pub(crate) fn pack(model: &Model, samples: &[Sample<'_>], options: &LearnOptions) -> Result<Packed> {
    pack_share(model, samples, options, 0, 1)
}

/// The share that one of so many ranks has of them.
fn pack_share(
    model: &Model,
    samples: &[Sample<'_>],
    options: &LearnOptions,
    rank: usize,
    ranks: usize,
) -> Result<Packed> {
    let reduction =
        if options.calculate_per_token_loss { Reduction::PerToken } else { Reduction::PerRollout };
    let weights = token_weights(samples, reduction);
    let lengths: Vec<_> = samples.iter().map(|sample| sample.tokens.len()).collect();
    let most = options.micro_batch_size.unwrap_or(usize::MAX);
    let operations = options.balance_data.then(|| model.config().operations());
    let own = share(&lengths, ranks, operations).swap_remove(rank);
    let own_lengths: Vec<_> = own.iter().map(|&index| lengths[index]).collect();
    let mut chosen = micro_batches(&own_lengths, options.max_tokens_per_gpu, most);
    chosen.iter_mut().flatten().for_each(|place| *place = own[*place]);
    let batch = |chosen: &Vec<usize>| {
        let some: Vec<_> = chosen.iter().map(|index| samples[*index]).collect();
        let some_weights: Vec<_> = chosen.iter().map(|index| weights[*index]).collect();
        Batch::new(&some, &some_weights, model.config().vocab_size, model.device())
    };
    let batches = chosen.iter().map(batch).collect::<Result<_>>()?;
    Ok(Packed { chosen, batches })
}
