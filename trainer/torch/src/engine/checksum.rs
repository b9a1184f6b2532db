//! Checksums of the live weights under SGLang's runtime names.

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};
use tch::Tensor;

use crate::error::Result;
use crate::libtorch::bytes_of;
use crate::models::Model;

/// Parameters that SGLang keeps as one: `(part of the fused name, its parts in order)`.
const FUSED: [(&str, &[&str]); 2] =
    [("qkv_proj", &["q_proj", "k_proj", "v_proj"]), ("gate_up_proj", &["gate_proj", "up_proj"])];

/// SGLang rounds the rows of the embedding and the head up to a multiple of this
/// (`DEFAULT_VOCAB_PADDING_SIZE`).
const VOCABULARY_PADDING: u64 = 64;

/// Checksum by runtime name.
pub(super) type Checksums = BTreeMap<String, String>;

/// `hex(sha256(bytes)[..8])` of every runtime parameter, as SGLang's `/weights_checker` reports on a CPU;
/// without those whose name contains one of `skip`.
///
/// # Errors
/// When libtorch cannot hand the bytes out.
pub(super) fn checksums(model: &Model, skip: &[String]) -> Result<Checksums> {
    let tensors: BTreeMap<&str, &Tensor> =
        model.parameters().iter().map(|parameter| (parameter.name.as_str(), &parameter.tensor)).collect();
    let mut sums = Checksums::new();
    for (name, tensor) in &tensors {
        let (runtime, parts) = runtime_name(name);
        if sums.contains_key(&runtime) || skip.iter().any(|part| runtime.contains(part)) {
            continue;
        }
        let mut hash = Sha256::new();
        for part in &parts {
            if let Some(tensor) = tensors.get(part.as_str()) {
                hash.update(bytes_of(tensor)?);
            }
        }
        if parts.is_empty() {
            hash.update(bytes_of(tensor)?);
            hash.update(padding(&runtime, tensor, model.config().vocab_size));
        }
        sums.insert(runtime, hex(&hash.finalize()[..8]));
    }
    Ok(sums)
}

/// The rows of zeros that SGLang appends to the matrices of the vocabulary.
fn padding(name: &str, tensor: &Tensor, vocab_size: i64) -> Vec<u8> {
    if !matches!(name, "model.embed_tokens.weight" | "lm_head.weight") {
        return Vec::new();
    }
    let rows = vocab_size.unsigned_abs().next_multiple_of(VOCABULARY_PADDING) - vocab_size.unsigned_abs();
    let row = tensor
        .size()
        .get(1)
        .map_or(0, |width| width.unsigned_abs() as usize * tensor.kind().elt_size_in_bytes());
    vec![0; rows as usize * row]
}

/// One digest of many sums: SHA-256 over names and sums, sorted by name.
pub(super) fn overall(sums: &Checksums) -> String {
    let mut hash = Sha256::new();
    for (name, sum) in sums {
        hash.update(name);
        hash.update(sum);
    }
    hex(&hash.finalize())
}

/// The digest over ranks, of which there is one.
pub(super) fn engine(rank: &str) -> String {
    hex(&Sha256::digest(rank))
}

/// The runtime name of a checkpoint's tensor, and the names of all parts if it is fused.
fn runtime_name(name: &str) -> (String, Vec<String>) {
    for (fused, parts) in FUSED {
        if let Some(part) = parts.iter().find(|part| name.contains(&format!(".{part}."))) {
            let with = |other: &str| name.replace(&format!(".{part}."), &format!(".{other}."));
            return (with(fused), parts.iter().map(|part| with(part)).collect());
        }
    }
    (name.to_owned(), Vec::new())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_fused_as_sglang_fuses_them() {
        let (name, parts) = runtime_name("model.layers.3.self_attn.k_proj.weight");
        assert_eq!(name, "model.layers.3.self_attn.qkv_proj.weight");
        assert_eq!(parts[2], "model.layers.3.self_attn.v_proj.weight");
        assert_eq!(
            runtime_name("model.layers.3.mlp.up_proj.weight").0,
            "model.layers.3.mlp.gate_up_proj.weight"
        );
        assert_eq!(runtime_name("model.layers.3.self_attn.o_proj.weight").1.len(), 0);
        assert_eq!(runtime_name("lm_head.weight").0, "lm_head.weight");
    }

    #[test]
    fn overall_sums_are_those_of_sglang() {
        // A reply of SGLang 0.5.23 on a CPU, with skip_tensor_list ["mlp", "norm"].
        let sums: Checksums = [
            ("model.embed_tokens.weight", "1ce9f4ca6e52a9c6"),
            ("model.layers.0.self_attn.qkv_proj.weight", "d0d673719bab76a9"),
            ("model.layers.0.self_attn.o_proj.weight", "aa724f73e78f7fa3"),
            ("model.layers.1.self_attn.qkv_proj.weight", "3c5b115952019c3f"),
            ("model.layers.1.self_attn.o_proj.weight", "11b69d85dae54aa8"),
            ("lm_head.weight", "d3ccf51444c3f1a9"),
        ]
        .map(|(name, sum)| (name.to_owned(), sum.to_owned()))
        .into();
        let rank = overall(&sums);
        assert_eq!(rank, "01d7c5999389ad3a8f7645794ced7fb6abc70cba9835c12878d6c793cb2fe526");
        assert!(engine(&rank).starts_with("16d3aec42213c8d3500a21c5c7dbcc6f975482"));
    }
}
