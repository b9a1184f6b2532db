//! Output heads that a model takes from its word embeddings.

use driftless_transport::prepared::{PreparedDelta, PreparedTensor};

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
            (tensor.dtype, &tensor.shape) == (head.dtype, &head.shape) && layout.has(&tensor.info())
        };
        let mut known = tensors.iter().filter(is_embedding);
        let changes_alike = |tensor| delta.change_alike(head, tensor);
        let found = known.try_fold(false, |found, tensor| Ok(found || changes_alike(tensor)?));
        if !found.map_err(|error: driftless_transport::Error| Error::Offer { source: error.into() })? {
            let expected = "changed as the word embeddings are, which this model takes for it";
            let found = format!("{} other changes", head.changed);
            return Err(Error::live(format!("tensor {}", head.name), expected, found));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(unsafe_code, reason = "layouts are made of addresses")]

    use driftless_transport::Dtype;
    use driftless_transport::prepared::checksum;
    use driftless_transport::snapshot::TensorInfo;
    use serde_json::{Value, json};

    use super::super::layout::{LiveCopy, LiveTensor, Strides};
    use super::super::part::Parts;
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
    fn tied_head_has_no_part_of_its_own() {
        let tensor = |name: &str, at: u64| -> PreparedTensor {
            let tensor = json!({"name": name, "dtype": "BF16", "shape": [8, 4], "changed": 2, "positions": at,
                "new": at + 8, "old": at + 16});
            serde_json::from_value(tensor).unwrap()
        };
        let (storage, copy) = storage();
        let info = tensor(EMBED, 0).info();
        // SAFETY: nothing is read or written at the address.
        let layout = unsafe { Layout::new(vec![info], vec![storage], vec![copy]) }.unwrap();
        let tensors = [tensor(HEAD, 64), tensor(EMBED, 128)];
        let error = Parts::new(&layout, &tensors, |at| at).unwrap_err().to_string();
        assert!(error.contains(HEAD), "{error}");
        let parts = Parts::new(&layout.with_tied_head(true), &tensors, |at| at).unwrap();
        let [part] = &parts.parts[..] else { panic!("one copy of the embeddings: {parts:?}") };
        assert_eq!((parts.tensors.as_slice(), parts.changes), (&[1][..], 2));
        assert_eq!((part.positions, part.new, part.old, part.live), (128, 136, 144, 64));
    }

    /// Where the embeddings lie.
    fn storage() -> (LiveTensor, LiveCopy) {
        let strides = || Strides { offset: 0, strides: vec![4, 1] };
        let live = LiveTensor { name: "storage".into(), dtype: Dtype::Bf16, address: 64, bytes: 64 };
        (live, LiveCopy { tensor: 0, live: 0, size: vec![8, 4], from: strides(), to: strides(), table: None })
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
