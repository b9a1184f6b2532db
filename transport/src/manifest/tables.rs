//! The part of a manifest that the weights determine.

use driftless_delta::DigestTable;
use driftless_store::ContentDigest;

use super::{File, Tensor};
use crate::error::{Error, Result};
use crate::snapshot::{AuxFile, Snapshot};

/// The tables of a version: its tensors and files, and how many elements changed.
#[derive(Debug)]
pub struct Tables {
    /// Its tensors, by name.
    pub tensors: Vec<Tensor>,
    /// Its auxiliary files.
    pub files: Vec<File>,
    /// The elements of all tensors.
    pub changed: u64,
}

impl Tables {
    /// The tables of a snapshot, such as a checkpoint directory: every tensor's digest, and no objects. Reads
    /// every byte.
    ///
    /// # Errors
    /// [`Error::Codec`] if a tensor's bytes are no whole elements; [`Error::TensorMismatch`] for a shape that
    /// overflows; what reading the tensors meets.
    pub fn of(snapshot: &dyn Snapshot) -> Result<Self> {
        let mut tables = Self { tensors: Vec::new(), files: Vec::new(), changed: 0 };
        for (index, info) in snapshot.tensors().iter().enumerate() {
            let digest = DigestTable::of(info.dtype.element(), &snapshot.bytes(index)?)
                .map_err(|source| Error::Codec { tensor: info.name.clone(), source })?
                .total();
            tables.changed += info.elements()?;
            tables.tensors.push(Tensor {
                name: info.name.clone(),
                dtype: info.dtype,
                shape: info.shape.clone(),
                digest,
                aliases: Vec::new(),
                pieces: Vec::new(),
                anchor: Vec::new(),
            });
        }
        let file = |file: &AuxFile| File {
            name: file.name().to_owned(),
            size: file.bytes().len() as u64,
            blake3: ContentDigest::of(file.bytes()),
            parts: Vec::new(),
        };
        tables.files = snapshot.files().iter().map(file).collect();
        Ok(tables)
    }
}
