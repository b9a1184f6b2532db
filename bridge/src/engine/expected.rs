//! Who an engine should be: what a checkpoint's config and tokenizer say.

use std::path::Path;

use driftless_transport::Snapshot;
use driftless_transport::snapshot::AuxFile;
use sha2::{Digest, Sha256};

use super::config::ModelConfig;
use crate::error::{Error, Result};

/// Bound on a `config.json`; real ones have a few KiB.
const CONFIG_BYTES_MAX: u64 = 4 << 20;
/// Bound on one tokenizer file; real ones reach 35 MB.
const TOKENIZER_BYTES_MAX: u64 = 256 << 20;
/// The files that decide which text a token id stands for, in the order that the digest takes them.
const TOKENIZER_FILES: [&str; 5] =
    ["added_tokens.json", "merges.txt", "tokenizer.json", "tokenizer.model", "vocab.json"];

/// Who an engine should be: what its model's config and tokenizer say.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Expected {
    /// The model.
    pub config: ModelConfig,
    /// SHA-256, in hex, over names and contents of the tokenizer's files; `None` where there are none.
    pub tokenizer: Option<String>,
}

impl Expected {
    /// Reads `config.json` and the tokenizer's files of a checkpoint directory; no weights.
    ///
    /// # Errors
    /// [`Error::Read`] for files that cannot be read, [`Error::Config`] for a config that is malformed or of
    /// an unknown architecture.
    pub fn from_checkpoint(directory: &Path) -> Result<Self> {
        let config = directory.join("config.json");
        let bytes = read(&config, CONFIG_BYTES_MAX)?;
        let bytes = bytes.ok_or_else(|| Error::Read {
            path: config.clone(),
            source: std::io::ErrorKind::NotFound.into(),
        })?;
        Self::build(&config, &bytes, |name| read(&directory.join(name), TOKENIZER_BYTES_MAX))
    }

    /// The same from a snapshot's auxiliary files. `place` names the snapshot in errors.
    ///
    /// # Errors
    /// As [`Expected::from_checkpoint`].
    pub fn from_snapshot(snapshot: &dyn Snapshot, place: &Path) -> Result<Self> {
        let find = |name: &str| snapshot.files().iter().find(|file| file.name() == name).map(AuxFile::bytes);
        let config = place.join("config.json");
        let bytes = find("config.json").ok_or_else(|| Error::Read {
            path: config.clone(),
            source: std::io::ErrorKind::NotFound.into(),
        })?;
        Self::build(&config, bytes, |name| Ok(find(name).map(<[u8]>::to_vec)))
    }

    fn build(
        path: &Path,
        config: &[u8],
        mut file: impl FnMut(&str) -> Result<Option<Vec<u8>>>,
    ) -> Result<Self> {
        let mut hash = Sha256::new();
        let mut any = false;
        for name in TOKENIZER_FILES {
            if let Some(bytes) = file(name)? {
                any = true;
                hash.update(name.as_bytes());
                hash.update((bytes.len() as u64).to_le_bytes());
                hash.update(&bytes);
            }
        }
        Ok(Self { config: ModelConfig::parse(path, config)?, tokenizer: any.then(|| hex(&hash.finalize())) })
    }
}

/// Lower-case hex.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A file's content, or `None` where there is none.
fn read(path: &Path, limit: u64) -> Result<Option<Vec<u8>>> {
    let fail = |source| Error::Read { path: path.to_owned(), source };
    match std::fs::metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(fail(error)),
        Ok(found) if found.len() > limit => Err(Error::Config {
            path: path.to_owned(),
            what: "the file".into(),
            expected: format!("at most {limit} bytes"),
            found: format!("{}", found.len()),
        }),
        Ok(found) if !found.is_file() => Err(Error::Config {
            path: path.to_owned(),
            what: "what lies there".into(),
            expected: "a regular file".into(),
            found: "a FIFO, a device or a directory".into(),
        }),
        Ok(_) => std::fs::read(path).map(Some).map_err(fail),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: &str = r#"{"architectures":["OddForCausalLM"],"torch_dtype":"bfloat16"}"#;

    #[test]
    fn the_tokenizer_digest_covers_names_and_contents() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), CONFIG).unwrap();
        let digest = || Expected::from_checkpoint(dir.path()).unwrap().tokenizer;
        assert_eq!(digest(), None);
        std::fs::write(dir.path().join("vocab.json"), "{}").unwrap();
        let first = digest().unwrap();
        std::fs::rename(dir.path().join("vocab.json"), dir.path().join("tokenizer.json")).unwrap();
        assert_ne!(digest().unwrap(), first);
    }
}
