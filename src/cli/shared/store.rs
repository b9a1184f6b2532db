//! Stores by URL, with what object stores take from the environment.

use crate::cli::shared::error::Result;
use crate::cli::shared::keys;
use driftless::relay::{Relays, RelaysOptions};
use driftless::store::{Store, open_with};
use std::path::PathBuf;
use std::sync::Arc;

/// Variables that object stores know begin so.
const PREFIXES: [&str; 3] = ["AWS_", "AZURE_", "GOOGLE_"];

/// How long a publisher waits for followers to hear of a version.
const NOTIFY_DEADLINE: std::time::Duration = std::time::Duration::from_secs(2);

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

/// The store behind relays.
pub(crate) fn behind(origin: Arc<dyn Store>, relays: &[String], token: Option<&str>) -> Result<Arc<Relays>> {
    let mut options = RelaysOptions::default();
    options.token = token.map(str::to_owned);
    Ok(Arc::new(Relays::new(origin, relays, options)?))
}

/// Who is told of a version as soon as it is published.
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
    /// Whether anybody is to be told.
    pub(crate) fn is_given(&self) -> bool {
        !self.notify.is_empty()
    }

    /// Refuses what can be told to nobody, before anything is published.
    pub(crate) fn check(&self) -> Result<()> {
        keys::secret(self.notify_token_file.as_deref(), "DRIFTLESS_TOKEN")?;
        Ok(driftless::transport::client::check_followers(&self.notify)?)
    }

    /// Tells followers. The version is published whether they hear of it or not.
    pub(crate) fn tell(&self) {
        if let Err(error) = self.try_tell() {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "followers were not told of the version"
            );
        }
    }

    fn try_tell(&self) -> Result<()> {
        let token = keys::secret(self.notify_token_file.as_deref(), "DRIFTLESS_TOKEN")?;
        for (url, error) in
            driftless::transport::client::notify(&self.notify, token.as_deref(), NOTIFY_DEADLINE)?
        {
            tracing::warn!(url, error, "a follower was not told of the version");
        }
        Ok(())
    }
}
