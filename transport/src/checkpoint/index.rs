//! `model.safetensors.index.json`: which file holds which tensor.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::{fmt, fs};

use driftless_store::os::{if_there, regular};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};

use super::INDEX;
use super::header::bad;
use crate::error::{Error, Result};
use crate::snapshot::{TensorInfo, is_plain_name};

/// An index lists names only; a 1 T-parameter model's has 10 MB.
const INDEX_BYTES_MAX: u64 = 256 << 20;

/// Tensor name → file name.
pub(super) type WeightMap = BTreeMap<String, String>;
/// By name, each tensor that the files' headers have, the number of its file, and where it lies there.
pub(super) type Found = BTreeMap<String, (TensorInfo, (usize, Range<usize>))>;

/// Reads a directory's index; `None` when it has none.
pub(super) fn read(dir: &Path) -> Result<Option<WeightMap>> {
    let path = dir.join(INDEX);
    let found = if_there(fs::metadata(&path)).map_err(|source| Error::io("inspect", &path, source))?;
    let Some(metadata) = found else { return Ok(None) };
    if metadata.len() > INDEX_BYTES_MAX {
        return Err(Error::TooLarge { what: format!("`{}`", path.display()), max: INDEX_BYTES_MAX });
    }
    let bytes = regular::read(&path).map_err(|source| Error::io("read", &path, source))?;
    let index: Index = serde_json::from_slice(&bytes)
        .map_err(|source| Error::Parse { subject: format!("`{}`", path.display()), source })?;
    for (tensor, file) in &index.weight_map.0 {
        if !is_plain_name(file) || !file.ends_with(".safetensors") {
            return Err(bad(
                &path,
                Some(tensor),
                "file name",
                "a plain name ending in .safetensors",
                file.escape_default(),
            ));
        }
    }
    if index.weight_map.0.is_empty() {
        return Err(bad(&path, None, "weight map", "at least one tensor", "none"));
    }
    Ok(Some(index.weight_map.0))
}

/// The index text for tensors (with their file) of `total_size` bytes.
pub(super) fn compose(weight_map: &WeightMap, total_size: u64) -> String {
    let index = serde_json::json!({ "metadata": { "total_size": total_size }, "weight_map": weight_map });
    // Pretty, as the reference writes it: people read this file.
    format!("{index:#}\n")
}

/// Refuses an index that lists a tensor its file lacks, or files that hold a tensor it does not list there.
/// Engines load what the files hold, so a stale index hides what they will serve.
pub(super) fn check(dir: &Path, weight_map: &WeightMap, shards: &[String], found: &Found) -> Result<()> {
    let path = dir.join(INDEX);
    for (tensor, file) in weight_map {
        let holder = found.get(tensor).and_then(|(_, (shard, _))| shards.get(*shard));
        if holder != Some(file) {
            let holder = holder.map_or("in no file", String::as_str);
            return Err(bad(&path, Some(tensor), "file that holds the tensor", file, holder));
        }
    }
    match found.keys().find(|name| !weight_map.contains_key(*name)) {
        Some(name) => {
            Err(bad(&path, Some(name), "entry in the index", "one for every tensor in the files", "none"))
        }
        None => Ok(()),
    }
}

#[derive(Deserialize)]
struct Index {
    weight_map: UniqueMap,
}

/// A JSON map that refuses repeated keys, where the usual map types keep the last.
struct UniqueMap(WeightMap);

impl<'de> Deserialize<'de> for UniqueMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Entries;

        impl<'de> Visitor<'de> for Entries {
            type Value = UniqueMap;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map from tensor to file names")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<UniqueMap, A::Error> {
                let mut entries = WeightMap::new();
                while let Some((tensor, file)) = map.next_entry::<String, String>()? {
                    if let Some(first) = entries.insert(tensor, file) {
                        return Err(A::Error::custom(format_args!(
                            "a tensor occurs twice, first in `{first}`"
                        )));
                    }
                }
                Ok(UniqueMap(entries))
            }
        }

        deserializer.deserialize_map(Entries)
    }
}
