//! Memory that an engine has given back for a while, recorded in the engine's own label.
//!
//! SGLang ends when it is told to release what it has released, or to resume what it has, and it does not
//! report which of the two holds. The label records it: `<label>?released=kv_cache` is set after the release,
//! `<label>?releasing=…` and `<label>?resuming=…` before a call whose outcome a crash would hide. No request
//! accepts any of them. The next process resumes what is released, and touches nothing whose state is
//! unknown.

use crate::activate::pause::partial;
use crate::engine::{PauseMode, plain};
use crate::error::{Error, Result};
use crate::sglang::{Client, MemoryTag};

/// What an engine with this label has given back.
///
/// # Errors
/// [`Error::Refused`] for memory that may or may not be there: it must not be touched.
pub(crate) fn released(client: &Client, label: Option<&str>) -> Result<Vec<MemoryTag>> {
    let expected = "one that says which of its memory it has";
    let found = "?releasing or ?resuming, because whoever told it to died meanwhile; start the engine again";
    released_by(label).ok_or_else(|| Error::refused(client.url(), "its weight version", expected, found))
}

/// The same; `None` where somebody died while the engine was told to release or resume.
fn released_by(label: Option<&str>) -> Option<Vec<MemoryTag>> {
    match label.and_then(|label| label.split_once('?')?.1.split_once('=')) {
        Some(("released", tags)) => tags.split(',').map(MemoryTag::parse).collect(),
        Some(("releasing" | "resuming", _)) => None,
        _ => Some(Vec::new()),
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
            (None, Some(vec![])),
            (Some("default"), Some(vec![])),
            (Some("0123456789ab:3"), Some(vec![])),
            (Some("0123456789ab:3?partial"), Some(vec![])),
            (Some("a?released=kv_cache"), Some(vec![KvCache])),
            (Some("a?released=weights,cuda_graph"), Some(vec![Weights, CudaGraph])),
            // A tag of somebody else's.
            (Some("a?released=kv_cache,draft"), None),
            (Some("a?releasing=kv_cache"), None),
            (Some("a?resuming=kv_cache"), None),
        ] {
            assert_eq!(released_by(label), expected, "{label:?}");
        }
        let tags = [KvCache, Weights, CudaGraph];
        let marked = mark("a:1?partial", "released", &tags);
        assert_eq!(released_by(Some(&marked)), Some(tags.to_vec()), "{marked}");
        for label in [marked, partial("a:1"), mark("a:1", "resuming", &tags)] {
            assert!(label.parse::<crate::engine::Label>().is_err(), "{label} counts as a version's");
        }
    }
}
