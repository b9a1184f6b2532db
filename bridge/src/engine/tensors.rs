//! Whether a checkpoint has the tensors of its config: those that engines take, or fail to.

use std::collections::BTreeMap;
use std::path::Path;

use driftless_transport::manifest::Manifest;
use driftless_transport::tied::refuse_parted;
use driftless_transport::{Dtype, Snapshot};

use super::config::ModelConfig;
use super::fusing::{Fusing, Parameter};
use crate::error::{Error, Result};

/// Refuses a version whose output head parted from the word embeddings that its `config.json` ties it to.
///
/// # Errors
/// [`Error::Open`].
pub(crate) fn check_tied(snapshot: &dyn Snapshot, place: &Path, manifest: &Manifest) -> Result<()> {
    let refused = refuse_parted(snapshot.files(), &manifest.tensors);
    refused.map_err(|source| Error::Open { path: place.into(), source: Box::new(source) })
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
