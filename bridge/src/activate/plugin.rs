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

use super::{Plan, patch};
use crate::engine::{Comparison, Engine};
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
    /// After so many versions that were patched, the next is proved: all weights are compared where something can
    /// compare them, and otherwise they are loaded.
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
pub(super) enum Unready {
    /// There is no plugin at a rank.
    Without(String),
    /// The plugin of a rank can patch nothing.
    Unable(String),
    /// A rank has not prepared the version.
    Unprepared(String),
}

impl Unready {
    pub(super) fn why(&self) -> &str {
        match self {
            Self::Without(why) | Self::Unable(why) | Self::Unprepared(why) => why,
        }
    }
}

/// Waits until every rank of an engine has prepared the plan's version, or one says that it will not: why the engine
/// loads, if it does.
///
/// # Errors
/// [`Error::NoPlugin`] for an engine without it, where it is required.
pub(super) async fn why_not_ready(
    engine: &dyn Engine,
    plan: &Plan<'_>,
    options: &PluginOptions,
) -> Result<Option<String>> {
    let Err(unready) = wait(engine, plan, options, plan.limit).await else { return Ok(None) };
    match unready {
        Unready::Without(why) | Unready::Unable(why) if options.required => {
            Err(Error::NoPlugin { engine: engine.url().into(), why })
        }
        Unready::Without(why) => {
            tracing::debug!(engine = engine.url(), why, "has no plugin");
            Ok(Some("it has no plugin".into()))
        }
        Unready::Unable(why) | Unready::Unprepared(why) => {
            tracing::info!(engine = engine.url(), label = plan.label, why, "loads instead of being patched");
            Ok(Some(why))
        }
    }
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

/// Has the plugin at each rank of an engine, paused or not, compare its weights with the plan's checkpoint, which has the
/// version and is not written meanwhile: all of them, for which the engine stands still up to seconds, or a sample of
/// milliseconds, another one for each number.
///
/// # Errors
/// The call's own failures. An engine whose plugin cannot compare is none.
pub(super) async fn compare(
    engine: &dyn Engine,
    plan: &Plan<'_>,
    options: &PluginOptions,
    sample: Option<u64>,
) -> Result<Comparison> {
    match compares(engine, plan.identity.tp, options) {
        Ok(()) => engine.compare(patch::request(plan), sample).await,
        Err(unready) => Ok(Comparison::Cannot { why: unready.why().to_owned() }),
    }
}

/// Refuses an engine that no delta can be prepared for.
pub(super) fn patches(engine: &dyn Engine, ranks: u32, options: &PluginOptions) -> Result<(), Unready> {
    all(engine, ranks, options).map(drop)
}

/// What the ranks of an engine say, if each of them can patch.
fn all(engine: &dyn Engine, ranks: u32, options: &PluginOptions) -> Result<Vec<RankFile>, Unready> {
    let port = port(engine).ok_or_else(|| Unready::Without(format!("{} has no port", engine.url())))?;
    prepared::check_dir(&options.dir).map_err(|error| Unready::Without(error.to_string()))?;
    let path = |number: u32| Rank { port, number, of: ranks }.path(&options.dir);
    (0..ranks).map(|rank| read(&path(rank), rank, ranks)).collect()
}

/// Refuses an engine that would take the call for a comparison for another one.
pub(super) fn compares(engine: &dyn Engine, ranks: u32, options: &PluginOptions) -> Result<(), Unready> {
    for (rank, said) in all(engine, ranks, options)?.into_iter().enumerate() {
        if !said.compares {
            let why =
                "the plugin in the engine, or the engine, is of an older release, which does not compare";
            return Err(Unready::Unable(format!("rank {rank}: {why}")));
        }
    }
    if engine.waits_for_requests() && !hands_on(engine, options) {
        return Err(Unready::Without("the process of the engine's HTTP server has no plugin".into()));
    }
    Ok(())
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
    use driftless_testkit::sglang::{Fake, Fault, checkpoint};
    use driftless_testkit::vllm::{self, Vllm};
    use driftless_transport::Checkpoint;
    use serde_json::{Value, json};

    use super::*;
    use crate::engine::{Expected, PauseMode};
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
    /// What a comparison becomes at an engine whose rank says something, and whose server hands on or not; and the body of
    /// the call that it got.
    fn compared(says: Value, hands_on: bool, fault: Fault) -> (Result<Comparison>, Option<Value>) {
        let dir = tempfile::tempdir().unwrap();
        let place = checkpoint(&dir.path().join("a"), 1, 4);
        let fake = Fake::start(&place);
        fake.fault("POST /update_weights_from_disk", fault);
        let options = PluginOptions::new(dir.path().join("plugins"));
        let (port, start) = (fake.address.port(), started(std::process::id()).unwrap());
        let rank = Rank { port, number: 0, of: 1 };
        rank.refuse(&options.dir, "made anew").unwrap();
        let mut told =
            json!({"format": 2, "pid": std::process::id(), "start": start, "ranks": 1, "deltas": {}});
        told.as_object_mut().unwrap().extend(says.as_object().unwrap().clone());
        std::fs::write(rank.path(&options.dir), told.to_string()).unwrap();
        if hands_on {
            crate::live::announce_server(&options.dir, port).unwrap();
        }
        let engine = crate::connect(&fake.address.to_string(), Default::default()).unwrap();
        let open = Checkpoint::open(&place).unwrap();
        let (limit, label) = (Limit::within(Duration::from_secs(60)), "a:1");
        let expected = Expected::from_checkpoint(&place).unwrap();
        let runtime = driftless_http::runtime::handle().unwrap();
        let found = driftless_http::runtime::wait(&runtime, async {
            let identity = &engine.identify(&expected).await?;
            let (directory, pause) = (place.clone(), PauseMode::InPlace);
            let (plugin, required, sums) = (Some(&options), Default::default(), Default::default());
            let plan = Plan {
                label,
                directory,
                identity,
                pause,
                plugin,
                compare: required,
                checkpoint: &open,
                limit: &limit,
                sums,
            };
            compare(&*engine, &plan, &options, Some(3)).await
        });
        let calls = fake.engine().calls.clone();
        (found, calls.into_iter().find(|(path, _)| path == "/update_weights_from_disk").map(|(_, body)| body))
    }

    const COMPARED: &str = r#"driftless: {"compared":"a:1","tensors":9,"bytes":4096,"differing":{"count":1,"first":["w"]},"unreached":{"count":0,"first":[]},"took_us":77}"#;

    fn answer(status: u16, message: &str) -> Fault {
        Fault::Answer(status, json!({"success": status == 200, "message": message}).to_string())
    }

    #[test]
    fn only_a_plugin_that_says_so_is_asked_to_compare() {
        for (says, hands_on, expected) in [
            (json!({"compares": true}), false, "the engine's HTTP server has no plugin"),
            (json!({"compares": false}), true, "of an older release, which does not compare"),
            (json!({}), true, "of an older release, which does not compare"),
            (json!({"compares": true, "why_not": "packed"}), true, "packed"),
            (json!({"compares": true, "start": 1}), true, "has ended"),
            (json!({"compares": true, "format": 1}), true, "format 1"),
        ] {
            let (found, asked) = compared(says, hands_on, answer(400, COMPARED));
            let found = found.unwrap();
            assert!(matches!(&found, Comparison::Cannot { why } if why.contains(expected)), "{found:?}");
            assert_eq!(asked, None, "others take the call for a load");
        }
    }

    #[test]
    fn comparison_is_asked_for_by_a_call_that_no_rank_carries_out() {
        let says = || json!({"compares": true});
        let (found, asked) = compared(says(), true, answer(400, COMPARED));
        let Comparison::Compared(found) = found.unwrap() else { panic!("it compared") };
        assert_eq!((found.tensors, found.is_equal(), found.took()), (9, false, Duration::from_micros(77)));
        let asked = asked.unwrap();
        assert_eq!(asked["manifest"], json!({"driftless": "compare", "sample": 3}));
        assert_eq!((&asked["weight_version"], &asked["flush_cache"]), (&json!("a:1"), &json!(false)));
        let refused = r#"driftless: {"label":"a:1","refused":"no such file"}"#;
        let found = compared(says(), true, answer(400, refused)).0.unwrap();
        assert_eq!(found, Comparison::Cannot { why: "no such file".into() });
        for (status, message) in
            [(200, COMPARED), (200, ""), (400, ""), (400, &COMPARED.replace("a:1", "a:2")), (500, COMPARED)]
        {
            let found = compared(says(), true, answer(status, message)).0;
            assert!(matches!(found, Err(Error::Refused { .. } | Error::Status { .. })), "{found:?}");
        }
    }

    #[test]
    fn a_worker_of_vllm_is_asked_to_compare_by_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let place = checkpoint(&dir.path().join("a"), 1, 4);
        let vllm = Vllm::start(&place);
        let runtime = driftless_http::runtime::handle().unwrap();
        let engine = crate::connect(&vllm.url(), Default::default()).unwrap();
        let expected = Expected::from_checkpoint(&place).unwrap();
        let identity = driftless_http::runtime::wait(&runtime, engine.identify(&expected)).unwrap();
        let ask = |body: String| {
            vllm.fault("POST /collective_rpc", vllm::Fault::Answer(200, body.leak()));
            let (directory, label, pause) = (place.as_path(), "a:1", PauseMode::InPlace);
            let load = crate::engine::Reload { directory, label, pause, identity: &identity };
            driftless_http::runtime::wait(&runtime, engine.compare(load, None))
        };
        let found = ask(json!({"results": [COMPARED]}).to_string()).unwrap();
        assert!(matches!(found, Comparison::Compared(found) if found.differing.to_string() == "w"));
        let refused = json!({"results": [r#"driftless: {"label":"a:1","refused":"no"}"#]});
        assert_eq!(ask(refused.to_string()).unwrap(), Comparison::Cannot { why: "no".into() });
        for results in [json!([]), json!([null]), json!([COMPARED.replace("a:1", "b:1")]), json!(["done"])] {
            let found = ask(json!({"results": results}).to_string());
            assert!(matches!(found, Err(Error::Reply { .. })), "{found:?}");
        }
        assert!(vllm.server().calls.iter().all(|call| call.ends_with(" driftless_compare")));
    }
}
