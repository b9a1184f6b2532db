//! Decides what to publish, as functions over tables.

use std::borrow::Cow;
use std::cmp::Ordering;

use super::options::{FullBecause, Mode};
use crate::error::{Error, Result};
use crate::ids::Version;
use crate::manifest::{Kind, Manifest, Representation};
use crate::snapshot::{Snapshot, TensorInfo};

/// Most differences of a layout that are named.
const DIFFERENCES_MAX: usize = 3;

/// How a version's bytes are to be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Encoding {
    /// [`Kind::Full`] or [`Kind::Delta`].
    pub(super) kind: Kind,
    /// Whether a delta carries full tensors as well.
    pub(super) anchor: bool,
}

/// Decides how to publish a version behind `base`, and why in full if it is.
///
/// A table or representation that differs from the base's leaves no choice: deltas exist only between equal
/// tables.
///
/// # Errors
/// [`Error::LayoutChanged`] for such a table, unless that is allowed.
pub(super) fn plan(
    base: Option<&Manifest>,
    tensors: &[&TensorInfo],
    representation: &Representation,
    mode: Mode,
    anchor_due: bool,
    allow_layout_change: bool,
) -> Result<(Encoding, Option<FullBecause>)> {
    let full = |why| Ok((Encoding { kind: Kind::Full, anchor: false }, Some(why)));
    let Some(base) = base else { return full(FullBecause::FirstVersion) };
    let layout = check_layout(base, tensors, representation, allow_layout_change)?;
    match (mode, layout) {
        (Mode::Full, _) => full(FullBecause::Asked),
        (Mode::Delta, Some(differences)) => full(FullBecause::LayoutChanged(differences)),
        (Mode::Delta, None) => Ok((Encoding { kind: Kind::Delta, anchor: anchor_due }, None)),
    }
}

/// What differs from the version before in names, types, shapes and representation: the first few
/// differences.
///
/// # Errors
/// [`Error::LayoutChanged`] if something does, unless that is allowed.
pub(super) fn check_layout(
    base: &Manifest,
    tensors: &[&TensorInfo],
    representation: &Representation,
    allowed: bool,
) -> Result<Option<String>> {
    let mut found = differences(base, tensors);
    if found.is_empty() && base.representation != *representation {
        found.push(format!("the representation is {representation:?}, it was {:?}", base.representation));
    }
    if found.is_empty() {
        return Ok(None);
    }
    let more = found.len().saturating_sub(DIFFERENCES_MAX);
    found.truncate(DIFFERENCES_MAX);
    let mut differences = found.join("; ");
    if more > 0 {
        differences.push_str(&format!("; and {more} more"));
    }
    if allowed {
        Ok(Some(differences))
    } else {
        Err(Error::LayoutChanged { version: base.version, differences })
    }
}

/// Differences of two tables, both sorted by name.
fn differences(base: &Manifest, tensors: &[&TensorInfo]) -> Vec<String> {
    let form = |dtype, shape: &[u64]| format!("{dtype} {shape:?}");
    let (old, mut differences) = (base.named_tensors(), Vec::new());
    let (mut old, mut new) = (old.iter().peekable(), tensors.iter().peekable());
    loop {
        let order = match (old.peek(), new.peek()) {
            (None, None) => return differences,
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (Some((name, _)), Some(info)) => (*name).cmp(info.name.as_str()),
        };
        let before = if order.is_le() { old.next() } else { None };
        let now = if order.is_ge() { new.next() } else { None };
        match (before, now) {
            (Some((name, was)), None) => {
                differences.push(format!("`{name}` is missing, it was {}", form(was.dtype, &was.shape)));
            }
            (None, Some(is)) => {
                differences.push(format!("`{}` is new, {}", is.name, form(is.dtype, &is.shape)));
            }
            (Some((name, was)), Some(is)) if (was.dtype, &was.shape) != (is.dtype, &is.shape) => {
                let (is, was) = (form(is.dtype, &is.shape), form(was.dtype, &was.shape));
                differences.push(format!("`{name}` is {is}, it was {was}"));
            }
            _ => {}
        }
    }
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
/// [`Error::DuplicateTensor`] for one name with two contents; [`Error::TensorMismatch`] if the snapshot is
/// not sorted.
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
    let bytes = snapshot.bytes(index)?;
    snapshot.tensors()[index].check_bytes(&bytes)?;
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
