//! A model as small as engines check it, whose weights follow from the optimiser step.

use std::path::{Path, PathBuf};

use driftless_testkit::random::Random;
use driftless_transport::checkpoint::write_checkpoint;
use driftless_transport::{Checkpoint, Dtype, Snapshot as _, Tensors};

const HIDDEN: u64 = 64;
const VOCABULARY: u64 = 2048;

pub(crate) struct Contents(Tensors<'static>);

/// What the checkpoint of a step holds: the same start for all, and a twentieth of the elements moved by each
/// step's own choice.
pub(crate) fn contents(step: u64) -> Contents {
    let layer = |name: &str| format!("model.layers.0.{name}.weight");
    let mut shapes = vec![
        ("model.embed_tokens.weight".to_owned(), vec![VOCABULARY, HIDDEN]),
        ("model.norm.weight".to_owned(), vec![HIDDEN]),
        (layer("input_layernorm"), vec![HIDDEN]),
        (layer("post_attention_layernorm"), vec![HIDDEN]),
        (layer("self_attn.q_proj"), vec![4, HIDDEN]),
        (layer("self_attn.k_proj"), vec![2, HIDDEN]),
        (layer("self_attn.v_proj"), vec![2, HIDDEN]),
        (layer("self_attn.o_proj"), vec![HIDDEN, 4]),
        (layer("self_attn.q_norm"), vec![2]),
        (layer("self_attn.k_norm"), vec![2]),
        (layer("mlp.gate_proj"), vec![96, HIDDEN]),
        (layer("mlp.up_proj"), vec![96, HIDDEN]),
        (layer("mlp.down_proj"), vec![HIDDEN, 96]),
    ];
    shapes.sort();
    let mut start = Random(1);
    let mut moved = Random(step.wrapping_mul(0x1000) + 7);
    let config = serde_json::json!({"architectures": ["Qwen3ForCausalLM"], "hidden_size": HIDDEN,
        "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 2, "vocab_size": VOCABULARY, "tie_word_embeddings": true, "torch_dtype": "bfloat16"});
    let mut tensors = Tensors::new().file("config.json", config.to_string()).expect("a name");
    for (name, shape) in shapes {
        let elements: u64 = shape.iter().product();
        let element = |_| {
            let move_it = step > 0 && moved.next().is_multiple_of(20);
            [start.next() as u8 ^ u8::from(move_it), 0x3c]
        };
        let bytes: Vec<u8> = (0..elements).flat_map(element).collect();
        tensors = tensors.tensor(name, Dtype::Bf16, shape, bytes).expect("a tensor");
    }
    Contents(tensors)
}

impl Contents {
    pub(crate) fn write(&self, dir: &Path) -> PathBuf {
        write_checkpoint(dir, &self.0, 100_000).expect("a checkpoint");
        std::fs::canonicalize(dir).expect("it is there")
    }

    /// Whether these are the tensors of `checkpoint`.
    pub(crate) fn is_in(&self, checkpoint: &Checkpoint) -> bool {
        let same = |index: usize| self.0.bytes(index).ok().as_deref() == checkpoint.tensor(index);
        checkpoint.tensors() == self.0.tensors() && (0..self.0.tensors().len()).all(same)
    }

    /// Panics at the first tensor of `checkpoint` that is another one.
    pub(crate) fn assert_in(&self, checkpoint: &Checkpoint) {
        assert_eq!(checkpoint.tensors(), self.0.tensors());
        for (index, info) in self.0.tensors().iter().enumerate() {
            let (found, expected) = (checkpoint.tensor(index), self.0.bytes(index).expect("in memory"));
            assert!(found == Some(&*expected), "{} differs", info.name);
        }
    }
}
