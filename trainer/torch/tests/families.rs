//! Every family computes what transformers computes, at positions to 4,096, with tied and separate heads and
//! with plain and stretched rotary frequencies; so does a real model, where there is one.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::process::Command;

use driftless_torch::{Config, Model};
use tch::{Device, Kind, Tensor};

/// Names an interpreter that has torch and transformers.
const PYTHON: &str = "DRIFTLESS_TRANSFORMERS_PYTHON";
/// Names the checkpoint of a pretrained model.
const REAL: &str = "DRIFTLESS_REAL_CHECKPOINT";
/// Cases that `families.py` makes: three families, two heads, two kinds of frequencies.
const FRESH: usize = 3 * 2 * 2;
const F32_MAX: f32 = 1e-4;
/// In units of the last place of the largest logit.
const BF16_ULPS_MAX: f32 = 2.0;

/// What both sides computed of one model in one dtype.
struct Compared {
    difference: f32,
    theirs: Tensor,
}

fn largest(tensor: &Tensor) -> f32 {
    f32::try_from(tensor.abs().max()).unwrap()
}

fn compare(checkpoint: &Path, theirs: &Path, kind: Kind) -> Compared {
    let _guard = tch::no_grad_guard();
    let tokens: Vec<i64> =
        serde_json::from_slice(&std::fs::read(theirs.join("tokens.json")).unwrap()).unwrap();
    let model = Model::open(checkpoint, kind, Device::Cpu).unwrap();
    let ours = model.forward(&Tensor::from_slice(&tokens).unsqueeze(0)).unwrap().squeeze_dim(0);
    let dtype = if kind == Kind::Float { "float32" } else { "bfloat16" };
    let bytes = std::fs::read(theirs.join(format!("logits-{dtype}"))).unwrap();
    let theirs = Tensor::from_data_size(&bytes, &ours.size(), Kind::Float);
    Compared { difference: largest(&(ours - &theirs)), theirs }
}

/// The distance of bf16 numbers of the size of `largest`.
fn bf16_ulp(largest: f32) -> f32 {
    (largest.log2().floor() - 7.0).exp2()
}

fn agrees(name: &str, checkpoint: &Path, theirs: &Path) -> (Compared, Compared) {
    let wide = compare(checkpoint, theirs, Kind::Float);
    let narrow = compare(checkpoint, theirs, Kind::BFloat16);
    let top = largest(&narrow.theirs);
    let ulps = narrow.difference / bf16_ulp(top);
    println!("{name}: largest logit {top:.2}; f32 {:.1e}, bf16 {ulps} ulp", wide.difference);
    assert!(wide.difference <= F32_MAX, "{name}");
    (wide, narrow)
}

fn fresh_agrees(name: &str, dir: &Path) {
    let (_, narrow) = agrees(name, dir, dir);
    assert!(narrow.difference <= BF16_ULPS_MAX * bf16_ulp(largest(&narrow.theirs)), "{name}");
}

/// Thirty layers round thirty times: the bound in bf16 is what that does to transformers' own logits.
fn pretrained_agrees(checkpoint: &Path, theirs: &Path) {
    let (wide, narrow) = agrees("a pretrained model", checkpoint, theirs);
    let rounding = largest(&(&narrow.theirs - &wide.theirs));
    println!("bf16: {} from transformers, whose own distance from f32 is {rounding}", narrow.difference);
    assert!(narrow.difference <= rounding);
}

#[test]
fn transformers_computes_the_same_for_every_family() {
    let Ok(python) = std::env::var(PYTHON) else {
        println!("skipped: {PYTHON} names no Python interpreter that has torch and transformers");
        return;
    };
    let real = std::env::var_os(REAL).map(PathBuf::from);
    let dir = tempfile::tempdir().unwrap();
    // One process for all: importing transformers takes longer than everything it computes here.
    let output = Command::new(python)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/families.py"))
        .arg(dir.path())
        .args(&real)
        .env("HF_HUB_OFFLINE", "1")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let entries = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path());
    let mut cases: Vec<_> = entries.filter(|path| !path.ends_with("real")).collect();
    cases.sort();
    assert_eq!(cases.len(), FRESH);
    for case in &cases {
        let name = case.file_name().unwrap().to_string_lossy();
        let config = Config::open(case).unwrap();
        assert!(name.starts_with(config.family.model_type()));
        assert_eq!(config.rope_scaling.is_some(), name.ends_with("stretched"));
        assert_eq!(config.tie_word_embeddings, !name.contains("untied"));
        fresh_agrees(&name, case);
    }
    match real {
        Some(real) => pretrained_agrees(&real, &dir.path().join("real")),
        None => println!("skipped: {REAL} names no checkpoint of a pretrained model"),
    }
}
