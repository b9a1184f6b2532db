//! From publications to a sealed journal: objects in, records out. This file touches no byte of the
//! checkpoint.
//!
//! Several publications in a row are folded: each tensor goes through all of them at once, on its own thread.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use driftless_delta::{DigestTable, Patch, Serial, Source};
use driftless_store::os::sync_dir;

use super::journal::{Record, Writer};
use super::objects::{Objects, Place};
use super::spare::{Kit, Spare};
use super::state::{Copy, State, Tables, digests_to_bytes};
use super::target::{PAGE, Ready, Targets};
use crate::checkpoint::write_weights;
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::manifest::{File, Kind, Manifest, Piece, Tensor};
use crate::pool::{Bounds, as_they_come, in_order, threads};
use crate::run::Committed;
use crate::snapshot::{AuxFile, TensorInfo};

/// Larger tensors do not exist; a manifest that claims one is not believed with an allocation.
const TENSOR_BYTES_MAX: u64 = 1 << 40;
/// Tensor data per weight file of a rebuilt checkpoint, as the reference writes them.
const SHARD_BYTES: u64 = 5_000_000_000;
/// Bytes that decoding may hold at once, until they are written; one tensor that needs more passes alone.
const IN_FLIGHT_BYTES: u64 = 256 << 20;
/// Most bytes that decoding holds for each byte of a payload: a change takes four to eight bytes in a patch,
/// and hardly less than one in `wire`.
const DECODED_PER_BYTE: u64 = 8;
/// Bytes of payload for each page of a tensor from which on nearly all of its pages change: at random places
/// some three changes, of which one page in twenty gets none. Where changes lie together more pages than that
/// stay as they are, and are made ready in vain.
const DENSE_BYTES: u64 = 4;
/// Most threads that decode.
const THREADS_MAX: usize = 16;
/// Most versions that one apply takes at once.
const FOLD_MAX: usize = 64;

/// A patch as the journal holds it, with the byte of the tensor at which it begins.
type PatchBytes = (u64, Vec<u8>);

fn bounds() -> Bounds {
    Bounds { threads: threads(THREADS_MAX), weight: IN_FLIGHT_BYTES }
}

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
        if !follows || !tied_alike || held > super::objects::CACHE_BYTES {
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

/// Writes and seals the journal that takes `base` over `versions` by their deltas. All versions tie the same names.
/// Of `targets`, the base's files, the pages are made ready that will change. What is in `spare` when it
/// returns is of no use any more.
pub(super) fn journal_deltas(
    path: &Path,
    (base, targets): (&State, &mut Targets),
    versions: &[Committed],
    (objects, spare): (&Objects<'_>, &Spare),
) -> Result<()> {
    let Some(last) = versions.last() else { return Ok(()) };
    let mut before = &base.manifest;
    for committed in versions {
        check_same_form(before, &committed.manifest)?;
        before = &committed.manifest;
    }
    let main_names: BTreeMap<&str, &str> =
        base.manifest.named_tensors().into_iter().map(|(name, entry)| (name, entry.name.as_str())).collect();
    let tensors = &last.manifest.tensors;
    let weights: Vec<u64> =
        (0..tensors.len()).map(|index| decoding_bytes(versions, index)).collect::<Result<_>>()?;
    let order = in_turn((0..tensors.len()).flat_map(|index| {
        steps(versions, index).flat_map(|(number, tensor)| places(number, &tensor.pieces))
    }));
    let dense = dense_tensors(versions)?;
    targets.ready_while(&base.checkpoint, &dense, |ready| {
        let mut journal = Writer::create(path)?.expecting(journal_bytes(versions));
        journal.push(Record::Base(base.applied.manifest_digest.as_bytes()))?;
        let mut tables = Tables::new();
        objects.ahead(order, || {
            as_they_come(
                &weights,
                bounds(),
                |index| patch_tensor((base, ready), &main_names, versions, index, (objects, spare)),
                |index, (patches, table): (Vec<PatchBytes>, DigestTable)| {
                    let tensor = &tensors[index].name;
                    for (offset, bytes) in patches {
                        journal.push(Record::Patch { tensor, offset, bytes: &bytes })?;
                        spare.give_bytes(bytes);
                    }
                    tables.insert(tensor.clone(), table);
                    Ok(())
                },
            )
        })?;
        journal_files(&mut journal, &base.manifest.files, true, versions, objects)?;
        seal(journal, last, &tables)
    })
}

/// Tensors with changes on nearly every page, each with the object that is the first to change it.
fn dense_tensors(versions: &[Committed]) -> Result<Vec<(Place, &Tensor)>> {
    let mut dense = Vec::new();
    let tensors = versions.last().map_or(&[][..], |last| &last.manifest.tensors);
    for (index, tensor) in tensors.iter().enumerate() {
        let pieces = steps(versions, index)
            .flat_map(|(number, tensor)| tensor.pieces.iter().map(move |piece| (number, piece)));
        dense.extend(place_if_dense(pieces, tensor.info().byte_len()?).map(|place| (place, tensor)));
    }
    Ok(dense)
}

/// The first object of these pieces, each with its version, if they are dense in a tensor of so many bytes.
fn place_if_dense<'a>(
    mut pieces: impl Iterator<Item = (usize, &'a Piece)>,
    tensor_bytes: u64,
) -> Option<Place> {
    let (number, first) = pieces.next()?;
    let payloads = pieces.fold(first.length, |sum, (_, piece)| sum.saturating_add(piece.length));
    let dense = payloads >= tensor_bytes.div_ceil(PAGE as u64).saturating_mul(DENSE_BYTES);
    dense.then_some((number, first.object))
}

/// About how long the journal of these deltas will be: for each change its place and its value, of two bytes
/// each in the most common types.
fn journal_bytes(versions: &[Committed]) -> u64 {
    versions
        .iter()
        .fold(0, |sum: u64, committed| sum.saturating_add(committed.manifest.changed.saturating_mul(4)))
}

/// The objects of pieces of a version.
fn places(number: usize, pieces: &[Piece]) -> impl Iterator<Item = Place> {
    pieces.iter().map(move |piece| (number, piece.object))
}

/// Each object once, where it comes first.
fn in_turn(places: impl Iterator<Item = Place>) -> Vec<Place> {
    let mut seen = BTreeSet::new();
    places.filter(|place| seen.insert(*place)).collect()
}

/// Bytes that decoding holds for the `index`-th tensor: its patches if one payload takes it all the way, and
/// otherwise the tensor.
fn decoding_bytes(versions: &[Committed], index: usize) -> Result<u64> {
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
fn steps(versions: &[Committed], index: usize) -> impl Iterator<Item = (usize, &Tensor)> {
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

/// Journals the files of the last version that are not among `old` (with `keep`), and the removal of those it
/// lacks.
fn journal_files(
    journal: &mut Writer,
    old: &[File],
    keep: bool,
    versions: &[Committed],
    objects: &Objects<'_>,
) -> Result<()> {
    for (number, entry) in carried_files(if keep { old } else { &[] }, versions) {
        let file = read_file(number, entry, objects)?;
        journal.push(Record::File { name: file.name(), bytes: file.bytes() })?;
    }
    let files = versions.last().map_or(&[][..], |committed| &committed.manifest.files);
    for old in old.iter().filter(|old| !files.iter().any(|file| file.name == old.name)) {
        journal.push(Record::Remove { name: &old.name })?;
    }
    Ok(())
}

fn read_file(number: usize, file: &File, objects: &Objects<'_>) -> Result<AuxFile> {
    let mut bytes = Vec::new();
    for part in &file.parts {
        bytes.extend_from_slice(&objects.range(number, part.object, part.offset, part.length)?);
    }
    file.blake3.check(&bytes, format_args!("file `{}`", file.name))?;
    AuxFile::new(file.name.clone(), bytes)
}

/// The base's digests of a tensor. Tensors may become tied or part from one version to the next; one delta
/// serves several names only where their bases are the same.
fn base_table<'a>(
    base: &'a State,
    main_names: &BTreeMap<&str, &str>,
    tensor: &Tensor,
) -> Result<&'a DigestTable> {
    let table_of = |name: &str| {
        main_names.get(name).and_then(|main| base.tables.get(*main)).ok_or_else(|| Error::TensorMismatch {
            tensor: name.to_owned(),
            what: "entry in the base's tensor table",
            expected: "present".to_owned(),
            found: "absent".to_owned(),
        })
    };
    let table = table_of(&tensor.name)?;
    for alias in &tensor.aliases {
        let other = table_of(alias)?;
        if other != table {
            return Err(Error::TensorMismatch {
                tensor: alias.clone(),
                what: "digest of the base that it shares a delta with",
                expected: table.total().to_string(),
                found: other.total().to_string(),
            });
        }
    }
    Ok(table)
}

/// Writes the tensors of the last version into `staging`, from the first one in full and the deltas behind it,
/// and seals the journal that installs them.
///
/// `stale` are the weight files now in the directory.
pub(super) fn journal_full(
    path: &Path,
    staging: &Path,
    versions: &[Committed],
    objects: &Objects<'_>,
    old_files: &[File],
    stale: &[String],
) -> Result<()> {
    let (Some(first), Some(last)) = (versions.first(), versions.last()) else { return Ok(()) };
    if !first.manifest.is_anchor() {
        return Err(Error::Unsupported {
            what: format!("starting at version {} of run {}", first.manifest.version, first.manifest.run_id),
            hint: "it is not published in full; give the checkpoint directory that the run starts from"
                .into(),
        });
    }
    for pair in versions.windows(2) {
        check_same_form(&pair[0].manifest, &pair[1].manifest)?;
    }
    let named: Vec<Vec<(&str, &Tensor)>> =
        versions.iter().map(|committed| committed.manifest.named_tensors()).collect();
    let target = last.manifest.named_tensors();
    let infos: Vec<TensorInfo> = target
        .iter()
        .map(|(name, tensor)| TensorInfo { name: (*name).to_owned(), ..tensor.info() })
        .collect();
    let mut tables = Tables::new();
    let names = write_weights(staging, &infos, SHARD_BYTES, &mut |order, sink| {
        let weights: Vec<u64> = order.iter().map(|&index| infos[index].byte_len()).collect::<Result<_>>()?;
        let feed = |position: usize| Ok(order[position]);
        let work = |index: usize| {
            let steps: Vec<&Tensor> = named.iter().map(|named| named[index].1).collect();
            full_tensor(versions, &steps, objects)
        };
        let turns = in_turn(order.iter().flat_map(|&index| {
            let full = first.manifest.full_pieces(named[0][index].1).unwrap_or_default();
            let deltas = (1..).zip(&named[1..]);
            places(0, full)
                .chain(deltas.flat_map(move |(number, committed)| places(number, &committed[index].1.pieces)))
        }));
        objects.ahead(turns, || {
            in_order(&weights, bounds(), feed, work, |position, (bytes, table)| {
                tables.insert(target[order[position]].1.name.clone(), table);
                sink(&bytes)
            })
        })
    })?;
    sync_dir(staging)?;
    // A journal may survive only with what it installs: a name that is gone from here counts as installed.
    staging.parent().map_or(Ok(()), sync_dir)?;
    let mut journal = Writer::create(path)?;
    for name in &names {
        journal.push(Record::Install { name })?;
    }
    for name in stale.iter().filter(|name| !names.contains(name)) {
        journal.push(Record::Remove { name })?;
    }
    journal_files(&mut journal, old_files, false, versions, objects)?;
    seal(journal, last, &tables)
}

/// A tensor's bytes after the last version; `steps` are its entries, the first one in full.
fn full_tensor(
    versions: &[Committed],
    steps: &[&Tensor],
    objects: &Objects<'_>,
) -> Result<(Vec<u8>, DigestTable)> {
    let Some((&first, deltas)) = steps.split_first() else { return Ok(Default::default()) };
    let codec = |source| Error::Codec { tensor: first.name.clone(), source };
    let element = first.dtype.element();
    let mut bytes = zeroed(first)?;
    let length = bytes.len();
    let mut kit = Kit::default();
    for piece in versions[0].manifest.full_pieces(first).unwrap_or_default() {
        let range = piece_range(first, piece, length)?;
        let payload = objects.range(0, piece.object, piece.offset, piece.length)?;
        kit.decoder.decode_full(&Serial, element, &payload, &mut bytes[range]).map_err(codec)?;
    }
    let mut table = DigestTable::of(element, &bytes).map_err(codec)?;
    check_digest(first, &table)?;
    for (number, tensor) in (1..).zip(deltas.iter().copied()) {
        if !tensor.pieces.is_empty() {
            table = decode_pieces(number, tensor, &bytes, &table, objects, &mut kit)?;
            apply(tensor, &kit.patches, &mut bytes)?;
        }
        check_digest(tensor, &table)?;
    }
    Ok((bytes, table))
}

/// The patches, with the byte at which each begins, that take the `index`-th tensor over `versions`; and what
/// its digests are then.
fn patch_tensor(
    (base, ready): (&State, &Ready<'_>),
    main_names: &BTreeMap<&str, &str>,
    versions: &[Committed],
    index: usize,
    (objects, spare): (&Objects<'_>, &Spare),
) -> Result<(Vec<PatchBytes>, DigestTable)> {
    let (mut patches, mut kit) = (Vec::new(), spare.take_kit());
    let mut table = None;
    let mut bytes: &[u8] = &[];
    // The tensor between two versions, once it is not the base's any more.
    let mut between: Option<Vec<u8>> = None;
    let last = steps(versions, index)
        .filter(|(_, tensor)| !tensor.pieces.is_empty())
        .map(|(number, _)| number)
        .last();
    for (number, tensor) in steps(versions, index) {
        let old = match table.take() {
            Some(table) => table,
            None => {
                let position = base.checkpoint.position(&tensor.name);
                bytes = position.and_then(|index| base.checkpoint.tensor(index)).unwrap_or_default();
                base_table(base, main_names, tensor)?.clone()
            }
        };
        let new = if tensor.pieces.is_empty() {
            old
        } else {
            let before = between.as_deref().unwrap_or(bytes);
            let new = decode_pieces(number, tensor, before, &old, objects, &mut kit)?;
            if Some(number) != last {
                apply(tensor, &kit.patches, between.get_or_insert_with(|| bytes.to_vec()))?;
            }
            ready.will_change(number, tensor, &kit.patches);
            for (offset, patch) in &kit.patches {
                let mut bytes = spare.take_bytes();
                patch.write_to(&mut bytes);
                patches.push((*offset, bytes));
            }
            new
        };
        check_digest(tensor, &new)?;
        table = Some(new);
    }
    spare.give_kit(kit);
    Ok((patches, table.unwrap_or_default()))
}

/// Leaves a tensor's patches in one version, each with the byte at which it begins, in `kit`. Returns the
/// digests of the result.
fn decode_pieces(
    number: usize,
    tensor: &Tensor,
    bytes: &[u8],
    old: &DigestTable,
    objects: &Objects<'_>,
    Kit { decoder, patches }: &mut Kit,
) -> Result<DigestTable> {
    let element = tensor.dtype.element();
    let codec = |source| Error::Codec { tensor: tensor.name.clone(), source };
    patches.resize_with(tensor.pieces.len(), Default::default);
    if let ([piece], [(offset, patch)]) = (tensor.pieces.as_slice(), patches.as_mut_slice()) {
        let payload = objects.range(number, piece.object, piece.offset, piece.length)?;
        *offset = 0;
        decoder.decode(&Serial, Source { element, bytes, digests: old }, &payload, patch).map_err(codec)?;
        return Ok(patch.digests().clone());
    }
    // Pieces of several publishers may be cut anywhere, so their digests are not those of the tensor's
    // blocks: hash again.
    let mut result = bytes.to_vec();
    for (piece, (offset, patch)) in tensor.pieces.iter().zip(patches) {
        let range = piece_range(tensor, piece, bytes.len())?;
        let slice = &bytes[range.clone()];
        let digests = DigestTable::of(element, slice).map_err(codec)?;
        let payload = objects.range(number, piece.object, piece.offset, piece.length)?;
        let source = Source { element, bytes: slice, digests: &digests };
        decoder.decode(&Serial, source, &payload, patch).map_err(codec)?;
        patch.apply_to(&mut result[range.clone()]).map_err(codec)?;
        *offset = range.start as u64;
    }
    DigestTable::of(element, &result).map_err(codec)
}

fn apply(tensor: &Tensor, patches: &[(u64, Patch)], bytes: &mut [u8]) -> Result<()> {
    for (offset, patch) in patches {
        let start = *offset as usize;
        let target =
            bytes.get_mut(start..start.saturating_add(patch.tensor_bytes() as usize)).unwrap_or_default();
        patch.apply_to(target).map_err(|source| Error::Codec { tensor: tensor.name.clone(), source })?;
    }
    Ok(())
}

/// Adds the manifest and the digest tables, and seals.
pub(super) fn seal(mut journal: Writer, committed: &Committed, tables: &Tables) -> Result<()> {
    let copy = Copy { digest: committed.digest, manifest: committed.manifest.clone() };
    journal.push(Record::Manifest(&copy.to_bytes()?))?;
    journal.push(Record::Digests(&digests_to_bytes(tables)))?;
    journal.commit()
}

/// Refuses a tensor whose digest is not the manifest's.
pub(super) fn check_digest(tensor: &Tensor, table: &DigestTable) -> Result<()> {
    let found = table.total();
    if found == tensor.digest {
        return Ok(());
    }
    Err(Error::TensorMismatch {
        tensor: tensor.name.clone(),
        what: "digest",
        expected: tensor.digest.to_string(),
        found: found.to_string(),
    })
}

/// The bytes of a tensor that a piece covers.
fn piece_range(tensor: &Tensor, piece: &Piece, length: usize) -> Result<std::ops::Range<usize>> {
    let size = tensor.dtype.size();
    let start = piece.start.checked_mul(size).and_then(|start| usize::try_from(start).ok());
    let bytes = piece.elements.checked_mul(size).and_then(|bytes| usize::try_from(bytes).ok());
    match start.zip(bytes).and_then(|(start, bytes)| Some(start..start.checked_add(bytes)?)) {
        Some(range) if range.end <= length => Ok(range),
        _ => Err(Error::TensorMismatch {
            tensor: tensor.name.clone(),
            what: "elements of a piece",
            expected: format!("inside {length} bytes"),
            found: format!("{} from {}", piece.elements, piece.start),
        }),
    }
}

/// A tensor's buffer; a size that cannot be had is an error, not an abort.
fn zeroed(tensor: &Tensor) -> Result<Vec<u8>> {
    let too_large = || Error::TooLarge { what: format!("tensor `{}`", tensor.name), max: TENSOR_BYTES_MAX };
    let length = tensor.info().byte_len()?;
    let length = usize::try_from(length).ok().filter(|_| length <= TENSOR_BYTES_MAX).ok_or_else(too_large)?;
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(length).map_err(|_| too_large())?;
    bytes.resize(length, 0);
    Ok(bytes)
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
    let describe = |entry: Option<&(&str, &Tensor)>| match entry {
        Some((name, tensor)) => {
            format!("`{name}` {} {:?}", tensor.dtype, tensor.shape)
        }
        None => "none".to_owned(),
    };
    fn form<'a>((name, tensor): &(&'a str, &'a Tensor)) -> (&'a str, Dtype, &'a [u64]) {
        (name, tensor.dtype, &tensor.shape)
    }
    for index in 0..old.len().max(new.len()) {
        let (expected, found) = (old.get(index), new.get(index));
        if expected.map(form) != found.map(form) {
            let tensor = found.or(expected).map_or_else(String::new, |(name, _)| (*name).to_owned());
            let (expected, found) = (describe(expected), describe(found));
            return Err(Error::TensorMismatch { tensor, what: "entry in the tensor table", expected, found });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dense_is_what_has_four_bytes_of_payload_a_page_wherever_they_come_from() {
        let piece = |object, length| Piece { start: 0, elements: 1, object, offset: 0, length };
        let place = |pieces: &[(usize, Piece)], pages: u64| {
            place_if_dense(pieces.iter().map(|(number, piece)| (*number, piece)), pages * PAGE as u64)
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
