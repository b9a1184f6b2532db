//! Reading and laying out the header of one safetensors file.
//!
//! The format: `u64` header length, that many bytes of JSON (`{"name": {"dtype", "shape", "data_offsets"},
//! …}`, padded with spaces), data. Parsed here and not with the `safetensors` crate, because every refusal
//! has to name the file, the tensor, and what was expected and found.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};

use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::snapshot::TensorInfo;

/// The limit of the reference implementation, in bytes.
const HEADER_BYTES_MAX: u64 = 100_000_000;
pub(crate) const METADATA: &str = "__metadata__";

/// A tensor and where its bytes lie in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) info: TensorInfo,
    pub(super) range: Range<u64>,
}

/// Reads and parses a file's header, and nothing else of it.
pub(super) fn read(path: &Path, file: &File) -> Result<Vec<Entry>> {
    let fail = |source| Error::io("read", path, source);
    let file_len = file.metadata().map_err(fail)?.len();
    let mut head = vec![0; file_len.min(8) as usize];
    file.read_exact_at(&mut head, 0).map_err(fail)?;
    if let Ok(length) = <[u8; 8]>::try_from(&head[..]).map(u64::from_le_bytes)
        && length <= HEADER_BYTES_MAX
    {
        head.resize(length.min(file_len - 8) as usize + 8, 0);
        file.read_exact_at(&mut head[8..], 8).map_err(fail)?;
    }
    parse(path, &head, file_len)
}

/// Parses the header of a file of so many bytes, which `bytes` begin; entries come in data order.
/// Tensors must cover the data exactly: no overlap, no gap, nothing missing and nothing behind.
pub(super) fn parse(path: &Path, bytes: &[u8], file_len: u64) -> Result<Vec<Entry>> {
    let json = header_json(path, bytes)?;
    let raw: RawHeader = serde_json::from_slice(json)
        .map_err(|source| Error::Parse { subject: format!("header of {}", path.display()), source })?;
    let data_start = 8 + json.len() as u64;
    let mut entries = raw
        .tensors
        .into_iter()
        .map(|(name, tensor)| entry(path, name, tensor, data_start, file_len))
        .collect::<Result<Vec<_>>>()?;
    entries.sort_by_key(|entry| (entry.range.start, entry.range.end));
    check_cover(path, &entries, data_start, file_len)?;
    Ok(entries)
}

/// The header's bytes for `tensors` stored back to back in this order, padded so that data starts at a
/// multiple of 8.
pub(super) fn compose(tensors: &[&TensorInfo]) -> Result<Vec<u8>> {
    let mut header = serde_json::Map::new();
    header.insert(METADATA.into(), serde_json::json!({ "format": "pt" }));
    let mut offset = 0u64;
    for info in tensors {
        let end = offset
            .checked_add(info.byte_len()?)
            .ok_or_else(|| Error::TooLarge { what: "data of one safetensors file".into(), max: u64::MAX })?;
        header.insert(
            info.name.clone(),
            serde_json::json!({ "dtype": info.dtype, "shape": info.shape, "data_offsets": [offset, end] }),
        );
        offset = end;
    }
    let mut json = serde_json::Value::Object(header).to_string().into_bytes();
    json.resize(json.len().next_multiple_of(8), b' ');
    if json.len() as u64 > HEADER_BYTES_MAX {
        return Err(Error::TooLarge { what: "safetensors header".into(), max: HEADER_BYTES_MAX });
    }
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.append(&mut json);
    Ok(bytes)
}

fn header_json<'a>(path: &Path, bytes: &'a [u8]) -> Result<&'a [u8]> {
    let (length, rest) = bytes.split_first_chunk::<8>().ok_or_else(|| {
        bad(
            path,
            None,
            "truncated before the header length",
            "at least 8 bytes",
            format!("{} bytes", bytes.len()),
        )
    })?;
    let length = u64::from_le_bytes(*length);
    if length > HEADER_BYTES_MAX {
        return Err(bad(path, None, "header length", format!("at most {HEADER_BYTES_MAX} bytes"), length));
    }
    // Bounded just above, so it fits a usize.
    rest.get(..length as usize).ok_or_else(|| {
        bad(path, None, "truncated header", format!("{length} bytes"), format!("{} bytes", rest.len()))
    })
}

fn entry(path: &Path, name: String, raw: RawTensor, data_start: u64, file_len: u64) -> Result<Entry> {
    let dtype: Dtype = raw
        .dtype
        .parse()
        .map_err(|_| bad(path, Some(&name), "element type", "a whole-byte safetensors type", &raw.dtype))?;
    let info = TensorInfo { name, dtype, shape: raw.shape };
    let expected = info.byte_len()?;
    let (begin, end) = raw.data_offsets;
    let found = end.checked_sub(begin).ok_or_else(|| {
        bad(path, Some(&info.name), "data offsets", "begin before end", format!("{begin}..{end}"))
    })?;
    if found != expected {
        return Err(bad(path, Some(&info.name), "bytes of data for its shape and type", expected, found));
    }
    let range = data_start.checked_add(begin).zip(data_start.checked_add(end));
    match range {
        Some((start, end)) if end <= file_len => Ok(Entry { info, range: start..end }),
        _ => Err(bad(
            path,
            Some(&info.name),
            "truncated data",
            format!("a file of at least {} bytes", data_start.saturating_add(end)),
            format!("{file_len} bytes"),
        )),
    }
}

fn check_cover(path: &Path, entries: &[Entry], data_start: u64, file_len: u64) -> Result<()> {
    let mut expected = data_start;
    for entry in entries {
        if entry.range.start != expected {
            let what = if entry.range.start < expected {
                "data overlaps the tensor before"
            } else {
                "gap before the data"
            };
            return Err(bad(
                path,
                Some(&entry.info.name),
                what,
                format!("offset {expected}"),
                format!("offset {}", entry.range.start),
            ));
        }
        expected = entry.range.end;
    }
    if expected != file_len {
        return Err(bad(
            path,
            None,
            "bytes behind the last tensor",
            format!("a file of {expected} bytes"),
            format!("{file_len} bytes"),
        ));
    }
    Ok(())
}

/// An [`Error::Corrupt`] that names the file, and the tensor where one is at fault.
pub(super) fn bad(
    path: &Path,
    tensor: Option<&str>,
    what: &'static str,
    expected: impl fmt::Display,
    found: impl fmt::Display,
) -> Error {
    let path = path.display();
    Error::Corrupt {
        subject: tensor
            .map_or_else(|| format!("`{path}`"), |tensor| format!("tensor `{tensor}` in `{path}`")),
        what,
        expected: expected.to_string(),
        found: found.to_string(),
    }
}

#[derive(serde::Deserialize)]
struct RawTensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// Kept as a list: a JSON map type would silently let the last of two equal names win.
struct RawHeader {
    tensors: Vec<(String, RawTensor)>,
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Header;

        impl<'de> Visitor<'de> for Header {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map of tensor names")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<RawHeader, A::Error> {
                let mut tensors = BTreeMap::new();
                let mut metadata = None;
                while let Some(name) = map.next_key::<String>()? {
                    if name == METADATA {
                        if metadata.replace(map.next_value::<BTreeMap<String, String>>()?).is_some() {
                            return Err(A::Error::custom("`__metadata__` occurs twice"));
                        }
                    } else if tensors.insert(name.clone(), map.next_value::<RawTensor>()?).is_some() {
                        return Err(A::Error::custom(format_args!("tensor `{name}` occurs twice")));
                    }
                }
                Ok(RawHeader { tensors: tensors.into_iter().collect() })
            }
        }

        deserializer.deserialize_map(Header)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(name: &str, dtype: Dtype, shape: &[u64]) -> TensorInfo {
        TensorInfo { name: name.into(), dtype, shape: shape.into() }
    }

    fn file(json: &str, data: usize) -> Vec<u8> {
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(json.as_bytes());
        bytes.resize(bytes.len() + data, 7);
        bytes
    }

    fn parse_whole(path: &str, bytes: &[u8]) -> Result<Vec<Entry>> {
        parse(Path::new(path), bytes, bytes.len() as u64)
    }

    fn refusal(json: &str, data: usize) -> String {
        parse_whole("dir/model.safetensors", &file(json, data)).unwrap_err().to_string()
    }

    #[test]
    fn composed_headers_parse_back() {
        let tensors =
            [info("a", Dtype::F32, &[2, 3]), info("b", Dtype::Bf16, &[]), info("c", Dtype::U8, &[0])];
        let mut bytes = compose(&tensors.iter().collect::<Vec<_>>()).unwrap();
        assert_eq!(bytes.len() % 8, 0);
        let start = bytes.len() as u64;
        bytes.resize(bytes.len() + 26, 0);
        let mut entries = parse_whole("m", &bytes).unwrap();
        entries.sort_by(|a, b| a.info.name.cmp(&b.info.name));
        let ranges: Vec<_> = entries.iter().map(|e| e.range.start - start..e.range.end - start).collect();
        assert_eq!(ranges, [0..24, 24..26, 26..26]);
        assert!(entries.into_iter().map(|e| e.info).eq(tensors));
    }

    #[test]
    fn refusals_name_file_tensor_expected_and_found() {
        let cases = [
            (
                r#"{"w":{"dtype":"BF16","shape":[4],"data_offsets":[0,6]}}"#,
                6,
                ["`w`", "expected 8", "found 6"],
            ),
            (
                r#"{"w":{"dtype":"BF16","shape":[4],"data_offsets":[0,8]}}"#,
                6,
                ["`w`", "truncated data", "expected a file of at least"],
            ),
            (
                r#"{"w":{"dtype":"BF16","shape":[4],"data_offsets":[8,0]}}"#,
                8,
                ["`w`", "begin before end", "8..0"],
            ),
            (
                r#"{"w":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}}"#,
                2,
                ["`w`", "element type", "found F4"],
            ),
            (
                r#"{"w":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}"#,
                6,
                ["`w`", "gap before", "expected offset"],
            ),
            (
                r#"{"v":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"w":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}"#,
                6,
                ["`w`", "overlaps", "found offset"],
            ),
            (
                r#"{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#,
                6,
                ["model.safetensors", "behind the last", "found"],
            ),
        ];
        for (json, data, parts) in cases {
            let message = refusal(json, data);
            assert!(message.contains("dir/model.safetensors"), "{message}");
            for part in parts {
                assert!(message.contains(part), "{message} lacks {part}");
            }
        }
    }

    #[test]
    fn duplicates_are_refused_by_name() {
        let tensor = r#""w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}"#;
        let error = parse_whole("m", &file(&format!("{{{tensor},{tensor}}}"), 2)).unwrap_err();
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert!(source.contains("`w` occurs twice"), "{source}");
    }

    #[test]
    fn no_truncation_or_header_length_panics_or_passes() {
        let json = r#"{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
        let whole = file(json, 4);
        assert!(parse_whole("m", &whole).is_ok());
        for cut in 0..whole.len() {
            assert!(parse_whole("m", &whole[..cut]).is_err(), "cut at {cut}");
        }
        for length in [u64::MAX, HEADER_BYTES_MAX + 1, 0, 1, json.len() as u64 + 1] {
            let mut bytes = whole.clone();
            bytes[..8].copy_from_slice(&length.to_le_bytes());
            assert!(parse_whole("m", &bytes).is_err(), "length {length}");
        }
        let huge = r#"{"w":{"dtype":"F64","shape":[18446744073709551615,2],"data_offsets":[0,4]}}"#;
        assert!(parse_whole("m", &file(huge, 4)).is_err());
        let far =
            r#"{"w":{"dtype":"U8","shape":[4],"data_offsets":[18446744073709551611,18446744073709551615]}}"#;
        assert!(parse_whole("m", &file(far, 4)).is_err());
    }
}
