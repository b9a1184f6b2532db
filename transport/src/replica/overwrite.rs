//! Overwrites weights in an apply: patches go through shared memory maps, several tensors at a time.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use driftless_delta::patch::JournaledPatch;

use super::journal::Record;
use super::prefault::{WriteMap, WriteMaps};
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::manifest::Manifest;
use driftless_store::pool::{Bounds, in_order, threads};

/// More threads than this only wait for memory, or for the file system's page faults.
const THREADS_MAX: usize = 16;

/// What happens to one tensor of a file: its bytes in the file, and its patches in order, each with the byte
/// of the tensor at which it begins.
struct Edit<'a> {
    tensor: &'a str,
    range: Range<usize>,
    patches: Vec<(u64, &'a [u8])>,
}

/// Writes the patches, to `maps` where they are open already: from here on an engine that reads the files
/// sees the new version. Returns the files that were written to.
pub(super) fn overwrite(
    checkpoint: &Checkpoint,
    manifest: &Manifest,
    records: &[Record<'_>],
    mut maps: WriteMaps,
) -> Result<Vec<(PathBuf, WriteMap)>> {
    let edits = edits(checkpoint, manifest, records)?;
    let take = |path: &&Path| Ok((path.to_path_buf(), maps.take(path)?));
    let mut overwritten: Vec<(PathBuf, WriteMap)> = edits.keys().map(take).collect::<Result<_>>()?;
    let mut places = Vec::new();
    for ((_, target), edits) in overwritten.iter_mut().zip(edits.values()) {
        places.append(&mut cut(&mut target.map, edits)?);
    }
    write(places)?;
    Ok(overwritten)
}

/// The edits of each file, in the order of their places.
fn edits<'a>(
    checkpoint: &'a Checkpoint,
    manifest: &'a Manifest,
    records: &[Record<'a>],
) -> Result<BTreeMap<&'a Path, Vec<Edit<'a>>>> {
    let mut patches: BTreeMap<&str, Vec<(u64, &[u8])>> = BTreeMap::new();
    for record in records {
        if let Record::Patch { tensor, offset, bytes } = *record {
            patches.entry(tensor).or_default().push((offset, bytes));
        }
    }
    let mut edits: BTreeMap<&Path, Vec<Edit<'_>>> = BTreeMap::new();
    for (tensor, patches) in patches {
        let entry = manifest.position(tensor).and_then(|index| manifest.tensors.get(index));
        let aliases = entry.map_or(&[][..], |entry| &entry.aliases);
        for name in std::iter::once(tensor).chain(aliases.iter().map(String::as_str)) {
            let place = checkpoint.position(name).and_then(|index| checkpoint.place(index));
            let place = place.ok_or_else(|| outside(name, "a tensor that is not here"))?;
            // Bounded by the length of the file's map.
            let range = place.offset as usize..(place.offset + place.length) as usize;
            edits.entry(place.path).or_default().push(Edit { tensor: name, range, patches: patches.clone() });
        }
    }
    for edits in edits.values_mut() {
        edits.sort_by_key(|edit| edit.range.start);
    }
    Ok(edits)
}

/// The bytes of each edit of one file, of which no two overlap.
fn cut<'a, 'e>(map: &'a mut [u8], edits: &'a [Edit<'e>]) -> Result<Vec<(&'a Edit<'e>, &'a mut [u8])>> {
    let (mut rest, mut at) = (map, 0);
    let mut places = Vec::with_capacity(edits.len());
    for edit in edits {
        let gone = || outside(edit.tensor, "a place beyond its file");
        let skip = edit.range.start.checked_sub(at).ok_or_else(gone)?;
        let (_, behind) = rest.split_at_mut_checked(skip).ok_or_else(gone)?;
        let (target, behind) = behind.split_at_mut_checked(edit.range.len()).ok_or_else(gone)?;
        places.push((edit, target));
        (rest, at) = (behind, edit.range.end);
    }
    Ok(places)
}

/// Writes the edits of all files to their places.
fn write(places: Vec<(&Edit<'_>, &mut [u8])>) -> Result<()> {
    let weights = vec![1; places.len()];
    let bounds = Bounds { threads: threads(THREADS_MAX), weight: u64::MAX };
    let mut places = places.into_iter();
    let work =
        |place: Option<(&Edit<'_>, &mut [u8])>| place.map_or(Ok(()), |(edit, bytes)| patch(edit, bytes));
    in_order(&weights, bounds, |_| Ok(places.next()), work, |_, ()| Ok(()))
}

fn patch(edit: &Edit<'_>, tensor: &mut [u8]) -> Result<()> {
    let codec = |source| Error::Codec { tensor: edit.tensor.to_owned(), source };
    for (offset, bytes) in &edit.patches {
        let patch = JournaledPatch::from_bytes(bytes).map_err(codec)?;
        let (start, length) = (usize::try_from(*offset).ok(), usize::try_from(patch.tensor_bytes()).ok());
        let target = start
            .zip(length)
            .and_then(|(start, length)| tensor.get_mut(start..start.checked_add(length)?))
            .ok_or_else(|| outside(edit.tensor, format!("{} bytes from {offset}", patch.tensor_bytes())))?;
        patch.apply_to(target).map_err(codec)?;
        driftless_store::os::crash_point("follow.apply")?;
    }
    Ok(())
}

fn outside(tensor: &str, found: impl std::fmt::Display) -> Error {
    Error::mismatch(tensor, "range that the journal overwrites", "inside the tensor", found)
}
