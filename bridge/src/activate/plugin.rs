//! Engines with our plugin: which have it, and whether it has prepared what they are to serve.
//!
//! Each rank keeps a file in a directory that it shares with followers of the same user. The file tells
//! nothing once the process that wrote it has ended.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use derive_setters::Setters;
use driftless_store::ContentDigest;
use driftless_store::os::regular;
use driftless_transport::activate::Limit;
use driftless_transport::prepared::{self, PreparedDelta, offer_path, offered};

use super::Plan;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::live::Rank;
use crate::live::rank::{FORMAT, Process, RankFile, Told, server_path};

/// Between two looks at what a rank says.
const LOOK: Duration = Duration::from_millis(2);

/// How engines' plugins are used.
#[derive(Debug, Clone, PartialEq, Eq, Setters)]
#[setters(prefix = "with_", strip_option)]
#[non_exhaustive]
pub struct PluginOptions {
    /// The directory where plugins and followers of this user meet.
    pub dir: PathBuf,
    /// Whether an engine without the plugin is refused.
    pub required: bool,
    /// How long ranks may take to prepare a delta. Then the engine loads.
    pub deadline: Duration,
    /// After so many versions that were patched, the next is proved: its checksums are compared where that is
    /// possible, and otherwise it is loaded.
    pub prove_every: u32,
}

impl PluginOptions {
    /// Plugins are used where they are; 30 s to prepare; every 50th version is proved.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into(), required: false, deadline: Duration::from_secs(30), prove_every: 50 }
    }
}

/// Why an engine's ranks are not ready.
#[derive(Debug)]
enum Unready {
    /// There is no plugin at a rank.
    Without(String),
    /// The plugin of a rank can patch nothing.
    Unable(String),
    /// A rank has not prepared the version.
    Unprepared(String),
}

/// Waits until every rank of an engine has prepared the plan's version, or one says that it will not. Whether all have.
///
/// # Errors
/// [`Error::NoPlugin`] for an engine without it, where it is required.
pub(super) async fn are_ready(
    engine: &dyn Engine,
    plan: &Plan<'_>,
    options: &PluginOptions,
    limit: &Limit,
) -> Result<bool> {
    let Err(unready) = wait(engine, plan, options, limit).await else { return Ok(true) };
    match unready {
        Unready::Without(why) | Unready::Unable(why) if options.required => {
            return Err(Error::NoPlugin { engine: engine.url().into(), why });
        }
        Unready::Without(why) => tracing::debug!(engine = engine.url(), why, "has no plugin"),
        Unready::Unable(why) | Unready::Unprepared(why) => {
            tracing::info!(engine = engine.url(), label = plan.label, why, "loads instead of being patched");
        }
    }
    Ok(false)
}

async fn wait(
    engine: &dyn Engine,
    plan: &Plan<'_>,
    options: &PluginOptions,
    limit: &Limit,
) -> Result<(), Unready> {
    let ranks = plan.identity.tp;
    let port = port(engine).ok_or_else(|| Unready::Without(format!("{} has no port", engine.url())))?;
    prepared::check_dir(&options.dir).map_err(|error| Unready::Without(error.to_string()))?;
    let offer = offer_path(&options.dir, plan.checkpoint.dir());
    let path = offer.map_err(|error| Unready::Unprepared(error.to_string()))?;
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut offer = Offered { path, read: None };
    let until = Instant::now() + options.deadline.min(limit.left());
    for rank in 0..ranks {
        let path = Rank { port, number: rank, of: ranks }.path(&options.dir);
        loop {
            let said = read(&path, rank, ranks)?;
            let why = match said.deltas.get(&name).filter(|told| told.target == plan.label) {
                Some(Told { why_not: None, .. }) => break,
                Some(Told { why_not: Some(why), .. }) => format!("rank {rank}: {why}"),
                None if !offer.leads_to(plan.label) => {
                    "this version was not offered as a prepared delta".into()
                }
                None if Instant::now() >= until => {
                    format!("rank {rank} has not prepared it within {:?}", options.deadline)
                }
                None => {
                    tokio::time::sleep(LOOK).await;
                    continue;
                }
            };
            return Err(Unready::Unprepared(why));
        }
    }
    Ok(())
}

/// The file in which the plan's version is offered.
struct Offered {
    path: PathBuf,
    /// The delta that was in it, and the label it leads to, if it is one.
    read: Option<(ContentDigest, Option<String>)>,
}

impl Offered {
    /// Whether a delta to this label lies there. The header of each delta is read once.
    fn leads_to(&mut self, label: &str) -> bool {
        let Ok(Some(id)) = offered(&self.path) else { return false };
        if self.read.as_ref().is_none_or(|(read, _)| *read != id) {
            let delta = PreparedDelta::open(&self.path).ok().flatten();
            self.read = Some((id, delta.map(|delta| delta.target().label.clone())));
        }
        matches!(&self.read, Some((_, Some(target))) if target == label)
    }
}

/// Whether the process of the engine's HTTP server has the plugin too, which hands on patches without a pause.
pub(super) fn hands_on(engine: &dyn Engine, options: &PluginOptions) -> bool {
    let read = |port| regular::read(&server_path(&options.dir, port)).ok();
    let file = port(engine).and_then(read).and_then(|bytes| serde_json::from_slice(&bytes).ok());
    file.is_some_and(|server: Process| !server.has_ended())
}

/// The port in the engine's URL.
fn port(engine: &dyn Engine) -> Option<u16> {
    reqwest::Url::parse(engine.url()).ok()?.port_or_known_default()
}

/// What a rank says, if the process that said it lives and can patch.
fn read(path: &Path, rank: u32, ranks: u32) -> Result<RankFile, Unready> {
    let place = path.display();
    let without = |why: String| Unready::Without(format!("rank {rank}: {why}"));
    let unable = |why: String| Err(Unready::Unable(format!("rank {rank}: {why}")));
    let bytes = regular::read(path).map_err(|error| without(format!("cannot read {place}: {error}")))?;
    let file: RankFile = match serde_json::from_slice(&bytes) {
        Ok(file) => file,
        Err(error) => return unable(format!("{place} does not parse: {error}")),
    };
    if file.process.has_ended() {
        return Err(without(format!("{place} is of process {}, which has ended", file.process.pid)));
    }
    if file.format != FORMAT {
        return unable(format!(
            "its plugin writes and replies in format {}, expected {FORMAT}: start the engine again with the driftless-rl \
             of this follower's release",
            file.format
        ));
    }
    if let Some(why) = file.why_not {
        return unable(format!("the plugin cannot patch this model: {why}"));
    }
    if file.ranks != ranks {
        return unable(format!("{place} is of an engine of {} ranks, expected {ranks}", file.ranks));
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::live::rank::started;

    #[test]
    fn a_rank_speaks_as_long_as_its_process_lives() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rank-1-0.json");
        let start = started(std::process::id()).unwrap();
        let write = |start: u64, ranks: u32, why: &str| {
            let pid = std::process::id();
            let deltas = r#"{"delta-1": {"target": "a:1", "why_not": null}}"#;
            let text = format!(
                r#"{{"format": 2, "pid": {pid}, "start": {start}, "ranks": {ranks}, "why_not": {why}, "deltas": {deltas}}}"#
            );
            std::fs::write(&path, text).unwrap();
            read(&path, 0, 2)
        };
        assert_eq!(write(start, 2, "null").unwrap().deltas["delta-1"].target, "a:1");
        for (start, ranks, why, expected) in [
            (start + 1, 2, "null", "has ended"),
            (start, 1, "null", "1 ranks, expected 2"),
            (start, 2, "\"packed\"", "cannot patch this model: packed"),
        ] {
            let said = format!("{:?}", write(start, ranks, why).unwrap_err());
            assert!(said.contains(expected), "{said}");
        }
        std::fs::write(&path, "{").unwrap();
        let said = read(&path, 0, 2).unwrap_err();
        assert!(matches!(&said, Unready::Unable(why) if why.contains("does not parse")), "{said:?}");
        std::fs::remove_file(&path).unwrap();
        let said = read(&path, 0, 2).unwrap_err();
        assert!(matches!(&said, Unready::Without(why) if why.contains("cannot read")), "{said:?}");
    }
}
