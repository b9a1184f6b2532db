//! What an engine can do, found by asking the engine itself.

use crate::error::{Error, Result};
use crate::sglang::Client;

/// First release whose replies say which output tokens came from which weights.
const REPORTS_SPANS: [u32; 3] = [0, 5, 19];

/// First release that answers a refused flush with an error; earlier ones end the whole server in an
/// assertion.
const SURVIVES_REFUSED_FLUSH: [u32; 3] = [0, 5, 22];

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
        for path in [
            "/pause_generation",
            "/continue_generation",
            "/update_weights_from_disk",
            "/update_weight_version",
        ] {
            if !client.has_post(path).await? {
                let (expected, found) = ("a call of the engine".into(), "no such call".into());
                return Err(Error::Refused {
                    engine: client.url().into(),
                    what: path.into(),
                    expected,
                    found,
                });
            }
        }
        let ready = client.ready().await?;
        let release = client.server_info().await?.version;
        let since = |minimum| release.as_deref().is_some_and(|release| at_least(release, minimum));
        Ok(Self {
            sessions: client.has_post("/begin_weight_update").await?,
            spans: since(REPORTS_SPANS),
            ready: ready.is_some(),
            survives_refused_flush: since(SURVIVES_REFUSED_FLUSH),
        })
    }
}

/// Whether a release such as `0.5.12.post1` is at least another. What does not read as a number counts as 0,
/// so an unknown release is old.
fn at_least(release: &str, minimum: [u32; 3]) -> bool {
    let mut parts = release.split(['.', '+', '-']).map(|part| part.parse::<u32>().unwrap_or(0));
    let found = [(); 3].map(|()| parts.next().unwrap_or(0));
    found >= minimum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_compare_by_number() {
        for (release, newer) in [
            ("0.5.22", true),
            ("0.5.23.post1", true),
            ("0.6.0", true),
            ("0.5.9", false),
            ("0.5.21", false),
            ("", false),
            ("main", false),
        ] {
            assert_eq!(at_least(release, SURVIVES_REFUSED_FLUSH), newer, "{release:?}");
        }
    }
}
