//! Comparisons of models whose layouts are of every kind with checkpoints, good and bad.

#![allow(unsafe_code, reason = "layouts are made of the addresses of buffers")]

use std::fs;

use driftless_transport::Dtype;
use driftless_transport::checkpoint::write_checkpoint;
use driftless_transport::snapshot::Tensors;
use tempfile::TempDir;

use super::super::part::BLOCK_CHANGES;
use super::super::tests::{STORAGES, Scene, TENSORS, VIEWS, host, infos};
use super::super::{LiveCopy, LiveModel, LiveTensor, Rank, Strides};
use super::*;

/// A checkpoint of a version, with what `edit` makes of its tensors, in several files.
fn checkpoint(version: &[Vec<u8>], edit: impl FnOnce(&mut Vec<(TensorInfo, Vec<u8>)>)) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut tensors: Vec<_> = infos().into_iter().zip(version.iter().cloned()).collect();
    edit(&mut tensors);
    let add = |all: Tensors<'static>, (info, bytes): (TensorInfo, Vec<u8>)| {
        all.tensor(info.name, info.dtype, info.shape, bytes).unwrap()
    };
    let tensors = tensors.into_iter().fold(Tensors::new(), add);
    write_checkpoint(dir.path().join("c"), &tensors, 16 << 10).unwrap();
    dir
}

fn with(scene: &Scene, dir: &TempDir, sample: Option<u64>) -> Result<Compared> {
    with_ranks(scene, dir, sample, |said| said)
}

fn with_ranks(
    scene: &Scene,
    dir: &TempDir,
    sample: Option<u64>,
    agree: impl FnMut(Vec<u8>) -> Vec<u8>,
) -> Result<Compared> {
    let directory = dir.path().join("c");
    scene.shared.compare(&Wanted { label: "a:1", directory: &directory, sample }, agree)
}

/// A comparison with the version that the scene's model has.
pub(in crate::live) fn compared(scene: &Scene, sample: Option<u64>) -> Result<Compared> {
    with(scene, &checkpoint(&scene.versions[0], |_| {}), sample)
}

fn assert_names(names: &Names, expected: &[&str]) {
    assert_eq!(
        (names.count, names.first.iter().map(String::as_str).collect()),
        (expected.len() as u64, expected.to_vec())
    );
}

/// Whatever memory the scene's model lies in.
pub(in crate::live) fn assert_compares(scene: &mut Scene) {
    let dir = checkpoint(&scene.versions[0], |_| {});
    let equal = with(scene, &dir, None).unwrap();
    let bytes: usize = scene.versions[0].iter().map(Vec::len).sum();
    assert_eq!((equal.label.as_str(), equal.tensors, equal.bytes), ("a:1", 7, bytes as u64));
    assert!(equal.is_equal() && equal.unreached.count == 0, "{equal:?}");
    // The last element of each view, and nothing of the padding behind the first.
    for (tensor, live, size, _, to) in VIEWS {
        let steps = size.iter().zip(to.1).map(|(size, stride)| (size - 1) * stride);
        let byte = ((to.0 + steps.sum::<u64>()) * STORAGES[live].0.size()) as usize;
        scene.live[live][byte] ^= 1;
        assert_names(&with(scene, &dir, None).unwrap().differing, &[TENSORS[tensor].0]);
        scene.live[live][byte] ^= 1;
    }
    *scene.live[0].last_mut().unwrap() ^= 1;
    assert!(with(scene, &dir, None).unwrap().is_equal());
    // Each block of a tensor, of which the kernel looks at some.
    for block in 0..20 {
        let byte = 2 * block * BLOCK_CHANGES as usize + 77;
        scene.live[8][byte] ^= 1;
        assert_names(&with(scene, &dir, None).unwrap().differing, &["wide"]);
        scene.live[8][byte] ^= 1;
    }
    assert_samples(scene, &dir);
}

fn assert_samples(scene: &mut Scene, dir: &TempDir) {
    // Samples go round: each element of both copies of `wide` is in one.
    let found =
        |scene: &Scene| (0..6).filter(|turn| !with(scene, dir, Some(*turn)).unwrap().is_equal()).count();
    assert_eq!(found(scene), 0);
    for element in [0, 13_653, 27_306, 20 * BLOCK_CHANGES as usize - 1] {
        scene.live[8][2 * element] ^= 1;
        assert!(found(scene) > 0, "{element}");
        scene.live[8][2 * element] ^= 1;
    }
    // Other weights are found by any, in each tensor.
    let other: Vec<Vec<u8>> =
        scene.versions[0].iter().map(|bytes| bytes.iter().map(|byte| !byte).collect()).collect();
    let other = checkpoint(&other, |_| {});
    for sample in [None, Some(0), Some(1), Some(u64::MAX)] {
        let differs = with(scene, &other, sample).unwrap();
        assert_eq!((differs.tensors, differs.differing.count), (7, 7), "{sample:?}");
        assert_eq!(differs.differing.to_string(), "embed, experts, fp8, k, q and 2 more");
    }
}

#[test]
fn weights_are_compared_wherever_they_lie() {
    assert_compares(&mut host());
}

#[test]
fn tensors_without_a_place_are_named_and_missing_ones_refused() {
    let scene = host();
    let version = &scene.versions[0];
    let more = checkpoint(version, |tensors| {
        let info = TensorInfo { name: "rotary".into(), dtype: Dtype::I64, shape: vec![1] };
        tensors.push((info, vec![0; 8]));
    });
    let found = with(&scene, &more, None).unwrap();
    assert_names(&found.unreached, &["rotary"]);
    assert!(found.is_equal() && found.tensors == 7);
    type Edit = fn(&mut Vec<(TensorInfo, Vec<u8>)>);
    let edits: [(Edit, &str); 3] = [
        (|tensors| tensors.retain(|(info, _)| info.name != "k"), "tensor k should be in the checkpoint"),
        (|tensors| tensors[1].0.shape = vec![32, 128], "tensor q should be BF16 [64, 64]"),
        (|tensors| tensors[1].0.dtype = Dtype::F16, "tensor q should be BF16 [64, 64]"),
    ];
    for (edit, expected) in edits {
        let error = with(&scene, &checkpoint(version, edit), None).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn a_tied_head_has_to_equal_the_embeddings() {
    let scene = host();
    scene.shared.state().layout.ties_head = true;
    let version = &scene.versions[0];
    let headed = |spoil: u8| {
        checkpoint(version, |tensors| {
            let (mut info, mut bytes) = tensors[0].clone();
            info.name = "lm_head.weight".into();
            bytes[7] ^= spoil;
            tensors.push((info, bytes));
        })
    };
    let equal = with(&scene, &headed(0), None).unwrap();
    assert!(equal.is_equal() && equal.tensors == 8, "{equal:?}");
    assert_names(&with(&scene, &headed(1), None).unwrap().differing, &["lm_head.weight"]);
    // An engine that has a head of its own does not tell by that name.
    scene.shared.state().layout.ties_head = false;
    assert_names(&with(&scene, &headed(1), None).unwrap().unreached, &["lm_head.weight"]);
}

#[test]
fn directories_that_are_no_checkpoint_are_refused() {
    let scene = host();
    let good = checkpoint(&scene.versions[0], |_| {});
    let shard = fs::read_dir(good.path().join("c")).unwrap().map(|entry| entry.unwrap().path());
    let shard = shard.filter(|path| path.extension().is_some_and(|end| end == "safetensors")).max().unwrap();
    let whole = fs::read(&shard).unwrap();
    let header = |length: u64| [&length.to_le_bytes()[..], &whole[8..]].concat();
    let spoilt = [
        whole[..whole.len() - 1].to_vec(),
        whole[..5].to_vec(),
        Vec::new(),
        b"garbage, and more of it".to_vec(),
        header(u64::MAX),
        header(100_000_000),
    ];
    let refused = |expected: &str| {
        let mut said = Vec::new();
        let error = with_ranks(&scene, &good, None, |bytes| {
            said.push(bytes.clone());
            bytes
        });
        let error = driftless_store::chain_text(&error.unwrap_err());
        assert!(error.contains(expected), "{error}");
        assert_eq!(said, [[0]], "the other ranks hear of it");
    };
    for bytes in spoilt {
        fs::write(&shard, bytes).unwrap();
        refused(shard.file_name().unwrap().to_str().unwrap());
    }
    fs::remove_file(&shard).unwrap();
    refused("no such file");
    fs::remove_dir_all(good.path().join("c")).unwrap();
    refused("no such file");
}

#[test]
fn what_one_rank_finds_or_fails_at_is_what_all_say() {
    let scene = host();
    let dir = checkpoint(&scene.versions[0], |_| {});
    // The other rank's bytes of the third call: whether it compared, and each tensor in the order of names.
    let with_other = |others: [Option<Vec<u8>>; 3]| {
        let mut asked = 0;
        let found = with_ranks(&scene, &dir, None, |said| {
            asked += 1;
            match &others[asked - 1] {
                Some(other) => said.iter().zip(other).map(|(one, other)| *one.min(other)).collect(),
                None => said,
            }
        });
        (found, asked)
    };
    let q = |state: u8| Some([&[1][..], &[3, 3, 3, 3, state, 3, 3]].concat());
    assert_names(&with_other([None, None, q(DIFFERS)]).0.unwrap().differing, &["q"]);
    assert!(with_other([None, None, q(UNREACHED)]).0.unwrap().is_equal());
    for (others, asked, expected) in [
        ([Some(vec![0]), None, None], 1, "the weights of each rank"),
        ([None, Some(vec![7; 64]), None], 2, "the same at each rank"),
        ([None, None, Some(vec![0; 8])], 3, "the weights of each rank"),
        ([None, None, Some(Vec::new())], 3, "the weights of each rank"),
    ] {
        let (found, count) = with_other(others);
        assert!(found.unwrap_err().to_string().contains(expected), "{expected}");
        assert_eq!(count, asked);
    }
}

#[test]
fn tensors_are_reached_where_any_rank_has_them() {
    let dir = tempfile::tempdir().unwrap();
    let (plugins, rank) = (dir.path().join("plugins"), Rank { port: 1, number: 0, of: 2 });
    // SAFETY: there is no storage.
    let layout = unsafe { Layout::new(infos(), Vec::new(), Vec::new()) }.unwrap();
    let model = LiveModel::in_host_memory(&plugins, rank, layout).unwrap();
    let checkpoint = checkpoint(&host().versions[0], |_| {});
    let directory = checkpoint.path().join("c");
    let mut asked = 0;
    let found = model.compare("a:1", &directory, None, |said| {
        asked += 1;
        if asked == 3 { vec![1, EQUAL, EQUAL, EQUAL, EQUAL, UNREACHED, UNREACHED, UNREACHED] } else { said }
    });
    let found = found.unwrap();
    assert_eq!((found.tensors, found.unreached.count), (4, 3));
    let none = model.compare("a:1", &directory, None, |said| said).unwrap();
    assert!(!none.is_equal() && none.unreached.count == 7);
    // Followers learn that they may ask.
    let told = || fs::read_to_string(rank.path(&plugins)).unwrap();
    assert!(told().contains(r#""compares":false"#));
    model.announce_compare().unwrap();
    assert!(told().contains(r#""compares":true"#));
}

#[test]
fn tensors_larger_than_a_batch_are_compared_to_their_ends() {
    let elements = BATCH_ELEMENTS as u64 + 3;
    let mut bytes = vec![7u8; elements as usize];
    let info = TensorInfo { name: "w".into(), dtype: Dtype::U8, shape: vec![elements] };
    let address = bytes.as_mut_ptr() as u64;
    let storage = LiveTensor { name: "w".into(), dtype: Dtype::U8, address, bytes: elements };
    let run = || Strides { offset: 0, strides: vec![1] };
    let copy = LiveCopy { tensor: 0, live: 0, size: vec![elements], from: run(), to: run(), table: None };
    // SAFETY: the bytes outlive the layout, and are written when nothing runs.
    let layout = unsafe { Layout::new(vec![info], vec![storage], vec![copy]) }.unwrap();
    let dir = tempfile::tempdir().unwrap();
    let directory = dir.path().join("c");
    let tensors = Tensors::new().tensor("w", Dtype::U8, [elements], bytes.clone()).unwrap();
    write_checkpoint(&directory, &tensors, u64::MAX).unwrap();
    let rank = Rank { port: 1, number: 0, of: 1 };
    let model = LiveModel::in_host_memory(&dir.path().join("plugins"), rank, layout).unwrap();
    let mut compare = |at: usize| {
        bytes[at] ^= 1;
        let found = model.compare("a:1", &directory, None, |said| said).unwrap();
        bytes[at] ^= 1;
        found.is_equal()
    };
    for at in [0, BATCH_ELEMENTS - 1, BATCH_ELEMENTS, BATCH_ELEMENTS + 2] {
        assert!(!compare(at), "{at}");
    }
    assert!(model.compare("a:1", &directory, None, |said| said).unwrap().is_equal());
}
