//! What the model promises its callers: padding changes nothing, a cache changes nothing, files round-trip.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use driftless_torch::tasks::tiny;
use driftless_torch::{Config, Error, Family, Model, RopeScaling};
use tch::{Device, Kind, Tensor};

const SEED: i64 = 11;

fn config() -> Config {
    Config {
        vocab_size: 24,
        hidden_size: 32,
        intermediate_size: 48,
        num_hidden_layers: 3,
        head_dim: 16,
        max_position_embeddings: 128,
        initializer_range: 0.2,
        ..tiny::config()
    }
}

/// One model a family, those of Llama with stretched frequencies. Biases are drawn, because fresh ones are
/// zero.
fn families() -> Vec<Model> {
    let scaling = RopeScaling {
        factor: 4.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 32,
    };
    let configs = [
        Config { family: Family::Llama, rope_scaling: Some(scaling), ..config() },
        Config { family: Family::Qwen2, tie_word_embeddings: false, ..config() },
        config(),
    ];
    let _guard = tch::no_grad_guard();
    configs
        .into_iter()
        .map(|config| {
            let model = Model::fresh(config, SEED, Kind::Float, Device::Cpu).unwrap();
            for parameter in model.parameters().iter().filter(|p| p.name.ends_with(".bias")) {
                let _ = parameter.tensor.shallow_clone().normal_(0.0, 0.5);
            }
            model
        })
        .collect()
}

fn model() -> Model {
    Model::fresh(config(), SEED, Kind::Float, Device::Cpu).unwrap()
}

fn tokens(rows: &[&[i64]]) -> Tensor {
    let width = rows.iter().map(|row| row.len()).max().unwrap();
    let padded =
        rows.iter().flat_map(|row| row.iter().copied().chain(std::iter::repeat_n(0, width - row.len())));
    Tensor::from_slice(&padded.collect::<Vec<_>>()).view([rows.len() as i64, width as i64])
}

fn difference(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.size(), b.size());
    f64::try_from((a - b).abs().max()).unwrap()
}

/// Logits of one sequence alone.
fn alone(model: &Model, row: &[i64]) -> Tensor {
    model.forward(&tokens(&[row])).unwrap().get(0)
}

#[test]
fn right_padding_changes_nothing() {
    let (model, _guard) = (model(), tch::no_grad_guard());
    let rows: [&[i64]; 3] = [&[5, 6, 7, 8, 9], &[4, 3], &[10, 11, 12]];
    let logits = model.forward(&tokens(&rows)).unwrap();
    assert_eq!(logits.kind(), Kind::Float);
    for (index, row) in rows.iter().enumerate() {
        let real = logits.get(index as i64).narrow(0, 0, row.len() as i64);
        assert!(difference(&real, &alone(&model, row)) < 1e-5);
    }
}

#[test]
fn a_cache_changes_nothing() {
    for model in families() {
        println!("{:?}", model.config().family);
        the_cache_changes_nothing(&model);
    }
}

fn the_cache_changes_nothing(model: &Model) {
    let _guard = tch::no_grad_guard();
    let mut cache = model.cache(4).unwrap();
    let (a, b): (Vec<i64>, Vec<i64>) =
        ((2..60).map(|i| i % 24).collect(), (3..40).map(|i| i * 7 % 24).collect());
    // Two ragged prompts in slots 2 and 0, one of them continued alone, then both a token at a time: slots in
    // and out of order, padding, growth past the first capacity.
    let first = model.extend(&tokens(&[&a[..5], &b[..3]]), &[5, 3], &[2, 0], &mut cache).unwrap();
    let mut got_a = vec![first.get(0)];
    let mut got_b = vec![first.get(1).narrow(0, 0, 3)];
    got_b.push(model.extend(&tokens(&[&b[3..20]]), &[17], &[0], &mut cache).unwrap().get(0));
    for step in 0..17 {
        let (order, new) = match step % 2 {
            0 => ([2, 0], [a[5 + step], b[20 + step]]),
            _ => ([0, 2], [b[20 + step], a[5 + step]]),
        };
        let hidden = model.extend(&tokens(&[&new[..1], &new[1..]]), &[1, 1], &order, &mut cache).unwrap();
        got_a.push(hidden.get(i64::from(order[0] == 0)));
        got_b.push(hidden.get(i64::from(order[0] == 2)));
    }
    got_a.push(model.extend(&tokens(&[&a[22..]]), &[a.len() - 22], &[2], &mut cache).unwrap().get(0));
    assert_eq!((cache.length(2), cache.length(0), cache.length(1)), (a.len(), b.len(), 0));
    for (got, row) in [(got_a, &a), (got_b, &b)] {
        let logits = model.logits(&Tensor::cat(&got, 0)).unwrap();
        assert!(difference(&logits, &alone(model, row)) < 1e-4);
    }
}

#[test]
fn a_freed_slot_holds_nothing_of_its_past() {
    let (model, _guard) = (model(), tch::no_grad_guard());
    let mut cache = model.cache(1).unwrap();
    let _ = model.extend(&tokens(&[&[9, 9, 9, 9]]), &[4], &[0], &mut cache).unwrap();
    cache.truncate(0, 0);
    let hidden = model.extend(&tokens(&[&[5, 6]]), &[2], &[0], &mut cache).unwrap();
    assert!(difference(&model.logits(&hidden).unwrap().get(0), &alone(&model, &[5, 6])) < 1e-5);
}

#[test]
fn refused_rows_leave_the_cache_alone() {
    let (model, _guard) = (model(), tch::no_grad_guard());
    let mut cache = model.cache(2).unwrap();
    let one = tokens(&[&[5, 6]]);
    let two = tokens(&[&[5, 6], &[7, 8]]);
    let long = Tensor::zeros([1, 200], (Kind::Int64, Device::Cpu));
    for result in [
        model.extend(&one, &[2], &[2], &mut cache),
        model.extend(&one, &[0], &[0], &mut cache),
        model.extend(&one, &[3], &[0], &mut cache),
        model.extend(&two, &[2, 2], &[1, 1], &mut cache),
        model.extend(&two, &[2, 2], &[1], &mut cache),
        model.extend(&long, &[200], &[0], &mut cache),
    ] {
        assert!(matches!(result, Err(Error::Input { .. })), "{result:?}");
    }
    assert!(matches!(model.extend(&tokens(&[&[5, 99]]), &[2], &[0], &mut cache), Err(Error::Torch(_))));
    assert!(matches!(model.forward(&long), Err(Error::Input { .. })));
    assert_eq!(cache.length(0), 0);
}

#[test]
fn models_made_at_once_are_the_ones_their_seeds_name() {
    let alone = Model::fresh(config(), SEED, Kind::Float, Device::Cpu).unwrap();
    let made = || Model::fresh(config(), SEED, Kind::Float, Device::Cpu).unwrap();
    let together = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(made)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    for model in &together {
        for (a, b) in alone.parameters().iter().zip(model.parameters()) {
            assert!(a.tensor.equal(&b.tensor), "{}", a.name);
        }
    }
}
