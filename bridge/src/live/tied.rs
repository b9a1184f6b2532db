//! Output heads that a model takes from its word embeddings.

use driftless_transport::prepared::{PreparedDelta, PreparedTensor};
use driftless_transport::snapshot::TensorInfo;

use super::layout::Layout;
use crate::error::{Error, Result};

/// Refuses a delta that changes a tied head otherwise than the word embeddings. That both are equal in the base, the
/// follower has seen.
///
/// # Errors
/// [`Error::Live`] for such a head; [`Error::Offer`] for a delta that cannot be read.
pub(super) fn check(layout: &Layout, delta: &PreparedDelta) -> Result<()> {
    let tensors = delta.tensors();
    for head in tensors.iter().filter(|tensor| layout.is_tied_head(&tensor.name)) {
        let is_embedding = |tensor: &&PreparedTensor| {
            let PreparedTensor { name, dtype, shape, .. } = tensor;
            let info = TensorInfo { name: name.clone(), dtype: *dtype, shape: shape.clone() };
            (*dtype, shape) == (head.dtype, &head.shape) && layout.has(&info)
        };
        let mut known = tensors.iter().filter(is_embedding);
        let changes_alike = |tensor| delta.change_alike(head, tensor);
        let found = known.try_fold(false, |found, tensor| Ok(found || changes_alike(tensor)?));
        if !found.map_err(|error: driftless_transport::Error| Error::Offer { source: error.into() })? {
            return Err(Error::Live {
                what: format!("tensor {}", head.name),
                expected: "changed as the word embeddings are, which this model takes for it".into(),
                found: format!("{} other changes", head.changed),
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(unsafe_code, reason = "layouts are made of addresses")]

    use driftless_transport::Dtype;
    use driftless_transport::prepared::checksum;
    use serde_json::{Value, json};

    use super::super::tests::{put, version};
    use super::*;

    const EMBED: &str = "model.embed_tokens.weight";
    const HEAD: &str = "lm_head.weight";

    fn layout(names: &[&str]) -> Layout {
        let info = |name: &&str| TensorInfo { name: (*name).into(), dtype: Dtype::Bf16, shape: vec![8, 4] };
        // SAFETY: there is no storage.
        unsafe { Layout::new(names.iter().map(info).collect(), Vec::new(), Vec::new()) }.unwrap()
    }

    /// What becomes of a delta of tensors, of each its name, the word that its arrays hold, and where they lie.
    fn checked(layout: &Layout, tensors: &[(&str, u8, usize)]) -> Result<()> {
        let mut bytes = vec![0; 64 * 8];
        let entry = |(name, word, at): &(&str, u8, usize)| {
            bytes[*at..at + 24].fill(*word);
            json!({"name": name, "dtype": "BF16", "shape": [8, 4], "changed": 2, "positions": at, "new": at + 8,
                "old": at + 16})
        };
        let tensors: Vec<Value> = tensors.iter().map(entry).collect();
        let header = json!({"base": version(1), "target": version(2), "checksum": checksum(&bytes[64..], 64), "tensors": tensors});
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("delta-1");
        put(&path, bytes, &header.to_string());
        check(layout, &PreparedDelta::open(&path).unwrap().unwrap())
    }

    #[test]
    fn tied_head_changes_as_the_embeddings_or_is_refused() {
        let tied = layout(&[EMBED, "other"]).with_tied_head(true);
        // Two names of one tensor, and two tensors that change alike.
        checked(&tied, &[(HEAD, 1, 64), (EMBED, 1, 64)]).unwrap();
        checked(&tied, &[(HEAD, 1, 64), (EMBED, 1, 128), ("other", 3, 192)]).unwrap();
        checked(&tied, &[(EMBED, 1, 64)]).unwrap();
        for tensors in
            [&[(HEAD, 1, 64), (EMBED, 2, 128)][..], &[(HEAD, 1, 64)], &[(HEAD, 1, 64), ("unknown", 1, 64)]]
        {
            let error = checked(&tied, tensors).unwrap_err().to_string();
            assert!(error.contains(HEAD) && error.contains("the word embeddings"), "{error}");
        }
        // A head of its own is a tensor as others are.
        for layout in [layout(&[EMBED]), layout(&[EMBED, HEAD]).with_tied_head(true)] {
            checked(&layout, &[(HEAD, 1, 64), (EMBED, 2, 128)]).unwrap();
        }
    }
}
