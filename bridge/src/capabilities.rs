//! What an engine can do, asked of the engine itself.

use std::time::Duration;

use crate::{Client, Error, GenerateRequest, Result, Rid, SamplingParams};

/// How long the one-token probe may take before the engine counts as busy or paused.
const PROBE_DEADLINE: Duration = Duration::from_secs(10);

/// First release that answers a refused flush with an error; earlier ones end the whole server in an assertion.
const SURVIVES_REFUSED_FLUSH: [u32; 3] = [0, 5, 22];

/// What an engine can do. Probed, except where the probe itself would do harm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Distributed updates want `begin_weight_update` and `end_weight_update` around them (0.5.21 and later).
    pub sessions: bool,
    /// Replies say which output tokens came from which weights (0.5.19 and later). `None`: the engine was paused or too busy to tell.
    pub spans: Option<bool>,
    /// `/ready` says whether the engine is paused (0.5.20 and later).
    pub ready: bool,
    /// An update that may not flush the cache is answered with an error; otherwise the server ends. Taken from the release number, because
    /// the probe would be that update. Activation does not depend on it: it flushes by a call of its own, which no release dies of.
    pub survives_refused_flush: bool,
}

impl Capabilities {
    /// Asks the engine. Nothing changes there; one token is generated.
    ///
    /// # Errors
    /// As every call of [`Client`]; [`Error::Refused`] for an engine without pause and continue, such as SGLang's embedded Rust server.
    pub async fn probe(client: &Client) -> Result<Self> {
        for path in ["/pause_generation", "/continue_generation", "/update_weights_from_disk"] {
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
        Ok(Self {
            sessions: client.has_post("/begin_weight_update").await?,
            spans: if ready == Some(false) { None } else { spans(client).await? },
            ready: ready.is_some(),
            survives_refused_flush: release
                .as_deref()
                .is_some_and(|release| at_least(release, SURVIVES_REFUSED_FLUSH)),
        })
    }
}

async fn spans(client: &Client) -> Result<Option<bool>> {
    let sampling =
        SamplingParams { temperature: 0.0, max_new_tokens: 1, ignore_eos: true, ..SamplingParams::default() };
    let request = GenerateRequest { rid: Rid::probe(), input_ids: vec![0], sampling };
    match tokio::time::timeout(PROBE_DEADLINE, client.generate(&request)).await {
        Ok(generation) => generation.map(|generation| Some(generation.spans_reported)),
        Err(_) => client.abort(&request.rid).await.map(|()| None),
    }
}

/// Whether a release such as `0.5.12.post1` is at least another. What does not read as a number counts as 0, so an unknown release is old.
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
