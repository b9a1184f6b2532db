//! The crate's one error type.

use std::path::PathBuf;

use cudarc::driver::DriverError;

/// Everything that can go wrong in this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file or directory could not be read, written, synced or renamed.
    #[error("cannot {action} {path}")]
    Io {
        /// What was attempted, as a verb: `read`, `write`, `rename` …
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The operating system's answer.
        source: std::io::Error,
    },
    /// A JSON file does not parse, or lacks a field.
    #[error("{path} is not the JSON expected of it")]
    Json {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// A checkpoint is of a family that this crate does not compute.
    #[error(
        "{path} is of `{found}`; computed here are {known}. Train it elsewhere, and publish its \
         checkpoints with `driftless publish`"
    )]
    Family {
        /// Its `config.json`.
        path: PathBuf,
        /// `model_type`, or `architectures`, as the file says.
        found: String,
        /// Every `model_type` that is computed.
        known: String,
    },
    /// A model's `config.json` asks for something this crate does not compute.
    #[error("config field {field}: expected {expected}, found {found}")]
    Config {
        /// Key in `config.json`.
        field: &'static str,
        /// What is supported.
        expected: String,
        /// What the file says.
        found: String,
    },
    /// A tensor of a checkpoint is missing, surplus, or of another shape or dtype than the model's.
    #[error("tensor {name}: expected {expected}, found {found}; the checkpoint is of another model")]
    Tensor {
        /// Hugging Face name of the tensor.
        name: String,
        /// What the model needs.
        expected: String,
        /// What the checkpoint holds.
        found: String,
    },
    /// An argument is outside what the function can work with.
    #[error("{what}: expected {expected}, found {found}")]
    Input {
        /// The argument or quantity.
        what: &'static str,
        /// The allowed range.
        expected: String,
        /// What was given.
        found: String,
    },
    /// The asked-for device is not there.
    #[error("device {asked} is not usable: {reason}")]
    Device {
        /// As asked for, e.g. `cuda:1`.
        asked: String,
        /// Why not, with the libraries searched.
        reason: String,
    },
    /// A loss, gradient or weight became NaN or infinite; the weights before the step are kept.
    #[error("{what} is {found} at optimizer step {step}; lower the learning rate or look at the batch")]
    NotFinite {
        /// The quantity.
        what: &'static str,
        /// Its value.
        found: f64,
        /// Optimizer steps done before.
        step: u64,
    },
    /// A training checkpoint belongs to another configuration or lacks something.
    #[error("training checkpoint {path}: {what}: expected {expected}, found {found}")]
    Resume {
        /// The checkpoint's directory.
        path: PathBuf,
        /// The field that disagrees.
        what: &'static str,
        /// What this run has.
        expected: String,
        /// What the checkpoint has.
        found: String,
    },
    /// A checkpoint, publication or store answered with an error.
    #[error(transparent)]
    Transport(#[from] driftless_transport::Error),
    /// The engine's address cannot be listened on.
    #[error(transparent)]
    Http(#[from] driftless_http::Error),
    /// A part of the loop that needs no libtorch answered with an error.
    #[error(transparent)]
    Loop(#[from] driftless_trainer::Error),
    /// An operation that is called by name is not there, or refused its arguments. libtorch has logged why.
    #[error("libtorch operation {name} failed; libtorch 2.11 is needed, and its log has the reason")]
    Operation {
        /// Its name.
        name: String,
    },
    /// The kernels of CUDA devices could not be compiled, loaded or launched.
    #[error("{what}: {why}")]
    Kernels {
        /// What was attempted.
        what: String,
        /// The answer of CUDA's driver or compiler.
        why: String,
    },
    /// Another rank ended, or did not do its part in time.
    #[error("rank {rank} did not {what}; found {found}")]
    Rank {
        /// The rank; of several that are late, the first that could be.
        rank: usize,
        /// What it was expected to do, as a verb.
        what: &'static str,
        /// What there was instead.
        found: String,
    },
    /// NCCL answered with an error.
    #[error(transparent)]
    Bridge(#[from] driftless_bridge::Error),
    /// The embedded engine's server answered with an error.
    #[error(transparent)]
    Server(#[from] driftless_server::Error),
    /// A pass of the model needs more memory than the device has.
    #[error(
        "the device has not enough memory for a pass of {tokens} tokens; less is needed with \
         `max_tokens_per_gpu` below {tokens}, `recompute_granularity` full or `optimizer_cpu_offload`"
    )]
    Memory {
        /// Tokens of the pass.
        tokens: usize,
        /// What libtorch could not allocate.
        source: tch::TchError,
    },
    /// libtorch refused an operation (a shape, a missing kernel).
    #[error("libtorch")]
    Torch(#[from] tch::TchError),
}

impl Error {
    /// The error of a pass of so many tokens.
    pub(crate) fn in_pass(self, tokens: usize) -> Error {
        match self {
            Error::Torch(source) if lacks_memory(&source) => Error::Memory { tokens, source },
            other => other,
        }
    }

    /// Whether a device, or the host, had no memory left.
    pub(crate) fn is_memory(&self) -> bool {
        match self {
            Error::Memory { .. } => true,
            Error::Torch(source) => lacks_memory(source),
            _ => false,
        }
    }
}

/// Whether it is in the words of one of libtorch's allocators, for CUDA and for the CPU.
fn lacks_memory(error: &tch::TchError) -> bool {
    let said = error.to_string();
    ["out of memory", "not enough memory", "t allocate memory"].iter().any(|words| said.contains(words))
}

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Adds the path and the verb to an I/O error.
pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.into();
    move |source| Error::Io { action, path, source }
}

/// An [`Error::Kernels`] of what the driver of CUDA answers.
pub(crate) fn driver(what: impl Into<String>) -> impl FnOnce(DriverError) -> Error {
    let what = what.into();
    move |error| Error::Kernels { what, why: format!("{error:?}") }
}

/// An [`Error::Input`] from anything that can be shown.
pub(crate) fn input(what: &'static str, expected: impl ToString, found: impl ToString) -> Error {
    Error::Input { what, expected: expected.to_string(), found: found.to_string() }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind, Tensor};

    use super::*;

    #[test]
    fn is_memory_of_what_libtorch_says_of_a_full_host_is_true() {
        let full = Tensor::f_empty([1 << 50], (Kind::Uint8, Device::Cpu)).map(drop).unwrap_err();
        assert!(Error::from(full).is_memory());
    }

    #[test]
    fn is_memory_of_another_refusal_is_false() {
        let shapes = Tensor::f_empty([-1], (Kind::Uint8, Device::Cpu)).map(drop).unwrap_err();
        assert!(!Error::from(shapes).is_memory());
    }
}
