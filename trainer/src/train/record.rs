//! `run.json`: what ties the state directory of a run to the store.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use driftless_store::ContentDigest;
use driftless_transport::RunId;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, io};
use crate::metrics::EvalMetrics;

/// What the run learned from when it was started last.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Data {
    /// [`TrainOptions::data`](super::TrainOptions::data).
    pub(super) settings: BTreeMap<String, String>,
    /// [`Task::digest`](crate::tasks::Task::digest).
    pub(super) prompts: Option<String>,
}

/// What the run's first step started from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Start {
    /// [`TrainOptions::hf_checkpoint`](super::TrainOptions::hf_checkpoint), from the root of the file system.
    pub(super) hf_checkpoint: PathBuf,
    /// Digest of the weights of version 0.
    pub(super) weights_digest: ContentDigest,
}

/// What the file holds.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct RunRecord {
    /// Name of the run.
    pub(super) run: String,
    /// Its identity, once it has one.
    pub(super) run_id: Option<RunId>,
    /// Success before the first step.
    pub(super) eval_start: Option<EvalMetrics>,
    /// Absent until a loop that keeps it has started the run.
    #[serde(default)]
    pub(super) data: Option<Data>,
    /// Absent before version 0, and where the loop does not publish.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) start: Option<Start>,
}

impl RunRecord {
    fn path(save: &Path) -> PathBuf {
        save.join("run.json")
    }

    pub(super) fn read(save: &Path) -> Result<Option<Self>> {
        let path = Self::path(save);
        match std::fs::read(&path) {
            Ok(bytes) => {
                serde_json::from_slice(&bytes).map(Some).map_err(|source| Error::Json { path, source })
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(Error::Io { action: "read", path, source }),
        }
    }

    pub(super) fn write(&self, save: &Path) -> Result<()> {
        let path = Self::path(save);
        let bytes =
            serde_json::to_vec_pretty(self).map_err(|source| Error::Json { path: path.clone(), source })?;
        write_atomically(&path, &bytes)
    }
}

/// Replaces a small file so that a crash leaves the old content or the new: written beside, synced, renamed.
pub(super) fn write_atomically(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let partial = PathBuf::from(partial);
    let write = |mut file: File| file.write_all(bytes).and_then(|()| file.sync_all());
    File::create(&partial).and_then(write).map_err(io("write", &partial))?;
    std::fs::rename(&partial, path).map_err(io("rename", &partial))?;
    let dir = path.parent().filter(|dir| *dir != Path::new("")).unwrap_or(Path::new("."));
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(io("sync", dir))
}
