//! Output heads that are left out of versions: engines take the word embeddings for them.

use super::device::Devices;
use super::options::LeftOut;
use super::plan::tensor_bytes;
use super::shard::Whole;
use crate::error::{Error, Result};
use crate::manifest::{Manifest, Tensor};
use crate::snapshot::{AuxFile, Snapshot};
use crate::tied::{is_head, is_tied, parted_head};

/// Takes out of `chosen`, positions of a snapshot's tensors, the output heads that `config.json` ties to the
/// word embeddings, and that equal these. A head that the version before has stays: its run has that layout.
///
/// # Errors
/// What reading the tensors meets.
pub(super) fn leave_out(
    snapshot: &dyn Snapshot,
    devices: &Devices,
    base: Option<&Manifest>,
    chosen: &mut Vec<usize>,
) -> Result<Vec<LeftOut>> {
    let tensors = snapshot.tensors();
    let mut heads: Vec<usize> = chosen.iter().copied().filter(|&at| is_head(&tensors[at].name)).collect();
    if heads.is_empty() || !is_tied(snapshot.files()) {
        return Ok(Vec::new());
    }
    if let Some(base) = base {
        let named = base.named_tensors();
        heads.retain(|&head| !named.iter().any(|(name, _)| *name == tensors[head].name));
    }
    let shard = Whole::new(snapshot)?;
    let mut left_out = Vec::new();
    for head in heads {
        let form = |at: usize| (tensors[at].dtype, &tensors[at].shape);
        let others = chosen.iter().filter(|&&at| !is_head(&tensors[at].name) && form(at) == form(head));
        let mut same_as = None;
        for &other in others {
            if devices.are_one(&shard, head, other) || are_equal(snapshot, head, other)? {
                same_as = Some(tensors[other].name.clone());
                break;
            }
        }
        if let Some(same_as) = same_as {
            left_out.push(LeftOut { tensor: tensors[head].name.clone(), same_as });
            chosen.retain(|&at| at != head);
        }
    }
    Ok(left_out)
}

fn are_equal(snapshot: &dyn Snapshot, a: usize, b: usize) -> Result<bool> {
    let (a, b) = (tensor_bytes(snapshot, a)?, tensor_bytes(snapshot, b)?);
    // Mostly they are one in memory.
    Ok(std::ptr::eq::<[u8]>(&*a, &*b) || a == b)
}

/// Refuses a version whose output head is not its word embeddings, though `config.json` ties them: no engine would
/// generate with what was trained.
///
/// # Errors
/// [`Error::TensorMismatch`].
pub(super) fn refuse_parted(files: &[AuxFile], tensors: &[Tensor]) -> Result<()> {
    match parted_head(tensors).filter(|_| is_tied(files)) {
        None => Ok(()),
        Some(head) => Err(Error::TensorMismatch {
            tensor: head.to_owned(),
            what: "content",
            expected:
                "that of the word embeddings, as `tie_word_embeddings` of config.json says; engines generate \
                       with these. Tie the model, or say `false` there"
                    .to_owned(),
            found: "that of no other tensor".to_owned(),
        }),
    }
}
