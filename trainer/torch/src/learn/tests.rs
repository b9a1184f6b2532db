use std::sync::{Arc, Mutex};

use driftless_buffer::Position;
use driftless_trainer::options::{Estimator, Kl};
use tch::{Device, Kind};

use super::*;
use crate::batch::tests::MEMORY;
use crate::config::Config;
use crate::optimizer::AdamWOptions;
use crate::ranks::Ranks;
use crate::ranks::tests::on_ranks;
use crate::tasks::tiny;
use crate::trained::Trained;

/// So large that a step of AdamW with this rate is the gradient itself.
const EPS: f64 = 1e6;
const TEMPERATURE: f64 = 0.9;

fn config() -> Config {
    Config {
        vocab_size: 24,
        hidden_size: 32,
        intermediate_size: 48,
        num_hidden_layers: 2,
        head_dim: 16,
        initializer_range: 0.2,
        ..tiny::config()
    }
}

fn model(seed: i64) -> Model {
    tch::set_num_threads(1);
    Model::fresh(config(), seed, Kind::Float, Device::Cpu).unwrap()
}

fn policy() -> Policy {
    let adamw = AdamWOptions { clip_grad: 0.0, ..AdamWOptions::default() };
    let policy = Policy::new(model(7), Kind::Float, adamw).unwrap();
    policy.with_reference(model(8), false).unwrap()
}

fn options() -> LearnOptions {
    LearnOptions::default().with_lr(1e-3).with_clip_grad(0.0).with_max_tokens_per_gpu(24)
}

fn penalised(options: &LearnOptions) -> LearnOptions {
    options.clone().with_use_kl_loss(true).with_kl_loss_type(Kl::K3).with_kl_loss_coef(0.2)
}

fn weights(policy: &Policy) -> Vec<f32> {
    let flat = |parameter: &crate::Parameter| {
        Vec::<f32>::try_from(parameter.tensor.detach().flatten(0, -1)).unwrap()
    };
    policy.model().parameters().iter().flat_map(flat).collect()
}

/// A generation of several lengths, with tokens of tools in the middle.
struct Generation {
    tokens: Vec<i32>,
    mask: Vec<u8>,
    log_probs: Vec<f32>,
    teacher: Vec<f32>,
    advantage: f32,
}

const PROMPT: usize = 3;

fn generations() -> Vec<Generation> {
    let lengths = [9, 4, 12, 6];
    lengths
        .into_iter()
        .enumerate()
        .map(|(number, length)| Generation {
            tokens: (0..PROMPT + length).map(|at| ((at * 5 + number * 7) % 23 + 1) as i32).collect(),
            mask: (0..length).map(|at| u8::from(at % 5 != 3)).collect(),
            log_probs: (0..length).map(|at| -2.0 - 0.15 * ((at + number) % 7) as f32).collect(),
            teacher: (0..length).map(|at| -2.5 + 0.2 * ((at * 3 + number) % 5) as f32).collect(),
            advantage: [1.2, -0.7, 0.4, -1.5][number],
        })
        .collect()
}

/// The generations as samples, each cut into parts that begin at the places that `cuts` gives of it.
fn samples(generations: &[Generation], cuts: impl Fn(usize) -> Vec<usize>) -> Vec<learner::Sample<'_>> {
    let parts = generations.iter().enumerate().flat_map(|(number, made)| {
        let mut starts = cuts(number);
        starts.insert(0, 0);
        let ends: Vec<usize> = starts[1..].iter().copied().chain([made.mask.len()]).collect();
        starts.into_iter().zip(ends).map(move |(start, end)| learner::Sample {
            position: Position(number as u64),
            tokens: &made.tokens[..PROMPT + end],
            prompt_len: PROMPT + start,
            loss_mask: &made.mask[start..end],
            stale: 0,
            log_probs: &made.log_probs[start..end],
            teacher_log_probs: &made.teacher[start..end],
            answer: number as u64,
            advantage: made.advantage,
        })
    });
    parts.collect()
}

fn whole(generations: &[Generation]) -> Vec<learner::Sample<'_>> {
    samples(generations, |_| Vec::new())
}

fn rollout(samples: Vec<learner::Sample<'_>>) -> learner::Batch<'_> {
    learner::Batch { rollout_id: 0, samples }
}

/// What a device that has memory for passes of `memory` tokens makes of two steps, in passes of at most 24.
fn with_memory(
    memory: usize,
    global_batch_size: Option<usize>,
) -> (Result<StepStats>, Vec<f32>, LearnOptions) {
    let (generations, mut policy) = (generations(), policy());
    // Nothing is looked at before the first step.
    let mut options = options().with_use_rollout_logprobs(true);
    options.global_batch_size = global_batch_size;
    MEMORY.set(memory);
    let learned =
        learn_within_memory(&mut policy, None, &rollout(whole(&generations)), &mut options, TEMPERATURE);
    MEMORY.set(usize::MAX);
    (learned.map(|learned| learned.stats), weights(&policy), options)
}

#[test]
fn learn_without_memory_for_a_pass_does_it_in_smaller_ones() {
    let (expected, weights, options) = with_memory(usize::MAX, None);
    assert_eq!(options.max_tokens_per_gpu, 24);
    let (learned, in_smaller, options) = with_memory(20, None);
    let (expected, learned) = (expected.unwrap(), learned.unwrap());
    // Passes of 22 tokens, then of 14, which the longest sample has without its last.
    assert!((14..20).contains(&options.max_tokens_per_gpu), "{}", options.max_tokens_per_gpu);
    assert!(
        (expected.loss - learned.loss).abs() < 1e-6 && (expected.grad_norm - learned.grad_norm).abs() < 1e-6
    );
    let apart = weights.iter().zip(&in_smaller).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(apart < 1e-6, "{apart}");
}

#[test]
fn learn_without_memory_for_a_sample_names_its_tokens() {
    let before = weights(&policy());
    let (learned, after, _) = with_memory(5, None);
    let told = learned.unwrap_err();
    assert!(matches!(told, Error::Memory { tokens: 6.., .. }), "{told}");
    assert!(
        told.to_string().contains("max_tokens_per_gpu") && told.to_string().contains("recompute_granularity")
    );
    assert_eq!(before, after);
}

#[test]
fn learn_that_has_made_a_step_is_not_begun_anew() {
    // Steps of 11 and 6 tokens, and of 14 and 8.
    let (learned, _, options) = with_memory(20, Some(2));
    assert!(matches!(learned.unwrap_err(), Error::Memory { tokens: 22, .. }));
    assert_eq!(options.max_tokens_per_gpu, 24);
}

#[test]
fn split_rollouts_have_the_same_loss_and_gradients() {
    let generations = generations();
    let engines = options().with_use_rollout_logprobs(true);
    let cases = [
        penalised(&engines).with_entropy_coef(0.05),
        engines.clone().with_advantage_estimator(Estimator::Cispo),
        engines.clone().with_calculate_per_token_loss(true),
        engines.clone().with_advantage_estimator(Estimator::ReinforcePlusPlus).with_gamma(0.9),
        engines
            .with_advantage_estimator(Estimator::ReinforcePlusPlus)
            .with_gamma(0.8)
            .with_kl_coef(0.3)
            .with_kl_loss_type(Kl::K2),
        options().with_use_tis(true).with_tis_clip_low(0.5).with_tis_clip(1.5),
    ];
    for options in cases {
        let gradient = |samples: Vec<learner::Sample<'_>>| {
            let adamw = AdamWOptions { eps: EPS, clip_grad: 0.0, ..AdamWOptions::default() };
            let mut policy =
                Policy::new(model(7), Kind::Float, adamw).unwrap().with_reference(model(8), false).unwrap();
            let before = weights(&policy);
            let options = options.clone().with_lr(EPS);
            let Learned { stats, .. } =
                learn(&mut policy, None, &rollout(samples), &options, TEMPERATURE).unwrap();
            let moved = before.iter().zip(weights(&policy)).map(|(before, after)| before - after);
            (stats, moved.collect::<Vec<_>>())
        };
        let (expected, slopes) = gradient(whole(&generations));
        assert!(slopes.iter().any(|slope| slope.abs() > 1e-3));
        for seed in 1..4_usize {
            // Every generation is cut once or twice, at other places each time.
            let cuts = |number: usize| {
                let length = generations[number].mask.len();
                let first = 1 + (seed + number) % (length - 2);
                if seed % 2 == 0 { vec![first] } else { vec![first, first + 1] }
            };
            let (found, moved) = gradient(samples(&generations, cuts));
            assert!((found.loss - expected.loss).abs() <= 1e-6, "{} {}", found.loss, expected.loss);
            assert!((found.entropy - expected.entropy).abs() <= 1e-6);
            let furthest = moved.iter().zip(&slopes).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(furthest <= 1e-6, "seed {seed}: gradients are {furthest:e} apart, {options:?}");
        }
    }
}

#[test]
fn steps_under_engine_log_probs_equal_as_many_rollouts() {
    let generations = generations();
    let all = whole(&generations);
    let options = options().with_use_rollout_logprobs(true);
    let (mut at_once, mut apart) = (policy(), policy());
    let steps = options.clone().with_global_batch_size(2);
    let Learned { stats, .. } =
        learn(&mut at_once, None, &rollout(all.clone()), &steps, TEMPERATURE).unwrap();
    let halves = [0..2, 2..4].map(|half| {
        learn(&mut apart, None, &rollout(all[half].to_vec()), &options, TEMPERATURE).unwrap().stats
    });
    assert_eq!(weights(&at_once), weights(&apart));
    assert_eq!(at_once.optimizer().steps(), 2);
    assert!((stats.loss - (halves[0].loss + halves[1].loss) / 2.0).abs() < 1e-12);
    assert!((stats.grad_norm - (halves[0].grad_norm + halves[1].grad_norm) / 2.0).abs() < 1e-12);
}

#[test]
fn old_policy_is_the_one_before_the_first_step() {
    let generations = generations();
    let all = whole(&generations);
    let (mut found, mut by_hand) = (policy(), policy());
    let steps = options().with_global_batch_size(2).with_lr(1e-2);
    let Learned { stats, .. } = learn(&mut found, None, &rollout(all.clone()), &steps, TEMPERATURE).unwrap();

    let [mut first, mut second] =
        [0..2, 2..4].map(|half| pack(by_hand.model(), &all[half], &steps).unwrap().batches);
    for batch in first.iter_mut().chain(&mut second) {
        batch.old_log_probs = Some(by_hand.log_probs(batch, TEMPERATURE).unwrap());
    }
    let first = by_hand.policy_step(&first, &steps, TEMPERATURE, 1e-2).unwrap();
    let second = by_hand.policy_step(&second, &steps, TEMPERATURE, 1e-2).unwrap();
    assert_eq!(weights(&found), weights(&by_hand));
    assert!(first.ppo_kl.abs() < 1e-9 && second.ppo_kl.abs() > 1e-5, "{} {}", first.ppo_kl, second.ppo_kl);
    assert!((stats.ppo_kl - second.ppo_kl / 2.0).abs() < 1e-9);
}

/// Log-probs of all response tokens under the current weights, sample by sample; NaN where a token is not trained on.
fn said(policy: &Policy, samples: &[learner::Sample<'_>], options: &LearnOptions) -> Vec<f32> {
    let of = |sample: &learner::Sample<'_>| {
        let alone = pack(policy.model(), &[*sample], options).unwrap();
        let known = Vec::<f32>::try_from(policy.log_probs(&alone.batches[0], TEMPERATURE).unwrap()).unwrap();
        let mut known = known.into_iter();
        let of_token = |place| if sample.is_trained(place) { known.next().unwrap() } else { f32::NAN };
        (0..sample.response_len()).map(of_token).collect::<Vec<_>>()
    };
    samples.iter().flat_map(of).collect()
}

#[test]
fn log_probs_of_a_step_are_those_before_it_sample_by_sample() {
    let generations = generations();
    let mut all = whole(&generations);
    all[1].stale = 3;
    let small = options().with_lr(1e-2).with_max_tokens_per_gpu(24);
    let halves = small.clone().with_global_batch_size(2);
    let cases = [(small, 4), (halves.clone(), 4), (halves.with_use_rollout_logprobs(true), 2)];
    for (options, before_the_first) in cases {
        let mut policy = policy();
        let expected = said(&policy, &all[..before_the_first], &options);
        let learned = learn(&mut policy, None, &rollout(all.clone()), &options, TEMPERATURE).unwrap();
        let found = learned.log_probs.unwrap();
        assert_eq!(found.len(), all.iter().map(learner::Sample::response_len).sum::<usize>());
        for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let same = if expected.is_nan() { found.is_nan() } else { (found - expected).abs() < 1e-5 };
            assert!(same, "token {at}: {found} {expected}, {options:?}");
        }
        let after = said(&policy, &all, &options);
        let moved = found.iter().zip(&after).any(|(before, after)| (before - after).abs() > 1e-4);
        assert!(moved, "the step moves them: {options:?}");
        let engine = all.iter().flat_map(|sample| sample.log_probs);
        let apart = found.iter().zip(engine).map(|(own, engine)| (own - engine).abs());
        let furthest = f64::from(apart.filter(|apart| !apart.is_nan()).fold(0.0_f32, f32::max));
        assert!((furthest - learned.stats.log_prob_diff_max).abs() < 1e-5, "{furthest}, {options:?}");
    }
}

#[test]
fn step_that_is_not_finite_leaves_out_the_rest_of_its_rollout() {
    let generations = generations();
    let mut all = whole(&generations);
    all[2].advantage = f32::MAX;
    let options = options().with_global_batch_size(2).with_entropy_coef(1e300);
    let mut struck = policy();
    let before = weights(&struck);
    let failed = learn(&mut struck, None, &rollout(all), &options, TEMPERATURE);
    assert!(matches!(failed, Err(crate::Error::NotFinite { step: 0, .. })), "{failed:?}");
    assert_eq!(weights(&struck), before);
}

#[test]
fn advantages_by_token_are_made_of_what_the_models_say() {
    let generations = generations();
    let all = whole(&generations);
    let policy = policy().with_teacher(model(9)).unwrap();
    let options = options()
        .with_advantage_estimator(Estimator::ReinforcePlusPlus)
        .with_gamma(0.9)
        .with_kl_coef(0.3)
        .with_kl_loss_type(Kl::K2)
        .with_use_opd(true)
        .with_opd_kl_coef(0.5);
    let mut rollout = Rollout::cut(&policy, &all, &options, TEMPERATURE).unwrap();
    let mut stats = StepStats::default();
    rollout.look_back(&policy).unwrap();
    let known = rollout.distances(&policy, &mut stats).unwrap();
    rollout.advantages(&known, policy.optimizer()).unwrap();

    // Sample by sample, in f64.
    let teacher = Policy::new(model(9), Kind::Float, AdamWOptions::default()).unwrap();
    let reference = Policy::new(model(8), Kind::Float, AdamWOptions::default()).unwrap();
    let mut expected = Vec::new();
    for sample in &all {
        let batch = &pack(policy.model(), std::slice::from_ref(sample), &options).unwrap().batches[0];
        let of = |policy: &Policy| -> Vec<f64> {
            Vec::try_from(policy.log_probs(batch, TEMPERATURE).unwrap().to_kind(Kind::Double)).unwrap()
        };
        let (own, reference, teacher) = (of(&policy), of(&reference), of(&teacher));
        let last = own.len() - 1;
        let reward = |t: usize| {
            let end = if t == last { f64::from(sample.advantage) } else { 0.0 };
            end - 0.3 * (own[t] - reference[t]).powi(2) / 2.0
        };
        let sum = |t: usize| (t..own.len()).map(|u| 0.9_f64.powi((u - t) as i32) * reward(u)).sum::<f64>();
        expected.push((0..own.len()).map(|t| sum(t) - 0.5 * (own[t] - teacher[t])).collect::<Vec<_>>());
    }
    let flat: Vec<f64> = expected.concat();
    let mean = flat.iter().sum::<f64>() / flat.len() as f64;
    let variance = flat.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (flat.len() as f64 - 1.0);
    for (chosen, batch) in rollout.batches() {
        let found: Vec<f64> = Vec::try_from(batch.advantages.to_kind(Kind::Double)).unwrap();
        let wanted = chosen.iter().flat_map(|&index| &expected[index]);
        let wanted: Vec<f64> = wanted.map(|value| (value - mean) / (variance + 1e-8).sqrt()).collect();
        assert_eq!(found.len(), wanted.len());
        for (found, wanted) in found.iter().zip(&wanted) {
            assert!((found - wanted).abs() < 2e-6, "{found} {wanted}");
        }
    }
    assert!(stats.kl > 0.0 && stats.opd_reverse_kl != 0.0);
}

#[test]
fn teacher_in_the_log_is_the_teacher_that_is_loaded() {
    let mut generations = generations();
    let options = options().with_use_opd(true);
    let teacher = Policy::new(model(9), Kind::Float, AdamWOptions::default()).unwrap();
    // What the teacher says of every token of the responses.
    let said: Vec<Vec<f32>> = whole(&generations)
        .iter()
        .map(|sample| {
            let all = [learner::Sample { loss_mask: &[], ..*sample }];
            let batch = &pack(teacher.model(), &all, &options).unwrap().batches[0];
            Vec::try_from(teacher.log_probs(batch, TEMPERATURE).unwrap()).unwrap()
        })
        .collect();
    for (made, said) in generations.iter_mut().zip(said) {
        made.teacher = said;
    }
    let (mut from_log, mut loaded) = (policy(), policy().with_teacher(model(9)).unwrap());
    let learned = |policy: &mut Policy| {
        learn(policy, None, &rollout(whole(&generations)), &options, TEMPERATURE).unwrap().stats
    };
    let (of_log, of_model) = (learned(&mut from_log), learned(&mut loaded));
    assert!((of_log.opd_reverse_kl - of_model.opd_reverse_kl).abs() < 1e-6);
    assert!((of_log.loss - of_model.loss).abs() < 1e-6);

    let bare = learner::Sample { teacher_log_probs: &[], ..whole(&generations)[1] };
    let failed = learn(&mut from_log, None, &rollout(vec![bare]), &options, TEMPERATURE);
    let words = failed.unwrap_err().to_string();
    assert!(words.contains("record 1 of the log") && words.contains("`opd_teacher_load`"), "{words}");
}

/// A critic of a fresh checkpoint, and the options that go with it.
fn critic(dir: &std::path::Path) -> (Critic, LearnOptions) {
    let policy = Policy::new(model(7), Kind::Float, AdamWOptions::default()).unwrap();
    let json = serde_json::to_vec(&config().to_json(Kind::Float)).unwrap();
    let files = vec![driftless_transport::snapshot::AuxFile::new("config.json", json).unwrap()];
    let snapshot = crate::snapshot::of_trained(&policy.trained, &files).unwrap();
    driftless_transport::checkpoint::write_checkpoint(dir, &snapshot, 1 << 30).unwrap();
    let of_critic = CriticOptions::default().with_critic_lr(1e-2).with_value_clip(1e9);
    let model = Model::open_critic(dir, Kind::Float, Device::Cpu).unwrap();
    let critic =
        Critic::of(Trained::new(model, Kind::Float, AdamWOptions::default(), None).unwrap()).unwrap();
    let options = options().with_advantage_estimator(Estimator::Ppo).with_critic(of_critic);
    (critic, options)
}

fn values(critic: &mut Critic, samples: &[learner::Sample<'_>], options: &LearnOptions) -> Vec<f32> {
    let packed = pack(&critic.trained.model, samples, options).unwrap();
    let of = |batch: &Batch| Vec::<f32>::try_from(critic.values(batch).unwrap()).unwrap();
    packed.batches.iter().flat_map(of).collect()
}

#[test]
fn split_rollouts_have_the_same_advantages_under_a_critic() {
    let dir = tempfile::tempdir().unwrap();
    let (generations, (_, options)) = (generations(), critic(dir.path()));
    let mut options = options.with_gamma(0.95).with_lambd(0.9).with_kl_coef(0.2);
    options.critic.num_critic_only_steps = 4;
    let learned = |samples: Vec<learner::Sample<'_>>| {
        let (mut critic, mut policy) = (critic(dir.path()).0, policy());
        let mut stats = StepStats::default();
        // Values are no zeros any more when the policy learns.
        for rollout_id in 0..5 {
            let batch = learner::Batch { rollout_id, samples: samples.clone() };
            stats = learn(&mut policy, Some(&mut critic), &batch, &options, TEMPERATURE).unwrap().stats;
        }
        (stats, weights(&policy))
    };
    let (expected, trained) = learned(whole(&generations));
    let before = weights(&policy());
    assert!(trained.iter().zip(&before).any(|(a, b)| (a - b).abs() > 1e-5));
    let (found, split) = learned(samples(&generations, |number| vec![1 + number, 2 + number]));
    assert!((found.value_loss - expected.value_loss).abs() < 1e-5, "{found:?} {expected:?}");
    assert!((found.loss - expected.loss).abs() < 1e-5 && (found.kl - expected.kl).abs() < 1e-5);
    let furthest = trained.iter().zip(&split).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(furthest < 2e-4, "weights are {furthest:e} apart");
}

#[test]
fn critic_learns_values_while_the_policy_waits() {
    let dir = tempfile::tempdir().unwrap();
    let (mut critic, mut options) = critic(dir.path());
    options.critic.num_critic_only_steps = 30;
    let generations = generations();
    let all: Vec<_> =
        whole(&generations).into_iter().map(|sample| learner::Sample { advantage: 0.5, ..sample }).collect();
    assert!(values(&mut critic, &all, &options).iter().all(|value| *value == 0.0), "a fresh head");
    let mut policy = policy();
    let before = weights(&policy);
    let mut losses = Vec::new();
    for rollout_id in 0..30 {
        let batch = learner::Batch { rollout_id, samples: all.clone() };
        let learned = learn(&mut policy, Some(&mut critic), &batch, &options, TEMPERATURE).unwrap();
        assert_eq!(learned.log_probs, None, "the policy said nothing");
        losses.push(learned.stats.value_loss);
    }
    // λ is 1: every return is the reward.
    assert!((losses[0] - 0.25).abs() < 1e-6 && losses[29] < 0.01, "{losses:?}");
    assert!(values(&mut critic, &all, &options).iter().all(|value| (value - 0.5).abs() < 0.2));
    assert_eq!((weights(&policy), policy.optimizer().steps()), (before.clone(), 0));
    let batch = learner::Batch { rollout_id: 30, samples: all };
    let Learned { stats, .. } = learn(&mut policy, Some(&mut critic), &batch, &options, TEMPERATURE).unwrap();
    assert!(stats.grad_norm > 0.0 && stats.critic_grad_norm > 0.0);
    assert_ne!(weights(&policy), before);
}

#[test]
fn critic_that_is_written_is_one_that_is_loaded() {
    let dir = tempfile::tempdir().unwrap();
    let start = dir.path().join("start");
    let (mut critic, options) = critic(&start);
    let generations = generations();
    let all = whole(&generations);
    let batch = rollout(all.clone());
    learn(&mut policy(), Some(&mut critic), &batch, &options, TEMPERATURE).unwrap();
    let snapshot = crate::snapshot::of_critic(&critic, &start).unwrap();
    driftless_transport::checkpoint::write_checkpoint(dir.path().join("critic"), &snapshot, 1 << 30).unwrap();
    let model = Model::open_critic(&dir.path().join("critic"), Kind::Float, Device::Cpu).unwrap();
    let mut loaded =
        Critic::of(Trained::new(model, Kind::Float, AdamWOptions::default(), None).unwrap()).unwrap();
    let found = values(&mut loaded, &all, &options);
    assert!(found.iter().any(|value| value.abs() > 1e-3));
    assert_eq!(found, values(&mut critic, &all, &options));
    // It is no language model.
    let refused = Model::open(&dir.path().join("critic"), Kind::Float, Device::Cpu);
    assert!(matches!(refused, Err(crate::Error::Family { .. })));
}

/// What some steps on these generations came to, and the weights after them.
fn learned(options: &LearnOptions, ranks: Option<&Ranks>) -> (Vec<Learned>, Vec<f32>) {
    let generations = generations();
    // Sums in another order differ in the last bits; where there is next to no gradient, division by its own size
    // would make a step of them.
    let adamw = AdamWOptions { clip_grad: 0.5, eps: 1e-4, ..AdamWOptions::default() };
    let policy = Policy::of(Trained::new(model(7), Kind::Float, adamw, ranks).unwrap());
    let mut policy = policy.with_reference(model(8), false).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let mut taught = options.critic().map(|_| {
        critic(dir.path());
        let trunk = Model::open_critic(dir.path(), Kind::Float, Device::Cpu).unwrap();
        Critic::of(Trained::new(trunk, Kind::Float, adamw, ranks).unwrap()).unwrap()
    });
    let step =
        |_| learn(&mut policy, taught.as_mut(), &rollout(whole(&generations)), options, TEMPERATURE).unwrap();
    let steps = (0..2).map(step).collect();
    (steps, weights(&policy))
}

#[test]
fn ranks_learn_what_one_does() {
    let dir = tempfile::tempdir().unwrap();
    let (_, ppo) = critic(dir.path());
    let cases = [
        penalised(&options()).with_entropy_coef(0.05).with_balance_data(true),
        options().with_advantage_estimator(Estimator::Gspo).with_global_batch_size(2),
        ppo.with_normalize_advantages(true),
    ];
    for options in cases {
        let (expected, weights) = learned(&options, None);
        // More ranks than samples leave some without any.
        for ranks in [2, 4, 5] {
            let found = on_ranks(ranks, |star| {
                let ranks: Ranks = Arc::new(Mutex::new(star));
                learned(&options, Some(&ranks))
            });
            for (steps, own) in found {
                let apart = own.iter().zip(&weights).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(apart < 1e-6, "{ranks} ranks: weights {apart} apart, {options:?}");
                for (found, expected) in steps.into_iter().zip(&expected) {
                    let pairs = found.log_probs.unwrap().into_iter().zip(expected.log_probs.clone().unwrap());
                    let same = |(a, b): (f32, f32)| (a.is_nan() && b.is_nan()) || (a - b).abs() < 1e-5;
                    assert!(pairs.into_iter().all(same), "{ranks} ranks: other log-probs, {options:?}");
                    let (mut found, mut expected) = (found.stats, expected.stats);
                    let norms = (found.grad_norm / expected.grad_norm - 1.0).abs();
                    assert!(norms < 1e-5, "{ranks} ranks: gradient norms {norms} apart");
                    let furthest = (found.log_prob_diff_max - expected.log_prob_diff_max).abs();
                    assert!(furthest < 1e-6, "{ranks} ranks: {furthest}");
                    for (found, expected) in found.sums().into_iter().zip(expected.sums()) {
                        let apart = (*found - *expected).abs();
                        assert!(apart < 1e-6, "{ranks} ranks: {found} {expected}, {options:?}");
                    }
                }
            }
        }
    }
}
