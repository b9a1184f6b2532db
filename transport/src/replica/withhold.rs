//! Keeps engines from loading a directory that is between two versions, by taking its `config.json` away.
//!
//! An engine that starts reads `config.json` first, and refuses a directory without one. The file is renamed
//! into the state directory before the first byte of the checkpoint changes, and back after the last one. If
//! the process is killed in between, the directory does not load until the journal is carried out. Nothing
//! here is synced: after a loss of power, only carrying out the journal makes the directory whole.

use std::path::PathBuf;

use driftless_store::os::rename_if_there;

use super::state::Layout;
use crate::error::Result;

/// The file without which no engine starts.
const CONFIG: &str = "config.json";

/// Takes the file out of the directory, if it is there.
pub(super) fn take(layout: &Layout) -> Result<()> {
    Ok(rename_if_there(&layout.dir.join(CONFIG), &layout.withheld())?)
}

/// Whether the directory has none.
pub(super) fn is_missing(layout: &Layout) -> bool {
    !layout.dir.join(CONFIG).exists()
}

/// Puts it back, if it was taken.
pub(super) fn give_back(layout: &Layout) -> Result<()> {
    Ok(rename_if_there(&layout.withheld(), &layout.dir.join(CONFIG))?)
}

/// Where an auxiliary file of this name lies while the directory is between two versions.
pub(super) fn place(layout: &Layout, name: &str) -> PathBuf {
    if name == CONFIG { layout.withheld() } else { layout.dir.join(name) }
}
