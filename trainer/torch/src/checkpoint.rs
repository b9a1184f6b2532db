//! Training checkpoints: everything an interrupted run needs to go on bit for bit.
//!
//! ```text
//! <dir>/step-00000042/model.safetensors   masters, mean/<name>, square/<name>: f32
//! <dir>/step-00000042/progress.json       steps, seed, metrics of the last step, digest of the model's shape
//! ```
//!
//! There is no random state to save: prompts, sampling seeds and batches are functions of the run's seed and
//! of the numbers of steps and samples. A directory is written beside, synced, and renamed, so that the one
//! with the highest number is always complete.

use std::borrow::Cow;
use std::fs::File;
use std::path::{Path, PathBuf};

use driftless_transport::checkpoint::write_checkpoint;
use driftless_transport::snapshot::{AuxFile, TensorInfo};
use driftless_transport::{self as transport, Checkpoint, Dtype, Snapshot};
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use crate::error::{Error, Result, io};
use crate::policy::Policy;
use crate::torch::{bytes_of, tensor_of};

pub use driftless_trainer::learner::Progress;

/// Tensor data per file.
const SHARD_BYTES_MAX: u64 = 4 << 30;
const PROGRESS: &str = "progress.json";
const PREFIX: &str = "step-";
/// First parts of the tensors' names; the second is the parameter's.
const PARTS: [&str; 3] = ["master", "mean", "square"];

/// `progress.json`.
#[derive(Serialize, Deserialize)]
struct Stored {
    optimizer_steps: u64,
    model: String,
    #[serde(flatten)]
    progress: Progress,
}

/// Where the checkpoints of a run lie in its state directory.
#[must_use]
pub fn dir(save: &Path) -> PathBuf {
    save.join("checkpoints")
}

/// Saves `policy` as `dir/step-N`, N the steps done; then deletes all but the newest `keep` (at least 1).
///
/// # Errors
/// [`Error::Transport`] or [`Error::Io`] if the disk is full or does not obey; older checkpoints are then
/// untouched.
pub fn save(dir: &Path, policy: &Policy, progress: &Progress, keep: usize) -> Result<()> {
    let name = format!("{PREFIX}{:08}", progress.step);
    let (target, partial) = (dir.join(&name), dir.join(format!("partial-{name}")));
    let stored = Stored {
        optimizer_steps: policy.optimizer().steps(),
        model: identity(policy),
        progress: progress.clone(),
    };
    let json = |source| Error::Json { path: target.join(PROGRESS), source };
    let file = AuxFile::new(PROGRESS, serde_json::to_vec_pretty(&stored).map_err(json)?)?;
    std::fs::create_dir_all(dir).map_err(io("create", dir))?;
    write_checkpoint(&partial, &State::of(policy, file)?, SHARD_BYTES_MAX)?;
    fail::fail_point!("train.checkpoint");
    std::fs::rename(&partial, &target).map_err(io("rename", &partial))?;
    sync_dir(dir)?;
    let mut steps = steps(dir)?;
    steps.truncate(steps.len().saturating_sub(keep.max(1)));
    for (_, old) in steps {
        std::fs::remove_dir_all(&old).map_err(io("delete", &old))?;
    }
    Ok(())
}

/// Puts the newest checkpoint of `dir` into `policy` and returns how far it is; `None` if there is none.
///
/// # Errors
/// [`Error::Resume`] if it is of another model or dtype, [`Error::Transport`] if it is damaged. The policy is
/// unchanged then.
pub fn load(dir: &Path, policy: &mut Policy) -> Result<Option<Progress>> {
    let Some((_, path)) = steps(dir)?.pop() else {
        return Ok(None);
    };
    let checkpoint = Checkpoint::open(&path)?;
    let file = checkpoint.files().iter().find(|file| file.name() == PROGRESS);
    let other = |what, expected, found| Error::Resume { path: path.clone(), what, expected, found };
    let file = file.ok_or_else(|| other("files", PROGRESS.to_owned(), "none".to_owned()))?;
    let json = |source| Error::Json { path: path.join(PROGRESS), source };
    let stored: Stored = serde_json::from_slice(file.bytes()).map_err(json)?;
    if stored.model != identity(policy) {
        return Err(other("model", identity(policy), stored.model));
    }
    let states = policy.optimizer().states().iter().map(|state| {
        let shape = state.master.size();
        let part = |part: &str| {
            let name = format!("{part}/{}", state.name);
            let expected: Vec<u64> = shape.iter().map(|size| size.unsigned_abs()).collect();
            let index = checkpoint.position(&name);
            let index = index.filter(|&index| {
                let info = &checkpoint.tensors()[index];
                info.dtype == Dtype::F32 && info.shape == expected
            });
            let index =
                index.ok_or_else(|| other("tensors", format!("{name} {shape:?}"), "another".to_owned()))?;
            tensor_of(&checkpoint.bytes(index)?, &shape, Kind::Float)
        };
        let [master, mean, square] = PARTS.map(part);
        Ok([master?, mean?, square?])
    });
    let states = states.collect::<Result<Vec<[Tensor; 3]>>>()?;
    policy.restore(stored.optimizer_steps, &states)?;
    Ok(Some(stored.progress))
}

/// Makes renames in a directory durable.
fn sync_dir(dir: &Path) -> Result<()> {
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(io("sync", dir))
}

/// The checkpoints in `dir` with their steps, oldest first.
fn steps(dir: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => return Err(Error::Io { action: "list", path: dir.to_owned(), source }),
    };
    let mut steps = Vec::new();
    for entry in entries {
        let entry = entry.map_err(io("list", dir))?;
        let name = entry.file_name();
        let step = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.parse().ok());
        steps.extend(step.map(|step| (step, entry.path())));
    }
    steps.sort();
    Ok(steps)
}

/// What a checkpoint has to agree with: the model's shape and the dtype that its weights are rounded to.
fn identity(policy: &Policy) -> String {
    let config = policy.model().config().to_json(policy.optimizer().rounded());
    blake3::hash(config.to_string().as_bytes()).to_hex().to_string()
}

/// Masters and moments as a list of named tensors.
struct State {
    tensors: Vec<TensorInfo>,
    bytes: Vec<Vec<u8>>,
    files: Vec<AuxFile>,
}

impl State {
    fn of(policy: &Policy, file: AuxFile) -> Result<State> {
        let (mut tensors, mut bytes) = (Vec::new(), Vec::new());
        let states = policy.optimizer().states();
        for (index, part) in PARTS.into_iter().enumerate() {
            for state in states {
                let tensor = [&state.master, &state.mean, &state.square][index];
                let shape = tensor.size().into_iter().map(i64::unsigned_abs).collect();
                tensors.push(TensorInfo { name: format!("{part}/{}", state.name), dtype: Dtype::F32, shape });
                bytes.push(bytes_of(tensor)?);
            }
        }
        Ok(State { tensors, bytes, files: vec![file] })
    }
}

impl Snapshot for State {
    fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn bytes(&self, index: usize) -> transport::Result<Cow<'_, [u8]>> {
        Ok(Cow::Borrowed(&self.bytes[index]))
    }

    fn files(&self) -> &[AuxFile] {
        &self.files
    }
}
