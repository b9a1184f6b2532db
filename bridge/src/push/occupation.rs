//! Memory that an engine has given back for a while, recorded in the engine's own label.
//!
//! SGLang ends when it is told to release what it has released, or to resume what it has, and it does not
//! report which of the two holds. The label records it: `<label>?released=kv_cache` is set after the release,
//! `<label>?releasing=…` and `<label>?resuming=…` before a call whose outcome a crash would hide. No request
//! accepts any of them. The next process resumes what is released, and touches nothing whose state is
//! unknown.

use crate::activate::pause::{partial, plain};
use crate::engine::PauseMode;
use crate::error::{Error, Result};
use crate::sglang::{Client, MemoryTag};

/// What an engine's label says about its memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Occupation {
    /// It has all of its memory.
    Whole,
    /// It has given these parts back.
    Released(Vec<MemoryTag>),
    /// Somebody died while it was told to release or resume.
    InDoubt,
}

impl Occupation {
    pub(crate) fn of(label: Option<&str>) -> Self {
        let Some((_, mark)) = label.and_then(|label| label.split_once('?')) else { return Self::Whole };
        let Some((verb, tags)) = mark.split_once('=') else { return Self::Whole };
        match verb {
            "released" => {
                let tags: Option<Vec<_>> = tags.split(',').map(MemoryTag::parse).collect();
                tags.map_or(Self::InDoubt, Self::Released)
            }
            "releasing" | "resuming" => Self::InDoubt,
            _ => Self::Whole,
        }
    }
}

/// Lets a paused engine give memory back. Requests that it still holds are aborted: it ends when it is told
/// to release while it has any.
pub(crate) async fn release(client: &Client, label: &str, tags: &[MemoryTag]) -> Result<()> {
    idle(client).await?;
    client.set_weight_version(&mark(label, "releasing", tags)).await?;
    client.release_memory(tags).await?;
    client.set_weight_version(&mark(label, "released", tags)).await
}

/// Lets an engine take back some of what it has `released`, the rest of which it keeps being without. Its
/// label is a mixture's, or says what is still released.
pub(crate) async fn resume(
    client: &Client,
    label: &str,
    released: &[MemoryTag],
    tags: &[MemoryTag],
) -> Result<()> {
    let (now, rest): (Vec<_>, Vec<_>) = released.iter().copied().partition(|tag| tags.contains(tag));
    if now.is_empty() {
        return Ok(());
    }
    client.set_weight_version(&mark(label, "resuming", &now)).await?;
    client.resume_memory(&now).await?;
    let after = if rest.is_empty() { partial(label) } else { mark(label, "released", &rest) };
    client.set_weight_version(&after).await
}

/// Memory that may or may not be there must not be touched.
pub(crate) fn in_doubt(client: &Client) -> Error {
    let expected = "one that says which of its memory it has";
    let found = "?releasing or ?resuming, because whoever told it to died meanwhile; start the engine again";
    Error::refused(client.url(), "its weight version", expected, found)
}

fn mark(label: &str, verb: &str, tags: &[MemoryTag]) -> String {
    let tags: Vec<_> = tags.iter().map(|tag| tag.as_str()).collect();
    format!("{}?{verb}={}", plain(label), tags.join(","))
}

/// Waits until a paused engine has no requests, after aborting those that it has.
async fn idle(client: &Client) -> Result<()> {
    for n in 0..crate::engine::TRIES {
        let loads = client.loads().await?;
        if loads.iter().all(|load| load.num_running_reqs + load.num_waiting_reqs == 0) {
            return Ok(());
        }
        if n == 0 {
            client.pause(PauseMode::Abort).await?;
        }
        tokio::time::sleep(crate::engine::BETWEEN_TRIES).await;
    }
    let expected = "0 once every request is aborted, before it gives memory back";
    Err(Error::refused(client.url(), "the number of its requests", expected, "more"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_say_what_is_released_and_what_is_in_doubt() {
        use MemoryTag::{CudaGraph, KvCache, Weights};
        for (label, expected) in [
            (None, Occupation::Whole),
            (Some("default"), Occupation::Whole),
            (Some("0123456789ab:3"), Occupation::Whole),
            (Some("0123456789ab:3?partial"), Occupation::Whole),
            (Some("a?released=kv_cache"), Occupation::Released(vec![KvCache])),
            (Some("a?released=weights,cuda_graph"), Occupation::Released(vec![Weights, CudaGraph])),
            // A tag of somebody else's.
            (Some("a?released=kv_cache,draft"), Occupation::InDoubt),
            (Some("a?releasing=kv_cache"), Occupation::InDoubt),
            (Some("a?resuming=kv_cache"), Occupation::InDoubt),
        ] {
            assert_eq!(Occupation::of(label), expected, "{label:?}");
        }
        let tags = [KvCache, Weights, CudaGraph];
        let marked = mark("a:1?partial", "released", &tags);
        assert_eq!(Occupation::of(Some(&marked)), Occupation::Released(tags.to_vec()), "{marked}");
        for label in [marked, partial("a:1"), mark("a:1", "resuming", &tags)] {
            assert!(label.parse::<crate::engine::Label>().is_err(), "{label} counts as a version's");
        }
    }
}
