//! Secrets: from files or the environment, never from the command line.

use crate::cli::error::{Error, Result};
use driftless::bridge::Keys;
use driftless::transport::{SignKey, TrustKey};
use std::path::{Path, PathBuf};

/// Where the keys of engines come from.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct KeyArgs {
    /// File holding the engines' API key [default: the variable DRIFTLESS_API_KEY, if set].
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// File holding the engines' admin API key [default: the variable DRIFTLESS_ADMIN_API_KEY, if set].
    #[arg(long, value_name = "FILE")]
    admin_api_key_file: Option<PathBuf>,
}

impl KeyArgs {
    /// The keys to call engines with.
    pub(crate) fn read(&self) -> Result<Keys> {
        let (api, admin) = self.secrets()?;
        Ok(Keys::new(api.as_deref(), admin.as_deref())?)
    }

    /// The API key and the admin key themselves.
    pub(crate) fn secrets(&self) -> Result<(Option<String>, Option<String>)> {
        let api = secret(self.api_key_file.as_deref(), "DRIFTLESS_API_KEY")?;
        Ok((api, secret(self.admin_api_key_file.as_deref(), "DRIFTLESS_ADMIN_API_KEY")?))
    }
}

/// Who signs what is published, and who else may have signed what is gone on from.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct SignArgs {
    /// Key to sign versions with, as `driftless keygen` makes it; versions that it has not signed are not gone on from.
    #[arg(long, value_name = "FILE")]
    sign_key: Option<PathBuf>,
    /// File of public keys whose versions are gone on from as well, such as the key before; may be given several times.
    #[arg(long, value_name = "FILE", requires = "sign_key")]
    trust_key: Vec<PathBuf>,
}

impl SignArgs {
    /// The key to sign with, if there is one, and those that are trusted besides.
    pub(crate) fn read(&self) -> Result<(Option<SignKey>, Vec<TrustKey>)> {
        let sign_key = self.sign_key.as_deref().map(SignKey::read).transpose()?;
        Ok((sign_key, trusted(&self.trust_key)?))
    }

    /// Whether versions are to be signed.
    pub(crate) fn is_given(&self) -> bool {
        self.sign_key.is_some()
    }
}

/// The keys of files of public keys, all together.
pub(crate) fn trusted(files: &[PathBuf]) -> Result<Vec<TrustKey>> {
    let keys = files.iter().map(|path| TrustKey::read_all(path)).collect::<Result<Vec<_>, _>>()?;
    Ok(keys.concat())
}

/// A secret from `file`, else from the environment.
pub(crate) fn secret(file: Option<&Path>, variable: &str) -> Result<Option<String>> {
    let Some(path) = file else {
        return Ok(std::env::var(variable).ok().filter(|value| !value.is_empty()));
    };
    let text =
        std::fs::read_to_string(path).map_err(|source| Error::Io { path: path.to_path_buf(), source })?;
    Ok(Some(text.trim_end().to_owned()))
}
