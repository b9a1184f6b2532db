//! From versions to a sealed journal: objects in, records out. This file touches no byte of the checkpoint.
//!
//! Several versions in a row are folded: each tensor goes through all of them at once, on its own thread.

use std::path::Path;
use std::thread;

use driftless_store::os::sync_dir;

use super::buffers::Buffers;
use super::decode::{Change, Deltas, full_tensor};
use super::fold::{
    carried_files, check_same_form, decoding_bytes, in_turn, journal_bytes, mostly_changed, places, steps,
};
use super::journal::{Record, Sealed, Writer};
use super::objects::Objects;
use super::prefault::WriteMaps;
use super::state::{Copy, State, Tables, digests_to_bytes};
use crate::checkpoint::write_weights;
use crate::error::{Error, Result};
use crate::manifest::{File, Tensor};
use crate::prepared::Offering;
use crate::run::Committed;
use crate::snapshot::{AuxFile, TensorInfo};
use driftless_store::pool::{Bounds, as_they_come, in_order, threads};

/// Tensor data per weight file of a rebuilt checkpoint, as the reference writes them.
const SHARD_BYTES: u64 = 5_000_000_000;
/// Bytes that decoding may hold at once, until they are written; one tensor that needs more passes alone.
const IN_FLIGHT_BYTES: u64 = 256 << 20;
/// Most threads that decode.
const THREADS_MAX: usize = 32;
fn bounds() -> Bounds {
    Bounds { threads: threads(THREADS_MAX), weight: IN_FLIGHT_BYTES }
}

/// Writes and seals the journal that takes `base` over `versions` by their deltas. All versions tie the same
/// names. Pages of `maps`, the base's files, are prefaulted where they will change. What changes is added to
/// `offering`, while its old bytes are at hand. `buffers` are of no use after it.
pub(super) fn journal_deltas(
    path: &Path,
    base: &State,
    maps: &mut WriteMaps,
    versions: &[Committed],
    objects: &Objects<'_>,
    buffers: &Buffers,
    offering: Option<&Offering>,
) -> Result<Sealed> {
    let Some(last) = versions.last() else { return Err(Error::Internal { what: "a journal of no version" }) };
    let mut before = &base.manifest;
    for committed in versions {
        check_same_form(before, &committed.manifest)?;
        before = &committed.manifest;
    }
    let tensors = &last.manifest.tensors;
    let all = 0..tensors.len();
    let weights: Vec<u64> =
        all.clone().map(|index| decoding_bytes(versions, index)).collect::<Result<_>>()?;
    let steps = |index| steps(versions, index);
    let turns = in_turn(all.flat_map(steps).flat_map(|(number, tensor)| places(number, &tensor.pieces)));
    let deltas = Deltas::new(base, versions, objects, buffers, offering);
    let prefault = maps.prefault(&base.checkpoint, &mostly_changed(versions)?);
    let journal = Writer::create(path)?.expecting(journal_bytes(versions));
    journal.push(Record::Base(base.applied.manifest_digest.as_bytes()))?;
    let mut tables = Tables::new();
    let work = |index: usize| -> Result<_> {
        let Change { patches, digests } = deltas.change(index, &prefault)?;
        let tensor = &tensors[index].name;
        for (offset, bytes) in patches {
            journal.push(Record::Patch { tensor, offset, bytes: &bytes })?;
            buffers.give_bytes(bytes);
        }
        Ok(digests)
    };
    let take = |index: usize, digests| {
        tables.insert(tensors[index].name.clone(), digests);
        Ok(())
    };
    thread::scope(|scope| {
        let _prefaulting = prefault.start(scope);
        let _fetching = objects.ahead(scope, turns);
        as_they_come(&weights, bounds(), work, take)
    })?;
    journal_files(&journal, &base.manifest.files, true, versions, objects)?;
    seal(journal, last, &tables)
}

/// Journals the files of the last version that are not among `old` (with `keep`), and the removal of those it
/// lacks.
fn journal_files(
    journal: &Writer,
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

/// Writes the tensors of the last version into `staging`, from the first one in full and the deltas behind
/// it, and seals the journal that installs them.
///
/// `stale` are the weight files now in the directory.
pub(super) fn journal_full(
    path: &Path,
    staging: &Path,
    versions: &[Committed],
    objects: &Objects<'_>,
    old_files: &[File],
    stale: &[String],
) -> Result<Sealed> {
    let (Some(first), Some(last)) = (versions.first(), versions.last()) else {
        return Err(Error::Internal { what: "a journal of no version" });
    };
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
        let work = |index: usize| -> Result<_> {
            let steps: Vec<&Tensor> = named.iter().map(|named| named[index].1).collect();
            full_tensor(versions, &steps, objects)
        };
        let turns = in_turn(order.iter().flat_map(|&index| {
            let full = first.manifest.full_pieces(named[0][index].1).unwrap_or_default();
            let deltas = (1..).zip(&named[1..]);
            places(0, full)
                .chain(deltas.flat_map(move |(number, committed)| places(number, &committed[index].1.pieces)))
        }));
        thread::scope(|scope| {
            let _fetching = objects.ahead(scope, turns);
            in_order(&weights, bounds(), feed, work, |position, (bytes, table)| {
                tables.insert(target[order[position]].1.name.clone(), table);
                sink(&bytes)
            })
        })
    })?;
    sync_dir(staging)?;
    // A journal may survive only with what it installs: a name that is gone from here counts as installed.
    staging.parent().map_or(Ok(()), sync_dir)?;
    let journal = Writer::create(path)?;
    journal_names(&journal, &names, stale)?;
    journal_files(&journal, old_files, false, versions, objects)?;
    seal(journal, last, &tables)
}

/// Journals that staged files get their `names`, and that of `stale` files go that have others.
pub(super) fn journal_names(journal: &Writer, names: &[String], stale: &[String]) -> Result<()> {
    for name in names {
        journal.push(Record::Install { name })?;
    }
    let mut gone = stale.iter().filter(|name| !names.contains(name));
    gone.try_for_each(|name| journal.push(Record::Remove { name }))
}

/// Adds the manifest and the digest tables, and seals.
pub(super) fn seal(journal: Writer, committed: &Committed, tables: &Tables) -> Result<Sealed> {
    let copy = Copy { digest: committed.digest, manifest: committed.manifest.clone() };
    journal.push(Record::Manifest(&copy.to_bytes()?))?;
    journal.push(Record::Digests(&digests_to_bytes(tables)))?;
    journal.seal()
}
