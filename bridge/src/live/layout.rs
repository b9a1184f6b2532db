//! Where a model keeps the elements of its checkpoint's tensors.

use std::collections::BTreeMap;
use std::ops::Range;

use driftless_transport::Dtype;
use driftless_transport::snapshot::TensorInfo;
use driftless_transport::tied::is_head;

use crate::error::{Error, Result};

/// Dimensions of a view, once those that follow each other without a gap are one.
pub(super) const DIMS_MAX: usize = 4;

/// Values that an element of 16 bits may have.
const TABLE_VALUES: u64 = 1 << 16;

/// A storage of the model, all of it.
#[derive(Debug, Clone)]
pub struct LiveTensor {
    /// A parameter or buffer in it.
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Where it begins, in the memory of the host or of the device.
    pub address: u64,
    /// How long it is.
    pub bytes: u64,
}

/// What a storage has in the place of each value of a tensor whose elements have 16 bits, in the order of those bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LiveTable {
    /// Where it begins, in the memory that the storage lies in.
    pub address: u64,
    /// How long it is.
    pub bytes: u64,
}

/// A view of a tensor: its offset, and its stride in each dimension, in elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Strides {
    /// Where the view begins.
    pub offset: u64,
    /// Of each dimension, how far its elements are from each other.
    pub strides: Vec<u64>,
}

/// A view of a checkpoint's tensor, which is row-major, that a storage of the model holds.
#[derive(Debug, Clone)]
pub struct LiveCopy {
    /// The tensor, an index of those that [`Layout::new`] is given.
    pub tensor: usize,
    /// The storage, likewise.
    pub live: usize,
    /// The extent of each dimension of the view.
    pub size: Vec<u64>,
    /// The view in the tensor.
    pub from: Strides,
    /// The view in the storage.
    pub to: Strides,
    /// What is made of each element; `None`: it stays as it is.
    pub table: Option<LiveTable>,
}

/// Which element of which tensor lies where.
#[derive(Debug)]
pub struct Layout {
    tensors: BTreeMap<String, Placed>,
    live: Vec<LiveTensor>,
    pub(super) ties_head: bool,
}

/// A tensor of the checkpoint, and the places of its copies.
#[derive(Debug)]
struct Placed {
    info: TensorInfo,
    places: Vec<Place>,
}

/// Where a copy lies.
#[derive(Debug)]
pub(super) struct Place {
    live: usize,
    pub(super) view: View,
    /// Address of the table that its elements go through, or 0.
    pub(super) table: u64,
}

impl Layout {
    /// The layout of a model that has `copies` of the tensors of its checkpoint in `live`.
    ///
    /// # Errors
    /// [`Error::Live`] for copies that are not within both tensors, have another dtype than their storage without a
    /// table for it, or whose elements' places do not tell which they are.
    ///
    /// # Safety
    /// Each storage stays where it is, readable and writable, for as long as the layout and what is made with
    /// it lives. No element of a storage belongs to two copies. Nothing but the engine, between two patches,
    /// writes to a storage. Each table stays where it is likewise, and nothing writes to it.
    #[allow(unsafe_code, reason = "the contract is the caller's: addresses are used later")]
    pub unsafe fn new(
        tensors: Vec<TensorInfo>,
        live: Vec<LiveTensor>,
        copies: Vec<LiveCopy>,
    ) -> Result<Self> {
        let mut places: Vec<Vec<Place>> = tensors.iter().map(|_| Vec::new()).collect();
        for copy in &copies {
            let (Some(info), Some(storage)) = (tensors.get(copy.tensor), live.get(copy.live)) else {
                let found = format!("tensor {} in storage {}", copy.tensor, copy.live);
                return Err(Error::live("a copy", "of a tensor, in a storage", found));
            };
            let subject = || format!("the copy of {} in {}", info.name, storage.name);
            let table = table_of(copy, info.dtype, storage.dtype)
                .map_err(|expected| Error::live(subject(), expected, form(copy.table, storage.dtype)))?;
            let elements =
                info.elements().map_err(|error| Error::live(subject(), "a shape", error.to_string()))?;
            let held = storage.bytes / storage.dtype.size();
            let view = View::new(copy).filter(|view| view.fits(elements, held)).ok_or_else(|| {
                let expected =
                    format!("at most {DIMS_MAX} nested dimensions, of {elements} elements in {held}");
                let found = format!("size {:?} from {:?} to {:?}", copy.size, copy.from, copy.to);
                Error::live(subject(), expected, found)
            })?;
            places[copy.tensor].push(Place { live: copy.live, view, table });
        }
        let placed = tensors.into_iter().zip(places);
        let tensors = placed.map(|(info, places)| (info.name.clone(), Placed { info, places })).collect();
        Ok(Self { tensors, live, ties_head: false })
    }

    /// The layout of a model that takes its word embeddings for its output head, if `ties`. Versions may have the head
    /// by its own name, which is none of the layout's tensors: it has no place.
    #[must_use]
    pub fn with_tied_head(self, ties: bool) -> Self {
        Self { ties_head: ties, ..self }
    }

    /// Whether a tensor is the output head of a model that has none of its own.
    pub(super) fn is_tied_head(&self, name: &str) -> bool {
        self.ties_head && is_head(name) && !self.tensors.contains_key(name)
    }

    /// Whether the model's checkpoint has this tensor, in this form.
    pub(super) fn has(&self, info: &TensorInfo) -> bool {
        self.tensors.get(&info.name).is_some_and(|placed| placed.info == *info)
    }

    /// Where a tensor's copies lie: each storage, and the place in it.
    ///
    /// # Errors
    /// [`Error::Live`] for a tensor that the model's checkpoint has not, or not in this form.
    pub(super) fn places(&self, info: &TensorInfo) -> Result<impl Iterator<Item = (&LiveTensor, &Place)>> {
        let describe = |info: &TensorInfo| format!("{} {:?}", info.dtype, info.shape);
        let known = self.tensors.get(&info.name);
        let Some(placed) = known.filter(|placed| placed.info == *info) else {
            let expected = known.map_or("a tensor of the model".into(), |placed| describe(&placed.info));
            return Err(Error::live(format!("tensor {}", info.name), &expected, describe(info)));
        };
        Ok(placed.places.iter().filter_map(|place| Some((self.live.get(place.live)?, place))))
    }

    /// The tensors of the model's checkpoint that are here, or parts of them.
    pub(super) fn held(&self) -> impl Iterator<Item = &TensorInfo> {
        self.tensors.values().filter(|placed| !placed.places.is_empty()).map(|placed| &placed.info)
    }

    /// Copies that there are.
    #[cfg(feature = "cuda")]
    pub(super) fn copies(&self) -> usize {
        self.tensors.values().map(|placed| placed.places.len()).sum()
    }
}

/// Address of the table that a copy's elements go through, or 0.
///
/// # Errors
/// What should be instead of a copy between these dtypes, or of its table.
fn table_of(copy: &LiveCopy, tensor: Dtype, storage: Dtype) -> std::result::Result<u64, String> {
    match copy.table {
        None if tensor == storage => Ok(0),
        None => Err(tensor.name().to_owned()),
        Some(_) if tensor.size() != 2 => Err(format!("no table, for {tensor} has no 16 bits")),
        Some(table) if matches!(storage.size(), 2 | 4) && table.bytes == TABLE_VALUES * storage.size() => {
            Ok(table.address)
        }
        Some(_) => Err(format!("a table of {TABLE_VALUES} values of 2 or 4 bytes")),
    }
}

/// What a copy goes to.
fn form(table: Option<LiveTable>, storage: Dtype) -> String {
    table.map_or_else(
        || storage.name().into(),
        |table| format!("a table of {} bytes for {storage}", table.bytes),
    )
}

/// A copy between two strided views of the same sizes, in which an element's place tells its index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct View {
    pub(super) from: u64,
    pub(super) to: u64,
    /// Stride in the tensor, size, stride in the live one; of the largest stride in the tensor first.
    pub(super) dims: Vec<[u64; 3]>,
}

impl View {
    fn new(copy: &LiveCopy) -> Option<Self> {
        let LiveCopy { size, from, to, .. } = copy;
        if size.len() != from.strides.len() || size.len() != to.strides.len() || size.contains(&0) {
            return None;
        }
        let strides = from.strides.iter().zip(&to.strides);
        let dims = size.iter().zip(strides).map(|(size, (from, to))| [*from, *size, *to]);
        let mut dims: Vec<_> = dims.filter(|[_, size, _]| *size != 1).collect();
        dims.sort_unstable();
        let mut extent = 1u64;
        for [stride, size, _] in &dims {
            if *stride < extent {
                return None;
            }
            extent = stride.checked_mul(size - 1)?.checked_add(extent)?;
        }
        // Two dimensions that follow each other without a gap in both are one.
        let mut joined: Vec<[u64; 3]> = Vec::new();
        for [from, size, to] in dims {
            match joined.last_mut() {
                Some([inner, extent, step])
                    if from == *inner * *extent && Some(to) == step.checked_mul(*extent) =>
                {
                    *extent *= size;
                }
                _ => joined.push([from, size, to]),
            }
        }
        joined.reverse();
        (joined.len() <= DIMS_MAX).then_some(Self { from: from.offset, to: to.offset, dims: joined })
    }

    /// The elements of the tensor that it begins and ends with.
    pub(super) fn span(&self) -> Range<u64> {
        self.from..self.from + span(&self.dims)
    }

    /// The same view of the tensor from an element on, if that is one that a row begins with, or lies before them all.
    #[cfg(feature = "cuda")]
    pub(super) fn from(&self, first: u64) -> Option<Self> {
        let Some(skipped) = first.checked_sub(self.from) else {
            return Some(Self { from: self.from - first, ..self.clone() });
        };
        let ([stride, size, step], inner) = self.dims.split_first()?;
        let rows = skipped / stride;
        let dims = std::iter::once([*stride, size.checked_sub(rows)?, *step]).chain(inner.iter().copied());
        let view = Self { from: 0, to: self.to + rows * step, dims: dims.collect() };
        (skipped % stride == 0 && rows < *size).then_some(view)
    }

    /// Of its elements that are among some of the tensor, each unbroken run: where it begins in the tensor, where in
    /// the storage, and how many it has.
    pub(super) fn runs(&self, among: &Range<u64>, each: &mut dyn FnMut(u64, u64, u64)) {
        runs(&self.dims, (self.from, self.to), among, each);
    }

    /// Whether it lies within a tensor and a storage of so many elements.
    fn fits(&self, elements: u64, held: u64) -> bool {
        let last = |offset: u64, which: usize| {
            let reach = |sum: u64, dim: &[u64; 3]| sum.checked_add(dim[which].checked_mul(dim[1] - 1)?);
            self.dims.iter().try_fold(offset, reach)
        };
        last(self.from, 0).is_some_and(|last| last < elements)
            && last(self.to, 2).is_some_and(|last| last < held)
    }
}

/// Elements from the first to the last of nested dimensions.
fn span(dims: &[[u64; 3]]) -> u64 {
    dims.iter().map(|[stride, size, _]| stride * (size - 1)).sum::<u64>() + 1
}

/// [`View::runs`] of the dimensions from a place on.
fn runs(dims: &[[u64; 3]], at: (u64, u64), among: &Range<u64>, each: &mut dyn FnMut(u64, u64, u64)) {
    let (from, to) = at;
    match dims {
        [] if among.contains(&from) => each(from, to, 1),
        [] => {}
        [[1, size, 1]] => {
            let (start, end) = (from.max(among.start), (from + size).min(among.end));
            if start < end {
                each(start, to + start - from, end - start);
            }
        }
        [[stride, size, step], inner @ ..] => {
            let first = among.start.saturating_sub(from + span(inner) - 1).div_ceil(*stride);
            let end = among.end.saturating_sub(from).div_ceil(*stride).min(*size);
            for index in first..end {
                runs(inner, (from + index * stride, to + index * step), among, each);
            }
        }
    }
}
