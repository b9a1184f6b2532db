//! What to publish: pure decisions over tables.

use std::borrow::Cow;

use crate::manifest::{Kind, Manifest, Representation};
use crate::{Error, Result, Snapshot, TensorInfo, Version};

/// How a version's bytes are to be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Plan {
    /// [`Kind::Full`] or [`Kind::Delta`].
    pub(super) kind: Kind,
    /// Whether a delta carries full tensors as well.
    pub(super) anchor: bool,
}

/// Decides how to publish `version` behind `base`.
///
/// A table or representation that differs from the base's leaves no choice: deltas exist only between equal tables.
pub(super) fn plan(
    base: Option<&Manifest>,
    tensors: &[&TensorInfo],
    representation: &Representation,
    (delta_wanted, anchor_due): (bool, bool),
    version: Version,
) -> Plan {
    let full = Plan { kind: Kind::Full, anchor: false };
    let Some(base) = base.filter(|_| delta_wanted) else { return full };
    if base.representation != *representation || !same_table(base, tensors) {
        tracing::info!(%version, "the tensors or their representation changed: publishing in full");
        return full;
    }
    Plan { kind: Kind::Delta, anchor: anchor_due }
}

/// What makes a version an anchor: its number, or the weight of the deltas since the newest one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Anchors {
    pub(super) every: Option<u64>,
    pub(super) share: Option<f64>,
}

impl Anchors {
    /// Whether `version` is due to be one, behind deltas of `chain_bytes` to tensors of `tensor_bytes`.
    pub(super) fn are_due(self, version: Version, chain_bytes: u64, tensor_bytes: u64) -> bool {
        let by_number = self.every.is_some_and(|every| version.0.checked_rem(every) == Some(0));
        by_number || self.share.is_some_and(|share| chain_bytes as f64 >= share * tensor_bytes as f64)
    }
}

fn same_table(base: &Manifest, tensors: &[&TensorInfo]) -> bool {
    let named = base.named_tensors();
    named.len() == tensors.len()
        && named.iter().zip(tensors).all(|((name, tensor), info)| {
            *name == info.name && tensor.dtype == info.dtype && tensor.shape == info.shape
        })
}

/// The form most of the elements have.
pub(super) fn representation(tensors: &[&TensorInfo]) -> Representation {
    let mut elements = std::collections::BTreeMap::new();
    for info in tensors {
        *elements.entry(info.dtype).or_insert(0u64) += info.elements().unwrap_or(0);
    }
    let most = elements.into_iter().max_by_key(|(_, elements)| *elements);
    let scheme = most.map_or("none".to_owned(), |(dtype, _)| dtype.name().to_lowercase());
    Representation { scheme, config_digest: None }
}

/// Positions of the tensors to publish, sorted by name. The same tensor given twice is published once.
///
/// # Errors
/// [`Error::DuplicateTensor`] for one name with two contents; [`Error::TensorMismatch`] if the snapshot is not sorted.
pub(super) fn unique_tensors(snapshot: &dyn Snapshot) -> Result<Vec<usize>> {
    let tensors = snapshot.tensors();
    let mut unique: Vec<usize> = Vec::with_capacity(tensors.len());
    for (index, info) in tensors.iter().enumerate() {
        let Some(&last) = unique.last() else {
            unique.push(index);
            continue;
        };
        match tensors[last].name.cmp(&info.name) {
            std::cmp::Ordering::Less => unique.push(index),
            std::cmp::Ordering::Equal => {
                if tensors[last] != *info || tensor_bytes(snapshot, last)? != tensor_bytes(snapshot, index)? {
                    return Err(Error::DuplicateTensor { tensor: info.name.clone() });
                }
            }
            std::cmp::Ordering::Greater => {
                return Err(Error::TensorMismatch {
                    tensor: info.name.clone(),
                    what: "place in the snapshot",
                    expected: format!("before `{}`, sorted by name", tensors[last].name),
                    found: "behind it".to_owned(),
                });
            }
        }
    }
    Ok(unique)
}

/// A tensor's bytes, as many as its shape says.
pub(super) fn tensor_bytes(snapshot: &dyn Snapshot, index: usize) -> Result<Cow<'_, [u8]>> {
    let info = &snapshot.tensors()[index];
    let (bytes, expected) = (snapshot.bytes(index)?, info.byte_len()?);
    if bytes.len() as u64 != expected {
        return Err(Error::TensorMismatch {
            tensor: info.name.clone(),
            what: "number of bytes",
            expected: expected.to_string(),
            found: bytes.len().to_string(),
        });
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn anchors_are_due_by_number_or_by_weight() {
        let due =
            |every, share, version, chain| Anchors { every, share }.are_due(Version(version), chain, 1000);
        assert!(!due(None, None, 6, u64::MAX));
        assert!(due(Some(3), None, 6, 0) && !due(Some(3), None, 7, 0));
        assert!(!due(None, Some(0.5), 6, 499) && due(None, Some(0.5), 6, 500));
        assert!(due(Some(3), Some(0.5), 7, 500) && due(Some(3), Some(0.5), 6, 0));
    }
}
