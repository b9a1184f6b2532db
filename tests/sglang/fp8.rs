//! Engines in fp8: SGLang loads what `driftless quantize` writes, and ends with the last version's weights.

use super::common::{self, Process, driftless, free_port, run};
use super::{RUN_DEADLINE, follow, ready, server, trainer, variable};
use driftless::bridge::ClientOptions;
use driftless::bridge::sglang::{Client, checksums};
use driftless::transport::{Checkpoint, Dtype, Snapshot, Tensors};
use serde_json::Value;
use std::path::Path;

#[test]
fn three_steps_in_fp8_end_with_the_weights_that_were_published() {
    let Some(python) = variable("DRIFTLESS_SGLANG_PYTHON") else { return };
    let _one = common::exclusive();
    let temporary = tempfile::tempdir().expect("a directory");
    let dir = temporary.path();
    let model = common::cold_start_of(dir, &common::fp8_config(), 20, "bfloat16");
    let (fp8, port) = (dir.join("model-fp8"), free_port());
    run(driftless().arg("quantize").arg(&model).arg(&fp8));

    let mut command = server(&python, &fp8, port, "bfloat16");
    let stand_in = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/sglang/fp8");
    let placeholders = variable("DRIFTLESS_SGLANG_PYTHONPATH").expect("set beside DRIFTLESS_SGLANG_PYTHON");
    command.env("PYTHONPATH", format!("{stand_in}:{}", placeholders.display()));
    let mut server = Process::start("sglang", dir, &mut command);
    ready(&mut server, port);
    let _follower = follow(dir, &fp8, port);
    let mut command = trainer(dir, &model, port, 3);
    command.args(["--rollout-dtype", "fp8", "--rollout-hf-checkpoint"]).arg(&fp8);
    command.args(["--task", "arithmetic", "--rollout-batch-size", "8", "--n-samples-per-prompt", "4"]);
    command.args(["--rollout-max-response-len", "8", "--lr", "1e-3"]);
    Process::start("trainer", dir, &mut command).within(RUN_DEADLINE).succeed();

    let client = Client::new(&format!("127.0.0.1:{port}"), ClientOptions::default()).expect("an address");
    let runtime = tokio::runtime::Runtime::new().expect("threads");
    let live = runtime.block_on(client.checksums()).expect("checksums").remove(0).checksums;
    let host = dir.join("host/checkpoint");
    let published = checksums(&dequantized(&host), &host).expect("a model");
    assert_eq!(live, published);
    let first = checksums(&dequantized(&fp8), &fp8).expect("a model");
    let moved = "model.layers.0.mlp.down_proj.weight";
    assert_ne!(published[moved], first[moved]);
}

/// What the weights of a checkpoint in fp8 stand for, in bf16: SGLang hashes that.
fn dequantized(dir: &Path) -> Tensors<'static> {
    let checkpoint = Checkpoint::open(dir).expect("a checkpoint");
    let bytes = |index: usize| checkpoint.bytes(index).expect("its bytes").into_owned();
    let mut tensors = Tensors::new();
    for (index, info) in checkpoint.tensors().iter().enumerate() {
        let bytes = match info.dtype {
            Dtype::F32 => continue,
            Dtype::F8E4M3 => {
                let scales = checkpoint.position(&format!("{}_scale_inv", info.name)).expect("its scales");
                bf16(&bytes(index), &bytes(scales), info.shape[1] as usize)
            }
            _ => bytes(index),
        };
        tensors = tensors.tensor(&info.name, Dtype::Bf16, info.shape.clone(), bytes).expect("a tensor");
    }
    let config = std::fs::read(dir.join("config.json")).expect("a config");
    let mut config: Value = serde_json::from_slice(&config).expect("JSON");
    config["quantization_config"] = Value::Null;
    tensors.file("config.json", config.to_string()).expect("a name")
}

/// Each e4m3 times the scale of its block, as bf16.
fn bf16(weight: &[u8], scales: &[u8], columns: usize) -> Vec<u8> {
    let scale = |row: usize, column: usize| {
        let at = 4 * (row / 128 * columns.div_ceil(128) + column / 128);
        f32::from_le_bytes(scales[at..at + 4].try_into().expect("four bytes"))
    };
    let number = |(at, bits): (usize, &u8)| {
        let (exponent, mantissa) = (i32::from(bits >> 3 & 15), f32::from(bits & 7) / 8.0);
        let size = if exponent == 0 { mantissa / 64.0 } else { (1.0 + mantissa) * 2f32.powi(exponent - 7) };
        let value = size * scale(at / columns, at % columns);
        let bits = value.to_bits() | u32::from(bits & 0x80) << 24;
        // To the nearest, to even where two are as near.
        ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
    };
    weight.iter().enumerate().map(number).flat_map(u16::to_le_bytes).collect()
}
