//! Engines that others keep on a version, by what followers left in the store and by what engines say they serve.

use driftless_bridge::Label;
use driftless_bridge::fleet::EngineStatus;
use driftless_transport::Run;
use driftless_transport::gc::{self, GcOptions, Lease};

use driftless_trainer::learner::MODEL;
use driftless_trainer::{Error, Result};

/// Refuses engines that another follower keeps on a version, or that serve a version of a run that is not known here.
/// `own` is the name of the follower that is to have them.
///
/// # Errors
/// [`Error::EnginesInUse`] with every such engine; what the store answers.
pub(super) fn check(run: Option<&Run>, own: &str, engines: &[EngineStatus]) -> Result<()> {
    let mut held = Vec::new();
    for engine in engines {
        if let Some(why) = held_by(run, own, engine)? {
            held.push(format!("{} ({why})", engine.url));
        }
    }
    match held.is_empty() {
        true => Ok(()),
        false => Err(Error::EnginesInUse { engines: held.join(", ") }),
    }
}

/// Who keeps an engine on a version.
fn held_by(run: Option<&Run>, own: &str, engine: &EngineStatus) -> Result<Option<String>> {
    let label = engine.serving.as_deref().and_then(|serving| serving.parse::<Label>().ok());
    let served = match (run, &label) {
        (Some(run), Some(label)) => match run_of(run, label)? {
            None => {
                return Ok(Some(format!("it serves {label}, of a run that {} does not have", run.store())));
            }
            served => served,
        },
        (None, Some(label)) => {
            return Ok(Some(format!("it serves {label}, and nothing here says whether that run goes on")));
        }
        _ => None,
    };
    for run in run.into_iter().chain(&served) {
        let leases = gc::leases(run, &GcOptions::new(MODEL))?;
        let live = leases.iter().filter(|lease| lease.live && lease.follower != own);
        if let Some(lease) = live.into_iter().find(|lease| keeps(lease, engine)) {
            return Ok(Some(format!("follower `{}` keeps it on run `{}`", lease.follower, run.name())));
        }
    }
    Ok(None)
}

/// The run of a label, of those in the store of `run`.
fn run_of(run: &Run, label: &Label) -> Result<Option<Run>> {
    let is_its = |run: &Run| run.id().to_string().starts_with(label.run());
    if is_its(run) {
        return Ok(Some(run.clone()));
    }
    for name in Run::names(&**run.store())? {
        match Run::open(run.store().clone(), &name) {
            Ok(other) if is_its(&other) => return Ok(Some(other)),
            // One that is just begun, or of a newer release, has other versions than this.
            _ => {}
        }
    }
    Ok(None)
}

/// Whether a follower has an engine. The loopback of its host may be another's: there the run tells, too. The versions of one
/// that is just being brought on differ, and one that was just started again has none.
fn keeps(lease: &Lease, engine: &EngineStatus) -> bool {
    let Ok(Some(ack)) = &lease.ack else { return false };
    let run = |label: &Option<String>| Some(label.as_ref()?.parse::<Label>().ok()?.run().to_owned());
    let port = |url: &str| url.rsplit(':').next().map(|port| port.trim_end_matches('/').to_owned());
    ack.engines.iter().any(|theirs| {
        if is_loopback(&theirs.url) || is_loopback(&engine.url) {
            let serving = run(&engine.serving);
            port(&theirs.url) == port(&engine.url) && (serving.is_none() || serving == run(&theirs.label))
        } else {
            theirs.url == engine.url
        }
    })
}

fn is_loopback(url: &str) -> bool {
    let host = url.split_once("://").map_or(url, |(_, rest)| rest);
    ["127.", "localhost", "[::1]"].iter().any(|name| host.starts_with(name))
}
