//! What a checkpoint directory promises: every bit back, or a refusal that names file and tensor.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

use std::borrow::Cow;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::symlink;
use std::path::Path;

use driftless_store::Error as StoreError;
use driftless_transport::checkpoint::write_checkpoint;
use driftless_transport::snapshot::{AuxFile, TensorInfo};
use driftless_transport::{Checkpoint, Dtype, Error, Result, Snapshot};

use driftless_testkit::publications::{Weights, assert_same};

const INDEX: &str = "model.safetensors.index.json";

fn shards(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.ends_with(".safetensors"))
        .collect();
    names.sort();
    names
}

/// A checkpoint in several files, and its weights.
fn sharded(dir: &Path) -> Weights {
    let weights = Weights::small(3);
    write_checkpoint(dir, &weights, 7000).unwrap();
    assert!(shards(dir).len() >= 3, "{:?}", shards(dir));
    weights
}

/// The message of an error and of everything behind it.
fn text(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {}", text(source)),
        None => error.to_string(),
    }
}

fn assert_refused(dir: &Path, parts: &[&str]) {
    let error = Checkpoint::open(dir).unwrap_err();
    let message = text(&error);
    for part in parts {
        assert!(message.contains(part), "`{message}` lacks `{part}`");
    }
}

#[test]
fn one_file_or_many_hold_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let weights = Weights::small(3);
    for (name, max) in [("single", u64::MAX), ("sharded", 7000), ("each", 0)] {
        let dir = dir.path().join(name);
        write_checkpoint(&dir, &weights, max).unwrap();
        let checkpoint = Checkpoint::open(&dir).unwrap();
        assert_same(&checkpoint, &weights);
        assert_eq!(dir.join("model.safetensors").exists(), max == u64::MAX);
        assert_eq!(dir.join(INDEX).exists(), max != u64::MAX);
        for (index, info) in weights.infos.iter().enumerate() {
            let place = checkpoint.place(index).unwrap();
            let file = fs::read(place.path).unwrap();
            assert_eq!(file[place.offset as usize..][..place.length as usize], weights.bytes[index]);
            assert_eq!(place.offset % info.dtype.size(), 0, "`{}` is not aligned", info.name);
            assert_eq!(checkpoint.position(&info.name), Some(index));
        }
        assert_eq!(checkpoint.position("absent"), None);
        assert!(checkpoint.bytes(weights.infos.len()).is_err());
    }
}

#[test]
fn links_are_followed_and_other_formats_are_left_out() {
    let dir = tempfile::tempdir().unwrap();
    let weights = sharded(&dir.path().join("blobs"));
    let linked = dir.path().join("snapshot");
    fs::create_dir(&linked).unwrap();
    for entry in fs::read_dir(dir.path().join("blobs")).unwrap() {
        let path = entry.unwrap().path();
        symlink(&path, linked.join(path.file_name().unwrap())).unwrap();
    }
    for stale in ["pytorch_model.bin", "optimizer.pt", ".gitattributes", "model.gguf"] {
        fs::write(linked.join(stale), b"x").unwrap();
    }
    fs::create_dir(linked.join("onnx")).unwrap();
    assert_same(&Checkpoint::open(&linked).unwrap(), &weights);
}

#[test]
fn auxiliary_file_name_of_no_version_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    write_checkpoint(dir.path(), &Weights::small(3), u64::MAX).unwrap();
    for name in [&b"a\nb.txt"[..], b"a\\b.txt", b"a\xffb.txt"] {
        let path = dir.path().join(OsStr::from_bytes(name));
        fs::write(&path, b"x").unwrap();
        assert_refused(dir.path(), &["name of an auxiliary file", "rename it", &format!("{path:?}")]);
        fs::remove_file(path).unwrap();
    }
    fs::write(dir.path().join(OsStr::from_bytes(b".hidden\n")), b"x").unwrap();
    Checkpoint::open(dir.path()).unwrap();
}

#[test]
fn open_missing_weights_are_named() {
    let dir = tempfile::tempdir().unwrap();
    assert_refused(dir.path(), &["model.safetensors", "no such file"]);
    sharded(dir.path().join("c").as_path());
    let dir = dir.path().join("c");
    let shard = shards(&dir)[1].clone();
    fs::remove_file(dir.join(&shard)).unwrap();
    assert_refused(&dir, &[&shard, "no such file"]);
    fs::remove_dir_all(&dir).unwrap();
    assert!(matches!(
        Checkpoint::open(&dir),
        Err(Error::Corrupt { .. } | Error::Store(StoreError::Io { .. }))
    ));
}

#[test]
fn a_truncated_shard_is_named_at_every_length() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("c");
    sharded(&dir);
    let shard = shards(&dir)[0].clone();
    let whole = fs::read(dir.join(&shard)).unwrap();
    for length in (0..whole.len()).step_by(97).chain([1, 7, 8, 9, whole.len() - 1]) {
        fs::write(dir.join(&shard), &whole[..length]).unwrap();
        assert_refused(&dir, &[&shard]);
    }
    fs::write(dir.join(&shard), [&whole[..], b"x"].concat()).unwrap();
    assert_refused(&dir, &[&shard, "behind the last tensor"]);
}

#[test]
fn an_index_that_disagrees_with_its_files_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("c");
    sharded(&dir);
    let path = dir.join(INDEX);
    let index = fs::read_to_string(&path).unwrap();
    let [first, second] = [&shards(&dir)[0], &shards(&dir)[1]];

    let misplaced = index.replacen(first, second, 1);
    fs::write(&path, &misplaced).unwrap();
    assert_refused(&dir, &["a.embed", second, "in no file"]);

    let mut json: serde_json::Value = serde_json::from_str(&index).unwrap();
    json["weight_map"].as_object_mut().unwrap().remove("d.norm");
    fs::write(&path, json.to_string()).unwrap();
    assert_refused(&dir, &["d.norm", "found none"]);

    json["weight_map"]["d.norm"] = serde_json::json!("../elsewhere.safetensors");
    fs::write(&path, json.to_string()).unwrap();
    assert_refused(&dir, &["d.norm", "../elsewhere.safetensors"]);

    fs::write(&path, r#"{"weight_map":{"a":"x.safetensors","a":"y.safetensors"}}"#).unwrap();
    assert_refused(&dir, &[INDEX, "twice"]);
    for broken in ["", "{", "[]", r#"{"weight_map":{}}"#, r#"{"metadata":{}}"#] {
        fs::write(&path, broken).unwrap();
        assert_refused(&dir, &[INDEX]);
    }
    fs::write(&path, index).unwrap();
    fs::copy(dir.join(first), dir.join(second)).unwrap();
    assert_refused(&dir, &["a.embed", "two files", first]);
}

#[test]
fn an_existing_checkpoint_is_replaced_whole_and_nothing_else_is() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("c");
    sharded(&target);
    let mut weights = Weights::small(4);
    weights.remove("g.up");
    weights.files.clear();
    write_checkpoint(&target, &weights, u64::MAX).unwrap();
    assert_same(&Checkpoint::open(&target).unwrap(), &weights);
    assert_eq!(shards(&target), ["model.safetensors"], "no shard of the old one stays");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is left beside it");

    let home = dir.path().join("home");
    fs::create_dir(&home).unwrap();
    write_checkpoint(&home, &weights, u64::MAX).unwrap();
    fs::remove_file(home.join("model.safetensors")).unwrap();
    fs::write(home.join("thesis.txt"), b"x").unwrap();
    assert!(matches!(write_checkpoint(&home, &weights, u64::MAX), Err(Error::BadSetting { .. })));
    assert!(home.join("thesis.txt").exists());
    fs::create_dir(target.join(".driftless")).unwrap();
    assert!(matches!(write_checkpoint(&target, &weights, u64::MAX), Err(Error::BadSetting { .. })));
}

/// A snapshot that contradicts itself at one tensor.
struct Broken {
    weights: Weights,
    short: usize,
}

impl Snapshot for Broken {
    fn tensors(&self) -> &[TensorInfo] {
        &self.weights.infos
    }
    fn bytes(&self, index: usize) -> Result<Cow<'_, [u8]>> {
        let bytes = &self.weights.bytes[index];
        Ok(Cow::Borrowed(if index == self.short { &bytes[1..] } else { bytes }))
    }
    fn files(&self) -> &[AuxFile] {
        &self.weights.files
    }
}

#[test]
fn a_failed_write_leaves_the_old_checkpoint_and_no_rest() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("c");
    let old = sharded(&target);
    let error =
        write_checkpoint(&target, &Broken { weights: Weights::small(5), short: 3 }, u64::MAX).unwrap_err();
    assert!(matches!(&error, Error::TensorMismatch { tensor, .. } if tensor == "d.norm"), "{error}");

    let mut twice = Weights::small(5);
    twice.infos[1].name = "a.embed".into();
    assert!(matches!(write_checkpoint(&target, &twice, u64::MAX), Err(Error::DuplicateTensor { .. })));
    twice.infos[1].name = "0".into();
    assert!(matches!(write_checkpoint(&target, &twice, u64::MAX), Err(Error::TensorMismatch { .. })));

    assert_same(&Checkpoint::open(&target).unwrap(), &old);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn a_sub_byte_type_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let header = br#"{"w":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}}"#;
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header, b"ab"].concat();
    fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
    assert_refused(dir.path(), &["`w`", "F4"]);
    assert!("F4".parse::<Dtype>().is_err());
}
