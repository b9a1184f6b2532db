//! Whether a checkpoint has the tensors of its config: those that engines take, or fail to.

use std::collections::BTreeMap;
use std::path::Path;

use driftless_transport::manifest::Manifest;
use driftless_transport::tied::{is_tied, parted_head};
use driftless_transport::{Dtype, Snapshot};

use super::config::ModelConfig;
use super::fusing::{Fusing, Parameter};
use crate::error::{Error, Result};

/// Refuses a version whose output head is not its word embeddings, though its `config.json` ties them: the engine would
/// generate with the embeddings, and not with what was trained.
pub(crate) fn check_tied(snapshot: &dyn Snapshot, place: &Path, manifest: &Manifest) -> Result<()> {
    match parted_head(&manifest.tensors).filter(|_| is_tied(snapshot.files())) {
        None => Ok(()),
        Some(head) => Err(Error::Checkpoint {
            path: place.into(),
            tensor: head.into(),
            expected: "equal to the word embeddings, which engines take for it as `tie_word_embeddings` of config.json says".into(),
            found: "other elements".into(),
        }),
    }
}

/// Refuses a snapshot that does not have the tensors of `config`, as far as those are known: exactly those where the
/// fusing is known, and otherwise tensors of `dtype` among them, and none that no engine takes.
pub(crate) fn check_tensors(
    snapshot: &dyn Snapshot,
    place: &Path,
    config: &ModelConfig,
    dtype: Dtype,
) -> Result<()> {
    match config.fusing() {
        Ok(fusing) => check_fused(snapshot, place, fusing, dtype),
        Err(_) => check_dtypes(snapshot, place, config, dtype),
    }
}

/// Which tensors a model of an unknown family has, its engine knows. An engine casts silently what has another dtype
/// than its own, and the cast would not be our bytes: it happens to all weights or to none.
fn check_dtypes(snapshot: &dyn Snapshot, place: &Path, config: &ModelConfig, dtype: Dtype) -> Result<()> {
    let fail = |tensor: &str, expected: String, found: &str| {
        let (path, tensor, found) = (place.into(), tensor.into(), found.into());
        Err(Error::Checkpoint { path, tensor, expected, found })
    };
    let infos = snapshot.tensors();
    if let Some(odd) = infos.iter().find(|info| matches!(info.dtype, Dtype::F64 | Dtype::C64)) {
        return fail(&odd.name, "of a dtype that engines compute with".into(), odd.dtype.name());
    }
    let mut others = infos.iter().filter(|info| info.dtype != dtype);
    match others.next() {
        _ if config.quantization.is_some() || infos.iter().any(|info| info.dtype == dtype) => Ok(()),
        Some(other) => {
            let expected = format!("{}, as config.json and the engine have it", dtype.name());
            fail(&other.name, expected, other.dtype.name())
        }
        None => fail("of any name", "there".into(), "none"),
    }
}

/// Refuses tensors that are not exactly those of a known family, of `dtype` but for what is quantised. A tied output
/// matrix may be there: engines skip it.
fn check_fused(snapshot: &dyn Snapshot, place: &Path, fusing: &Fusing, dtype: Dtype) -> Result<()> {
    let fail = |tensor: &str, expected: String, found: String| {
        Err(Error::Checkpoint { path: place.into(), tensor: tensor.into(), expected, found })
    };
    let of = |parameter: Parameter| {
        let dtype = parameter.dtype.unwrap_or(dtype);
        parameter.parts.into_iter().map(move |(name, shape)| (name, (dtype, shape)))
    };
    let mut wanted: BTreeMap<String, (Dtype, Vec<u64>)> =
        fusing.parameters().into_iter().flat_map(of).collect();
    if fusing.tied && snapshot.tensors().iter().any(|info| info.name == "lm_head.weight") {
        wanted.insert("lm_head.weight".into(), (dtype, vec![fusing.vocabulary, fusing.hidden_size]));
    }
    for info in snapshot.tensors() {
        let found = format!("{} {:?}", info.dtype.name(), info.shape);
        match wanted.remove(&info.name) {
            None => return fail(&info.name, "absent".into(), found),
            Some((dtype, shape)) if shape != info.shape || dtype != info.dtype => {
                return fail(&info.name, format!("{} {shape:?}", dtype.name()), found);
            }
            Some(_) => {}
        }
    }
    match wanted.pop_first() {
        Some((name, (dtype, shape))) => fail(&name, format!("{} {shape:?}", dtype.name()), "absent".into()),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use driftless_store::Memory;
    use driftless_transport::publish::{Mode, PublisherOptions, Start, Step};
    use driftless_transport::{Publisher, Tensors};

    use super::*;

    #[test]
    fn tied_head_that_is_another_matrix_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let weights = |head: u8, tied: bool| {
            let config = format!(r#"{{"tie_word_embeddings": {tied}}}"#);
            let tensors = Tensors::new().file("config.json", config).unwrap();
            let tensors =
                tensors.tensor("model.embed_tokens.weight", Dtype::Bf16, vec![2, 2], vec![1; 8]).unwrap();
            tensors.tensor("lm_head.weight", Dtype::Bf16, vec![2, 2], vec![head; 8]).unwrap()
        };
        for (run, head) in [("equal", 1), ("other", 2)] {
            let options = PublisherOptions::new(run, Start::NewRun, dir.path().join(run));
            let mut publisher = Publisher::open(Arc::new(Memory::new()), options).unwrap();
            // A publisher refuses it as well, where the config that it is given says so.
            let version =
                publisher.publish(&weights(head, false), Step::default(), Mode::Full).unwrap().version;
            let manifest = publisher.run().get("policy", version).unwrap().manifest;
            check_tied(&weights(head, false), Path::new("c"), &manifest).unwrap();
            let refused = check_tied(&weights(head, true), Path::new("c"), &manifest)
                .map_err(|error| error.to_string());
            assert_eq!(refused.is_err(), run == "other", "{refused:?}");
            assert!(refused.err().is_none_or(|text| text.contains("lm_head.weight should be equal")));
        }
    }
}
