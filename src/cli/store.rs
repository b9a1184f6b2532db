//! Stores by URL, with what object stores take from the environment.

use crate::cli::error::Result;
use driftless::transport::{Store, open_with};
use std::sync::Arc;

/// Variables that object stores know begin so.
const PREFIXES: [&str; 3] = ["AWS_", "AZURE_", "GOOGLE_"];

/// Opens the store that `url` names.
pub(crate) fn open(url: &str) -> Result<Arc<dyn Store>> {
    // A variable that is not text is none that a store could use.
    let settings: Vec<(String, String)> = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .filter(|(name, _)| PREFIXES.iter().any(|prefix| name.starts_with(prefix)))
        .collect();
    Ok(open_with(url, &settings)?)
}
