//! A manifest that contradicts itself is refused, and the error says where, what was expected and what was
//! found.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

use std::sync::Arc;

use driftless_store::{Memory, Store};
use driftless_testkit::publications::{MODEL, Weights, options, step};
use driftless_testkit::random::Random;
use driftless_transport::manifest::{FORMAT, Kind, MANIFEST_BYTES_MAX, Manifest};
use driftless_transport::publish::{Mode, Start};
use driftless_transport::{Dtype, Error, Publisher, Version};
use serde_json::{Value, json};

/// An anchor with a delta in several objects, as a publisher wrote it.
fn published() -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    let mut options = options(Start::NewRun, dir.path());
    options.object_bytes_max = 1 << 20;
    options.anchor_every = Some(1);
    let mut publisher = Publisher::open(store.clone(), options).unwrap();
    let mut weights = Weights::small(1);
    let mut random = Random(5);
    weights.set("x.large", Dtype::Bf16, &[1000, 500], |_| random.next() as u8);
    publisher.publish(&weights, step(0), Mode::Delta).unwrap();
    weights.step(1, 10);
    publisher.publish(&weights, step(1), Mode::Delta).unwrap();
    store.get(&publisher.run().manifest_key(MODEL, Version(1)).unwrap(), None).unwrap()
}

fn parse(value: &Value) -> Result<Manifest, Error> {
    Manifest::parse(&serde_json::to_vec(value).unwrap())
}

/// The index of the tensor of this name.
fn tensor(value: &Value, name: &str) -> usize {
    value["tensors"].as_array().unwrap().iter().position(|tensor| tensor["name"] == name).unwrap()
}

fn add(value: &mut Value, by: i64) {
    *value = json!(value.as_i64().unwrap() + by);
}

#[test]
fn a_published_manifest_parses_to_itself() {
    let bytes = published();
    let manifest = Manifest::parse(&bytes).unwrap();
    assert_eq!(manifest.to_bytes().unwrap(), bytes);
    assert_eq!((manifest.kind, manifest.version, manifest.is_anchor()), (Kind::Delta, Version(1), true));
    let large = manifest.tensors.iter().find(|tensor| tensor.name == "x.large").unwrap();
    assert_eq!((large.pieces.len(), large.anchor.len()), (1, 2));
    assert_eq!(manifest.full_pieces(large), Some(&large.anchor[..]));
    let names: Vec<_> = manifest.named_tensors().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["a.embed", "b.head", "c.empty", "d.norm", "e.norm", "f.ids", "g.up", "x.large"]);
    assert_eq!(manifest.object_bytes(), manifest.objects.iter().map(|object| object.size).sum::<u64>());
}

#[test]
fn contradictions_name_the_place() {
    let good: Value = serde_json::from_slice(&published()).unwrap();
    parse(&good).unwrap();
    let large = tensor(&good, "x.large");
    type Change = Box<dyn Fn(&mut Value)>;
    let cases: Vec<(&str, &str, Change)> = vec![
        // Pieces.
        (
            "x.large",
            "starts at the wrong element",
            Box::new(move |v| add(&mut v["tensors"][large]["anchor"][1]["start"], 1)),
        ),
        (
            "x.large",
            "elements of a piece",
            Box::new(move |v| add(&mut v["tensors"][large]["anchor"][1]["elements"], 1)),
        ),
        (
            "x.large",
            "elements covered",
            Box::new(move |v| add(&mut v["tensors"][large]["anchor"][1]["elements"], -1)),
        ),
        ("x.large", "elements covered", Box::new(move |v| v["tensors"][large]["anchor"] = json!([]))),
        (
            "x.large",
            "elements of a piece",
            Box::new(move |v| v["tensors"][large]["pieces"][0]["elements"] = json!(0)),
        ),
        (
            "x.large",
            "elements of a piece",
            Box::new(move |v| v["tensors"][large]["pieces"][0]["elements"] = json!(u64::MAX)),
        ),
        ("x.large", "not listed", Box::new(move |v| v["tensors"][large]["pieces"][0]["object"] = json!(99))),
        (
            "x.large",
            "outside its object",
            Box::new(move |v| v["tensors"][large]["pieces"][0]["offset"] = json!(u64::MAX)),
        ),
        (
            "x.large",
            "outside its object",
            Box::new(move |v| v["tensors"][large]["pieces"][0]["length"] = json!(0)),
        ),
        ("object `", "overlap or leave a gap", Box::new(|v| v["tensors"][0]["pieces"] = json!([]))),
        (
            "object `",
            "overlap or leave a gap",
            Box::new(move |v| {
                let piece = v["tensors"][large]["anchor"][0].clone();
                v["tensors"][large]["anchor"][1]["object"] = piece["object"].clone();
                v["tensors"][large]["anchor"][1]["offset"] = piece["offset"].clone();
                v["tensors"][large]["anchor"][1]["length"] = piece["length"].clone();
            }),
        ),
        // Objects.
        ("object `", "bytes used by pieces", Box::new(|v| add(&mut v["objects"][0]["size"], 1))),
        ("object `", "its size", Box::new(|v| v["objects"][0]["size"] = json!(1u64 << 40))),
        ("object `", "its size", Box::new(|v| v["objects"][0]["size"] = json!(0))),
        ("object `", "stands twice", Box::new(|v| v["objects"][1]["key"] = v["objects"][0]["key"].clone())),
        ("object `runs/test`", "leaves the run", Box::new(|v| v["objects"][0]["key"] = json!("runs/test"))),
        ("object `", "leaves the run", Box::new(|v| v["run_id"] = json!("00".repeat(16)))),
        ("object `", "leaves the run", Box::new(|v| v["model"] = json!("critic"))),
        // Tensors.
        ("tensor `a.embed`", "not sorted", Box::new(|v| v["tensors"][1]["name"] = json!("a.embed"))),
        ("tensor `", "not sorted", Box::new(|v| v["tensors"].as_array_mut().unwrap().reverse())),
        ("tensor `g.up`", "stands twice", Box::new(|v| v["tensors"][0]["aliases"] = json!(["g.up"]))),
        (
            "tensor `b.head`",
            "stands twice",
            Box::new(|v| v["tensors"][0]["aliases"] = json!(["b.head", "b.head"])),
        ),
        ("changed", "more elements", Box::new(|v| v["changed"] = json!(u64::MAX))),
        ("x.large", "elements", Box::new(move |v| v["tensors"][large]["shape"] = json!([1000, 501]))),
        // Files.
        ("file `config.json`", "bytes of its parts", Box::new(|v| add(&mut v["files"][0]["size"], 1))),
        ("file `config.json`", "bytes of its parts", Box::new(|v| v["files"][0]["parts"] = json!([]))),
        ("file `config.json`", "not sorted", Box::new(|v| v["files"][1]["name"] = json!("config.json"))),
        // The version and its base.
        ("base", "not the version in front", Box::new(|v| v["base"] = Value::Null)),
        ("base", "not the version in front", Box::new(|v| v["base"]["version"] = json!(1))),
        ("base", "not the version in front", Box::new(|v| v["version"] = json!(0))),
        ("version", "too large", Box::new(|v| v["version"] = json!(10_000_000_000u64))),
        ("kind", "only version 0", Box::new(|v| v["kind"] = json!("reference"))),
        ("", "only a delta has anchor", Box::new(|v| v["kind"] = json!("full"))),
        ("kind", "version 0 has no base", Box::new(|v| (v["version"], v["base"]) = (json!(0), Value::Null))),
    ];
    for (number, (place, what, change)) in cases.iter().enumerate() {
        let mut bad = good.clone();
        change(&mut bad);
        let error = parse(&bad).unwrap_err();
        let Error::Corrupt { subject, what: found, .. } = &error else {
            panic!("case {number} ({what}): {error:?}")
        };
        assert!(subject.contains(place) && found.contains(what), "case {number} ({place}: {what}): {error}");
    }
}

#[test]
fn parse_contradiction_has_its_own_error() {
    let good: Value = serde_json::from_slice(&published()).unwrap();
    let change = |path: &str, value: Value| {
        let mut bad = good.clone();
        *bad.pointer_mut(path).unwrap_or_else(|| panic!("no {path}")) = value;
        parse(&bad).unwrap_err()
    };
    assert!(matches!(change("/format", json!(FORMAT + 1)), Error::Unsupported { .. }));
    assert!(
        matches!(change("/algorithms/coder", json!("other/9")), Error::Unsupported { what, .. } if what.contains("other/9"))
    );
    assert!(matches!(change("/model", json!("followers")), Error::BadName { what: "model", .. }));
    assert!(matches!(change("/model", json!("a/b")), Error::BadName { .. }));
    assert!(matches!(change("/tensors/0/name", json!("")), Error::BadName { what: "tensor", .. }));
    assert!(matches!(change("/files/0/name", json!("../x")), Error::BadFileName { .. }));
    assert!(matches!(change("/files/0/name", json!("a.safetensors")), Error::BadFileName { .. }));
    assert!(matches!(change("/files/0/size", json!(u64::MAX)), Error::TooLarge { .. }));
    for (path, value) in [
        ("/run_id", json!("xyz")),
        ("/tensors/0/digest", json!("12")),
        ("/tensors/0/dtype", json!("F4")),
        ("/objects/0/key", json!("../../etc/passwd")),
        ("/objects/0/blake3", json!("AA".repeat(32))),
        ("/objects/0/size", json!(-1)),
        ("/tensors", Value::Null),
        ("/kind", json!("other")),
    ] {
        assert!(matches!(change(path, value), Error::Parse { .. }), "{path}");
    }
    let overflow = change("/tensors/0/shape", json!([u64::MAX, 2]));
    assert!(overflow.to_string().contains("a.embed"), "{overflow}");
    let large = Manifest::parse(&vec![b' '; MANIFEST_BYTES_MAX as usize + 1]).unwrap_err();
    assert!(matches!(large, Error::TooLarge { max: MANIFEST_BYTES_MAX, .. }));
}

#[test]
fn features_decide_before_anything_else_is_read() {
    let good: Value = serde_json::from_slice(&published()).unwrap();
    let mut optional = good.clone();
    optional["features"]["optional"] = json!(["scented"]);
    optional["unknown_field"] = json!(1);
    parse(&optional).unwrap();
    // A required feature may change the meaning of the rest, so nothing else is looked at.
    let required = json!({ "format": FORMAT, "features": { "required": ["striped"] }, "tensors": "striped" });
    let error = parse(&required).unwrap_err();
    assert!(matches!(&error, Error::UnknownFeature { feature, .. } if feature == "striped"), "{error:?}");
}

#[test]
fn no_truncation_parses_and_no_flipped_bit_panics() {
    let good = published();
    for length in 0..good.len() {
        assert!(Manifest::parse(&good[..length]).is_err(), "{length} bytes of {} parse", good.len());
    }
    let mut random = Random(17);
    for _ in 0..5000 {
        let mut bad = good.clone();
        let bit = random.next() as usize % (bad.len() * 8);
        bad[bit / 8] ^= 1 << (bit % 8);
        // It may still be a manifest, but then it is another one: its digest, which the chain holds, tells.
        let _ = Manifest::parse(&bad);
    }
}
