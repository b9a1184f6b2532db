//! Prepared deltas written into the weights of a model that is live: found, compared with what is there,
//! written, taken back.

use crate::error;
use crate::tensor::Borrowed;
use driftless::transport::Dtype;
use driftless::transport::prepared::{self, PreparedChanges};
use pyo3::prelude::*;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

/// Calls a function for elements of so many bytes.
macro_rules! each_width {
    ($width:expr, $function:ident($($argument:expr),*)) => {
        match $width {
            1 => $function::<1>($($argument),*),
            2 => $function::<2>($($argument),*),
            4 => $function::<4>($($argument),*),
            _ => $function::<8>($($argument),*),
        }
    };
}

/// See the stub.
#[pyclass(frozen, module = "driftless")]
pub(crate) struct PreparedDelta(prepared::PreparedDelta);

/// A copy of a tensor's view into a live tensor: the tensor's index, the live one's index, the sizes of both
/// views, and of each its offset and strides, in elements.
type Copy = (usize, usize, Vec<u64>, (u64, Vec<u64>), (u64, Vec<u64>));

#[pymethods]
impl PreparedDelta {
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        py.detach(|| prepared::PreparedDelta::open(&path)).map(Self).map_err(error::transport)
    }

    #[getter]
    fn base(&self) -> (String, String) {
        let version = self.0.base();
        (version.label.clone(), version.manifest.to_string())
    }

    #[getter]
    fn target(&self) -> (String, String) {
        let version = self.0.target();
        (version.label.clone(), version.manifest.to_string())
    }

    fn tensors(&self) -> Vec<(String, String, Vec<u64>, usize)> {
        let row = |(index, info): (usize, &driftless::transport::snapshot::TensorInfo)| {
            let changed = self.0.changes(index).positions.len();
            (info.name.clone(), info.dtype.to_string(), info.shape.clone(), changed)
        };
        self.0.tensors().iter().enumerate().map(row).collect()
    }

    fn prepare(
        &self,
        py: Python<'_>,
        live: Vec<(String, Bound<'_, PyAny>)>,
        copies: Vec<Copy>,
    ) -> PyResult<Patch> {
        let live = live
            .into_iter()
            .map(|(name, tensor)| Borrowed::writable(name, &tensor))
            .collect::<PyResult<Vec<_>>>()?;
        py.detach(|| {
            let jobs = copies
                .iter()
                .map(|copy| self.job(copy, &live))
                .filter(|job| !job.as_ref().is_ok_and(|job| job.positions.is_empty()))
                .collect::<PyResult<Vec<_>>>()?;
            let elements = jobs.iter().map(|job| job.positions.len()).sum();
            Ok(Patch { elements, work: Mutex::new((live, jobs)) })
        })
    }
}

impl PreparedDelta {
    /// What one copy changes in its live tensor, which has the old values.
    fn job(&self, (index, target, size, from, to): &Copy, live: &[Borrowed]) -> PyResult<Job> {
        let (Some(info), Some(tensor)) = (self.0.tensors().get(*index), live.get(*target)) else {
            let found = format!("tensor {index} into live tensor {target}");
            return Err(error::usage("copies", "indices of the delta's and the live tensors", &found));
        };
        if tensor.info.dtype != info.dtype {
            let (expected, found) = (info.dtype.name(), tensor.info.dtype.name());
            return Err(error::tensor(&info.name, "the live dtype", expected, found));
        }
        let width = info.dtype.size() as usize;
        let elements = (tensor.bytes().len() / width) as u64;
        let view = View::new(size, from, to).filter(|view| view.fits(elements));
        let Some(view) = view else {
            let expected = format!("views without overlaps, of a live tensor of {elements} elements");
            let found = format!("size {size:?}, from {from:?} to {to:?}");
            return Err(error::tensor(&info.name, "a copy of it", &expected, &found));
        };
        let (positions, new, old) = Default::default();
        let mut job = Job { live: *target, dtype: info.dtype, positions, new, old };
        view.locate(&self.0.changes(*index), width, &mut job);
        match each_width!(width, differing(tensor.bytes(), &job.positions, &job.old)) {
            None => Ok(job),
            Some(at) => Err(error::own(
                "RefusedError",
                format!(
                    "tensor `{}`: the live weights are not those of {}, or lie elsewhere: element {at} of `{}` differs",
                    info.name,
                    self.0.base().label,
                    tensor.info.name
                ),
            )),
        }
    }
}

/// See the stub.
#[pyclass(frozen, module = "driftless")]
pub(crate) struct Patch {
    #[pyo3(get)]
    elements: usize,
    work: Mutex<(Vec<Borrowed>, Vec<Job>)>,
}

#[pymethods]
impl Patch {
    fn apply(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| {
            let mut work = self.work.lock().unwrap_or_else(PoisonError::into_inner);
            let (live, jobs) = &mut *work;
            for (number, job) in jobs.iter().enumerate() {
                let written = job.write(live, &job.old, &job.new, job.positions.len());
                if written < job.positions.len() {
                    let done = jobs.iter().take(number).map(|job| (job, job.positions.len()));
                    done.chain([(job, written)]).for_each(|(job, count)| {
                        job.write(live, &job.new, &job.old, count);
                    });
                    let name = live.get(job.live).map_or("", |live| &live.info.name);
                    let text = format!(
                        "`{name}` changed after the delta was prepared; all of it has its values again"
                    );
                    return Err(error::own("RefusedError", text));
                }
            }
            Ok(())
        })
    }
}

/// What changes in one live tensor.
struct Job {
    live: usize,
    dtype: Dtype,
    positions: Vec<u32>,
    new: Vec<u8>,
    old: Vec<u8>,
}

impl Job {
    /// Has the first `count` elements go from one value to another, up to one that does not have the first;
    /// returns how many.
    fn write(&self, live: &mut [Borrowed], from: &[u8], to: &[u8], count: usize) -> usize {
        let Some(tensor) = live.get_mut(self.live) else { return 0 };
        let positions = self.positions.get(..count).unwrap_or_default();
        each_width!(self.dtype.size() as usize, exchange(tensor.bytes_mut(), positions, from, to))
    }
}

/// The first position whose live value is not the one expected.
fn differing<const W: usize>(live: &[u8], positions: &[u32], expected: &[u8]) -> Option<u32> {
    let (live, expected) = (live.as_chunks::<W>().0, expected.as_chunks::<W>().0);
    let mut pairs = positions.iter().zip(expected);
    pairs.find(|(at, expected)| live.get(**at as usize) != Some(*expected)).map(|(at, _)| *at)
}

/// Elements that are compared before any of them is written: stores that miss the caches go one after the
/// other, loads side by side.
const TOGETHER: usize = 512;

/// Writes `to` where `from` is, in order, and ends before the first few elements of which one is not `from`;
/// returns how many were written.
fn exchange<const W: usize>(live: &mut [u8], positions: &[u32], from: &[u8], to: &[u8]) -> usize {
    let mut written = 0;
    for ((positions, from), to) in
        positions.chunks(TOGETHER).zip(from.chunks(TOGETHER * W)).zip(to.chunks(TOGETHER * W))
    {
        if differing::<W>(live, positions, from).is_some() {
            break;
        }
        let live = live.as_chunks_mut::<W>().0;
        for (at, new) in positions.iter().zip(to.as_chunks::<W>().0) {
            if let Some(element) = live.get_mut(*at as usize) {
                *element = *new;
            }
        }
        written += positions.len();
    }
    written
}

/// A copy between two strided views of the same sizes.
struct View {
    from: u64,
    to: u64,
    /// Stride in the tensor, size, stride in the live one; of the largest stride in the tensor first.
    dims: Vec<(u64, u64, u64)>,
}

impl View {
    /// `None` for views in which an element's place does not tell its index.
    fn new(size: &[u64], from: &(u64, Vec<u64>), to: &(u64, Vec<u64>)) -> Option<Self> {
        if size.len() != from.1.len() || size.len() != to.1.len() || size.contains(&0) {
            return None;
        }
        let dims = size.iter().zip(from.1.iter().zip(&to.1)).map(|(size, (from, to))| (*from, *size, *to));
        let mut dims: Vec<_> = dims.filter(|(_, size, _)| *size != 1).collect();
        dims.sort_unstable();
        let mut extent = 1u64;
        for (stride, size, _) in &dims {
            if *stride < extent {
                return None;
            }
            extent = stride.checked_mul(size - 1)?.checked_add(extent)?;
        }
        // Two dimensions that follow each other without a gap in both are one.
        let mut joined: Vec<(u64, u64, u64)> = Vec::new();
        for (from, size, to) in dims {
            match joined.last_mut() {
                Some(inner) if from == inner.0 * inner.1 && Some(to) == inner.2.checked_mul(inner.1) => {
                    inner.1 *= size;
                }
                _ => joined.push((from, size, to)),
            }
        }
        joined.reverse();
        Some(Self { from: from.0, to: to.0, dims: joined })
    }

    /// Whether it lies within a live tensor of so many elements, whose positions have 32 bits.
    fn fits(&self, elements: u64) -> bool {
        let reach = |sum: u64, (_, size, to): &(u64, u64, u64)| sum.checked_add(to.checked_mul(size - 1)?);
        let last = self.dims.iter().try_fold(self.to, reach);
        last.is_some_and(|last| last < elements && u32::try_from(last).is_ok())
    }

    /// Adds the changes that it holds to `job`, at their live positions.
    fn locate(&self, changes: &PreparedChanges<'_>, width: usize, job: &mut Job) {
        let position = |at: &[u8; 4]| u64::from(u32::from_le_bytes(*at));
        let values = |bytes: &[u8], from: usize, to: usize| bytes[from * width..to * width].to_vec();
        if let [] | [(1, _, 1)] = self.dims[..] {
            let end = self.from + self.dims.first().map_or(1, |(_, size, _)| *size);
            let first = changes.positions.partition_point(|at| position(at) < self.from);
            let last = changes.positions.partition_point(|at| position(at) < end).max(first);
            // Within 32 bits, as `fits` has seen.
            let place = |at: &[u8; 4]| (position(at) - self.from + self.to) as u32;
            job.positions = changes.positions[first..last].iter().map(place).collect();
            (job.new, job.old) = (values(changes.new, first, last), values(changes.old, first, last));
            return;
        }
        for (number, at) in changes.positions.iter().enumerate() {
            if let Some(place) = self.place(position(at)) {
                job.positions.push(place);
                job.new.extend_from_slice(&changes.new[number * width..(number + 1) * width]);
                job.old.extend_from_slice(&changes.old[number * width..(number + 1) * width]);
            }
        }
    }

    /// Where an element of the tensor lies in the live one, if the view has it.
    fn place(&self, position: u64) -> Option<u32> {
        let (mut rest, mut place) = (position.checked_sub(self.from)?, self.to);
        for (from, size, to) in &self.dims {
            let index = rest / from;
            if index >= *size {
                return None;
            }
            rest -= index * from;
            place += index * to;
        }
        (rest == 0).then_some(place as u32)
    }
}
