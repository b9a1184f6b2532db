//! Output heads that are left out of versions: engines take the word embeddings for them.

use std::borrow::Cow;

use driftless_delta::Digest;

use super::device::Devices;
use super::options::LeftOut;
use super::shard::{Sliced, digest, digest_of, slice_bytes};
use crate::error::Result;
use crate::manifest::Manifest;
use crate::snapshot::Snapshot;
use crate::tied::{is_head, is_tied};

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
    let shard = Sliced::whole(snapshot)?;
    let mut left_out = Vec::new();
    for head in heads {
        let form = |at: usize| (tensors[at].dtype, &tensors[at].shape);
        let others =
            chosen.iter().copied().filter(|&at| !is_head(&tensors[at].name) && form(at) == form(head));
        let others: Vec<usize> = others.collect();
        if let Some(other) = find_same(&shard, devices, head, &others)? {
            let [tensor, same_as] = [head, other].map(|at| tensors[at].name.clone());
            left_out.push(LeftOut { tensor, same_as });
            chosen.retain(|&at| at != head);
        }
    }
    Ok(left_out)
}

/// What a head is compared with: bytes that lie there anyway, or the digest of those that had to be read.
enum Head<'a> {
    Lent(&'a [u8]),
    Read(Digest),
}

/// The first of `others` that equals `head`. No more than one tensor is read at a time, and each once.
fn find_same(shard: &Sliced<'_>, devices: &Devices, head: usize, others: &[usize]) -> Result<Option<usize>> {
    let is_it = |&&other: &&usize| devices.are_one(shard, head, other);
    if let Some(&other) = others.iter().find(is_it) {
        return Ok(Some(other));
    }
    let known = match devices.digest(shard, head) {
        Some(digest) => Head::Read(digest),
        None => match slice_bytes(shard, head)? {
            Cow::Borrowed(bytes) => Head::Lent(bytes),
            Cow::Owned(bytes) => Head::Read(digest_of(shard, head, &bytes)),
        },
    };
    for &other in others {
        let is_same = match known {
            // Mostly they are one in memory.
            Head::Lent(bytes) => {
                let other = slice_bytes(shard, other)?;
                std::ptr::eq(bytes, &*other) || bytes == &*other
            }
            Head::Read(known) => digest(shard, devices, other)? == known,
        };
        if is_same {
            return Ok(Some(other));
        }
    }
    Ok(None)
}
