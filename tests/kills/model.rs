//! A model as small as engines check it, whose weights follow from the optimiser step.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use driftless::transport::{AuxFile, Checkpoint, Dtype, Result, Snapshot, TensorInfo, write_checkpoint};

const HIDDEN: u64 = 64;
const VOCABULARY: u64 = 2048;

/// splitmix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// A number in [0, 1).
    pub(crate) fn unit(&mut self) -> f64 {
        self.next() as f64 / 2f64.powi(64)
    }
}

pub(crate) struct Contents {
    tensors: Vec<TensorInfo>,
    bytes: Vec<Vec<u8>>,
    files: Vec<AuxFile>,
}

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
    let mut contents = Contents { tensors: Vec::new(), bytes: Vec::new(), files: Vec::new() };
    for (name, shape) in shapes {
        let elements: u64 = shape.iter().product();
        let element = |_| {
            let move_it = step > 0 && moved.next().is_multiple_of(20);
            [start.next() as u8 ^ u8::from(move_it), 0x3c]
        };
        contents.bytes.push((0..elements).flat_map(element).collect());
        contents.tensors.push(TensorInfo { name, dtype: Dtype::Bf16, shape });
    }
    let config = serde_json::json!({"architectures": ["Qwen3ForCausalLM"], "hidden_size": HIDDEN,
        "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 2, "vocab_size": VOCABULARY, "tie_word_embeddings": true, "torch_dtype": "bfloat16"});
    contents.files.push(AuxFile::new("config.json", config.to_string().into_bytes()).expect("a name"));
    contents
}

impl Contents {
    pub(crate) fn write(&self, dir: &Path) -> PathBuf {
        write_checkpoint(dir, self, 100_000).expect("a checkpoint");
        std::fs::canonicalize(dir).expect("it is there")
    }

    /// Whether these are the tensors of `checkpoint`.
    pub(crate) fn is_in(&self, checkpoint: &Checkpoint) -> bool {
        let same = |index: usize| checkpoint.tensor(index) == self.bytes.get(index).map(Vec::as_slice);
        checkpoint.tensors() == self.tensors && (0..self.tensors.len()).all(same)
    }

    /// Panics at the first tensor of `checkpoint` that is another one.
    pub(crate) fn assert_in(&self, checkpoint: &Checkpoint) {
        assert_eq!(checkpoint.tensors(), self.tensors);
        for (index, bytes) in self.bytes.iter().enumerate() {
            let found = checkpoint.bytes(index).expect("bytes");
            assert!(found == bytes.as_slice(), "{} differs", self.tensors[index].name);
        }
    }
}

impl Snapshot for Contents {
    fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn bytes(&self, index: usize) -> Result<Cow<'_, [u8]>> {
        Ok(Cow::Borrowed(&self.bytes[index]))
    }

    fn files(&self) -> &[AuxFile] {
        &self.files
    }
}
