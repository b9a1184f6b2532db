//! What a replica knows about its directory: the marker (`state.json`), the applied manifest and the digest
//! tables.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use driftless_delta::{BLOCK_ELEMENTS, DigestTable};
use driftless_store::ContentDigest;
use driftless_store::os::{if_there, regular, rename, sync_dir, write_file};
use serde::{Deserialize, Serialize};

use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::ids::{RunId, Version};
use crate::manifest::{Manifest, Representation, Tensor};
use crate::prepared::PreparedVersion;

const FORMAT: u32 = 1;
const DIGESTS_MAGIC: [u8; 8] = *b"dftldig1";
const SEAL_BYTES: usize = 32;

/// The version that a replica's directory holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Applied {
    /// The run it belongs to; a replica never leaves its run.
    pub run_id: RunId,
    /// The model within the run.
    pub model: String,
    /// The version.
    pub version: Version,
    /// Digest of that version's manifest: its identity.
    pub manifest_digest: ContentDigest,
    /// Form of its tensors.
    pub representation: Representation,
}

impl Applied {
    pub(super) fn of(manifest: &Manifest, manifest_digest: ContentDigest) -> Self {
        Self {
            run_id: manifest.run_id,
            model: manifest.model.clone(),
            version: manifest.version,
            manifest_digest,
            representation: manifest.representation.clone(),
        }
    }

    /// The text an engine is given for this version.
    #[must_use]
    pub fn label(&self) -> String {
        self.run_id.label(self.version)
    }

    /// As prepared deltas name it.
    pub(super) fn prepared(&self) -> PreparedVersion {
        PreparedVersion { label: self.label(), manifest: self.manifest_digest }
    }
}

/// Size and time of a weight file as this crate left it: any difference means that another program wrote to
/// it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Stamp {
    name: String,
    size: u64,
    modified_ns: i128,
}

/// The content of `state.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Marker {
    format: u32,
    pub(super) applied: Applied,
    /// Digest of the state directory's `manifest` file.
    pub(super) manifest_file: ContentDigest,
    pub(super) weights: Vec<Stamp>,
}

/// The content of the `manifest` file: the applied version's manifest as this build understood it, and its
/// digest in the store. The store's bytes may say more (a newer writer's optional fields), so the digest is
/// kept beside it and not computed from it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Copy {
    pub(super) digest: ContentDigest,
    pub(super) manifest: Manifest,
}

impl Copy {
    pub(super) fn to_bytes(&self) -> Result<Vec<u8>> {
        serde_json::to_vec(self).map_err(|source| Error::Parse { subject: "replica manifest".into(), source })
    }

    pub(super) fn parse(bytes: &[u8]) -> Result<Self> {
        let subject = "replica manifest";
        let copy: Self = serde_json::from_slice(bytes)
            .map_err(|source| Error::Parse { subject: subject.into(), source })?;
        copy.manifest.check()?;
        Ok(copy)
    }
}

/// Everything known about the applied version.
#[derive(Debug)]
pub(super) struct State {
    pub(super) applied: Applied,
    pub(super) manifest: Manifest,
    pub(super) tables: Tables,
    pub(super) checkpoint: Arc<Checkpoint>,
    /// The weight files as this crate left them.
    pub(super) weights: Vec<Stamp>,
}

impl State {
    /// Whether another program wrote to a weight file, as far as its size and time tell. The delta codec
    /// takes the digest tables at their word, so this is what stands between such a write and the next apply.
    pub(super) fn is_touched(&self) -> bool {
        stamps(self.checkpoint.weight_files()).map_or(true, |now| now != self.weights)
    }
}

/// Digest table of every tensor, by its main name.
pub(super) type Tables = BTreeMap<String, DigestTable>;

/// The files of the state directory.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    /// The replica's directory.
    pub(super) dir: PathBuf,
    pub(super) root: PathBuf,
}

impl Layout {
    pub(super) fn new(dir: &Path) -> Self {
        Self { dir: dir.to_owned(), root: dir.join(crate::checkpoint::STATE_DIR) }
    }

    pub(super) fn lock(&self) -> PathBuf {
        self.root.join("lock")
    }

    pub(super) fn marker(&self) -> PathBuf {
        self.root.join("state.json")
    }

    pub(super) fn manifest(&self) -> PathBuf {
        self.root.join("manifest")
    }

    pub(super) fn digests(&self) -> PathBuf {
        self.root.join("digests")
    }

    pub(super) fn journal(&self) -> PathBuf {
        self.root.join("journal")
    }

    /// New files of a rebuild, before they are installed.
    pub(super) fn staging(&self) -> PathBuf {
        self.root.join("next")
    }

    /// `config.json`, while the directory is between two versions.
    pub(super) fn withheld(&self) -> PathBuf {
        self.root.join("config.json")
    }

    /// Objects that arrive.
    pub(super) fn downloads(&self) -> PathBuf {
        self.root.join("spool")
    }

    /// What is left of a damaged version until another one is in place.
    pub(super) fn quarantine(&self) -> PathBuf {
        self.root.join("quarantine")
    }

    /// Replaces a file atomically; durable once the directory is synced.
    pub(super) fn replace(&self, path: &Path, bytes: &[u8]) -> Result<()> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        // The name may be as long as names can be, and the partial file's no longer.
        let short: String = name.chars().take(50).collect();
        let partial = self.root.join(format!("{short}.partial"));
        write_file(&partial, bytes)?;
        rename(&partial, path).map_err(|source| Error::io("replace", path, source))
    }

    pub(super) fn sync(&self) -> Result<()> {
        Ok(sync_dir(&self.root)?)
    }
}

impl Marker {
    /// The same with the weight files as they are now.
    pub(super) fn restamped(self, weights: Vec<Stamp>) -> Self {
        Self { weights, ..self }
    }

    pub(super) fn new(applied: Applied, manifest_file: ContentDigest, weights: Vec<Stamp>) -> Self {
        Self { format: FORMAT, applied, manifest_file, weights }
    }

    /// Whether a weight file of this name was there when the marker was written.
    pub(super) fn stamps(&self, name: &str) -> bool {
        self.weights.iter().any(|stamp| stamp.name == name)
    }

    pub(super) fn to_bytes(&self) -> Result<Vec<u8>> {
        serde_json::to_vec_pretty(self)
            .map_err(|source| Error::Parse { subject: "replica state".into(), source })
    }

    /// Reads the marker; `None` for a directory that never held a version.
    pub(super) fn read(path: &Path) -> Result<Option<Self>> {
        let Some(bytes) = read_optional(path)? else { return Ok(None) };
        let subject = || format!("`{}`", path.display());
        let marker: Self =
            serde_json::from_slice(&bytes).map_err(|source| Error::Parse { subject: subject(), source })?;
        if marker.format != FORMAT {
            return Err(Error::Unsupported {
                what: format!("format {} of {}", marker.format, subject()),
                hint: format!("this build reads format {FORMAT}"),
            });
        }
        Ok(Some(marker))
    }
}

/// A file's bytes, or `None` if it does not exist.
pub(super) fn read_optional(path: &Path) -> Result<Option<Vec<u8>>> {
    if_there(regular::read(path)).map_err(|source| Error::io("read", path, source))
}

/// Weight files as they are now.
pub(super) fn stamps<'a>(files: impl Iterator<Item = &'a Path>) -> Result<Vec<Stamp>> {
    files
        .map(|path| {
            // Of a link itself, which is no file that this crate left.
            let metadata = fs::symlink_metadata(path).map_err(|source| Error::io("inspect", path, source))?;
            Ok(Stamp {
                name: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
                size: metadata.len(),
                modified_ns: i128::from(metadata.mtime()) * 1_000_000_000 + i128::from(metadata.mtime_nsec()),
            })
        })
        .collect()
}

/// The digest file: magic, per tensor `name length: u32, blocks: u32, name, 16 bytes per block`, BLAKE3-256
/// of all before it.
pub(super) fn digests_to_bytes(tables: &Tables) -> Vec<u8> {
    let mut bytes = DIGESTS_MAGIC.to_vec();
    for (name, table) in tables {
        bytes.extend_from_slice(&(name.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&(table.blocks().len() as u32).to_le_bytes());
        bytes.extend_from_slice(name.as_bytes());
        bytes.extend_from_slice(&table.to_bytes());
    }
    let seal = blake3::hash(&bytes);
    bytes.extend_from_slice(seal.as_bytes());
    bytes
}

/// Reads a digest file for `manifest`; `None` if it is damaged or of another version, then the tensors have
/// to be hashed again.
pub(super) fn digests_from_bytes(bytes: &[u8], manifest: &Manifest) -> Option<Tables> {
    let (content, seal) = bytes.split_at_checked(bytes.len().checked_sub(SEAL_BYTES)?)?;
    if *blake3::hash(content).as_bytes() != *seal {
        return None;
    }
    let mut rest = content.strip_prefix(&DIGESTS_MAGIC)?;
    let mut tables = Tables::new();
    while !rest.is_empty() {
        let (name, tail) = rest.split_first_chunk::<4>()?;
        let (blocks, tail) = tail.split_first_chunk::<4>()?;
        let (name, tail) = tail.split_at_checked(u32::from_le_bytes(*name) as usize)?;
        let (table, tail) = tail.split_at_checked((u32::from_le_bytes(*blocks) as usize).checked_mul(16)?)?;
        tables.insert(String::from_utf8(name.to_vec()).ok()?, DigestTable::from_bytes(table).ok()?);
        rest = tail;
    }
    (tables.len() == manifest.tensors.len() && manifest.tensors.iter().all(|tensor| fits(&tables, tensor)))
        .then_some(tables)
}

fn fits(tables: &Tables, tensor: &Tensor) -> bool {
    tables.get(&tensor.name).is_some_and(|table| {
        let elements = codec_elements(tensor).unwrap_or(u64::MAX);
        table.total() == tensor.digest
            && table.blocks().len() as u64 == elements.div_ceil(BLOCK_ELEMENTS as u64)
    })
}

/// Number of elements as the codec counts them: bytes for opaque types.
pub(super) fn codec_elements(tensor: &Tensor) -> Result<u64> {
    Ok(tensor.info().byte_len()? / tensor.dtype.element().size() as u64)
}
