//! `driftless publish --rank`: one of several processes that publish a version together.

use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::{numbers, paths};
use driftless::store::Store;
use driftless::store::wait::Stop;
use driftless::transport::publish::{Mode, Rank, Slice, Sliced, Step};
use driftless::transport::snapshot::TensorInfo;
use driftless::transport::{Checkpoint, Publisher, Result as TransportResult, Run, Snapshot, Version};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

#[derive(clap::Args)]
pub(crate) struct RankArgs {
    /// Publish as this rank of --ranks: the checkpoint holds its tensors, whole or, with --slices, in part.
    /// Rank 0 joins the parts and brings the auxiliary files.
    #[arg(long, requires = "ranks", requires = "attempt", conflicts_with = "by_reference")]
    rank: Option<u32>,
    /// Number of ranks that publish the version together.
    #[arg(long, requires = "rank", value_parser = numbers::count::<u32>())]
    ranks: Option<u32>,
    /// Name of this publication, the same at all its ranks and unlike that of any other: <job id>-<step>, for
    /// instance.
    #[arg(long, value_name = "NAME", requires = "rank")]
    attempt: Option<String>,
    /// JSON file that says which tensors of the checkpoint are slices: {"<name>": {"shape": [whole], "start":
    /// first element}}.
    #[arg(long, value_name = "FILE", requires = "rank")]
    slices: Option<PathBuf>,
    /// Seconds to wait for the other ranks.
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = numbers::seconds())]
    join_deadline: u64,
}

/// Of which tensor a checkpoint's tensor is a slice.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Place {
    shape: Vec<u64>,
    start: u64,
}

impl RankArgs {
    /// The rank, if this is one of several.
    pub(crate) fn rank(&self) -> Option<Rank> {
        let (rank, ranks, attempt) = (self.rank?, self.ranks?, self.attempt.clone()?);
        Some(Rank { rank, ranks, attempt })
    }

    fn deadline(&self) -> Duration {
        Duration::from_secs(self.join_deadline)
    }

    /// Waits for rank 0 to begin the run.
    pub(crate) fn wait_for_run(&self, store: &Arc<dyn Store>, name: &str, stop: &Stop) -> Result<()> {
        Ok(Run::open_within(store.clone(), name, self.deadline(), stop).map(drop)?)
    }

    /// Publishes the rank's part and waits until the version is committed, which rank 0 does.
    pub(crate) fn publish(
        &self,
        publisher: &mut Publisher,
        checkpoint: &Checkpoint,
        step: Step,
        mode: Mode,
        rank: &Rank,
    ) -> Result<(Version, u64)> {
        let shard = Sliced::new(checkpoint, self.slices(checkpoint)?)?;
        let (part, _) = publisher.publish_with_ranks(&shard, step, mode, rank, self.deadline())?;
        Ok((part.version(), part.publication_bytes))
    }

    fn slices(&self, checkpoint: &Checkpoint) -> Result<Vec<Slice>> {
        let mut places: BTreeMap<String, Place> = match &self.slices {
            None => BTreeMap::new(),
            Some(path) => {
                let bytes = paths::read("--slices", path, paths::SMALL)?;
                let what = path.display().to_string();
                serde_json::from_slice(&bytes).map_err(|source| Error::Json { what, source })?
            }
        };
        let slice = |info: &TensorInfo| match places.remove(&info.name) {
            None => Slice::whole(info.clone()),
            Some(Place { shape, start }) => Slice::of(info.clone(), shape, start),
        };
        let slices = checkpoint.tensors().iter().map(slice).collect::<TransportResult<Vec<_>>>()?;
        match places.into_keys().next() {
            None => Ok(slices),
            Some(name) => Err(Error::usage("--slices", "names of tensors of the checkpoint", name)),
        }
    }
}
