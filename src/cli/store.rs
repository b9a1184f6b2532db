//! Stores by URL, with what object stores take from the environment.

use crate::cli::error::Result;
use driftless::transport::{Store, open_with};
use std::sync::Arc;

/// Variables that object stores know begin so.
const PREFIXES: [&str; 3] = ["AWS_", "AZURE_", "GOOGLE_"];

/// How long a publisher waits for followers to hear of a version.
const NOTIFY_DEADLINE: std::time::Duration = std::time::Duration::from_secs(2);

/// Opens the store that `url` names.
pub(crate) fn open(url: &str) -> Result<Arc<dyn Store>> {
    // A variable that is not text is none that a store could use.
    let settings: Vec<(String, String)> = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .filter(|(name, _)| PREFIXES.iter().any(|prefix| name.starts_with(prefix)))
        .collect();
    Ok(open_with(url, &settings)?)
}

/// The store behind relays.
pub(crate) fn behind(
    origin: Arc<dyn Store>,
    relays: &[String],
    token: Option<&str>,
) -> Result<Arc<dyn Store>> {
    Ok(Arc::new(driftless::transport::relay::Relays::new(origin, relays, token)?))
}

/// Tells followers that there is a version; who does not hear it finds it with his next look.
pub(crate) fn notify(urls: &[String], token: Option<&str>) -> Result<()> {
    for (url, error) in driftless::transport::notify(urls, token, NOTIFY_DEADLINE)? {
        tracing::warn!(url, error, "a follower was not told of the version");
    }
    Ok(())
}
