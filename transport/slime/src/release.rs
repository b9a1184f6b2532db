//! One version's directory, read up to the headers of its files.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use driftless_store::{Error as StoreError, Key, Store};
use driftless_transport::foreign::is_plain_name;
use driftless_transport::{Error, Result, Version};
use serde::Deserialize;

use crate::json::Unique;
use crate::{Checksum, Encoding, index_key, version_key};

/// Largest index, and largest header of a file, in bytes: room for 300,000 tensors.
const INDEX_BYTES_MAX: u64 = 64 << 20;
const HEADER_BYTES_MAX: u64 = INDEX_BYTES_MAX;
const METADATA: &str = "__metadata__";

/// What a version's directory says.
#[derive(Debug)]
pub(crate) struct Release {
    pub(crate) version: Version,
    pub(crate) encoding: Encoding,
    pub(crate) checksum: Checksum,
    /// The tensors that change.
    pub(crate) tensors: BTreeMap<String, Frame>,
}

/// A changed tensor.
#[derive(Debug)]
pub(crate) struct Frame {
    /// The file that holds it.
    pub(crate) key: Key,
    /// Its zstd frame within the file.
    pub(crate) range: Range<u64>,
    /// Checksum of all bytes of the new tensor.
    pub(crate) checksum: String,
}

#[derive(Deserialize)]
struct Index {
    #[serde(default)]
    metadata: Metadata,
    weight_map: Unique<String>,
}

#[derive(Default, Deserialize)]
struct Metadata {
    version: Option<String>,
    base_version: Option<String>,
    delta_encoding: Option<String>,
    compression_format: Option<String>,
    checksum_format: Option<String>,
}

#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

impl Release {
    /// Reads the index and every file's header.
    ///
    /// # Errors
    /// [`NotFound`](driftless_store::Error::NotFound) if there is no index: the version is not there, or not
    /// yet. [`Error::Unsupported`] for a full checkpoint, an encoding, compression or checksum that is
    /// unknown. [`Error::Corrupt`], [`Error::Parse`] and [`Error::DuplicateTensor`] for a directory that
    /// contradicts itself.
    pub(crate) fn read(store: &dyn Store, version: Version) -> Result<Self> {
        let key = index_key(version)?;
        let bytes = store.get(&key, Some(0..INDEX_BYTES_MAX + 1))?;
        if bytes.len() as u64 > INDEX_BYTES_MAX {
            return Err(Error::TooLarge { what: key.to_string(), max: INDEX_BYTES_MAX });
        }
        let index: Index = serde_json::from_slice(&bytes)
            .map_err(|source| Error::Parse { subject: key.to_string(), source })?;
        let (encoding, checksum) = check_metadata(&key, version, &index.metadata)?;
        let weight_map = index.weight_map.0;
        let mut release = Self { version, encoding, checksum, tensors: BTreeMap::new() };
        for file in weight_map.values().collect::<BTreeSet<_>>() {
            if !is_plain_name(file) || !file.ends_with(".safetensors") {
                let expected = "a plain name ending in .safetensors";
                return Err(Error::corrupt(&key, "name of a file", expected, file.escape_default()));
            }
            release.read_file(store, version_key(version)?.join(file)?, &weight_map)?;
        }
        for (name, file) in &weight_map {
            if !release.tensors.contains_key(name) {
                let expected = format!("`{name}` in {file}");
                return Err(Error::corrupt(&key, "file of a tensor", expected, "it is not in it"));
            }
        }
        Ok(release)
    }

    /// Adds the tensors of one file. Ranks that share a tensor each write it: the same content twice is the
    /// same tensor.
    fn read_file(
        &mut self,
        store: &dyn Store,
        key: Key,
        weight_map: &BTreeMap<String, String>,
    ) -> Result<()> {
        let (mut header, data) = read_header(store, &key)?;
        let checksums: BTreeMap<String, String> = match header.remove(METADATA) {
            None => BTreeMap::new(),
            Some(metadata) => parse(&key, metadata)?,
        };
        let mut ranges = Vec::with_capacity(header.len());
        for (name, entry) in header {
            let entry: Entry = parse(&key, entry)?;
            let (start, end) = check_entry(&key, &name, &entry)?;
            ranges.push((start, end));
            if !weight_map.contains_key(&name) {
                let what = "a tensor that the index does not list";
                return Err(Error::corrupt(&key, what, "none", format!("`{name}`")));
            }
            let checksum = checksums.get(&name).cloned().unwrap_or_default();
            let hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
            if checksum.len() != self.checksum.digits() || !checksum.bytes().all(hex) {
                let expected =
                    format!("{} lower-case hex digits of {}", self.checksum.digits(), self.checksum);
                let found = format!("`{}`", checksum.escape_default());
                return Err(Error::corrupt(format!("`{name}` in {key}"), "checksum", expected, found));
            }
            match self.tensors.get(&name) {
                Some(first) if first.checksum != checksum => {
                    return Err(Error::DuplicateTensor { tensor: name });
                }
                Some(_) => {}
                None => {
                    let range = data.start.saturating_add(start)..data.start.saturating_add(end);
                    self.tensors.insert(name, Frame { key: key.clone(), range, checksum });
                }
            }
        }
        check_cover(&key, ranges, data.end - data.start)
    }
}

/// The directory must be a delta of the version in front, in a form that this build knows.
fn check_metadata(key: &Key, version: Version, metadata: &Metadata) -> Result<(Encoding, Checksum)> {
    let Some(encoding) = &metadata.delta_encoding else {
        return Err(Error::Unsupported {
            what: format!("the full checkpoint {key}"),
            hint: "nothing in it tells when it is complete; only deltas are followed".to_owned(),
        });
    };
    let unknown = |what: &str, found: &str, known: &str| Error::Unsupported {
        what: format!("{what} `{}` of {key}", found.escape_default()),
        hint: format!("this build knows {known}"),
    };
    let encoding = match encoding.as_str() {
        "xor" => Encoding::Xor,
        "overwrite" => Encoding::Overwrite,
        other => return Err(unknown("the delta encoding", other, "xor and overwrite")),
    };
    let compression = metadata.compression_format.as_deref().unwrap_or_default();
    if compression != "zstd" {
        return Err(unknown("the compression", compression, "zstd"));
    }
    let checksum = match metadata.checksum_format.as_deref().unwrap_or_default() {
        "xxh3-128" => Checksum::Xxh3,
        "blake3" => Checksum::Blake3,
        "adler32" => Checksum::Adler32,
        other => return Err(unknown("the checksum", other, "xxh3-128, blake3 and adler32")),
    };
    let base = Version(version.0.saturating_sub(1));
    for (what, expected, found) in
        [("version", version, &metadata.version), ("base_version", base, &metadata.base_version)]
    {
        let number = found.as_ref().and_then(|text| text.parse::<Version>().ok());
        if number != Some(expected) {
            let found = found.as_deref().unwrap_or("none").escape_default();
            return Err(Error::corrupt(key, what, expected, found));
        }
    }
    Ok((encoding, checksum))
}

/// The header's entries, not yet looked into, and the range of the data behind it.
fn read_header(store: &dyn Store, key: &Key) -> Result<(BTreeMap<String, serde_json::Value>, Range<u64>)> {
    let missing = |error| match error {
        StoreError::NotFound { .. } => Error::corrupt(key, "a file of the index", "there", "missing"),
        error => error.into(),
    };
    let size = store.head(key).map_err(missing)?.size;
    let length = store.get(key, Some(0..8)).map_err(missing)?;
    let Ok(length) = length.try_into().map(u64::from_le_bytes) else {
        return Err(Error::corrupt(key, "truncated before the header length", "8 bytes", size));
    };
    let limit = HEADER_BYTES_MAX.min(size.saturating_sub(8));
    if length > limit {
        return Err(Error::corrupt(key, "header length", format!("at most {limit}"), length));
    }
    let bytes = store.get(key, Some(8..8 + length)).map_err(missing)?;
    let header: Unique<serde_json::Value> = serde_json::from_slice(&bytes)
        .map_err(|source| Error::Parse { subject: format!("header of {key}"), source })?;
    Ok((header.0, 8 + length..size))
}

fn parse<T: serde::de::DeserializeOwned>(key: &Key, value: serde_json::Value) -> Result<T> {
    serde_json::from_value(value)
        .map_err(|source| Error::Parse { subject: format!("header of {key}"), source })
}

/// A frame is a flat tensor of bytes.
fn check_entry(key: &Key, name: &str, entry: &Entry) -> Result<(u64, u64)> {
    let subject = || format!("`{name}` in {key}");
    if entry.dtype != "U8" {
        return Err(Error::corrupt(subject(), "element type of a frame", "U8", entry.dtype.escape_default()));
    }
    let (start, end) = entry.data_offsets;
    let length = end.checked_sub(start);
    if entry.shape.len() != 1 || entry.shape.first().copied() != length {
        let found = format!("shape {:?}, bytes {start}..{end}", entry.shape);
        return Err(Error::corrupt(subject(), "shape of a frame", "its number of bytes", found));
    }
    Ok((start, end))
}

/// Frames lie back to back and fill the file.
fn check_cover(key: &Key, mut ranges: Vec<(u64, u64)>, data: u64) -> Result<()> {
    ranges.sort_unstable();
    let mut next = 0;
    for (start, end) in ranges {
        if start != next {
            return Err(Error::corrupt(key, "start of a frame", next, start));
        }
        next = end;
    }
    if next == data { Ok(()) } else { Err(Error::corrupt(key, "bytes of all frames", data, next)) }
}
