//! SGLang as an [`Engine`].

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use driftless_transport::activate::Limit;

use super::{Capabilities, Client, DiskUpdate, DiskUpdated, identity};
use crate::activate::pause::expect_label;
use crate::engine::{
    Answer, BETWEEN_TRIES, Engine, Expected, GenerateRequest, Generation, Identity, LiveWeights, Patched,
    PauseMode, Reload, Rid, TRIES, local,
};
use crate::error::{Error, Result};

/// How our plugin's answer begins.
const PATCHED: &str = "driftless: patched to ";
/// What it says of the cache, where it could ask for it to be dropped.
const CACHE: [&str; 2] = [", cache dropped", ", cache kept"];
/// What follows the milliseconds for which the engine stood still.
const IN_ALL: &str = " ms in all";
/// How it begins when it could not write.
const NOT_PATCHED: &str = "driftless: not patched to ";

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

    fn check<'a>(
        &'a self,
        identity: &'a Identity,
        expected: &'a BTreeMap<String, String>,
    ) -> Answer<'a, LiveWeights> {
        Box::pin(check(self, identity, expected))
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
    let update = DiskUpdate {
        model_path: load.directory.into(),
        load_format: load.identity.load_format.clone(),
        weight_version: Some(load.label.into()),
        flush_cache: false,
        only_patch: false,
    };
    match client.update_weights_from_disk(&update).await? {
        DiskUpdated::Done => Ok(()),
        // Applied all the same: the flush is what is missing.
        DiskUpdated::Unflushed => empty_cache(client, load.pause).await,
    }
}

/// One call for weights, cache and label.
async fn patch(client: &Client, load: Reload<'_>) -> Result<Patched> {
    match client.told_update_from_disk(&patch_update(load, false)).await {
        Ok((DiskUpdated::Done, message)) if message.starts_with(PATCHED) => {
            patched(client, load, &message).await.map(|()| Patched::Patched)
        }
        Ok((DiskUpdated::Done, _)) => Ok(Patched::Loaded),
        // The label is owed as well.
        Ok((DiskUpdated::Unflushed, _)) => empty_cache(client, load.pause).await.map(|()| Patched::Loaded),
        Err(error) => untouched(client, error).map(|()| Patched::Untouched),
    }
}

async fn patch_running(client: &Client, load: Reload<'_>) -> Result<Option<Duration>> {
    let began = Instant::now();
    match client.told_update_from_disk(&patch_update(load, true)).await {
        Ok((DiskUpdated::Done, message)) if message.starts_with(PATCHED) => {
            patched(client, load, &message).await?;
            Ok(Some(stood_still(&message).unwrap_or_else(|| began.elapsed())))
        }
        Ok((_, found)) => Err(Error::Refused {
            engine: client.url().into(),
            what: "the reply to a call for a patch without a pause".into(),
            expected: format!("{PATCHED}{}", load.label),
            found,
        }),
        Err(error) => untouched(client, error).map(|()| None),
    }
}

fn patch_update(load: Reload<'_>, only_patch: bool) -> DiskUpdate {
    DiskUpdate {
        model_path: load.directory.into(),
        load_format: load.identity.load_format.clone(),
        weight_version: Some(load.label.into()),
        flush_cache: !only_patch && load.identity.flushes_with_patch(load.pause),
        only_patch,
    }
}

/// What is left to do for a patch whose reply was `message`.
async fn patched(client: &Client, load: Reload<'_>, message: &str) -> Result<()> {
    // What answers is what tells the label: it need not be asked again.
    if !message.ends_with(&format!("Weight version updated to {}.", load.label)) {
        expect_label(client, load.label).await?;
    }
    // Requests that stay may keep the cache. A call that is refused for it would end some releases.
    if load.pause == PauseMode::InPlace && !CACHE.iter().any(|said| message.contains(said)) {
        empty_cache(client, load.pause).await?;
    }
    Ok(())
}

/// Refuses every failure but the plugin's, after which the engine loads.
fn untouched(client: &Client, error: Error) -> Result<()> {
    match error {
        Error::Status { status: 400, body, .. } if body.contains(NOT_PATCHED) => {
            tracing::warn!(engine = client.url(), reply = body, "loads instead of being patched");
            Ok(())
        }
        error => Err(error),
    }
}

/// How long the engine stood still, as its first rank says.
fn stood_still(message: &str) -> Option<Duration> {
    let (before, _) = message.split_once(IN_ALL)?;
    let (_, ms) = before.rsplit_once(", ")?;
    Duration::try_from_secs_f64(ms.parse::<f64>().ok()? / 1e3).ok()
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
    let (expected, found) =
        ("accepted once every request is aborted".into(), format!("refused {TRIES} times"));
    Err(Error::Refused { engine: client.url().into(), what: "flush_cache".into(), expected, found })
}

async fn check(
    client: &Client,
    identity: &Identity,
    expected: &BTreeMap<String, String>,
) -> Result<LiveWeights> {
    if !identity.checksums_comparable() {
        let (tp, device) = (identity.tp, identity.device.as_deref().unwrap_or("an unknown device"));
        let quantized = if identity.quantized { ", quantised" } else { "" };
        let reason = format!(
            "checksums are known for one rank on the CPU that is not quantised, found {tp} on {device}{quantized}"
        );
        return Ok(LiveWeights::Unchecked { reason });
    }
    let ranks = client.checksums().await?;
    let empty = BTreeMap::new();
    let found = ranks.first().map_or(&empty, |rank| &rank.checksums);
    match difference(expected, found) {
        None => Ok(LiveWeights::Equal),
        Some((count, tensor, expected, found)) => {
            Err(Error::LiveWeights { engine: client.url().into(), count, tensor, expected, found })
        }
    }
}

/// How many entries differ, and the first of them: name, expected, found.
fn difference(
    expected: &BTreeMap<String, String>,
    found: &BTreeMap<String, String>,
) -> Option<(usize, String, String, String)> {
    let show = |sum: Option<&String>| sum.map_or_else(|| "none".to_owned(), Clone::clone);
    let names: BTreeSet<&String> = expected.keys().chain(found.keys()).collect();
    let mut differing = names.into_iter().filter(|name| expected.get(*name) != found.get(*name));
    let first = differing.next()?;
    Some((1 + differing.count(), first.clone(), show(expected.get(first)), show(found.get(first))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stood_still_is_the_first_time_that_a_reply_tells() {
        let tells = |rest: &str| stood_still(&format!("{PATCHED}it{rest}. Weight version updated to it."));
        assert_eq!(tells(", cache dropped, 16.250 ms in all"), Some(Duration::from_micros(16_250)));
        assert_eq!(
            tells(", 1 ms in all | driftless: patched to it, 2 ms in all"),
            Some(Duration::from_millis(1))
        );
        for without in [
            "",
            ", 16.250 ms",
            " ms in all",
            ",  ms in all",
            ", -1 ms in all",
            ", NaN ms in all",
            ", 1e99 ms in all",
        ] {
            assert_eq!(tells(without), None, "{without}");
        }
    }

    #[test]
    fn the_first_difference_is_named() {
        let map = |entries: &[(&str, &str)]| {
            entries.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect::<BTreeMap<_, _>>()
        };
        let base = map(&[("a", "1"), ("b", "2")]);
        assert_eq!(difference(&base, &base.clone()), None);
        let changed = difference(&base, &map(&[("a", "1"), ("b", "3")])).unwrap();
        assert_eq!(changed, (1, "b".into(), "2".into(), "3".into()));
        let missing = difference(&base, &map(&[("c", "3")])).unwrap();
        assert_eq!(missing, (3, "a".into(), "1".into(), "none".into()));
    }
}
