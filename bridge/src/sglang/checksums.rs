//! The checksums an engine should report for a checkpoint.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

use driftless_transport::Snapshot;
use sha2::{Digest, Sha256};

use crate::engine::{Expected, Fusing, check_tensors, hex};
use crate::error::{Error, Result};

/// What SGLang's `/weights_checker` reports on the CPU, with one rank, for an engine that holds this
/// snapshot: fused parameter name → hex of the first 8 bytes of the SHA-256 of the parameter's bytes.
///
/// The snapshot must bring its `config.json` and hold exactly the tensors that follow from it; `place` names
/// the snapshot in errors.
///
/// # Errors
/// [`Error::Config`] for a model whose fusing is not known, and for a quantised snapshot, of which SGLang hashes what
/// the weights stand for;
/// [`Error::Checkpoint`] for a tensor that is missing, surplus, or of another dtype or shape; [`Error::Open`]
/// when its bytes cannot be read; [`Error::Config`] and [`Error::Read`] also as [`Expected::from_snapshot`].
pub fn checksums(snapshot: &dyn Snapshot, place: &Path) -> Result<BTreeMap<String, String>> {
    let config = Expected::from_snapshot(snapshot, place)?.config;
    let refused = |what: &str, expected: &str, found: &str| Error::Config {
        path: place.join("config.json"),
        what: what.into(),
        expected: expected.into(),
        found: found.into(),
    };
    if let Some(found) = &config.quantization {
        return Err(refused("quantization_config", "none, where checksums are compared", found));
    }
    let known = "those of a model whose checksums are known";
    let fusing = config.fusing().map_err(|_| refused("architectures", known, &config.architecture))?;
    check_tensors(snapshot, place, &config, config.dtype)?;
    checksums_of(fusing, |name| {
        let index = snapshot.tensors().partition_point(|info| info.name.as_str() < name);
        let failed = |source| Error::Open { path: place.into(), source: Box::new(source) };
        snapshot.bytes(index).map_err(failed)
    })
}

/// The same for an engine of a model that is fused like this, whose tensors have these bytes, asked for by their names in a checkpoint.
///
/// # Errors
/// Those of `bytes`.
pub fn checksums_of<'a, E>(
    fusing: &Fusing,
    bytes: impl Fn(&str) -> Result<Cow<'a, [u8]>, E>,
) -> Result<BTreeMap<String, String>, E> {
    let mut out = BTreeMap::new();
    for parameter in fusing.parameters() {
        let mut hash = Sha256::new();
        for (name, _) in &parameter.parts {
            let part = bytes(name)?;
            hash.update(&part);
            // Only the vocabulary's matrices are padded.
            let row = part.len() as u64 / fusing.vocabulary;
            hash.update(vec![0_u8; (row * parameter.padding_rows) as usize]);
        }
        out.insert(parameter.name, hex(&hash.finalize()[..8]));
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use driftless_transport::Dtype;
    use driftless_transport::snapshot::{AuxFile, TensorInfo};

    use super::*;
    use crate::engine::{ModelConfig, Parameter};

    /// A snapshot of zeros with this config's tensors, to which tests then do harm.
    struct Zeros {
        tensors: Vec<TensorInfo>,
        files: Vec<AuxFile>,
    }

    impl Zeros {
        fn new(config: &str) -> Self {
            let parsed = ModelConfig::parse(Path::new("c"), config.as_bytes()).unwrap();
            let fusing = parsed.fusing().unwrap();
            let infos = |parameter: Parameter| {
                let dtype = parameter.dtype.unwrap_or(fusing.dtype);
                parameter.parts.into_iter().map(move |(name, shape)| TensorInfo { name, dtype, shape })
            };
            let mut tensors: Vec<_> = fusing.parameters().into_iter().flat_map(infos).collect();
            tensors.sort_by(|a, b| a.name.cmp(&b.name));
            Self { tensors, files: vec![AuxFile::new("config.json", config.into()).unwrap()] }
        }
    }

    impl Snapshot for Zeros {
        fn tensors(&self) -> &[TensorInfo] {
            &self.tensors
        }
        fn bytes(&self, index: usize) -> driftless_transport::Result<Cow<'_, [u8]>> {
            Ok(vec![0; self.tensors[index].byte_len()? as usize].into())
        }
        fn files(&self) -> &[AuxFile] {
            &self.files
        }
    }

    const CONFIG: &str = r#"{"architectures":["Qwen3ForCausalLM"],"hidden_size":2,"intermediate_size":3,"num_hidden_layers":1,
        "num_attention_heads":1,"head_dim":2,"vocab_size":5,"tie_word_embeddings":true,"torch_dtype":"bfloat16"}"#;

    #[test]
    fn fused_and_padded_bytes_are_hashed() {
        let sums = checksums(&Zeros::new(CONFIG), Path::new("m")).unwrap();
        let zeros = |n: usize| hex(&Sha256::digest(vec![0u8; n])[..8]);
        assert_eq!(sums["model.embed_tokens.weight"], zeros(64 * 2 * 2), "5 rows are padded to 64");
        assert_eq!(sums["model.layers.0.self_attn.qkv_proj.weight"], zeros(3 * 2 * 2 * 2));
        assert_eq!(sums["model.layers.0.mlp.gate_up_proj.weight"], zeros(2 * 3 * 2 * 2));
        assert_eq!(sums.len(), 10);
    }

    #[test]
    fn fp8_tensors_are_checked_and_not_hashed() {
        let fp8 = r#","quantization_config":{"quant_method":"fp8","weight_block_size":[128,128]}}"#;
        let text = CONFIG.replace('}', fp8);
        let (snapshot, place) = (Zeros::new(&text), Path::new("m"));
        let config = ModelConfig::parse(place, text.as_bytes()).unwrap();
        check_tensors(&snapshot, place, &config, Dtype::Bf16).unwrap();
        assert!(matches!(checksums(&snapshot, place), Err(Error::Config { .. })));
        match check_tensors(&Zeros::new(CONFIG), place, &config, Dtype::Bf16) {
            Err(Error::Checkpoint { tensor, expected, found, .. }) => {
                assert_eq!(tensor, "model.layers.0.mlp.down_proj.weight");
                assert_eq!((&*expected, &*found), ("F8_E4M3 [2, 3]", "BF16 [2, 3]"));
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn wrong_tensors_are_named() {
        let refused = |harm: &dyn Fn(&mut Vec<TensorInfo>)| {
            let mut snapshot = Zeros::new(CONFIG);
            harm(&mut snapshot.tensors);
            match checksums(&snapshot, Path::new("m")) {
                Err(Error::Checkpoint { tensor, expected, found, .. }) => {
                    format!("{tensor}: {expected} / {found}")
                }
                other => panic!("{other:?}"),
            }
        };
        let down = "model.layers.0.mlp.down_proj.weight";
        assert_eq!(refused(&|t| t[2].shape[0] += 1), format!("{down}: BF16 [2, 3] / BF16 [3, 3]"));
        assert_eq!(refused(&|t| t[2].dtype = Dtype::F32), format!("{down}: BF16 [2, 3] / F32 [2, 3]"));
        assert_eq!(refused(&|t| drop(t.remove(2))), format!("{down}: BF16 [2, 3] / absent"));
        let surplus = TensorInfo { name: "zz".into(), dtype: Dtype::Bf16, shape: vec![1] };
        assert_eq!(refused(&|t| t.push(surplus.clone())), "zz: absent / BF16 [1]");
    }

    #[test]
    fn a_tied_output_matrix_is_skipped() {
        let mut snapshot = Zeros::new(CONFIG);
        let head = TensorInfo { name: "lm_head.weight".into(), dtype: Dtype::Bf16, shape: vec![5, 2] };
        snapshot.tensors.insert(0, head);
        assert!(!checksums(&snapshot, Path::new("m")).unwrap().contains_key("lm_head.weight"));
    }
}
