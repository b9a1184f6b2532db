//! A checkpoint directory's tensors.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors};
use tch::Kind;

use crate::error::{Error, Result, io};

/// The tensors of an HF checkpoint directory.
#[derive(Debug)]
pub struct Weights {
    tensors: BTreeMap<String, (Kind, Vec<i64>, Vec<u8>)>,
}

impl Weights {
    /// Reads `*.safetensors` in a directory.
    ///
    /// # Errors
    /// [`Error::Io`] or [`Error::Safetensors`].
    pub fn open(dir: &Path) -> Result<Weights> {
        let mut tensors = BTreeMap::new();
        for entry in std::fs::read_dir(dir).map_err(io("list", dir))? {
            let path: PathBuf = entry.map_err(io("list", dir))?.path();
            if path.extension().is_none_or(|extension| extension != "safetensors") {
                continue;
            }
            let bytes = std::fs::read(&path).map_err(io("read", &path))?;
            let file = SafeTensors::deserialize(&bytes)
                .map_err(|source| Error::Safetensors { path: path.clone(), source })?;
            for (name, view) in file.tensors() {
                let kind = kind_of(&name, view.dtype())?;
                let shape = view.shape().iter().map(|&size| size as i64).collect();
                tensors.insert(name, (kind, shape, view.data().to_vec()));
            }
        }
        Ok(Weights { tensors })
    }

    /// Names of all tensors.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Kind, shape and bytes of a tensor.
    pub(super) fn get(&self, name: &str) -> Option<(Kind, &[i64], &[u8])> {
        self.tensors.get(name).map(|(kind, shape, bytes)| (*kind, shape.as_slice(), bytes.as_slice()))
    }
}

fn kind_of(name: &str, dtype: Dtype) -> Result<Kind> {
    match dtype {
        Dtype::F32 => Ok(Kind::Float),
        Dtype::BF16 => Ok(Kind::BFloat16),
        Dtype::F16 => Ok(Kind::Half),
        other => Err(Error::Tensor {
            name: name.to_owned(),
            expected: "F32, BF16 or F16".to_owned(),
            found: format!("{other:?}"),
        }),
    }
}
