//! A trainer's writer and an engine's receiver of slime's delta directories, from the description of the
//! format alone. They share no code with the crate, and the receiver is as trusting as the real one: it
//! applies in place and checks after.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

/// Bytes of named tensors.
pub(crate) type Tensors = BTreeMap<String, Vec<u8>>;

pub(crate) const FORMS: [(&str, &str); 6] = [
    ("xor", "xxh3-128"),
    ("xor", "blake3"),
    ("xor", "adler32"),
    ("overwrite", "xxh3-128"),
    ("overwrite", "blake3"),
    ("overwrite", "adler32"),
];

pub(crate) fn digest(algorithm: &str, bytes: &[u8]) -> String {
    match algorithm {
        "xxh3-128" => format!("{:032x}", xxhash_rust::xxh3::xxh3_128(bytes)),
        "blake3" => blake3::hash(bytes).to_string(),
        "adler32" => {
            let (a, b) = bytes.iter().fold((1u32, 0u32), |(a, b), byte| {
                let a = (a + u32::from(*byte)) % 65521;
                (a, (a + b) % 65521)
            });
            format!("{:08x}", b << 16 | a)
        }
        other => panic!("{other}"),
    }
}

pub(crate) fn payload(encoding: &str, old: &[u8], new: &[u8]) -> Vec<u8> {
    if encoding == "xor" {
        return old.iter().zip(new).map(|(old, new)| old ^ new).collect();
    }
    let changed: Vec<usize> = (0..old.len()).filter(|at| old[*at] != new[*at]).collect();
    let mut payload = (changed.len() as u32).to_le_bytes().to_vec();
    changed.iter().for_each(|at| payload.extend((*at as u32).to_le_bytes()));
    changed.iter().for_each(|at| payload.push(new[*at]));
    payload
}

pub(crate) fn compress(payload: &[u8]) -> Vec<u8> {
    zstd::bulk::compress(payload, 1).unwrap()
}

/// One rank's file: name, frame and checksum of each tensor.
pub(crate) type Rank = Vec<(String, Vec<u8>, String)>;

/// A version on its way to disk, open to every kind of tampering.
pub(crate) struct Delta {
    pub(crate) version: u64,
    pub(crate) metadata: Value,
    pub(crate) ranks: Vec<Rank>,
    pub(crate) weight_map: BTreeMap<String, String>,
    pub(crate) dtype: &'static str,
}

impl Delta {
    /// The version that turns `old` into `new`; tensors go to `ranks` files in turn.
    pub(crate) fn new(version: u64, form: (&str, &str), old: &Tensors, new: &Tensors, ranks: usize) -> Self {
        let (encoding, algorithm) = form;
        let mut files: Vec<Rank> = vec![Vec::new(); ranks];
        let changed = new.iter().filter(|(name, bytes)| old[*name] != **bytes);
        for (number, (name, bytes)) in changed.enumerate() {
            let frame = compress(&payload(encoding, &old[name], bytes));
            files[number % ranks].push((name.clone(), frame, digest(algorithm, bytes)));
        }
        files.retain(|rank| !rank.is_empty());
        let metadata = json!({
            "version": format!("{version:06}"), "base_version": format!("{:06}", version - 1),
            "delta_encoding": encoding, "compression_format": "zstd", "checksum_format": algorithm,
        });
        let mut delta = Self { version, metadata, ranks: files, weight_map: BTreeMap::new(), dtype: "U8" };
        delta.map();
        delta
    }

    /// Makes the weight map follow from the files; the last rank that has a tensor is listed.
    pub(crate) fn map(&mut self) {
        let listed = self
            .ranks
            .iter()
            .enumerate()
            .flat_map(|(rank, tensors)| tensors.iter().map(move |(name, ..)| (name.clone(), rank)));
        self.weight_map = listed.map(|(name, rank)| (name, self.file(rank))).collect();
    }

    pub(crate) fn file(&self, rank: usize) -> String {
        format!("model-{rank:05}-of-{:05}.safetensors", self.ranks.len())
    }

    pub(crate) fn dir(&self, root: &Path) -> PathBuf {
        root.join(format!("weight_v{:06}", self.version))
    }

    pub(crate) fn write(&self, root: &Path) -> PathBuf {
        let dir = self.dir(root);
        fs::create_dir_all(&dir).unwrap();
        for (rank, tensors) in self.ranks.iter().enumerate() {
            fs::write(dir.join(self.file(rank)), safetensors(tensors, self.dtype)).unwrap();
        }
        let index = json!({ "metadata": self.metadata, "weight_map": self.weight_map });
        fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
        dir
    }
}

fn safetensors(tensors: &Rank, dtype: &str) -> Vec<u8> {
    let checksums: BTreeMap<_, _> = tensors.iter().map(|(name, _, sum)| (name, sum)).collect();
    let mut header = json!({ "__metadata__": checksums });
    let mut data = Vec::new();
    for (name, frame, _) in tensors {
        let end = data.len() + frame.len();
        header[name] = json!({ "dtype": dtype, "shape": [frame.len()], "data_offsets": [data.len(), end] });
        data.extend_from_slice(frame);
    }
    let mut text = header.to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    [&(text.len() as u64).to_le_bytes()[..], &text, &data].concat()
}

/// Entries of a safetensors file: name, dtype, shape, range of its bytes in the file; and the metadata.
fn header(bytes: &[u8]) -> (BTreeMap<String, Value>, Value, usize) {
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let Value::Object(mut header) = serde_json::from_slice(&bytes[8..8 + length]).unwrap() else { panic!() };
    let metadata = header.remove("__metadata__").unwrap_or_default();
    (header.into_iter().collect(), metadata, 8 + length)
}

fn range(entry: &Value, start: usize) -> std::ops::Range<usize> {
    let offset = |side: usize| entry["data_offsets"][side].as_u64().unwrap() as usize;
    start + offset(0)..start + offset(1)
}

/// The tensors of a checkpoint directory.
pub(crate) fn read_checkpoint(dir: &Path) -> Tensors {
    let mut tensors = Tensors::new();
    for path in weight_files(dir) {
        let bytes = fs::read(path).unwrap();
        let (entries, _, start) = header(&bytes);
        tensors.extend(entries.into_iter().map(|(name, entry)| (name, bytes[range(&entry, start)].to_vec())));
    }
    tensors
}

fn weight_files(dir: &Path) -> Vec<PathBuf> {
    let files = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> =
        files.filter(|path| path.extension().is_some_and(|end| end == "safetensors")).collect();
    files.sort();
    files
}

/// The receiver: turns `local`, at the version in front, into version `version` of `source`.
pub(crate) fn receive(local: &mut Tensors, source: &Path, version: u64) {
    let dir = source.join(format!("weight_v{version:06}"));
    let index: Value =
        serde_json::from_slice(&fs::read(dir.join("model.safetensors.index.json")).unwrap()).unwrap();
    let metadata = |key: &str| index["metadata"][key].as_str().unwrap().to_owned();
    assert_eq!(metadata("version").parse::<u64>().unwrap(), version);
    assert_eq!(metadata("base_version").parse::<u64>().unwrap(), version - 1);
    assert_eq!(metadata("compression_format"), "zstd");
    let mut seen = BTreeMap::new();
    // Every file that is there, whatever the index says.
    for path in weight_files(&dir) {
        let bytes = fs::read(&path).unwrap();
        let (entries, checksums, start) = header(&bytes);
        for (name, entry) in entries {
            assert_eq!((&entry["dtype"], entry["shape"].as_array().unwrap().len()), (&"U8".into(), 1));
            let frame = &bytes[range(&entry, start)];
            // A receiver asks the frame for the size of its content.
            let size = zstd::zstd_safe::get_frame_content_size(frame).unwrap().unwrap() as usize;
            let payload = zstd::bulk::decompress(frame, size).unwrap();
            let tensor = local.get_mut(&name).unwrap();
            if metadata("delta_encoding") == "xor" {
                assert_eq!(payload.len(), tensor.len());
                tensor.iter_mut().zip(payload).for_each(|(byte, mask)| *byte ^= mask);
            } else {
                let count = u32::from_le_bytes(payload[..4].try_into().unwrap()) as usize;
                let (positions, values) = payload[4..].split_at(4 * count);
                assert_eq!(values.len(), count);
                for (at, value) in positions.chunks(4).zip(values) {
                    tensor[u32::from_le_bytes(at.try_into().unwrap()) as usize] = *value;
                }
            }
            assert_eq!(checksums[&name], digest(&metadata("checksum_format"), tensor), "{name}");
            seen.insert(name, path.file_name().unwrap().to_str().unwrap().to_owned());
        }
    }
    assert_eq!(json!(seen), index["weight_map"]);
}
