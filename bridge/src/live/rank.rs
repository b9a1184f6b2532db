//! The files in which the processes of an engine tell followers what they can do, and what a rank did with each delta.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use driftless_store::os::regular;
use driftless_transport::prepared;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The variable that names another directory of plugins than [`plugin_dir`]'s own.
pub const PLUGIN_DIR: &str = "DRIFTLESS_PLUGIN_DIR";

/// The format of a rank's file and of a plugin's replies. Plugins of format 1 write no number, and reply in sentences.
pub(crate) const FORMAT: u32 = 2;

/// The directory where plugins and followers of this user meet: `set`, the value of [`PLUGIN_DIR`], or one in shared
/// memory for each user.
pub fn plugin_dir(set: Option<OsString>) -> PathBuf {
    let own = || format!("/dev/shm/driftless-{}", rustix::process::geteuid().as_raw()).into();
    set.filter(|dir| !dir.is_empty()).map_or_else(own, PathBuf::from)
}

/// A rank of the engine that listens on `port`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rank {
    /// The engine's port.
    pub port: u16,
    /// Which rank it is, from 0.
    pub number: u32,
    /// How many there are.
    pub of: u32,
}

/// The content of a rank's file: `docs/format/prepared.md`. It tells nothing once its process has ended.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct RankFile {
    /// [`FORMAT`], of plugins that say it.
    #[serde(default = "first_format")]
    pub(crate) format: u32,
    #[serde(flatten)]
    pub(crate) process: Process,
    pub(crate) ranks: u32,
    /// Why it never patches.
    pub(crate) why_not: Option<String>,
    /// Whether it takes calls for a comparison: plugins of before would take them for a load.
    #[serde(default)]
    pub(crate) compares: bool,
    /// By the name of the prepared delta's file, what became of it.
    pub(crate) deltas: BTreeMap<String, Told>,
}

fn first_format() -> u32 {
    1
}

/// What became of a prepared delta.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Told {
    /// Label of the version that it leads to.
    pub(crate) target: String,
    /// Why it is not prepared.
    pub(crate) why_not: Option<String>,
}

impl Rank {
    /// Where its file lies in the plugins' directory `dir`.
    pub(crate) fn path(self, dir: &Path) -> PathBuf {
        dir.join(format!("rank-{}-{}.json", self.port, self.number))
    }

    /// Says that this rank never patches, and why.
    ///
    /// # Errors
    /// [`Error::Live`] for a directory that others can enter; [`Error::Write`] for one that cannot be written
    /// to.
    pub fn refuse(self, dir: &Path, why: &str) -> Result<()> {
        let mut file = RankFile::of(self);
        file.why_not = Some(why.into());
        file.write(self, dir)
    }
}

impl RankFile {
    /// The file of a rank in this process, which has told nothing yet.
    pub(super) fn of(rank: Rank) -> Self {
        let (process, ranks, deltas) = (Process::own(), rank.of, BTreeMap::new());
        Self { format: FORMAT, process, ranks, why_not: None, compares: false, deltas }
    }

    /// Writes it whole; makes the directory, for this user alone.
    pub(super) fn write(&self, rank: Rank, dir: &Path) -> Result<()> {
        write(&rank.path(dir), dir, self)
    }
}

/// Whose a file is: all that the file of an engine's HTTP server has.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    /// When it began, in the kernel's clock ticks.
    pub(crate) start: u64,
}

impl Process {
    fn own() -> Self {
        let pid = std::process::id();
        Self { pid, start: started(pid).unwrap_or_default() }
    }

    pub(crate) fn has_ended(&self) -> bool {
        started(self.pid) != Some(self.start)
    }
}

/// Where the file of the server that listens on `port` lies in the plugins' directory `dir`.
pub(crate) fn server_path(dir: &Path, port: u16) -> PathBuf {
    dir.join(format!("server-{port}.json"))
}

/// Tells followers that the HTTP server of this process, on `port`, has an engine patched without a pause: a call that
/// asks for that does not wait for running requests.
///
/// # Errors
/// As [`Rank::refuse`].
pub fn announce_server(dir: &Path, port: u16) -> Result<()> {
    write(&server_path(dir, port), dir, &Process::own())
}

/// Removes what processes that have ended left in the plugins' directory `dir`, an older plugin's as well.
pub(crate) fn sweep(dir: &Path) {
    let Ok(entries) = prepared::check_dir(dir).map_err(io::Error::other).and_then(|()| fs::read_dir(dir))
    else {
        return;
    };
    for path in entries.flatten().map(|entry| entry.path()) {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if !name.ends_with(".json") || !(name.starts_with("rank-") || name.starts_with("server-")) {
            continue;
        }
        let bytes = regular::read(&path).unwrap_or_default();
        // Both kinds of files have it.
        if serde_json::from_slice(&bytes).is_ok_and(|of: Process| of.has_ended()) {
            // It tells nothing: left behind, it does no harm.
            let _ = fs::remove_file(&path);
        }
    }
}

fn write(path: &Path, dir: &Path, content: &impl Serialize) -> Result<()> {
    let fail = |source: io::Error| Error::Write { path: path.into(), source };
    match DirBuilder::new().mode(0o700).create(dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(fail(error)),
        _ => prepared::check_dir(dir).map_err(|error| Error::Offer { source: error.into() })?,
    }
    let partial = path.with_extension("partial");
    let text = serde_json::to_vec(content).map_err(|error| fail(error.into()))?;
    fs::write(&partial, text).and_then(|()| fs::rename(&partial, path)).map_err(fail)
}

/// When a process began, in the kernel's clock ticks; `None` for one that is not there.
pub(crate) fn started(pid: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Behind the name, which may hold anything.
    text.get(text.rfind(')')?..)?.split(' ').nth(20)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sweep_removes_what_ended_processes_left() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("plugins");
        announce_server(&dir, 30000).unwrap();
        Rank { port: 30000, number: 0, of: 1 }.refuse(&dir, "packed").unwrap();
        let dead = r#"{"pid": 4294967295, "start": 7, "ranks": 1, "why_not": null, "deltas": {}}"#;
        for name in ["rank-30001-0.json", "server-30001.json", "notes.json"] {
            fs::write(dir.join(name), dead).unwrap();
        }
        fs::write(dir.join("rank-30002-0.json"), "{").unwrap();
        sweep(&dir);
        let names =
            fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.collect();
        names.sort();
        assert_eq!(names, ["notes.json", "rank-30000-0.json", "rank-30002-0.json", "server-30000.json"]);
    }
}
