//! What `publish` and `follow` do with slime's layout of a directory.

use crate::cli::shared::error::Result;
use crate::cli::shared::output::Output;
use crate::cli::shared::{numbers, paths, progress};
use driftless::slime::{Checksum, Encoding, Publisher, PublisherOptions};
use driftless::store::Store;
use driftless::transport::Checkpoint;
use driftless::transport::publish::{Published, Start};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How versions lie in the store.
#[derive(Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Layout {
    /// Runs, manifests and objects.
    #[default]
    Driftless,
    /// The delta directories of slime 0.3.1, weight_v000001 and so on; the store is its
    /// --update-weight-disk-dir.
    Slime,
}

const ENCODINGS: [(&str, Encoding); 2] = [("xor", Encoding::Xor), ("overwrite", Encoding::Overwrite)];
const CHECKSUMS: [(&str, Checksum); 3] =
    [("xxh3-128", Checksum::Xxh3), ("blake3", Checksum::Blake3), ("adler32", Checksum::Adler32)];

#[derive(clap::Args)]
#[command(next_help_heading = "With --layout slime")]
pub(crate) struct PublishArgs {
    /// How changed tensors are written.
    #[arg(long, value_parser = numbers::one_of(&ENCODINGS), default_value = "xor")]
    delta_encoding: Encoding,
    /// Checksum of changed tensors.
    #[arg(long, value_parser = numbers::one_of(&CHECKSUMS), default_value = "xxh3-128")]
    delta_checksum: Checksum,
    /// The checkpoint that is version 0; needed with --resume if the baseline is lost.
    #[arg(long, value_name = "DIR")]
    hf_checkpoint: Option<PathBuf>,
}

impl PublishArgs {
    /// Settings for a run that begins with `checkpoint`, or goes on.
    pub(crate) fn options(
        &self,
        start: Start,
        baseline: &Path,
        checkpoint: &Path,
    ) -> Result<PublisherOptions> {
        if let Some(dir) = &self.hf_checkpoint {
            paths::check_checkpoint("--hf-checkpoint", dir)?;
        }
        let mut options = PublisherOptions::new(start, baseline);
        options.hf_checkpoint = match start {
            Start::NewRun => Some(checkpoint.to_path_buf()),
            Start::Resume => self.hf_checkpoint.clone(),
        };
        (options.encoding, options.checksum) = (self.delta_encoding, self.delta_checksum);
        Ok(options)
    }
}

/// Publishes `checkpoint` as the next version. For a new run it is version 0, for which nothing is written:
/// `None`.
pub(crate) fn publish(
    store: Arc<dyn Store>,
    options: PublisherOptions,
    checkpoint: &Path,
    output: Output,
) -> Result<Option<Published>> {
    let start = options.start;
    let mut publisher = Publisher::open(store, options)?;
    if let (Start::NewRun, Some(applied)) = (start, publisher.applied()) {
        let value = json!({ "version": applied.version.0, "label": applied.label(), "publication_bytes": 0 });
        output.print(&value, |_| format!("version 0 ({}): {}", applied.label(), checkpoint.display()))?;
        return Ok(None);
    }
    let checkpoint = Checkpoint::open(checkpoint)?;
    let (bar, moved) = progress::publication();
    publisher.on_progress(moved);
    let published = publisher.publish(&checkpoint)?;
    bar.finish_and_clear();
    Ok(Some(published))
}
