//! The tensors that a config says a checkpoint has.

use std::collections::BTreeMap;
use std::path::Path;

use driftless_transport::{Dtype, Snapshot};

use super::model::{ModelConfig, Parameter};
use crate::error::{Error, Result};

/// Refuses a snapshot whose tensors are not exactly those of `config`, of `dtype` but for what is quantised. A tied
/// output matrix may be there: engines skip it.
pub(crate) fn check_tensors(
    snapshot: &dyn Snapshot,
    place: &Path,
    config: &ModelConfig,
    dtype: Dtype,
) -> Result<()> {
    let fail = |tensor: &str, expected: String, found: String| {
        Err(Error::Checkpoint { path: place.into(), tensor: tensor.into(), expected, found })
    };
    let of = |parameter: Parameter| {
        let dtype = parameter.dtype.unwrap_or(dtype);
        parameter.parts.into_iter().map(move |(name, shape)| (name, (dtype, shape)))
    };
    let mut wanted: BTreeMap<String, (Dtype, Vec<u64>)> =
        config.parameters().into_iter().flat_map(of).collect();
    if config.tied && snapshot.tensors().iter().any(|info| info.name == "lm_head.weight") {
        wanted.insert("lm_head.weight".into(), (dtype, vec![config.vocabulary, config.hidden_size]));
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
