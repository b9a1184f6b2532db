//! A cold start leaves a checkpoint that this crate, and Hugging Face's `transformers`, read alike.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use driftless_torch::sft::{SftOptions, SftTask, sft};
use driftless_torch::tasks::text::{self, Text};
use driftless_torch::tasks::tiny;
use driftless_torch::{Config, Kind, Model, Policy, policy_snapshot};
use driftless_trainer::LossMask;
use driftless_trainer::data::{DataOptions, Order};
use driftless_trainer::options::LearnOptions;
use driftless_trainer::tasks::Generated;
use driftless_trainer::tasks::problems::Kind as Problems;
use driftless_transport::{Checkpoint, Snapshot};
use tch::{Device, Tensor};

const SEED: u64 = 3;
/// The tokens that the logits are compared on: two prompts of the task.
const TOKENS: [[i64; 6]; 2] = [[6, 7, 13, 8, 11, 14], [12, 12, 13, 4, 3, 14]];
/// Sums of a step.
const BATCH: u64 = 64;

/// So many sums with their answers.
fn sums(count: u64) -> SftTask {
    let options = DataOptions::default().with_loss_mask(LossMask::Generation);
    let reader = driftless_trainer::tasks::tiny::reader(options).unwrap();
    let kind = Problems::named("arithmetic").unwrap();
    let data = Generated::worked(kind, 1, SEED, count, reader).unwrap();
    let order = Order { prompts: count, shuffle: false, seed: 0 };
    let learn = LearnOptions::default().with_lr(1e-3);
    SftTask::Chat { data: Arc::new(data), order, learn: Box::new(learn) }
}

fn cold_start(dir: &Path, published: Kind, steps: u64) -> SftOptions {
    let config = Config { num_hidden_layers: 2, ..tiny::config() };
    SftOptions::new(sums(steps * BATCH), config, dir, steps)
        .with_dtype(Some(published))
        .with_batch_size(BATCH)
        .with_seed(SEED)
        .with_num_threads(1)
}

fn logits(dir: &Path) -> Vec<f32> {
    let _guard = tch::no_grad_guard();
    let model = Model::open(dir, Kind::Float, Device::Cpu).unwrap();
    let tokens = Tensor::from_slice2(&TOKENS);
    Vec::try_from(model.forward(&tokens).unwrap().flatten(0, -1)).unwrap()
}

#[test]
fn the_demo_model_has_a_million_parameters() {
    let config = tiny::config();
    config.check().unwrap();
    assert!(config.elements() >= 1_000_000);
    assert!(config.num_attention_heads > config.num_key_value_heads);
}

#[test]
fn a_cold_start_learns_and_is_a_function_of_its_seed() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b] = ["a", "b"].map(|name| dir.path().join(name));
    let mut losses = Vec::new();
    let summary = sft(&cold_start(&a, Kind::BFloat16, 15), |_, loss| losses.push(loss)).unwrap();
    sft(&cold_start(&b, Kind::BFloat16, 15), |_, _| {}).unwrap();
    println!("seed {SEED}, losses {losses:?}");
    assert_eq!(losses.len(), 15);
    assert!(summary.loss < 0.8 * losses[0]);
    for file in ["model.safetensors", "config.json", "tokenizer.json"] {
        // Not `assert_eq`: nobody wants to read a megabyte of weights.
        assert!(std::fs::read(a.join(file)).unwrap() == std::fs::read(b.join(file)).unwrap(), "{file}");
    }
    assert_eq!(Config::published_kind(&a).unwrap(), Kind::BFloat16);
    // From there on: the same weights, and the same files beside them.
    let model = Model::open(&a, Kind::Float, Device::Cpu).unwrap();
    let policy = Policy::new(model, Kind::BFloat16, Default::default()).unwrap();
    let snapshot = policy_snapshot(&policy, &a, false).unwrap();
    let checkpoint = Checkpoint::open(&a).unwrap();
    assert_eq!(snapshot.tensors(), checkpoint.tensors());
    assert_eq!(snapshot.files(), checkpoint.files());
    for index in 0..snapshot.tensors().len() {
        assert_eq!(snapshot.bytes(index).unwrap(), checkpoint.bytes(index).unwrap());
    }
}

#[test]
fn a_cold_start_stops_at_the_loss_that_is_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let options = cold_start(&dir.path().join("hf"), Kind::Float, 100).with_stop_loss(Some(2.3));
    let mut losses = Vec::new();
    let summary = sft(&options, |_, loss| losses.push(loss)).unwrap();
    let mean = |last: &[f64]| last.iter().sum::<f64>() / 5.0;
    println!("seed {SEED}, losses {losses:?}");
    assert_eq!(summary.steps, losses.len() as u64);
    assert!(losses.len() < 100);
    let reached: Vec<bool> = losses.windows(5).map(|window| mean(window) <= 2.3).collect();
    assert_eq!(reached.iter().position(|&reached| reached), Some(reached.len() - 1));
}

#[test]
fn a_training_that_is_taken_up_again_goes_on_bit_for_bit() {
    let dir = tempfile::tempdir().unwrap();
    let [whole, first, second] = ["whole", "first", "second"].map(|name| dir.path().join(name));
    let text = Text::new(include_bytes!("task.rs").to_vec()).unwrap();
    let config = Config { hidden_size: 32, num_hidden_layers: 2, ..text::config() };
    let task = SftTask::Text(text);
    let options = |dir: &Path, steps| {
        cold_start(dir, Kind::BFloat16, steps)
            .with_task(task.clone())
            .with_config(config.clone())
            .with_batch_size(2)
            .with_save(Some(dir.join("checkpoints")))
            .with_save_hf(dir.join("step-{rollout_id}"))
    };
    let mut losses = Vec::new();
    sft(&options(&whole, 6), |_, loss| losses.push(loss)).unwrap();
    sft(&options(&first, 4), |_, _| {}).unwrap();
    let rest = options(&second, 6).with_load(Some(first.join("checkpoints")));
    let mut seen = Vec::new();
    let summary = sft(&rest, |step, loss| seen.push((step, loss))).unwrap();
    assert_eq!(summary.steps, 6);
    assert_eq!(seen, [(5, losses[4]), (6, losses[5])]);
    for (step, other) in [(4, &first), (5, &second), (6, &second)] {
        let [a, b] = [&whole, other].map(|dir| dir.join(format!("step-{step}")));
        assert!(Checkpoint::open(&b).unwrap().tensors().len() > 20);
        for file in ["model.safetensors", "config.json"] {
            assert!(
                std::fs::read(a.join(file)).unwrap() == std::fs::read(b.join(file)).unwrap(),
                "{step} {file}"
            );
        }
    }
    assert!(!second.join("step-4").exists());
    let other_seed = rest.clone().with_seed(SEED + 1);
    let error = sft(&other_seed, |_, _| {}).unwrap_err().to_string();
    assert!(error.contains("seed"), "{error}");
    let nothing = rest.with_load(Some(dir.path().join("nowhere")));
    assert!(sft(&nothing, |_, _| {}).is_err());
}

#[test]
fn transformers_computes_the_same() {
    const PYTHON: &str = "DRIFTLESS_TRANSFORMERS_PYTHON";
    let Ok(python) = std::env::var(PYTHON) else {
        println!("skipped: {PYTHON} names no Python interpreter that has torch and transformers");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    for (name, tied) in [("tied", true), ("untied", false)] {
        let dir = dir.path().join(name);
        let mut options = cold_start(&dir, Kind::Float, 3);
        options.config.tie_word_embeddings = tied;
        sft(&options, |_, _| {}).unwrap();
        let script = format!(
            "import json, sys, torch\n\
             from transformers import AutoModelForCausalLM, AutoTokenizer\n\
             model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, attn_implementation='eager')\n\
             tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])\n\
             logits = model(torch.tensor({TOKENS:?})).logits.flatten().tolist()\n\
             chat = [{{'role': 'user', 'content': '34+58='}}, {{'role': 'assistant', 'content': '29'}}]\n\
             text = tokenizer.apply_chat_template(chat, tokenize=False)\n\
             print(json.dumps([logits, tokenizer('34+58=')['input_ids'], text]))\n"
        );
        let output = Command::new(&python)
            .arg("-c")
            .arg(script)
            .arg(&dir)
            .env("HF_HUB_OFFLINE", "1")
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let (theirs, ids, text): (Vec<f32>, Vec<i32>, String) =
            serde_json::from_slice(&output.stdout).unwrap();
        let ours = logits(&dir);
        assert_eq!(ours.len(), theirs.len());
        let difference = ours.iter().zip(&theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        println!("{name}: largest difference of logits {difference}");
        assert!(difference < 1e-5, "{difference}");
        assert_eq!((ids.as_slice(), text.as_str()), (&[6, 7, 13, 8, 11, 14][..], "34+58=29<eos>"));
    }
}
