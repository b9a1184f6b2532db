//! Secrets: from files or the environment, never from the command line.

use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::paths;
use driftless::bridge::engine::Ca;
use driftless::bridge::{ClientOptions, Keys};
use driftless::transport::sign::{SignKey, TrustKey};
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

/// Most bytes that are read of a secret, or of certificates.
const BYTES_MAX: u64 = 1 << 20;

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
    /// The keys to call engines with, or to be asked for.
    pub(crate) fn read(&self) -> Result<Keys> {
        let api = secret(self.api_key_file.as_deref(), "DRIFTLESS_API_KEY")?;
        let admin = secret(self.admin_api_key_file.as_deref(), "DRIFTLESS_ADMIN_API_KEY")?;
        Ok(Keys::new(api.as_deref(), admin.as_deref())?)
    }
}

/// What engines are called with.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct CallArgs {
    #[command(flatten)]
    keys: KeyArgs,
    /// File of the CA certificates, in PEM, that engines at https:// addresses must have theirs from [default: any that
    /// the system trusts].
    #[arg(long, value_name = "FILE")]
    engine_ca: Option<PathBuf>,
}

impl CallArgs {
    /// How to call engines at these addresses, which `flag` names. Says which of them get a key that others can read.
    pub(crate) fn client(&self, flag: &str, addresses: &[String]) -> Result<ClientOptions> {
        let mut client = ClientOptions::default().with_keys(self.keys.read()?);
        if let Some(path) = &self.engine_ca {
            paths::check_file("--engine-ca", path)?;
            let refused = |error| {
                let found = format!("{}: {error}", path.display());
                Error::usage("--engine-ca", "a file of certificates in PEM", found)
            };
            client.ca = Some(Ca::from_pem(read(path)?.as_bytes()).map_err(refused)?);
        }
        let bare = client.keys.in_clear(addresses)?;
        if !bare.is_empty() {
            tracing::warn!(
                "the key of --api-key-file or --admin-api-key-file goes in clear text to {}: give {flag} as https://…",
                bare.join(", ")
            );
        }
        Ok(client)
    }
}

/// Who signs what is published, and who else may have signed what is gone on from.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct SignArgs {
    /// Key to sign versions with, as `driftless keygen` makes it. Without a signature of this key, or of a
    /// --trust-key, no earlier version is built on.
    #[arg(long, value_name = "FILE")]
    sign_key: Option<PathBuf>,
    /// File of public keys that may have signed earlier versions, such as the key before; may be given
    /// several times.
    #[arg(long, value_name = "FILE", requires = "sign_key")]
    trust_key: Vec<PathBuf>,
}

impl SignArgs {
    /// The key to sign with, if there is one, and those that are trusted besides.
    pub(crate) fn read(&self) -> Result<(Option<SignKey>, Vec<TrustKey>)> {
        let sign_key = self.sign_key.as_deref().map(signing).transpose()?;
        Ok((sign_key, trusted(&self.trust_key)?))
    }

    /// Whether versions are to be signed.
    pub(crate) fn is_given(&self) -> bool {
        self.sign_key.is_some()
    }
}

/// The keys of files of public keys, all together.
pub(crate) fn trusted(files: &[PathBuf]) -> Result<Vec<TrustKey>> {
    let read = |path: &PathBuf| -> Result<Vec<TrustKey>> {
        paths::check_file("--trust-key", path)?;
        Ok(TrustKey::read_all(path)?)
    };
    Ok(files.iter().map(read).collect::<Result<Vec<_>>>()?.concat())
}

fn signing(path: &Path) -> Result<SignKey> {
    paths::check_file("--sign-key", path)?;
    Ok(SignKey::read(path)?)
}

/// A secret from `file`, else from the environment.
pub(crate) fn secret(file: Option<&Path>, variable: &str) -> Result<Option<String>> {
    let Some(path) = file else {
        return Ok(std::env::var(variable).ok().filter(|value| !value.is_empty()));
    };
    paths::check_file("key file", path)?;
    Ok(Some(read(path)?.trim_end().to_owned()))
}

fn read(path: &Path) -> Result<String> {
    let io = |source| Error::Io { path: path.to_path_buf(), source };
    // It may be a pipe from what keeps secrets.
    let file = File::open(path).map_err(io)?;
    std::io::read_to_string(file.take(BYTES_MAX)).map_err(io)
}
