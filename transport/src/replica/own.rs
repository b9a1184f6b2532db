//! Files that this program did not put into a directory: it neither replaces them nor lets engines load them.

use std::fs;
use std::path::Path;

use super::Replica;
use super::state::Layout;
use crate::error::{Error, Result};
use crate::manifest::Manifest;
use crate::snapshot::is_plain_name;

/// A file of a checkpoint in `dir`, which is to hold a replica, that none has put there: weights, their index or
/// `config.json`. There is none if `dir` is not there, if it holds a replica already, or if it is `start`, a
/// checkpoint that may be gone on from in place.
///
/// # Errors
/// The file system's.
pub fn foreign_file(dir: &Path, start: Option<&Path>) -> Result<Option<String>> {
    let is_start = start.is_some_and(|start| start.canonicalize().ok() == dir.canonicalize().ok());
    if is_start || !dir.exists() || Layout::new(dir).root.exists() {
        return Ok(None);
    }
    let config = || dir.join("config.json").symlink_metadata().is_ok().then(|| "config.json".to_owned());
    Ok(weight_names(dir)?.into_iter().next().or_else(config))
}

/// Refuses a directory with a [`foreign_file`], before anything is made in it.
pub(crate) fn refuse_foreign_place(dir: &Path, start: Option<&Path>) -> Result<()> {
    foreign_file(dir, start)?.map_or(Ok(()), |name| Err(foreign(dir, &name)))
}

/// Refuses a directory with weights that a replica has not put there; one that does not exist has none.
///
/// # Errors
/// [`Error::BadSetting`] that names the first such file; the file system's.
pub fn refuse_foreign(dir: &Path) -> Result<()> {
    let names = if dir.exists() { weight_names(dir)? } else { Vec::new() };
    names.first().map_or(Ok(()), |name| Err(foreign(dir, name)))
}

/// Refuses weights beside those of a checkpoint without an index: engines load every weight file that they find.
pub(super) fn refuse_stray(dir: &Path) -> Result<()> {
    let names = weight_names(dir)?;
    let has_index = names.iter().any(|name| name.ends_with(".index.json"));
    let stray = names.iter().find(|name| !has_index && *name != "model.safetensors");
    stray.map_or(Ok(()), |name| Err(foreign(dir, name)))
}

impl Replica {
    /// Names of the weight files in the directory. They are only ours to replace if we put them there, and so
    /// is what lies in the place of a file of the version with this manifest.
    pub(super) fn replaceable(&self, manifest: &Manifest) -> Result<Vec<String>> {
        if self.state.is_none() {
            refuse_foreign(&self.dir)?;
            // What was set aside may have left files of its own behind.
            let taken = |name: &&String| self.dir.join(name).symlink_metadata().is_ok();
            let mut names = manifest.files.iter().map(|file| &file.name);
            if !self.layout.quarantine().exists()
                && let Some(name) = names.find(taken)
            {
                return Err(foreign(&self.dir, name));
            }
        }
        weight_names(&self.dir)
    }
}

/// Names of the weight files in a directory.
pub(super) fn weight_names(dir: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).map_err(|source| Error::io("list", dir, source))? {
        let name = entry.map_err(|source| Error::io("list", dir, source))?.file_name();
        let Some(name) = name.to_str().filter(|name| is_plain_name(name)) else { continue };
        if name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json") {
            names.push(name.to_owned());
        }
    }
    Ok(names)
}

fn foreign(dir: &Path, name: &str) -> Error {
    Error::BadSetting {
        name: "checkpoint directory",
        expected: "a new or empty directory, or one that this program made".into(),
        found: format!("`{}` with a foreign `{name}`", dir.display()),
    }
}
