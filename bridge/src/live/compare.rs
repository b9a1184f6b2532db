//! Live weights against a checkpoint: each element that this rank has by its map, or a sample, byte for byte.
//!
//! Files are read by calls: one that is made shorter must not end the engine.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::time::{Duration, Instant};

use driftless_store::{ContentDigest, chain_text};
use driftless_transport::checkpoint::Pieces;
use driftless_transport::snapshot::TensorInfo;

use super::layout::{Layout, View};
use super::memory::{Found, Memory, Piece};
use super::reply::{Compared, Names};
use super::{Shared, State};
use crate::error::{Error, Result};

/// Bytes and elements that are compared at a time.
pub(super) const BATCH_BYTES: usize = 8 << 20;
pub(super) const BATCH_ELEMENTS: usize = 4 << 20;

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
                    batch.compare(layout, memory, &mut self.pairs)?;
                }
                let Pair { place, tensor, .. } = &self.pairs[number];
                let into = batch.add(number, &among, width);
                self.bytes += into.len() as u64;
                self.checkpoint.read(*tensor, among.start * width, into).map_err(unread(place))?;
            }
        }
        batch.compare(layout, memory, &mut self.pairs)?;
        for pair in &self.pairs {
            let seen = &mut self.seen[pair.tensor];
            let found = if pair.differs { DIFFERS } else { EQUAL };
            // A tied head may have the form of several tensors, of which one has to equal it.
            *seen = if *seen <= EQUAL { found.max(*seen) } else { found };
        }
        Ok(())
    }

    /// Which elements of a pair are compared, a piece at a time.
    fn ranges(&self, layout: &Layout, number: usize) -> Result<Vec<Range<u64>>> {
        let place = &self.pairs[number].place;
        let width = place.dtype.size();
        let views: Vec<&View> = layout.places(place)?.map(|(_, view)| view).collect();
        if let Some(number) = self.sample {
            let (turn, places) = (number / views.len().max(1) as u64, views.len().max(1));
            let sample = views.get((number % places as u64) as usize).map(|view| sample(view, width, turn));
            return Ok(sample.into_iter().collect());
        }
        let step = (BATCH_BYTES as u64 / width).min(BATCH_ELEMENTS as u64);
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

fn unread(place: &TensorInfo) -> impl FnOnce(driftless_transport::Error) -> Error {
    let what = format!("tensor {}", place.name);
    move |error| Error::live(what, "readable in the checkpoint", chain_text(&error))
}

/// Pieces that are compared together.
#[derive(Default)]
struct Batch {
    pieces: Vec<Read>,
    bytes: Vec<u8>,
    elements: u64,
}

/// A piece that was read, of the pair of this number.
struct Read {
    pair: usize,
    among: Range<u64>,
    bytes: Range<usize>,
}

impl Read {
    /// The piece, whose bytes begin at a place.
    fn piece<'a>(&self, at: usize, pairs: &'a [Pair]) -> Piece<'a> {
        let (first, elements) = (self.among.start, self.among.end - self.among.start);
        Piece { info: &pairs[self.pair].place, first, elements, at }
    }
}

impl Batch {
    fn has_room(&self, among: &Range<u64>, width: u64) -> bool {
        let elements = among.end - among.start;
        let end = self.bytes.len().next_multiple_of(8) as u64 + elements * width;
        end <= BATCH_BYTES as u64 && self.elements + elements <= BATCH_ELEMENTS as u64
    }

    /// Room for a piece's bytes.
    fn add(&mut self, pair: usize, among: &Range<u64>, width: u64) -> &mut [u8] {
        let elements = among.end - among.start;
        let start = self.bytes.len().next_multiple_of(8);
        let bytes = start..start + (elements * width) as usize;
        self.bytes.resize(bytes.end, 0);
        self.elements += elements;
        self.pieces.push(Read { pair, among: among.clone(), bytes: bytes.clone() });
        &mut self.bytes[bytes]
    }

    /// Compares the pieces, and forgets them.
    fn compare(&mut self, layout: &Layout, memory: &mut dyn Memory, pairs: &mut [Pair]) -> Result<()> {
        let all: Vec<_> = self.pieces.iter().map(|read| read.piece(read.bytes.start, pairs)).collect();
        if !all.is_empty() && memory.compare(layout, &all, &self.bytes)? != Found::default() {
            // Which they are, each says by itself.
            for read in &self.pieces {
                let one = [read.piece(0, pairs)];
                let found = memory.compare(layout, &one, &self.bytes[read.bytes.clone()])?;
                pairs[read.pair].differs |= found.others > 0;
            }
        }
        self.pieces.clear();
        self.bytes.clear();
        self.elements = 0;
        Ok(())
    }
}

#[cfg(test)]
pub(super) mod tests;
