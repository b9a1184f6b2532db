//! Live weights against a checkpoint: each element that this rank has by its map, or a sample, byte for byte.
//!
//! Files are read by calls: one that is made shorter must not end the engine.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use driftless_store::{ContentDigest, chain_text};
use driftless_transport::checkpoint::Pieces;
use driftless_transport::snapshot::TensorInfo;

use super::layout::{Layout, View};
use super::memory::{Found, Memory, Piece};
use super::reply::{Compared, Names};
use super::{Shared, State};
use crate::error::{Error, Result};

/// Bytes and elements that are compared at a time. Memory has room for them.
pub(super) const BATCH_BYTES: usize = 8 << 20;
pub(super) const BATCH_ELEMENTS: usize = 4 << 20;

/// Threads that read them, and bytes that one reads at a time.
const READERS_MAX: usize = 4;
const READ_BYTES: usize = 1 << 20;

/// A sample has a piece of so many tensors, and so many bytes of each: 16 MiB in all, which take about 10 ms. Other weights
/// differ nearly everywhere, so one look finds them.
const SAMPLE_TENSORS: usize = 512;
const SAMPLE_BYTES: u64 = 32 << 10;

// What is known of a tensor of the checkpoint. The least of all ranks' is what becomes of it.
const DIFFERS: u8 = 0;
const EQUAL: u8 = 1;
/// It is no part of the sample.
const PASSED: u8 = 2;
/// The map does not have it, or not at this rank.
const UNREACHED: u8 = 3;

/// What is compared.
pub(super) struct Wanted<'a> {
    pub(super) label: &'a str,
    pub(super) directory: &'a Path,
    /// `None` is all; otherwise the number of the sample.
    pub(super) sample: Option<u64>,
}

impl Shared {
    /// See [`LiveModel::compare`](super::LiveModel::compare).
    pub(super) fn compare(
        &self,
        wanted: &Wanted<'_>,
        mut agree: impl FnMut(Vec<u8>) -> Vec<u8>,
    ) -> Result<Compared> {
        let began = Instant::now();
        let mut state = self.state();
        let State { layout, memory, .. } = &mut *state;
        let opened = Comparing::open(layout, wanted);
        let all = agree(vec![opened.is_ok().into()]) == [1];
        let mut comparison = opened?;
        if !all {
            return Err(another_rank());
        }
        let table = comparison.table();
        if agree(table.clone()) != table {
            return Err(Error::live("the checkpoint", "the same at each rank", "others"));
        }
        let done = comparison.run(layout, &mut **memory);
        let mut said = vec![u8::from(done.is_ok())];
        said.append(&mut comparison.seen);
        let mut agreed = agree(said).into_iter();
        done?;
        if agreed.next() != Some(1) {
            return Err(another_rank());
        }
        comparison.seen = agreed.collect();
        Ok(comparison.report(wanted.label, began.elapsed()))
    }
}

fn another_rank() -> Error {
    Error::live("the weights of each rank", "compared", "some that are not, as their rank's own log says")
}

/// A comparison under way at a rank.
struct Comparing {
    checkpoint: Pieces,
    pairs: Vec<Pair>,
    sample: Option<u64>,
    /// Of each tensor of the checkpoint, what is known.
    seen: Vec<u8>,
    bytes: u64,
}

/// A tensor of the checkpoint, and the one of the map whose places should have it.
struct Pair {
    tensor: usize,
    place: TensorInfo,
    differs: bool,
}

impl Comparing {
    /// Pairs the tensors of a checkpoint with those of the map that this rank has.
    ///
    /// # Errors
    /// [`Error::Open`] for a checkpoint that cannot be read, [`Error::Live`] for one of another model.
    fn open(layout: &Layout, wanted: &Wanted<'_>) -> Result<Self> {
        let fail = |source: driftless_transport::Error| Error::Open {
            path: wanted.directory.into(),
            source: source.into(),
        };
        let checkpoint = Pieces::open(wanted.directory).map_err(fail)?;
        let mut missing: BTreeMap<&str, &TensorInfo> =
            layout.held().map(|info| (info.name.as_str(), info)).collect();
        let mut pairs = Vec::new();
        for (tensor, info) in checkpoint.tensors().iter().enumerate() {
            let pair = |place: &TensorInfo| Pair { tensor, place: place.clone(), differs: false };
            if layout.is_tied_head(&info.name) {
                // The model takes its word embeddings for it, which have its form.
                let alike = |held: &&TensorInfo| (held.dtype, &held.shape) == (info.dtype, &info.shape);
                pairs.extend(layout.held().filter(alike).map(pair));
            } else if missing.remove(info.name.as_str()).is_some() {
                // In another form it is another model's.
                let _ = layout.places(info)?;
                pairs.push(pair(info));
            }
        }
        if let Some(name) = missing.keys().next() {
            let found = format!("none in {}", wanted.directory.display());
            return Err(Error::live(format!("tensor {name}"), "in the checkpoint", found));
        }
        let seen = vec![UNREACHED; checkpoint.tensors().len()];
        let mut comparison = Self { checkpoint, pairs, sample: wanted.sample, seen, bytes: 0 };
        comparison.choose();
        Ok(comparison)
    }

    /// Leaves out the tensors that are no part of the sample.
    fn choose(&mut self) {
        let Some(number) = self.sample else { return };
        let every = self.pairs.len().div_ceil(SAMPLE_TENSORS).max(1) as u64;
        self.sample = Some(number / every);
        let mut index = 0;
        self.pairs.retain(|pair| {
            let stays = index % every == number % every;
            index += 1;
            if !stays {
                self.seen[pair.tensor] = PASSED;
            }
            stays
        });
    }

    /// What all ranks have to agree on: a digest of the checkpoint's tensors and its complement, of which the least is
    /// the same only where all are.
    fn table(&self) -> Vec<u8> {
        let forms = self.checkpoint.tensors().iter().map(|info| format!("{:?}", info.form()));
        let digest = ContentDigest::of(forms.collect::<Vec<_>>().join("\n").as_bytes());
        let bytes = digest.as_bytes();
        bytes.iter().copied().chain(bytes.iter().map(|byte| !byte)).collect()
    }

    fn run(&mut self, layout: &Layout, memory: &mut dyn Memory) -> Result<()> {
        let mut batch = Batch::default();
        for number in 0..self.pairs.len() {
            for among in self.ranges(layout, number)? {
                if self.pairs[number].differs {
                    break;
                }
                let width = self.pairs[number].place.dtype.size();
                if !batch.has_room(&among, width) {
                    self.compare_batch(&mut batch, layout, memory)?;
                }
                batch.add(number, among, width);
            }
        }
        self.compare_batch(&mut batch, layout, memory)?;
        for pair in &self.pairs {
            let seen = &mut self.seen[pair.tensor];
            let found = if pair.differs { DIFFERS } else { EQUAL };
            // A tied head may have the form of several tensors, of which one has to equal it.
            *seen = if *seen <= EQUAL { found.max(*seen) } else { found };
        }
        Ok(())
    }

    /// Reads and compares pieces, and forgets them.
    fn compare_batch(&mut self, batch: &mut Batch, layout: &Layout, memory: &mut dyn Memory) -> Result<()> {
        let Batch { reads, .. } = std::mem::take(batch);
        self.bytes += reads.iter().map(|read| read.bytes.len() as u64).sum::<u64>();
        self.read(&reads, memory.room()?)?;
        let pieces: Vec<_> = reads.iter().map(|read| read.piece(&self.pairs)).collect();
        if pieces.is_empty() || memory.compare(layout, &pieces)? == Found::default() {
            return Ok(());
        }
        // Which they are, each says by itself.
        for read in &reads {
            let others = memory.compare(layout, &[read.piece(&self.pairs)])?.others;
            self.pairs[read.pair].differs |= others > 0;
        }
        Ok(())
    }

    /// Reads pieces to their places, by several threads.
    fn read(&self, reads: &[Read], room: &mut [u8]) -> Result<()> {
        let (mut jobs, mut rest, mut end) = (Vec::new(), room, 0);
        for read in reads {
            let Pair { tensor, place, .. } = &self.pairs[read.pair];
            let (_, behind) = rest.split_at_mut(read.bytes.start - end);
            let (into, behind) = behind.split_at_mut(read.bytes.len());
            (rest, end) = (behind, read.bytes.end);
            let first = read.among.start * place.dtype.size();
            let offsets = (first..).step_by(READ_BYTES);
            jobs.extend(
                offsets.zip(into.chunks_mut(READ_BYTES)).map(|(offset, into)| (*tensor, offset, into)),
            );
        }
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let threads = cores.min(READERS_MAX).min(jobs.len());
        let jobs = Mutex::new(jobs.into_iter());
        let work = || {
            // The lock is let go before the bytes are read.
            let next = || jobs.lock().unwrap_or_else(PoisonError::into_inner).next();
            while let Some((tensor, offset, into)) = next() {
                self.checkpoint.read(tensor, offset, into).map_err(|source| self.unread(tensor, &source))?;
            }
            Ok(())
        };
        thread::scope(|scope| {
            let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
            let ended = others.into_iter().map(thread::ScopedJoinHandle::join);
            ended.fold(work(), |done, ended| match ended {
                Ok(more) => done.and(more),
                Err(panic) => std::panic::resume_unwind(panic),
            })
        })
    }

    fn unread(&self, tensor: usize, source: &driftless_transport::Error) -> Error {
        let name = &self.checkpoint.tensors()[tensor].name;
        Error::live(format!("tensor {name}"), "readable in the checkpoint", chain_text(source))
    }

    /// Which elements of a pair are compared, a piece at a time.
    fn ranges(&self, layout: &Layout, number: usize) -> Result<Vec<Range<u64>>> {
        let place = &self.pairs[number].place;
        let width = place.dtype.size();
        let views: Vec<&View> = layout.places(place)?.map(|(_, place)| &place.view).collect();
        if let Some(number) = self.sample {
            let (turn, places) = (number / views.len().max(1) as u64, views.len().max(1));
            let sample = views.get((number % places as u64) as usize).map(|view| sample(view, width, turn));
            return Ok(sample.into_iter().collect());
        }
        // Of rows that are parts of the tensor's, pieces begin with one.
        let rows = views.iter().filter_map(|view| Some(view.dims.first()?[0])).max().unwrap_or(1);
        let most = (BATCH_BYTES as u64 / width).min(BATCH_ELEMENTS as u64);
        let step = if rows <= most { most - most % rows } else { most };
        let spans: Vec<_> = views.iter().map(|view| view.span()).collect();
        let (first, end) =
            spans.iter().fold((u64::MAX, 0), |(first, end), span| (first.min(span.start), end.max(span.end)));
        let pieces = (first..end).step_by(step as usize).map(|start| start..end.min(start + step));
        let touched =
            |among: &Range<u64>| spans.iter().any(|span| span.start < among.end && among.start < span.end);
        Ok(pieces.filter(touched).collect())
    }

    fn report(self, label: &str, took: Duration) -> Compared {
        let named = |state: u8| {
            let infos = self.checkpoint.tensors().iter().zip(&self.seen);
            Names::of(infos.filter(|(_, seen)| **seen == state).map(|(info, _)| info.name.as_str()))
        };
        let (differing, unreached) = (named(DIFFERS), named(UNREACHED));
        let tensors = self.seen.iter().filter(|seen| **seen <= EQUAL).count() as u64;
        let took_us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        Compared { label: label.to_owned(), tensors, bytes: self.bytes, differing, unreached, took_us }
    }
}

/// A piece of a view, which begins with one of its elements: another one each turn.
fn sample(view: &View, width: u64, turn: u64) -> Range<u64> {
    let (span, elements) = (view.span(), SAMPLE_BYTES / width);
    let pieces = (span.end - span.start).div_ceil(elements);
    let [stride, size, _] = view.dims.first().copied().unwrap_or([1, 1, 1]);
    let row = u128::from(turn % pieces) * u128::from(size) / u128::from(pieces);
    let start = span.start + row as u64 * stride;
    start..span.end.min(start + elements)
}

/// Pieces that are compared together.
#[derive(Default)]
struct Batch {
    reads: Vec<Read>,
    bytes: usize,
    elements: u64,
}

/// A piece of the pair of this number, and where its bytes go.
struct Read {
    pair: usize,
    among: Range<u64>,
    bytes: Range<usize>,
}

impl Read {
    fn piece<'a>(&self, pairs: &'a [Pair]) -> Piece<'a> {
        let (first, elements) = (self.among.start, self.among.end - self.among.start);
        Piece { info: &pairs[self.pair].place, first, elements, at: self.bytes.start }
    }
}

impl Batch {
    fn has_room(&self, among: &Range<u64>, width: u64) -> bool {
        let elements = among.end - among.start;
        let end = self.bytes.next_multiple_of(8) as u64 + elements * width;
        end <= BATCH_BYTES as u64 && self.elements + elements <= BATCH_ELEMENTS as u64
    }

    fn add(&mut self, pair: usize, among: Range<u64>, width: u64) {
        let elements = among.end - among.start;
        let start = self.bytes.next_multiple_of(8);
        let bytes = start..start + (elements * width) as usize;
        (self.bytes, self.elements) = (bytes.end, self.elements + elements);
        self.reads.push(Read { pair, among, bytes });
    }
}

#[cfg(test)]
pub(super) mod tests;
