//! Stores by URL, with what object stores take from the environment.

use crate::cli::shared::error::Result;
use crate::cli::shared::keys;
use driftless::http::Followers;
use driftless::store::{Store, open_with};
use driftless::transport::publish::Notify;
use std::path::PathBuf;
use std::sync::Arc;

/// Variables that object stores know begin so.
const PREFIXES: [&str; 3] = ["AWS_", "AZURE_", "GOOGLE_"];

/// Opens the store that `url` names, with the credentials, region and endpoint that the environment has for
/// object stores.
///
/// # Errors
/// As [`open_with`].
pub fn open(url: &str) -> driftless::transport::Result<Arc<dyn Store>> {
    // A variable that is not text is none that a store could use.
    let settings: Vec<(String, String)> = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .filter(|(name, _)| PREFIXES.iter().any(|prefix| name.starts_with(prefix)))
        .collect();
    Ok(open_with(url, &settings)?)
}

/// Followers that are told of a version as soon as it is published.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct NotifyArgs {
    /// Follower to notify of each version, by the URL of its --listen address; may be given several times.
    /// One that does not answer within 2 s finds the version at its next poll.
    #[arg(long, value_name = "URL")]
    notify: Vec<String>,
    /// File holding the token that these followers want [default: DRIFTLESS_TOKEN].
    #[arg(long, value_name = "FILE", requires = "notify")]
    notify_token_file: Option<PathBuf>,
}

impl NotifyArgs {
    /// Whether any follower is to be told.
    pub(crate) fn is_given(&self) -> bool {
        !self.notify.is_empty()
    }

    /// What tells them, if there are any. Refuses what is no follower's URL.
    pub(crate) fn notify(&self) -> Result<Option<Notify>> {
        let token = keys::secret(self.notify_token_file.as_deref(), "DRIFTLESS_TOKEN")?;
        if !self.is_given() {
            return Ok(None);
        }
        let followers = Followers::new(&self.notify, token.as_deref())?;
        Ok(Some(Notify::new(move |_| followers.tell())))
    }
}
