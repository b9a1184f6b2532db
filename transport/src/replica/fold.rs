//! Which versions one apply takes together, and what it will need of their objects: planning over manifests,
//! without a byte read.

use std::collections::BTreeSet;

use super::objects::{CACHE_BYTES, ObjectNumber};
use super::prefault::PAGE;
use crate::error::{Error, Result};
use crate::manifest::{File, Kind, Manifest, Piece, Tensor};
use crate::run::Committed;
use crate::snapshot::{Form, check_table};

/// Most bytes that decoding holds for each byte of a payload: a change takes four to eight bytes in a patch,
/// and hardly less than one in `wire`.
const DECODED_PER_BYTE: u64 = 8;
/// Bytes of payload for each page of a tensor from which on nearly all of its pages change. At random places
/// these are some three changes, of which one page in twenty gets none. Where changes lie together, more
/// pages than that stay as they are and are prefaulted in vain.
const MOSTLY_CHANGED_BYTES: u64 = 4;
/// Most versions that one apply takes at once.
const FOLD_MAX: usize = 64;

/// How many of `versions` can be applied at once, the first of them in full or as a delta.
///
/// One patch serves all names of a tied tensor, so a fold of deltas ends where names become tied or part.
/// Each version has an object in memory while its neighbours need it, so the fold also ends where those would
/// not fit.
pub(super) fn fold_length(versions: &[Committed], first_in_full: bool) -> usize {
    let largest = |committed: &Committed| {
        committed.manifest.objects.iter().map(|object| object.size).max().unwrap_or(0)
    };
    let mut held = versions.first().map_or(0, largest);
    let mut length = 1;
    for pair in versions.windows(2).take(FOLD_MAX - 1) {
        let [before, committed] = pair else { break };
        held = held.saturating_add(largest(committed));
        let follows =
            committed.manifest.kind == Kind::Delta && committed.manifest.base == Some(before.identity());
        let tied_alike = first_in_full || same_names(&before.manifest, &committed.manifest);
        if !follows || !tied_alike || held > CACHE_BYTES {
            break;
        }
        length += 1;
    }
    length
}

/// Whether the same names are tied in both.
fn same_names(a: &Manifest, b: &Manifest) -> bool {
    let alike = |(a, b): (&Tensor, &Tensor)| a.name == b.name && a.aliases == b.aliases;
    a.tensors.len() == b.tensors.len() && a.tensors.iter().zip(&b.tensors).all(alike)
}

/// Tensors with changes on nearly every page, each with the object that is the first to change it.
pub(super) fn mostly_changed(versions: &[Committed]) -> Result<Vec<(ObjectNumber, &Tensor)>> {
    let mut mostly_changed = Vec::new();
    let tensors = versions.last().map_or(&[][..], |last| &last.manifest.tensors);
    for (index, tensor) in tensors.iter().enumerate() {
        let pieces = steps(versions, index)
            .flat_map(|(number, tensor)| tensor.pieces.iter().map(move |piece| (number, piece)));
        mostly_changed
            .extend(place_if_mostly_changed(pieces, tensor.info().byte_len()?).map(|place| (place, tensor)));
    }
    Ok(mostly_changed)
}

/// The first object of these pieces, each with its version, if they are mostly_changed in a tensor of so many
/// bytes.
fn place_if_mostly_changed<'a>(
    mut pieces: impl Iterator<Item = (usize, &'a Piece)>,
    tensor_bytes: u64,
) -> Option<ObjectNumber> {
    let (number, first) = pieces.next()?;
    let payloads = pieces.fold(first.length, |sum, (_, piece)| sum.saturating_add(piece.length));
    let mostly_changed = payloads >= tensor_bytes.div_ceil(PAGE as u64).saturating_mul(MOSTLY_CHANGED_BYTES);
    mostly_changed.then_some((number, first.object))
}

/// About how long the journal of these deltas will be: for each change its place and its value, of two bytes
/// each in the most common types.
pub(super) fn journal_bytes(versions: &[Committed]) -> u64 {
    versions
        .iter()
        .fold(0, |sum: u64, committed| sum.saturating_add(committed.manifest.changed.saturating_mul(4)))
}

/// The objects of pieces of a version.
pub(super) fn places(number: usize, pieces: &[Piece]) -> impl Iterator<Item = ObjectNumber> {
    pieces.iter().map(move |piece| (number, piece.object))
}

/// Each object once, where it comes first.
pub(super) fn in_turn(places: impl Iterator<Item = ObjectNumber>) -> Vec<ObjectNumber> {
    let mut seen = BTreeSet::new();
    places.filter(|place| seen.insert(*place)).collect()
}

/// Bytes that decoding holds for the `index`-th tensor: its patches if one payload takes it all the way, and
/// otherwise the tensor.
pub(super) fn decoding_bytes(versions: &[Committed], index: usize) -> Result<u64> {
    let mut changes = steps(versions, index).filter(|(_, tensor)| !tensor.pieces.is_empty());
    let Some((_, tensor)) = changes.next() else { return Ok(1) };
    let whole = tensor.info().byte_len()?;
    match tensor.pieces.as_slice() {
        [piece] if changes.next().is_none() => {
            Ok(piece.length.saturating_mul(DECODED_PER_BYTE).clamp(1, whole.max(1)))
        }
        _ => Ok(whole),
    }
}

/// The entry of the `index`-th tensor in each version.
pub(super) fn steps(versions: &[Committed], index: usize) -> impl Iterator<Item = (usize, &Tensor)> {
    versions
        .iter()
        .enumerate()
        .filter_map(move |(number, committed)| Some((number, committed.manifest.tensors.get(index)?)))
}

/// The files of the last version that are not among `kept`, each with the version that carries it.
pub(super) fn carried_files<'a>(kept: &[File], versions: &'a [Committed]) -> Vec<(usize, &'a File)> {
    let files = versions.last().map_or(&[][..], |committed| &committed.manifest.files);
    let new = files
        .iter()
        .filter(|file| !kept.iter().any(|old| old.name == file.name && old.blake3 == file.blake3));
    // Where the last version does not carry it, the one in front of it has it or carries it.
    let carrier = |file: &'a File| {
        let carried = versions.iter().enumerate().rev().find_map(|(number, committed)| {
            let entry = committed.manifest.files.iter().find(|entry| entry.name == file.name)?;
            (!entry.parts.is_empty() && entry.blake3 == file.blake3).then_some((number, entry))
        });
        carried.unwrap_or((0, file))
    };
    new.map(carrier).collect()
}

/// Refuses a delta whose representation or tensor table is not the base's: adding, removing or reshaping a
/// tensor needs a full publication.
pub(crate) fn check_same_form(base: &Manifest, new: &Manifest) -> Result<()> {
    if base.representation != new.representation {
        return Err(Error::Corrupt {
            subject: format!("delta of version {}", new.version),
            what: "its representation is not its base's",
            expected: format!("{:?}", base.representation),
            found: format!("{:?}", new.representation),
        });
    }
    let (old, new) = (base.named_tensors(), new.named_tensors());
    fn form<'a>(entry: &(&'a str, &'a Tensor)) -> Form<'a> {
        (entry.0, entry.1.dtype, &entry.1.shape)
    }
    check_table(old.iter().map(form), new.iter().map(form))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn place_if_mostly_changed_needs_four_bytes_of_payload_a_page() {
        let piece = |object, length| Piece { start: 0, elements: 1, object, offset: 0, length };
        let place = |pieces: &[(usize, Piece)], pages: u64| {
            place_if_mostly_changed(
                pieces.iter().map(|(number, piece)| (*number, piece)),
                pages * PAGE as u64,
            )
        };
        assert_eq!(place(&[(0, piece(5, 400))], 100), Some((0, 5)));
        assert_eq!(place(&[(0, piece(5, 399))], 100), None);
        assert_eq!(
            place(&[(2, piece(7, 300)), (3, piece(1, 100))], 100),
            Some((2, 7)),
            "the first of a fold"
        );
        assert_eq!(place(&[(2, piece(7, u64::MAX)), (3, piece(1, u64::MAX))], 100), Some((2, 7)));
        assert_eq!(place(&[], 0), None, "nothing changes it");
    }
}
