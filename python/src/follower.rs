//! `Follower`: a checkpoint directory at a run's newest version.

use crate::error::{self, transport};
use crate::work::{self, Held};
use driftless::command;
use driftless::store::wait::Stop;
use driftless::transport::follow::FollowerOptions;
use driftless::transport::sign::TrustKey;
use driftless::transport::{Follower as Inner, Version};
use pyo3::prelude::*;
use std::path::PathBuf;

/// What `Follower` of `driftless_rl` stands on: see there.
#[pyclass(frozen, module = "driftless_rl._native")]
pub(crate) struct Follower {
    held: Held<Inner>,
}

/// Settings, as Python's class passes them on.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct Settings {
    store: String,
    run: String,
    checkpoint_dir: PathBuf,
    id: String,
    model: String,
    hf_checkpoint: Option<PathBuf>,
    trust_keys: Vec<PathBuf>,
    plugin_dir: Option<PathBuf>,
}

#[pymethods]
impl Follower {
    #[new]
    fn new(py: Python<'_>, settings: Settings) -> PyResult<Self> {
        let mut options = FollowerOptions::new(settings.run, settings.checkpoint_dir, settings.id);
        options.model = settings.model;
        options.hf_checkpoint = settings.hf_checkpoint;
        options.plugin_dir = settings.plugin_dir;
        for path in &settings.trust_keys {
            options.trust_keys.extend(TrustKey::read_all(path).map_err(transport)?);
        }
        let open = || Inner::open(command::open_store(&settings.store)?, options, Vec::new());
        Ok(Self { held: Held::new("Follower", py.detach(open).map_err(transport)?) })
    }

    /// Brings the directory to a version, or to the newest one, durably; returns the version and how many
    /// were applied for it.
    #[pyo3(signature = (version = None))]
    fn advance(&self, py: Python<'_>, version: Option<u64>) -> PyResult<(u64, u64)> {
        let follower = self.held.get()?;
        let work = || {
            let prepared = follower.prepare(version.map(Version))?;
            follower.sync()?;
            Ok((prepared.version.0, prepared.advanced.versions))
        };
        work::run(py, &Stop::new(), work)?.map_err(transport)
    }

    /// The status as the follower's HTTP interface gives it, in JSON.
    fn status_json(&self) -> PyResult<String> {
        let status = self.held.get()?.status();
        serde_json::to_string(&status).map_err(|source| error::own("StoreError", source.to_string()))
    }

    /// Lets go of the directory.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.held.close(py)
    }
}
