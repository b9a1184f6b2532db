//! Live weights of an engine in this process, for the plugin.
#![allow(unsafe_code, reason = "weights are written by their addresses")]

use crate::error;
use crate::tensor::dtype_named;
use driftless::bridge::engine::torch_name;
use driftless::bridge::live::{
    self, Cache, Layout, LiveCopy, LivePatch, LiveTable, LiveTensor, PatchRefused, PluginReply, Rank,
    Strides, Vote,
};
use driftless::store::chain_text;
use driftless::transport::Checkpoint;
use driftless::transport::snapshot::{Snapshot as _, TensorInfo};
use driftless::transport::tied::is_head;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString};
use std::path::PathBuf;
use std::time::Duration;

/// A copy of a tensor's view into a live tensor: the tensor's index, the live one's index, the sizes of both
/// views, of each its offset and strides, in elements, and the table that its elements go through.
type Copy = (usize, usize, Vec<u64>, (u64, Vec<u64>), (u64, Vec<u64>), Option<usize>);

/// See the stub.
#[pyfunction]
pub(crate) fn checkpoint_tensors(
    py: Python<'_>,
    directory: PathBuf,
    ties_head: bool,
) -> PyResult<Vec<(String, String, Vec<u64>)>> {
    let checkpoint = py.detach(|| Checkpoint::open(directory)).map_err(error::transport)?;
    let row = |info: &TensorInfo| {
        if !live::is_patched(info.dtype) {
            return Err(error::own(
                "RefusedError",
                format!("{} is {}, which is not patched", info.name, info.dtype),
            ));
        }
        Ok((info.name.clone(), torch_name(info.dtype).to_owned(), info.shape.clone()))
    };
    let loaded = checkpoint.tensors().iter().filter(|info| !(ties_head && is_head(&info.name)));
    loaded.map(row).collect()
}

/// See the stub.
#[pyfunction]
pub(crate) fn plugin_dir() -> PathBuf {
    live::plugin_dir(std::env::var_os(live::PLUGIN_DIR))
}

/// See the stub.
#[pyfunction]
pub(crate) fn patch_refused(label: String, why: String) -> String {
    PluginReply::Refused(PatchRefused { label, refused: why }).to_string()
}

/// See the stub.
#[pyfunction]
pub(crate) fn refuse_patches(directory: PathBuf, rank: (u16, u32, u32), why: &str) -> PyResult<()> {
    self::rank(rank).refuse(&directory, why).map_err(refused)
}

/// See the stub.
#[pyfunction]
pub(crate) fn announce_server(directory: PathBuf, port: u16) -> PyResult<()> {
    live::announce_server(&directory, port).map_err(refused)
}

/// See the stub.
#[pyclass(frozen, module = "driftless_rl")]
pub(crate) struct LiveModel {
    model: live::LiveModel,
    /// Where each parameter is held, and its address.
    slots: Vec<(Py<PyDict>, Py<PyString>, usize)>,
    /// They keep their storages, and the tables.
    _live: Vec<Py<PyAny>>,
}

#[pymethods]
impl LiveModel {
    #[new]
    #[expect(clippy::too_many_arguments, reason = "what the trace has learned, each by its name in the stub")]
    fn new(
        py: Python<'_>,
        directory: PathBuf,
        rank: (u16, u32, u32),
        tensors: Vec<(String, String, Vec<u64>)>,
        live: Vec<(String, Bound<'_, PyAny>)>,
        tables: Vec<Bound<'_, PyAny>>,
        copies: Vec<Copy>,
        slots: Vec<(Py<PyDict>, Py<PyString>, usize)>,
        device: Option<usize>,
        arena: u64,
        ties_head: bool,
    ) -> PyResult<Self> {
        let info = |(name, dtype, shape): (String, String, Vec<u64>)| match dtype_named(&dtype) {
            Some(dtype) => Ok(TensorInfo { name, dtype, shape }),
            None => Err(error::tensor(&name, "its dtype", "one of checkpoint_tensors", &dtype)),
        };
        let tensors = tensors.into_iter().map(info).collect::<PyResult<Vec<_>>>()?;
        let storages =
            live.iter().map(|(name, tensor)| storage(name, tensor)).collect::<PyResult<Vec<_>>>()?;
        let made = tables.iter().map(table).collect::<PyResult<Vec<_>>>()?;
        let copies = copies.into_iter().map(|found| copy(found, &made)).collect::<PyResult<_>>()?;
        // SAFETY: this value holds the tensors and tables, which hold their storages. `_trace.py` has seen that no two
        // copies overlap. Engines write to weights in loads, of which the plugin is told, and the base check
        // sees what others write.
        let layout = unsafe { Layout::new(tensors, storages, copies) }.map_err(refused)?;
        let layout = layout.with_tied_head(ties_head);
        let (directory, rank) = (directory.as_path(), self::rank(rank));
        let model = py.detach(|| match device {
            None => live::LiveModel::in_host_memory(directory, rank, layout),
            Some(ordinal) => live::LiveModel::on_cuda_device(directory, rank, layout, ordinal, arena),
        });
        let _live = live.into_iter().map(|(_, tensor)| tensor).chain(tables).map(Bound::unbind).collect();
        Ok(Self { model: model.map_err(refused)?, slots, _live })
    }

    fn loaded(&self, py: Python<'_>, label: Option<&str>) {
        py.detach(|| self.model.loaded(label));
    }

    fn patch(&self, py: Python<'_>, label: &str, least: Option<Py<PyAny>>) -> PyResult<Option<Patch>> {
        let (moved, mut failed) = (self.moved(py)?, None);
        if moved.is_some() {
            self.loaded(py, None);
        }
        let vote = |vote: Vote| {
            let vote = if moved.is_some() { Vote::Refuses } else { vote };
            let Some(least) = &least else { return vote };
            Python::attach(|py| {
                let said = least.call1(py, (vote as u8,)).and_then(|said| said.extract::<u8>(py));
                match said {
                    Ok(said) if said == Vote::Patches as u8 => Vote::Patches,
                    Ok(said) if said == Vote::Loads as u8 => Vote::Loads,
                    said => {
                        failed = said.err();
                        Vote::Refuses
                    }
                }
            })
        };
        let done = py.detach(|| self.model.patch(label, vote));
        if let Some(key) = moved {
            return Err(has_moved(&key));
        }
        match (failed, done) {
            (Some(error), _) => Err(error),
            (None, done) => Ok(done.map_err(refused)?.map(Patch)),
        }
    }

    fn announce_compare(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.model.announce_compare()).map_err(refused)
    }

    fn compare(
        &self,
        py: Python<'_>,
        label: &str,
        directory: PathBuf,
        sample: Option<u64>,
        least: Option<Py<PyAny>>,
    ) -> PyResult<String> {
        let (moved, mut failed) = (self.moved(py)?, None);
        let agree = |mut said: Vec<u8>| {
            if moved.is_some() {
                said.fill(0);
            }
            let Some(least) = &least else { return said };
            let agreed = Python::attach(|py| {
                let agreed = least.call1(py, (PyBytes::new(py, &said),))?;
                Ok::<_, PyErr>(agreed.cast_bound::<PyBytes>(py)?.as_bytes().to_vec())
            });
            agreed.unwrap_or_else(|error| {
                failed = Some(error);
                Vec::new()
            })
        };
        let done = py.detach(|| self.model.compare(label, &directory, sample, agree));
        if let Some(key) = moved {
            return Err(has_moved(&key));
        }
        match (failed, done) {
            (Some(error), _) => Err(error),
            (None, done) => Ok(PluginReply::Compared(done.map_err(refused)?).to_string()),
        }
    }
}

fn has_moved(key: &str) -> PyErr {
    error::own("RefusedError", format!("`{key}` is not where it was learned"))
}

impl LiveModel {
    /// The first parameter that does not lie where it was learned.
    fn moved(&self, py: Python<'_>) -> PyResult<Option<String>> {
        for (held, key, address) in &self.slots {
            let found = held.bind(py).get_item(key)?;
            let address_of = |tensor: Bound<'_, PyAny>| {
                tensor.call_method0(pyo3::intern!(py, "data_ptr")).ok()?.extract::<usize>().ok()
            };
            if found.and_then(address_of) != Some(*address) {
                return Ok(Some(key.to_string()));
            }
        }
        Ok(None)
    }
}

/// See the stub.
#[pyclass(frozen, module = "driftless_rl")]
pub(crate) struct Patch(LivePatch);

#[pymethods]
impl Patch {
    fn reply(&self, stood_still: f64, cache: Option<&str>) -> PyResult<String> {
        let stood_still = Duration::try_from_secs_f64(stood_still).unwrap_or_default();
        let known = [("dropped", Cache::Dropped), ("kept", Cache::Kept), ("versioned", Cache::Versioned)];
        let cache = cache.map(|name| error::named("cache", &known, name)).transpose()?;
        Ok(self.0.reply(stood_still, cache).to_string())
    }
}

fn rank(place: (u16, u32, u32)) -> Rank {
    let (port, number, of) = place;
    Rank { port, number, of }
}

/// A flat tensor of a whole storage.
fn storage(name: &str, tensor: &Bound<'_, PyAny>) -> PyResult<LiveTensor> {
    let dtype = tensor.getattr("dtype")?.str()?.to_string();
    let Some(dtype) = dtype_named(dtype.strip_prefix("torch.").unwrap_or(&dtype)) else {
        return Err(error::tensor(name, "its dtype", "one that safetensors has", &dtype));
    };
    let address = tensor.call_method0("data_ptr")?.extract()?;
    Ok(LiveTensor { name: name.to_owned(), dtype, address, bytes: tensor.getattr("nbytes")?.extract()? })
}

/// A flat tensor that is a table.
fn table(tensor: &Bound<'_, PyAny>) -> PyResult<LiveTable> {
    let address = tensor.call_method0("data_ptr")?.extract()?;
    Ok(LiveTable { address, bytes: tensor.getattr("nbytes")?.extract()? })
}

fn copy(found: Copy, tables: &[LiveTable]) -> PyResult<LiveCopy> {
    let strides = |(offset, strides): (u64, Vec<u64>)| Strides { offset, strides };
    let (tensor, live, size, from, to, table) = found;
    let unknown = |number: usize| error::usage("copies", "numbers of tables", &number.to_string());
    let known = |number: usize| tables.get(number).copied().ok_or_else(|| unknown(number));
    let table = table.map(known).transpose()?;
    Ok(LiveCopy { tensor, live, size, from: strides(from), to: strides(to), table })
}

fn refused(error: driftless::bridge::Error) -> PyErr {
    error::own("RefusedError", chain_text(&error))
}
