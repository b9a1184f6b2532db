//! What an engine can do, found by asking the engine itself.

use crate::error::{Error, Result};
use crate::sglang::{Client, Dialect, Feature};

/// The calls without which an engine cannot be updated.
const NEEDED: [&str; 4] =
    ["/pause_generation", "/continue_generation", "/update_weights_from_disk", "/update_weight_version"];

/// What an engine can do. Probed, except where the probe itself would do harm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Distributed updates want `begin_weight_update` and `end_weight_update` around them (0.5.21 and later).
    pub sessions: bool,
    /// Replies say which output tokens came from which weights (0.5.19 and later). Taken from the release
    /// number, because a reply depends on the weights that are live, and an engine with broken ones has to be
    /// given others.
    pub spans: bool,
    /// `/ready` says whether the engine is paused (0.5.20 and later).
    pub ready: bool,
    /// An update that may not flush the cache is answered with an error; otherwise the server ends. Taken
    /// from the release number, because the probe would be that update. Activation does not depend on it: it
    /// flushes by a call of its own, which no release dies of.
    pub survives_refused_flush: bool,
}

impl Capabilities {
    /// Asks the engine. Nothing changes there, and nothing is generated.
    ///
    /// # Errors
    /// As every call of [`Client`]; [`Error::Refused`] for an engine without pause and continue, such as
    /// SGLang's embedded Rust server.
    pub async fn probe(client: &Client) -> Result<Self> {
        for path in NEEDED {
            if !client.has_post(path).await? {
                return Err(Error::refused(client.url(), path, "a call of the engine", "no such call"));
            }
        }
        let ready = client.ready().await?;
        let release = client.server_info().await?.version.unwrap_or_default();
        let dialect = Dialect::of_release(&release);
        Ok(Self {
            sessions: client.has_post("/begin_weight_update").await?,
            spans: dialect.has(Feature::Spans),
            ready: ready.is_some(),
            survives_refused_flush: dialect.has(Feature::SurvivesRefusedFlush),
        })
    }
}
