//! Versions in a foreign format, whose tensors come as absolute new bytes. They go through the same journal
//! as ours.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;
use std::time::Instant;

use driftless_delta::{BLOCK_ELEMENTS, Digest, DigestTable, Element, Patch, Profile, decode, encode};
use driftless_store::ContentDigest;

use super::decode::read_back;
use super::journal::{Record, Sealed, Writer};
use super::prefault::WriteMaps;
use super::state::State;
use super::{Advanced, CarriedOut, Replica, begin, stage};
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::ids::{RunId, Version};
use crate::manifest::{Kind, Manifest};
use crate::prepared::{OfferWhen, Offering};
use crate::run::Committed;

/// Bytes of a tensor that are rewritten at a time: a whole number of blocks of every element type.
pub const SLICE_BYTES: usize = 4 << 20;
/// More threads than this only wait for memory.
const WORKERS_MAX: usize = 16;

/// The version that comes after the applied one.
#[derive(Debug)]
pub struct Foreign<'a> {
    /// Its run.
    pub run_id: RunId,
    /// Its number.
    pub version: Version,
    /// Its identity.
    pub digest: ContentDigest,
    /// The tensors that change, each once.
    pub tensors: Vec<&'a str>,
}

/// Gives the new bytes of `tensors[index]`, whose bytes now are the slice, to the rewriter; called from
/// several threads. It returns only when it has checked them.
pub type Rewrite<'f> = dyn Fn(usize, &[u8], &mut Rewriter<'_>) -> Result<()> + Sync + 'f;

/// Takes the new bytes of one tensor, [`SLICE_BYTES`] at a time.
pub struct Rewriter<'a> {
    index: usize,
    name: &'a str,
    element: Element,
    base: &'a [u8],
    at: usize,
    blocks: Vec<Digest>,
    changed: u64,
    payload: Vec<u8>,
    patch: Patch,
    out: SyncSender<Result<Made>>,
}

enum Made {
    Patch { index: usize, offset: u64, bytes: Vec<u8> },
    Tensor { index: usize, table: DigestTable, changed: u64 },
}

impl Replica {
    /// Applies a version of a foreign format: `rewrite` gives the bytes, and `confirm` is asked a last time
    /// before the version is committed. Whether the version follows the applied one is the caller's to check.
    ///
    /// # Errors
    ///
    /// Those of `rewrite` and `confirm`; [`Error::TensorMismatch`] for a tensor that is not here; the file
    /// system's. Nothing has changed then.
    pub fn advance_foreign(
        &mut self,
        next: &Foreign<'_>,
        rewrite: &Rewrite<'_>,
        confirm: &dyn Fn() -> Result<()>,
    ) -> Result<Advanced> {
        let sync = self.finish()?;
        if self.applied().is_some_and(|applied| applied.manifest_digest == next.digest) {
            // It was committed by an earlier call that could not finish.
            return Ok(Advanced::default());
        }
        if self.state.as_ref().is_some_and(State::is_touched) {
            self.unfinished = true;
            self.recover()?;
        }
        let Some(state) = &self.state else { return Err(Error::NothingApplied { path: self.dir.clone() }) };
        let started = Instant::now();
        let offering = begin(&mut self.offer, state);
        let sealed = journal(&self.layout.journal(), state, next, rewrite, confirm, offering.as_ref());
        let decoded = started.elapsed();
        let changed = sealed.as_ref().map_or(0, |(_, changed)| *changed);
        let sealed = sealed.map(|(sealed, _)| sealed);
        // Of what a trainer may remove again nobody has to be given anything that is not kept.
        let CarriedOut { kept, overwrite } =
            self.carry_out(sealed, WriteMaps::default(), offering, OfferWhen::Durable)?;
        let journal = decoded + kept;
        tracing::info!(
            dir = %self.dir.display(), version = %next.version, changed, journal_ms = journal.as_millis() as u64,
            overwrite_ms = overwrite.as_millis() as u64, "applied"
        );
        let offer = started.elapsed().saturating_sub(journal);
        Ok(Advanced { versions: 1, changed, journal, offer, overwrite, sync, ..Advanced::default() })
    }
}

/// Seals the journal; returns the number of elements that change, too.
fn journal(
    path: &std::path::Path,
    state: &State,
    next: &Foreign<'_>,
    rewrite: &Rewrite<'_>,
    confirm: &dyn Fn() -> Result<()>,
    offering: Option<&Offering>,
) -> Result<(Sealed, u64)> {
    let mut manifest = successor(state, next);
    let positions = next.tensors.iter().map(|name| position(&manifest, name)).collect::<Result<Vec<_>>>()?;
    let journal = Writer::create(path)?;
    let mut tables = state.tables.clone();
    // Of the tensors under way, what is offered once they are whole.
    let mut patches: BTreeMap<usize, Vec<(u64, Vec<u8>)>> = BTreeMap::new();
    rewrite_all(state, next, rewrite, &mut |made| {
        let index = match &made {
            Made::Patch { index, .. } | Made::Tensor { index, .. } => *index,
        };
        let Some(tensor) = positions.get(index).and_then(|at| manifest.tensors.get_mut(*at)) else {
            return Ok(());
        };
        match made {
            Made::Patch { offset, bytes, .. } => {
                journal.push(Record::Patch { tensor: &tensor.name, offset, bytes: &bytes })?;
                if offering.is_some() {
                    patches.entry(index).or_default().push((offset, bytes));
                }
            }
            Made::Tensor { table, changed, .. } => {
                tensor.digest = table.total();
                tables.insert(tensor.name.clone(), table);
                manifest.changed += changed;
                if let (Some(offering), Some(patches)) = (offering, patches.remove(&index)) {
                    let patches = read_back(tensor, &patches)?;
                    offering.add(tensor, state.checkpoint.named(&tensor.name)?, &patches);
                }
            }
        }
        Ok(())
    })?;
    confirm()?;
    let changed = manifest.changed;
    Ok((stage::seal(journal, &Committed::new(manifest, next.digest), &tables)?, changed))
}

/// The manifest that stands for the version in the replica's state. It names no objects: there are none in a
/// store of ours.
fn successor(state: &State, next: &Foreign<'_>) -> Manifest {
    let mut manifest = state.manifest.clone();
    manifest.base = Some(crate::manifest::Base {
        version: state.applied.version,
        manifest_digest: state.applied.manifest_digest,
    });
    (manifest.run_id, manifest.version, manifest.kind) = (next.run_id, next.version, Kind::Delta);
    manifest.changed = 0;
    manifest
}

/// Where a tensor that a version changes stands in the manifest of the version in front.
///
/// # Errors
/// [`Error::TensorMismatch`] if it is not there.
pub fn position(manifest: &Manifest, name: &str) -> Result<usize> {
    manifest.position(name).ok_or_else(|| {
        Error::mismatch(name, "place in the local checkpoint", "one that the version changes", "none")
    })
}

/// Rewrites all tensors on several threads; what they make is given to `take` on this one.
fn rewrite_all(
    state: &State,
    next: &Foreign<'_>,
    rewrite: &Rewrite<'_>,
    take: &mut dyn FnMut(Made) -> Result<()>,
) -> Result<()> {
    let workers = thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let workers = workers.min(WORKERS_MAX).min(next.tensors.len());
    let queue = AtomicUsize::new(0);
    let mut left = next.tensors.len();
    let work = |out: SyncSender<Result<Made>>| {
        while let Some((index, name)) = {
            let index = queue.fetch_add(1, Ordering::Relaxed);
            next.tensors.get(index).map(|name| (index, *name))
        } {
            let done = rewrite_one(state, index, name, rewrite, &out);
            let failed = done.is_err();
            // The receiver is gone once something else failed.
            if out.send(done).is_err() || failed {
                break;
            }
        }
    };
    thread::scope(|scope| {
        let (out, made) = sync_channel(2 * workers);
        let threads: Vec<_> = (0..workers)
            .map(|_| {
                let out = out.clone();
                let work = &work;
                scope.spawn(move || work(out))
            })
            .collect();
        drop(out);
        let taken = made.into_iter().try_for_each(|made| {
            let made = made?;
            left -= usize::from(matches!(made, Made::Tensor { .. }));
            take(made)
        });
        let whole = threads.into_iter().map(|thread| thread.join().is_ok()).fold(true, |all, ok| all & ok);
        taken?;
        if whole && left == 0 { Ok(()) } else { Err(Error::Internal { what: "rewriting the tensors" }) }
    })
}

fn rewrite_one(
    state: &State,
    index: usize,
    name: &str,
    rewrite: &Rewrite<'_>,
    out: &SyncSender<Result<Made>>,
) -> Result<Made> {
    let tensor = &state.manifest.tensors[position(&state.manifest, name)?];
    let checkpoint: &Checkpoint = &state.checkpoint;
    let base = checkpoint.named(name)?;
    let mut rewriter = Rewriter {
        index,
        name,
        element: tensor.dtype.element(),
        base,
        at: 0,
        blocks: state.tables.get(name).map(|table| table.blocks().to_vec()).unwrap_or_default(),
        changed: 0,
        payload: Vec::new(),
        patch: Patch::new(),
        out: out.clone(),
    };
    rewrite(index, base, &mut rewriter)?;
    rewriter.finish()
}

impl Rewriter<'_> {
    /// Takes the next bytes of the tensor: [`SLICE_BYTES`], or all that are left.
    ///
    /// # Errors
    /// [`Error::TensorMismatch`] for any other number of bytes; [`Error::Codec`]; [`Error::Internal`] once
    /// other work failed.
    pub fn push(&mut self, new: &[u8]) -> Result<()> {
        let expected = SLICE_BYTES.min(self.base.len() - self.at);
        let Some(base) = self.base.get(self.at..self.at + new.len()).filter(|_| new.len() == expected) else {
            return Err(self.mismatch("bytes of a slice", expected, new.len()));
        };
        let offset = self.at;
        self.at += new.len();
        if base == new {
            return Ok(());
        }
        let codec = |source| Error::Codec { tensor: self.name.to_owned(), source };
        // As a tensor of its own; only the changes are of interest here.
        let digests = DigestTable::of(self.element, base).map_err(codec)?;
        self.payload.clear();
        let fast = Profile::Fast;
        let encoded = encode(self.element, base, new, &digests, fast, &mut self.payload).map_err(codec)?;
        decode(self.element, base, &digests, &self.payload, &mut self.patch).map_err(codec)?;
        self.changed += encoded.changed;
        let size = self.element.size();
        let first = offset / size / BLOCK_ELEMENTS;
        for (block, bytes) in (first..).zip(new.chunks(BLOCK_ELEMENTS * size)) {
            if let Some(digest) = self.blocks.get_mut(block) {
                *digest = Digest::of(self.element, (block * BLOCK_ELEMENTS) as u64, bytes);
            }
        }
        let made = Made::Patch { index: self.index, offset: offset as u64, bytes: self.patch.to_bytes() };
        self.out.send(Ok(made)).map_err(|_| Error::Internal { what: "rewriting the tensors" })
    }

    fn finish(self) -> Result<Made> {
        if self.at != self.base.len() {
            return Err(self.mismatch("bytes rewritten", self.base.len(), self.at));
        }
        let bytes: Vec<u8> = self.blocks.iter().flat_map(|digest| digest.to_bytes()).collect();
        let table = DigestTable::from_bytes(&bytes)
            .map_err(|source| Error::Codec { tensor: self.name.to_owned(), source })?;
        Ok(Made::Tensor { index: self.index, table, changed: self.changed })
    }

    fn mismatch(&self, what: &'static str, expected: usize, found: usize) -> Error {
        let (expected, found) = (expected.to_string(), found.to_string());
        Error::TensorMismatch { tensor: self.name.to_owned(), what, expected, found }
    }
}
