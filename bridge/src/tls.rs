//! Who vouches for engines.

use std::time::Duration;

use driftless_http::client_builder;
use driftless_store::chain_text;
use reqwest::Certificate;

use crate::error::{Error, Result};

/// Certificates of authorities that vouch for engines.
#[derive(Debug, Clone)]
pub struct Ca(Vec<Certificate>);

impl Ca {
    /// Reads one PEM certificate or several.
    ///
    /// # Errors
    /// [`Error::Ca`] for anything else, and where there is none.
    pub fn from_pem(pem: &[u8]) -> Result<Self> {
        let refused = |reason: String| Error::Ca { reason };
        let certificates = Certificate::from_pem_bundle(pem);
        let certificates = certificates.map_err(|error| refused(chain_text(&error)))?;
        if certificates.is_empty() {
            return Err(refused("it has no PEM certificate".into()));
        }
        // Only a client looks into them.
        let client = client_builder(Duration::ZERO).tls_certs_only(certificates.clone()).build();
        client.map_err(|error| refused(chain_text(&error)))?;
        Ok(Self(certificates))
    }

    pub(crate) fn certificates(&self) -> impl Iterator<Item = Certificate> {
        self.0.clone().into_iter()
    }
}
