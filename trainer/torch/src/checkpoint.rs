//! Training checkpoints: everything an interrupted run needs to go on bit for bit.
//!
//! ```text
//! <dir>/step-00000042/model.safetensors   master/<name>, mean/<name>, square/<name>: f32; those of a critic as
//!                                         critic/master/<name> …; reference/<name>, if the reference moves
//! <dir>/step-00000042/progress.json       steps, seed, metrics of the last step, digest of the model's shape
//! ```
//!
//! There is no random state to save: prompts, sampling seeds and batches are functions of the run's seed and
//! of the numbers of steps and samples. A directory is written beside, synced, and renamed, so that the one
//! with the highest number is always complete.

use std::fs::File;
use std::path::{Path, PathBuf};

use driftless_transport::checkpoint::write_checkpoint;
use driftless_transport::snapshot::TensorInfo;
use driftless_transport::{Checkpoint, Snapshot as _, Tensors};
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use crate::critic::Critic;
use crate::error::{Error, Result, io};
use crate::libtorch::{bytes_of, dtype_of, info_of, tensor_of};
use crate::models::{Model, Span};
use crate::optimizer::{AdamW, Part};
use crate::policy::Policy;
use crate::trained::Trained;

pub use driftless_trainer::learner::Progress;

/// Tensor data per file.
const SHARD_BYTES_MAX: u64 = 4 << 30;
const PROGRESS: &str = "progress.json";
const PREFIX: &str = "step-";
/// What stands before the names of a critic's tensors.
const CRITIC: &str = "critic/";
/// What stands before the names of a reference policy's weights.
const REFERENCE: &str = "reference/";

/// `progress.json`.
#[derive(Serialize, Deserialize)]
struct Stored {
    optimizer_steps: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    critic_steps: Option<u64>,
    model: String,
    #[serde(flatten)]
    progress: Progress,
}

/// Where the checkpoints of a run lie in its state directory.
#[must_use]
pub fn dir(save: &Path) -> PathBuf {
    save.join("checkpoints")
}

/// Saves `policy`, and its critic if it has one, as `dir/step-N`, N the steps done; then deletes all but the newest
/// `keep` (at least 1).
///
/// # Errors
/// [`Error::Transport`] or [`Error::Io`] if the disk is full or does not obey; older checkpoints are then
/// untouched.
pub fn save(
    dir: &Path,
    policy: &Policy,
    critic: Option<&Critic>,
    progress: &Progress,
    keep: usize,
) -> Result<()> {
    let name = format!("{PREFIX}{:08}", progress.step);
    let (target, partial) = (dir.join(&name), dir.join(format!("partial-{name}")));
    let stored = Stored {
        optimizer_steps: policy.optimizer().steps(),
        critic_steps: critic.map(|critic| critic.trained.optimizer.steps()),
        model: identity(policy),
        progress: progress.clone(),
    };
    let json = |source| Error::Json { path: target.join(PROGRESS), source };
    std::fs::create_dir_all(dir).map_err(io("create", dir))?;
    let state = Tensors::new().file(PROGRESS, serde_json::to_vec_pretty(&stored).map_err(json)?)?;
    let mut state = add(state, "", &policy.trained)?;
    if let Some(critic) = critic {
        state = add(state, CRITIC, &critic.trained)?;
    }
    for weight in policy.moving_reference().map_or(&[][..], Model::parameters) {
        state = add_tensor(state, format!("{REFERENCE}{}", weight.name), &weight.tensor)?;
    }
    write_checkpoint(&partial, &state, SHARD_BYTES_MAX)?;
    fail::fail_point!("train.checkpoint");
    std::fs::rename(&partial, &target).map_err(io("rename", &partial))?;
    // Makes the rename durable.
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(io("sync", dir))?;
    let mut steps = steps(dir)?;
    steps.truncate(steps.len().saturating_sub(keep.max(1)));
    for (_, old) in steps {
        std::fs::remove_dir_all(&old).map_err(io("delete", &old))?;
    }
    Ok(())
}

/// What every rank but the first does while that saves: gives its parts.
pub(crate) fn give(policy: &Policy, critic: Option<&Critic>) -> Result<()> {
    let of_critic = critic.map(|critic| &critic.trained);
    for trained in [&policy.trained].into_iter().chain(of_critic) {
        Part::ALL.into_iter().try_for_each(|part| trained.optimizer.state(part).map(drop))?;
    }
    Ok(())
}

/// Puts the newest checkpoint of `dir` into `policy` and its critic, and returns how far it is; `None` if there is
/// none.
///
/// # Errors
/// [`Error::Resume`] if it is of another model or dtype, or lacks a critic, [`Error::Transport`] if it is damaged.
/// Nothing has changed then.
pub fn load(dir: &Path, policy: &mut Policy, critic: Option<&mut Critic>) -> Result<Option<Progress>> {
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
    let saved = Saved { path: &path, checkpoint: &checkpoint };
    let states = saved.states("", &policy.trained)?;
    let of_critic = critic.as_ref().map(|critic| saved.states(CRITIC, &critic.trained)).transpose()?;
    let reference = policy.moving_reference().map(|model| saved.weights(REFERENCE, model)).transpose()?;
    policy.trained.restore(stored.optimizer_steps, |optimizer| saved.put(&states, optimizer))?;
    if let (Some(critic), Some(states)) = (critic, of_critic) {
        let steps = stored.critic_steps.unwrap_or_default();
        critic.trained.restore(steps, |optimizer| saved.put(&states, optimizer))?;
    }
    if let Some(weights) = reference {
        policy.restore_reference(&weights)?;
    }
    Ok(Some(stored.progress))
}

/// A checkpoint that is being read.
struct Saved<'a> {
    path: &'a Path,
    checkpoint: &'a Checkpoint,
}

impl Saved<'_> {
    /// Where masters and moments of a model's weights are.
    fn states(&self, prefix: &str, trained: &Trained) -> Result<Vec<(Part, Span, usize)>> {
        let spans = || trained.model.places.spans();
        let all = Part::ALL.into_iter().flat_map(|part| spans().map(move |(name, span)| (part, name, span)));
        let states = all.map(|(part, name, span)| {
            let name = format!("{prefix}{}/{name}", part.name());
            Ok((part, span.clone(), self.find(&name, &span.shape, Kind::Float)?))
        });
        states.collect()
    }

    /// Puts them into an optimizer.
    fn put(&self, states: &[(Part, Span, usize)], optimizer: &mut AdamW) -> Result<()> {
        states.iter().try_for_each(|(part, span, index)| {
            let values = tensor_of(&self.checkpoint.bytes(*index)?, &span.shape, Kind::Float)?;
            optimizer.put(*part, span, &values)
        })
    }

    /// The weights of a model.
    fn weights(&self, prefix: &str, model: &Model) -> Result<Vec<Tensor>> {
        let weights = model.parameters().iter().map(|parameter| {
            let (name, shape) = (format!("{prefix}{}", parameter.name), parameter.tensor.size());
            let index = self.find(&name, &shape, model.kind())?;
            tensor_of(&self.checkpoint.bytes(index)?, &shape, model.kind())
        });
        weights.collect()
    }

    fn find(&self, name: &str, shape: &[i64], kind: Kind) -> Result<usize> {
        let expected: Vec<u64> = shape.iter().map(|size| size.unsigned_abs()).collect();
        let index = self.checkpoint.position(name).filter(|&index| {
            let info = &self.checkpoint.tensors()[index];
            info.dtype == dtype_of(kind) && info.shape == expected
        });
        index.ok_or_else(|| Error::Resume {
            path: self.path.to_owned(),
            what: "tensors",
            expected: format!("{name} {shape:?}"),
            found: "none, or of another shape".to_owned(),
        })
    }
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

/// Adds masters and moments.
fn add(mut state: Tensors<'static>, prefix: &str, trained: &Trained) -> Result<Tensors<'static>> {
    for part in Part::ALL {
        let flat = trained.optimizer.state(part)?;
        for (name, span) in trained.model.places.spans() {
            state = add_tensor(state, format!("{prefix}{}/{name}", part.name()), &span.of(&flat)?)?;
        }
    }
    Ok(state)
}

fn add_tensor(state: Tensors<'static>, name: String, tensor: &Tensor) -> Result<Tensors<'static>> {
    let TensorInfo { name, dtype, shape } = info_of(name, tensor)?;
    Ok(state.tensor(name, dtype, shape, bytes_of(tensor)?)?)
}
