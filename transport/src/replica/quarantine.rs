//! Sets a damaged replica aside, so that it is built anew from the store without an operator.
//!
//! The damaged files stay in `quarantine/` until another version is in place. The marker moves there last.
//! Until then the directory still names its run, and a crash leads to the same steps again. Afterwards the
//! marker in `quarantine/` pins the run.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use driftless_store::Error as StoreError;
use driftless_store::os::watch::{self, Call};
use driftless_store::os::{remove_dir, remove_file, rename_if_there, sync_dir};

use super::journal;
use super::own::weight_names;
use super::state::{Applied, Copy, Layout, Marker, read_optional};
use crate::error::{Error, Result};
use crate::snapshot::is_plain_name;

/// A weight file in `dir` that this program did not put there, as far as can be told.
pub(super) fn foreign_file(dir: &Path, layout: &Layout) -> Result<Option<String>> {
    let marker = Marker::read(&layout.marker()).ok().flatten();
    let stamped = |name: &str| marker.as_ref().is_some_and(|marker| marker.stamps(name));
    Ok(weight_names(dir)?.into_iter().find(|name| !stamped(name) && !is_our_name(name)))
}

/// Names that this program gives: `model.safetensors`, `model-00001-of-00002.safetensors`, and their index.
fn is_our_name(name: &str) -> bool {
    if matches!(name, "model.safetensors" | "model.safetensors.index.json") {
        return true;
    }
    let middle = name.strip_prefix("model-").and_then(|rest| rest.strip_suffix(".safetensors"));
    let numbers = middle.and_then(|middle| middle.split_once("-of-"));
    let is_number = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    numbers.is_some_and(|(number, count)| is_number(number) && is_number(count))
}

/// Moves weights, the version's files and the state into the quarantine, the marker last of all.
pub(super) fn set_aside(dir: &Path, layout: &Layout) -> Result<()> {
    let quarantine = layout.quarantine();
    match watch::before(Call::Create, &quarantine).and_then(|()| fs::create_dir(&quarantine)) {
        Err(source) if source.kind() != ErrorKind::AlreadyExists => {
            return Err(Error::io("create", &quarantine, source));
        }
        _ => {}
    }
    let copy = read_optional(&layout.manifest())?.and_then(|bytes| Copy::parse(&bytes).ok());
    // `config.json` among them, so first: without it no engine starts from what is left.
    let mut names: Vec<String> =
        copy.iter().flat_map(|copy| &copy.manifest.files).map(|file| file.name.clone()).collect();
    names.extend(weight_names(dir)?);
    rename_if_there(&layout.withheld(), &quarantine.join("config.json"))?;
    for name in names.iter().filter(|name| is_plain_name(name)) {
        rename_if_there(&dir.join(name), &quarantine.join(name))?;
    }
    remove_dir(&layout.staging())?;
    for path in [layout.journal(), layout.digests(), layout.manifest()] {
        rename_if_there(&path, &quarantine.join(path.file_name().unwrap_or_default()))?;
    }
    for dir in [dir, &quarantine] {
        sync_dir(dir)?;
    }
    layout.sync()?;
    rename_if_there(&layout.marker(), &pin(layout))?;
    sync_dir(&quarantine)?;
    layout.sync()
}

fn pin(layout: &Layout) -> std::path::PathBuf {
    layout.quarantine().join("state.json")
}

/// What the directory held before it was set aside, if that can still be read.
pub(super) fn pinned(layout: &Layout) -> Result<Option<Applied>> {
    match Marker::read(&pin(layout)) {
        Ok(marker) => Ok(marker.map(|marker| marker.applied)),
        Err(error @ Error::Store(StoreError::Io { .. } | StoreError::PermissionDenied { .. })) => Err(error),
        // A marker that was part of the damage pins nothing.
        Err(_) => Ok(None),
    }
}

/// Gives up what was set aside: another version is in place.
pub(super) fn forget(layout: &Layout) {
    if let Err(error) = remove_dir(&layout.quarantine()) {
        tracing::warn!(%error, "what was set aside stays behind");
    }
}

/// Gives up the weights that were set aside, but not the pin, and what journals are written over: their space is
/// needed.
pub(super) fn make_room(layout: &Layout) {
    if let Err(error) = journal::remove_spare(&layout.journal()) {
        tracing::warn!(%error, "what journals are written over stays behind");
    }
    let quarantine = layout.quarantine();
    for name in weight_names(&quarantine).unwrap_or_default() {
        if let Err(error) = remove_file(&quarantine.join(&name)) {
            tracing::warn!(%error, name, "what was set aside stays behind");
        }
    }
}
