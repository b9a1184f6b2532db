//! The native half of the Python package `driftless_rl`; its public half is in `python/driftless_rl`.
//!
//! | File | Does |
//! |---|---|
//! | `work` | runs calls without the interpreter's lock, with Ctrl-C, forks and the interpreter's end in mind |
//! | `tensor` | borrows the memory of numpy arrays and torch tensors |
//! | `publisher` | publishes them |
//! | `gpu` | the GPUs that they are encoded on |
//! | `fleet` | samples from engines |
//! | `follower` | keeps a checkpoint directory at the newest version |
//! | `codec` | deltas of single tensors |
//! | `live` | weights of an engine in this process, patched from prepared deltas |
//! | `log` | the rollout log, read where it lies |
//! | `error` | makes Python's exceptions of the crates' errors |

mod codec;
mod error;
mod fleet;
mod follower;
mod gpu;
mod live;
mod log;
mod publisher;
mod tensor;
mod work;

use driftless::bridge::live::Vote;
use pyo3::prelude::*;
use std::ffi::OsString;

/// Runs the `driftless` command with these arguments, the first of which is its name, and returns its exit
/// code.
#[pyfunction]
fn main(py: Python<'_>, args: Vec<OsString>) -> u8 {
    py.detach(|| driftless::command::main(args))
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<publisher::Publisher>()?;
    module.add_class::<publisher::Published>()?;
    module.add_class::<fleet::Fleet>()?;
    module.add_class::<fleet::EngineStatus>()?;
    module.add_class::<fleet::Generation>()?;
    module.add_class::<fleet::Request>()?;
    module.add_class::<follower::Follower>()?;
    module.add_class::<codec::Codec>()?;
    module.add_class::<live::LiveModel>()?;
    module.add_class::<live::Patch>()?;
    module.add("REFUSES", Vote::Refuses as u8)?;
    module.add("LOADS", Vote::Loads as u8)?;
    module.add("PATCHES", Vote::Patches as u8)?;
    module.add_class::<log::RolloutLog>()?;
    module.add_class::<log::RolloutProducer>()?;
    module.add_class::<log::LogReader>()?;
    module.add_class::<log::LogRecord>()?;
    module.add_class::<log::Column>()?;
    module.add_function(wrap_pyfunction!(live::checkpoint_tensors, module)?)?;
    module.add_function(wrap_pyfunction!(live::plugin_dir, module)?)?;
    module.add_function(wrap_pyfunction!(live::patch_refused, module)?)?;
    module.add_function(wrap_pyfunction!(live::refuse_patches, module)?)?;
    module.add_function(wrap_pyfunction!(live::announce_server, module)?)?;
    module.add_function(wrap_pyfunction!(main, module)?)?;
    module.add_function(wrap_pyfunction!(work::end, module)?)
}
