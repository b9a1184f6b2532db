//! The seam between what uses engines and the kinds of engines.
//!
//! The fleet, and activation from disk, know an [`Engine`] and nothing else of it. A kind of engine is one
//! folder beside this one ([`sglang`](crate::sglang), [`vllm`](crate::vllm)) whose client implements the
//! trait, and one line in [`connect`](crate::connect).

pub(crate) mod config;
mod drawn;
mod expected;
mod fusing;
mod generate;
mod identity;
mod label;
mod meter;
mod options;
mod reply;
mod sums;
mod tensors;

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use driftless_transport::Snapshot;
use driftless_transport::activate::Limit;
use serde::{Deserialize, Serialize};

pub use crate::tls::Ca;
pub use config::{ModelConfig, torch_name};
pub use drawn::{Drawn, Piece, Tell};
pub use expected::Expected;
pub(crate) use expected::hex;
pub use fusing::Fusing;
#[cfg(test)]
pub(crate) use fusing::Parameter;
pub use generate::{Finish, GenerateRequest, Generation, Rid, SamplingParams, VersionSpan};
pub(crate) use generate::{Mismatch, log_probability, outside};
pub use identity::{About, Identity};
pub(crate) use identity::{Check, local};
pub use label::Label;
pub(crate) use label::plain;
pub use meter::{Decoded, Meter};
pub use options::{ClientOptions, Deadlines};
pub use reply::{Digester, ReplyDigest, context};
pub(crate) use sums::check;
pub use sums::{LiveWeights, Sums};
pub(crate) use tensors::{check_tensors, check_tied};

use crate::error::{Error, Result};
use crate::http::excerpt;
use crate::live::{Compared, PatchRefused};

/// How often what an engine refuses for a moment is tried again, and how long apart. An engine answers a
/// request slightly before it drops it, so the first flush after an abort may come too early.
pub(crate) const TRIES: u32 = 20;
pub(crate) const BETWEEN_TRIES: Duration = Duration::from_millis(50);

/// A call under way at an engine. Every call ends within a deadline of its own.
pub type Answer<'a, T> = Pin<Box<dyn Future<Output = Result<T>> + Send + 'a>>;

/// One inference server, of whatever kind.
///
/// Every call may fail as calls do: the engine is unreachable, its deadline or its limit passes, it answers
/// another status, or with another reply than the protocol's.
pub trait Engine: fmt::Debug + Send + Sync {
    /// Its kind: `sglang`, `vllm`.
    fn kind(&self) -> &'static str;

    /// Its URL, as errors and statuses name it.
    fn url(&self) -> &str;

    /// The same engine, whose calls all end when nothing is left of `limit`.
    fn limited(&self, limit: &Limit) -> Arc<dyn Engine>;

    /// Asks the engine what it is.
    fn about(&self) -> Answer<'_, About>;

    /// Asks the engine who it is and what it can do. Nothing changes there, and nothing is generated.
    ///
    /// Fails with [`Error::Refused`] for another model or a set-up that cannot be updated, by the fields of both configs
    /// or the engine's own names, and with [`Error::Config`] when the config under its model path is readable here but not as one.
    fn identify<'a>(&'a self, expected: &'a Expected) -> Answer<'a, Identity>;

    /// The label of its weights; one that nobody set is no [`Label`].
    fn label(&self) -> Answer<'_, Option<String>>;

    /// Changes the label, and nothing else.
    fn set_label<'a>(&'a self, label: &'a str) -> Answer<'a, ()>;

    /// Generates one sample. The reply is checked: one finite log-probability per token, of that token, under
    /// the distribution that it was drawn from.
    ///
    /// Fails with [`Error::Request`] for what this kind of engine cannot do, and [`Error::Reply`] for a reply that does
    /// not hold.
    fn generate<'a>(&'a self, request: &'a GenerateRequest) -> Answer<'a, Generation>;

    /// As [`Engine::generate`], and tells of tokens as they come: at most `interval` of them unsaid, where this kind of
    /// engine streams. The reply has all of them.
    fn stream<'a>(
        &'a self,
        request: &'a GenerateRequest,
        interval: u32,
        seen: Tell<'a>,
    ) -> Answer<'a, Generation> {
        let _ = (interval, seen);
        self.generate(request)
    }

    /// Aborts one request, never all. An id that the engine does not know is no error.
    fn abort<'a>(&'a self, request: &'a Rid) -> Answer<'a, ()>;

    /// Stops generation.
    fn pause(&self, mode: PauseMode) -> Answer<'_, ()>;

    /// Goes on with generation. Harmless when the engine is not paused.
    fn resume(&self) -> Answer<'_, ()>;

    /// Whether it takes requests and is not paused; `None` where it cannot tell.
    fn ready(&self) -> Answer<'_, Option<bool>>;

    /// Whether requests run or wait there, as far as it tells.
    fn is_busy(&self) -> Answer<'_, bool> {
        Box::pin(async { Ok(false) })
    }

    /// Drops the KV cache of a paused engine. With [`PauseMode::InPlace`], what running requests hold may
    /// stay.
    fn empty_cache(&self, mode: PauseMode) -> Answer<'_, ()>;

    /// Loads the weights of a checkpoint directory into a paused engine. After a failure they may be new, old
    /// or a mixture.
    fn load<'a>(&'a self, load: Reload<'a>) -> Answer<'a, ()>;

    /// Has the engine's plugin write what it prepared into the weights of a paused engine, which then has the
    /// label of `load`. With [`PauseMode::InPlace`] a patch drops the cache as [`Engine::empty_cache`] does. After
    /// a failure the weights may be new, old or a mixture.
    fn patch<'a>(&'a self, load: Reload<'a>) -> Answer<'a, Patched> {
        Box::pin(async move { self.load(load).await.map(|()| Patched::Loaded) })
    }

    /// Has the plugin of an engine that generates write what it prepared, between two steps: weights and label, and
    /// the cache as [`Engine::patch`] does with [`PauseMode::InPlace`]. Returns how long the engine stood still for it;
    /// `None` if it could not, and has changed nothing. After a failure, the label tells which weights it has.
    fn patch_running<'a>(&'a self, load: Reload<'a>) -> Answer<'a, Option<Duration>> {
        let _ = load;
        Box::pin(async { Ok(None) })
    }

    /// Has the plugin of an engine, paused or not, compare its weights with the checkpoint of `load`, byte for byte: all
    /// that its map has, or a sample, another one for each number. Nothing changes there.
    ///
    /// Only an engine whose plugin says that it compares may be asked: others take the call for a load.
    fn compare<'a>(&'a self, load: Reload<'a>, sample: Option<u64>) -> Answer<'a, Comparison> {
        let _ = (load, sample);
        let why = format!("the plugin of {} does not compare", self.kind());
        Box::pin(async { Ok(Comparison::Cannot { why }) })
    }

    /// Whether a plugin's call to an engine that is not paused waits for its requests, unless the server's process has the
    /// plugin too.
    fn waits_for_requests(&self) -> bool {
        false
    }

    /// What the engine has to report of its weights once it holds a snapshot, which has to be of the model that it
    /// said it is. All of the snapshot is read; `place` names it in errors.
    ///
    /// Fails as [`Expected::from_snapshot`], with [`Error::Checkpoint`] for other tensors, and with [`Error::Open`] for
    /// bytes that cannot be read.
    fn sums(&self, identity: &Identity, snapshot: &dyn Snapshot, place: &Path) -> Result<Sums> {
        let _ = (snapshot, place);
        let reason = identity.no_checksums.clone();
        let none = || format!("the checksums of {} are not known here", self.kind());
        Ok(Sums::Unknown { reason: reason.unwrap_or_else(none) })
    }

    /// What the engine reports of its weights, in the form of [`Sums::Known`].
    fn live_sums(&self) -> Answer<'_, BTreeMap<String, String>> {
        Box::pin(async { Ok(BTreeMap::new()) })
    }
}

/// Refuses an engine that has another label.
///
/// # Errors
/// [`Error::LabelMismatch`]; the call's own failures.
pub(crate) async fn expect_label(engine: &dyn Engine, label: &str) -> Result<()> {
    let found = engine.label().await?;
    if found.as_deref() == Some(label) {
        return Ok(());
    }
    let (expected, found) = (label.into(), found.map_or("none".into(), |found| excerpt(found.as_bytes())));
    Err(Error::LabelMismatch { engine: engine.url().into(), expected, found })
}

/// What a load needs to know.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Reload<'a> {
    /// The checkpoint directory, absolute, as the engine sees it.
    pub directory: &'a Path,
    /// The label to carry from then on, for kinds that take it with the load. It is the one that they carry
    /// already.
    pub label: &'a str,
    /// How the engine was paused.
    pub pause: PauseMode,
    /// What the engine said about itself.
    pub identity: &'a Identity,
}

/// How an engine that was to be patched came by its weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Patched {
    /// Its plugin wrote the prepared delta, and the engine took the label.
    Patched,
    /// Its plugin could not write it, and has changed nothing.
    Untouched,
    /// There was nothing prepared: it loaded the checkpoint.
    Loaded,
}

/// What became of a comparison by an engine's plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Comparison {
    /// Each rank compared its weights.
    Compared(Compared),
    /// Nothing was compared.
    Cannot {
        /// Why not.
        why: String,
    },
}

impl From<PatchRefused> for Comparison {
    fn from(refused: PatchRefused) -> Self {
        Self::Cannot { why: excerpt(refused.refused.as_bytes()) }
    }
}

/// What a pause does with running requests. New ones wait in every mode, unanswered, until generation
/// continues.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PauseMode {
    /// They are answered with what they have, finish reason `abort`. Takes a second where there are any.
    Abort,
    /// They go back to the queue and lose their KV cache, which is recomputed with the weights that are live
    /// then.
    #[default]
    Retract,
    /// They stay, with the KV cache of the old weights.
    InPlace,
}

/// An engine that fits: the right model, in a set-up that can be updated.
#[derive(Debug, Clone)]
pub struct Attached {
    engine: Arc<dyn Engine>,
    identity: Identity,
}

impl Attached {
    /// Asks an engine who it is, and accepts it if it fits.
    ///
    /// # Errors
    /// As [`Engine::identify`].
    pub async fn attach(engine: Arc<dyn Engine>, expected: &Expected) -> Result<Self> {
        let identity = engine.identify(expected).await?;
        tracing::info!(engine = engine.url(), kind = engine.kind(), ?identity, "attached");
        if !identity.incremental {
            let engine = engine.url();
            tracing::info!(
                engine,
                "each piece of its streams has all tokens so far, so answers come in few pieces; SGLang's \
                 --incremental-streaming-output changes that"
            );
        }
        if expected.config.custom_code {
            let engine = engine.url();
            tracing::warn!(
                engine,
                "its model code is the checkpoint's own: no field of config.json says what that loads"
            );
        }
        Ok(Self::new(engine, identity))
    }

    /// An engine that was accepted before.
    pub(crate) fn new(engine: Arc<dyn Engine>, identity: Identity) -> Self {
        Self { engine, identity }
    }

    /// The engine.
    pub fn engine(&self) -> &dyn Engine {
        &*self.engine
    }

    /// What it said about itself.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// What the engine has to report of its weights once it holds a snapshot.
    ///
    /// # Errors
    /// As [`Engine::sums`].
    pub fn sums(&self, snapshot: &dyn Snapshot, place: &Path) -> Result<Sums> {
        self.engine.sums(&self.identity, snapshot, place)
    }

    /// Compares the weights that the engine holds with [`Attached::sums`], where those are known.
    ///
    /// # Errors
    /// [`Error::LiveWeights`] when they differ; the call's own failures.
    pub async fn check_live(&self, expected: &Sums) -> Result<LiveWeights> {
        check(&*self.engine, expected).await
    }
}
