//! `driftless follow` beside a vLLM server, which loads the directory that it was started with.

use super::{Made, Run};
use crate::common::{self, code, json};
use driftless_testkit::vllm::{Fault, Vllm, digest};
use driftless_transport::Dtype;
use driftless_transport::snapshot::{AuxFile, TensorInfo};

const CONFIG: &str = r#"{"architectures": ["Qwen3ForCausalLM"], "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2, "vocab_size": 10, "tie_word_embeddings": true,
    "torch_dtype": "bfloat16"}"#;

/// A Qwen3 checkpoint of a few hundred bytes.
fn made() -> Made {
    let layer = |name: &str| format!("model.layers.0.{name}.weight");
    let mut shapes = vec![
        ("model.embed_tokens.weight".to_owned(), vec![10, 4]),
        ("model.norm.weight".to_owned(), vec![4]),
        (layer("input_layernorm"), vec![4]),
        (layer("post_attention_layernorm"), vec![4]),
        (layer("self_attn.q_proj"), vec![4, 4]),
        (layer("self_attn.k_proj"), vec![2, 4]),
        (layer("self_attn.v_proj"), vec![2, 4]),
        (layer("self_attn.o_proj"), vec![4, 4]),
        (layer("self_attn.q_norm"), vec![2]),
        (layer("self_attn.k_norm"), vec![2]),
        (layer("mlp.gate_proj"), vec![6, 4]),
        (layer("mlp.up_proj"), vec![6, 4]),
        (layer("mlp.down_proj"), vec![4, 6]),
    ];
    shapes.sort();
    let info = |(name, shape)| TensorInfo { name, dtype: Dtype::Bf16, shape };
    let tensors: Vec<_> = shapes.into_iter().map(info).collect();
    let bytes =
        tensors.iter().map(|tensor| super::weights(tensor.byte_len().expect("small") as usize)).collect();
    let files = vec![AuxFile::new("config.json", CONFIG.as_bytes().to_vec()).expect("a name")];
    Made { tensors, bytes, files }
}

#[test]
fn follow_vllm_engine_loads_what_was_overwritten() {
    let mut run = Run { made: made(), ..Run::new() };
    let engines = run.publish()["engines"].as_str().expect("what engines get").to_owned();
    assert!(
        engines.starts_with("engines: patched and compared where") && engines.contains("checksums"),
        "{engines}"
    );
    json(&mut run.follow_once());
    let vllm = Vllm::start(&run.path("host"));
    let before = vllm.server().weights;
    let dry = |more: &[&str]| {
        let mut command = run.follow_once();
        command.args(["--dry-run", "--engine", &vllm.url()]).args(more);
        common::run(&mut command).lines().last().expect("a line").to_owned()
    };
    let gets = dry(&[]);
    assert!(gets.starts_with(&format!("{}: loaded, not compared (", vllm.url())), "{gets}");
    let gets = dry(&["--compare", "require"]);
    assert!(
        gets.contains("refused: the live weights of engine") && gets.contains("Install driftless-rl"),
        "{gets}"
    );
    assert!(vllm.server().calls.is_empty(), "a dry run changes nothing");
    let (ended, words) = code(run.follow_once().args(["--compare", "require", "--engine", &vllm.url()]));
    assert!(ended == Some(1) && words.contains("cannot be compared"), "{ended:?} {words}");
    assert!(vllm.server().calls.iter().all(|call| !call.starts_with("/pause")), "it is refused untouched");

    run.made.step(3);
    run.publish();
    let follow = |run: &Run| {
        let mut command = run.follow_once();
        command.args(["--engine", &vllm.url()]);
        command
    };
    let status = json(&mut follow(&run));
    let label = status["applied"]["label"].as_str().expect("a label").to_owned();
    let engine = &status["applied"]["engines"][0];
    assert!(
        engine["how"]["loaded"]["why"].is_string() && engine["compared"]["not"]["why"].is_string(),
        "{engine}"
    );
    assert_eq!(status["applied"]["engines"][0]["label"], label.as_str());
    let holds = digest(&run.path("host"));
    {
        let server = vllm.server();
        assert_eq!((&server.label, server.paused), (&label, false));
        assert_eq!(server.weights, Some(holds));
        assert_ne!(server.weights, before);
    }

    vllm.restart();
    json(&mut follow(&run));
    assert_eq!(vllm.server().label, label, "a process that was started again is told again");

    run.made.step(2);
    run.publish();
    vllm.fault("POST /collective_rpc", Fault::Half(Some(500)));
    let (ended, words) = code(&mut follow(&run));
    assert_eq!(ended, Some(5), "an engine is left paused: {words}");
    let server = vllm.server();
    assert!(server.paused && server.label.ends_with("?partial"), "{}", server.label);
    assert!(words.contains(&format!("http://{}", vllm.address)), "{words}");
}
