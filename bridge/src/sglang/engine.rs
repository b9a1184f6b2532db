//! SGLang as an [`Engine`].

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use driftless_transport::Snapshot;
use driftless_transport::activate::Limit;

use super::wire::PluginUpdated;
use super::{Capabilities, Client, DiskUpdate, DiskUpdated, OnlyPlugin, checksums, identity};
use crate::engine::{
    About, Answer, BETWEEN_TRIES, Comparison, Engine, Expected, GenerateRequest, Generation, Identity,
    Patched, PauseMode, Reload, Rid, Sums, TRIES, Tell, expect_label, local,
};
use crate::error::{Error, Result};
use crate::http::excerpt;
use crate::live::PatchDone;

impl Engine for Client {
    fn kind(&self) -> &'static str {
        "sglang"
    }

    fn url(&self) -> &str {
        Client::url(self)
    }

    fn limited(&self, limit: &Limit) -> Arc<dyn Engine> {
        Arc::new(Client::limited(self, limit))
    }

    fn about(&self) -> Answer<'_, About> {
        Box::pin(async {
            let server = self.server_info().await?;
            Ok(About { release: server.version, model: server.model_path })
        })
    }

    fn identify<'a>(&'a self, expected: &'a Expected) -> Answer<'a, Identity> {
        Box::pin(identify(self, expected))
    }

    fn label(&self) -> Answer<'_, Option<String>> {
        Box::pin(async { Ok(self.model_info().await?.weight_version) })
    }

    fn set_label<'a>(&'a self, label: &'a str) -> Answer<'a, ()> {
        Box::pin(self.set_weight_version(label))
    }

    fn generate<'a>(&'a self, request: &'a GenerateRequest) -> Answer<'a, Generation> {
        Box::pin(Client::generate(self, request))
    }

    fn stream<'a>(
        &'a self,
        request: &'a GenerateRequest,
        interval: u32,
        seen: Tell<'a>,
    ) -> Answer<'a, Generation> {
        Box::pin(Client::stream(self, request, interval, seen))
    }

    fn abort<'a>(&'a self, request: &'a Rid) -> Answer<'a, ()> {
        Box::pin(Client::abort(self, request))
    }

    fn pause(&self, mode: PauseMode) -> Answer<'_, ()> {
        Box::pin(Client::pause(self, mode))
    }

    fn resume(&self) -> Answer<'_, ()> {
        Box::pin(Client::resume(self))
    }

    fn ready(&self) -> Answer<'_, Option<bool>> {
        Box::pin(Client::ready(self))
    }

    fn is_busy(&self) -> Answer<'_, bool> {
        Box::pin(is_busy(self))
    }

    fn empty_cache(&self, mode: PauseMode) -> Answer<'_, ()> {
        Box::pin(empty_cache(self, mode))
    }

    fn load<'a>(&'a self, load: Reload<'a>) -> Answer<'a, ()> {
        Box::pin(reload(self, load))
    }

    fn patch<'a>(&'a self, load: Reload<'a>) -> Answer<'a, Patched> {
        Box::pin(patch(self, load))
    }

    fn patch_running<'a>(&'a self, load: Reload<'a>) -> Answer<'a, Option<Duration>> {
        Box::pin(patch_running(self, load))
    }

    fn compare<'a>(&'a self, load: Reload<'a>, sample: Option<u64>) -> Answer<'a, Comparison> {
        Box::pin(compare(self, load, sample))
    }

    /// An update takes a lock that each request holds.
    fn waits_for_requests(&self) -> bool {
        true
    }

    fn sums(&self, identity: &Identity, snapshot: &dyn Snapshot, place: &Path) -> Result<Sums> {
        sums(identity, snapshot, place)
    }

    fn live_sums(&self) -> Answer<'_, BTreeMap<String, String>> {
        Box::pin(live_sums(self))
    }
}

async fn identify(client: &Client, expected: &Expected) -> Result<Identity> {
    let (model, server) = (client.model_info().await?, client.server_info().await?);
    let local = local(Path::new(&server.model_path), server.tokenizer_path.as_deref().map(Path::new))?;
    let identity = identity::compare(client.url(), expected, &model, &server, local.as_ref())?;
    let capabilities = Capabilities::probe(client).await?;
    tracing::debug!(engine = client.url(), ?capabilities, "capabilities");
    let Capabilities { spans, sessions, survives_refused_flush: flushes, .. } = capabilities;
    Ok(Identity { spans, sessions, flushes, ..identity })
}

async fn reload(client: &Client, load: Reload<'_>) -> Result<()> {
    match client.update_weights_from_disk(&update_of(load)).await? {
        DiskUpdated::Done => Ok(()),
        // Applied all the same: the flush is what is missing.
        DiskUpdated::Unflushed => empty_cache(client, load.pause).await,
    }
}

/// One call for weights, cache and label.
async fn patch(client: &Client, load: Reload<'_>) -> Result<Patched> {
    let flush_cache = load.identity.flushes_with_patch(load.pause);
    let update = DiskUpdate { flush_cache, ..update_of(load) };
    match client.update_by_plugin(&update).await? {
        PluginUpdated::Done { done, behind } => {
            patched(client, load, &done, &behind).await.map(|()| Patched::Patched)
        }
        PluginUpdated::Refused(refused) => {
            refused.log(client.url());
            Ok(Patched::Untouched)
        }
        PluginUpdated::Engine(DiskUpdated::Done) => Ok(Patched::Loaded),
        // The label is owed as well.
        PluginUpdated::Engine(DiskUpdated::Unflushed) => {
            empty_cache(client, load.pause).await.map(|()| Patched::Loaded)
        }
        other @ PluginUpdated::Compared(_) => Err(no_reply(client, "a patch", load.label, &other)),
    }
}

async fn patch_running(client: &Client, load: Reload<'_>) -> Result<Option<Duration>> {
    let update = DiskUpdate { only: Some(OnlyPlugin::Patch), ..update_of(load) };
    match client.update_by_plugin(&update).await? {
        PluginUpdated::Done { done, behind } => {
            patched(client, load, &done, &behind).await.map(|()| Some(done.stood_still()))
        }
        PluginUpdated::Refused(refused) => {
            refused.log(client.url());
            Ok(None)
        }
        other => Err(no_reply(client, "a patch without a pause", load.label, &other)),
    }
}

/// The engine is not asked to load in any case: the call goes to engines whose plugin says that it compares.
async fn compare(client: &Client, load: Reload<'_>, sample: Option<u64>) -> Result<Comparison> {
    let update = DiskUpdate { only: Some(OnlyPlugin::Compare { sample }), ..update_of(load) };
    match client.update_by_plugin(&update).await? {
        PluginUpdated::Compared(compared) if compared.label == load.label => {
            Ok(Comparison::Compared(compared))
        }
        PluginUpdated::Refused(refused) => Ok(refused.into()),
        other => Err(no_reply(client, "a comparison", load.label, &other)),
    }
}

/// An engine answered a call that only its plugin knows in another way.
fn no_reply(client: &Client, call: &str, label: &str, found: &PluginUpdated) -> Error {
    let what = format!("the reply to a call for {call}");
    let found = excerpt(format!("{found:?}").as_bytes());
    Error::refused(client.url(), what, format!("one of its plugin about {label}"), found)
}

/// A load that flushes nothing.
fn update_of(load: Reload<'_>) -> DiskUpdate {
    DiskUpdate {
        model_path: load.directory.into(),
        load_format: load.identity.load_format.clone(),
        weight_version: Some(load.label.into()),
        flush_cache: false,
        only: None,
    }
}

/// What is left to do behind a patch, of which the engine says `behind` too.
async fn patched(client: &Client, load: Reload<'_>, done: &PatchDone, behind: &str) -> Result<()> {
    let label = load.label;
    if done.label != label {
        let (engine, expected, found) = (client.url().into(), label.into(), excerpt(done.label.as_bytes()));
        return Err(Error::LabelMismatch { engine, expected, found });
    }
    // What answers is what tells the label: it need not be asked again.
    if !behind.ends_with(&format!("Weight version updated to {label}.")) {
        expect_label(client, label).await?;
    }
    // Requests that stay may keep the cache. A call that is refused for it would end some releases.
    if load.pause == PauseMode::InPlace && done.cache.is_none() {
        empty_cache(client, load.pause).await?;
    }
    Ok(())
}

/// Releases without this call count as idle.
async fn is_busy(client: &Client) -> Result<bool> {
    match client.loads().await {
        Ok(loads) => Ok(loads.iter().any(|load| load.num_running_reqs + load.num_waiting_reqs > 0)),
        Err(Error::Status { status: 404, .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Before 0.5.21 a flush is refused while retracted requests wait; those are then aborted, and whoever sent
/// them sends them again.
async fn empty_cache(client: &Client, mode: PauseMode) -> Result<()> {
    if client.flush_cache().await? || mode == PauseMode::InPlace {
        return Ok(());
    }
    client.pause(PauseMode::Abort).await?;
    for _ in 0..TRIES {
        if client.flush_cache().await? {
            return Ok(());
        }
        tokio::time::sleep(BETWEEN_TRIES).await;
    }
    let expected = "accepted once every request is aborted";
    Err(Error::refused(client.url(), "flush_cache", expected, format!("refused {TRIES} times")))
}

fn sums(identity: &Identity, snapshot: &dyn Snapshot, place: &Path) -> Result<Sums> {
    match &identity.no_checksums {
        None => checksums(snapshot, place).map(Sums::Known),
        Some(reason) => Ok(Sums::Unknown { reason: reason.clone() }),
    }
}

async fn live_sums(client: &Client) -> Result<BTreeMap<String, String>> {
    let ranks = client.checksums().await?;
    Ok(ranks.into_iter().next().map(|rank| rank.checksums).unwrap_or_default())
}
