//! A bundle carries a list of named tensors from one state to the next, and refuses any other list.

mod common;

use common::{PROFILES, noisy};
use driftless_delta::bundle::{Bundle, Tensor, encode};
use driftless_delta::{Element, Error, Profile};

type Owned = (&'static str, &'static str, Vec<u64>, Vec<u8>);

fn view(tensors: &[Owned]) -> Vec<Tensor<'_>> {
    tensors.iter().map(|(name, dtype, shape, bytes)| Tensor { name, dtype, shape, bytes }).collect()
}

fn checkpoints() -> (Vec<Owned>, Vec<Owned>) {
    let tensor = |name, dtype, elements: usize, density, seed| {
        let (base, new) = noisy(Element::of_dtype(dtype), elements, density, seed);
        let shape = vec![elements as u64];
        ((name, dtype, shape.clone(), base), (name, dtype, shape, new))
    };
    [
        tensor("model.norm.weight", "BF16", 300, 0.0, 1),
        tensor("lm_head.weight", "BF16", 70_000, 0.01, 2),
        tensor("model.scale", "F32", 1, 1.0, 3),
        tensor("model.layers.0.q", "F8_E4M3", 5000, 0.1, 4),
        tensor("ids", "I64", 80, 0.2, 5),
        tensor("empty", "F16", 0, 0.0, 6),
    ]
    .into_iter()
    .unzip()
}

fn apply(base: &[Owned], bytes: &[u8]) -> driftless_delta::Result<Vec<Owned>> {
    let mut result = base.to_vec();
    let bundle = Bundle::read(bytes)?;
    bundle.decode(&view(base), |index, patch| patch.apply_to(&mut result[index].3))?;
    Ok(result)
}

#[test]
fn checkpoints_round_trip_in_any_order() {
    let (base, mut new) = checkpoints();
    let expected = new.clone();
    new.reverse();
    for profile in PROFILES {
        let mut bytes = Vec::new();
        let summary = encode(&view(&base), &view(&new), profile, &mut bytes).unwrap();
        assert_eq!(apply(&base, &bytes).unwrap(), expected);
        assert_eq!(Bundle::read(&bytes).unwrap().summary(), summary);
        assert_eq!(summary.tensors, 6);
        assert!(summary.changed_tensors <= 4 && summary.changed > 600 && summary.elements > 75_000);
    }
}

#[test]
fn other_tables_and_contents_are_refused() {
    let (base, new) = checkpoints();
    let mut bytes = Vec::new();
    encode(&view(&base), &view(&new), Profile::Wire, &mut bytes).unwrap();
    assert!(matches!(apply(&new, &bytes), Err(Error::OtherBase { what: "contents", .. })));
    assert!(matches!(apply(&base[1..], &bytes), Err(Error::OtherBase { what: "tensor table", .. })));
    let refused = |new: &[Owned]| {
        let error = encode(&view(&base), &view(new), Profile::Wire, &mut Vec::new()).unwrap_err();
        let Error::TableMismatch { name, why } = error else { panic!("{error}") };
        (name, why)
    };
    assert_eq!(refused(&new[1..]), ("model.norm.weight".into(), "removed"));
    let mut added = new.clone();
    added.push(("zz", "BF16", vec![0], vec![]));
    assert_eq!(refused(&added), ("zz".into(), "added"));
    let mut reshaped = new.clone();
    reshaped[1].2 = vec![7, 10_000];
    assert_eq!(refused(&reshaped), ("lm_head.weight".into(), "other shape"));
    let mut twice = new.clone();
    twice.push(new[0].clone());
    assert_eq!(refused(&twice), ("model.norm.weight".into(), "the name occurs twice"));
}

#[test]
fn damage_is_noticed_before_anything_is_decoded() {
    let (base, new) = checkpoints();
    let mut bytes = Vec::new();
    encode(&view(&base), &view(&new), Profile::Fast, &mut bytes).unwrap();
    for at in 0..bytes.len() {
        let mut flipped = bytes.clone();
        flipped[at] ^= 1 << (at % 8);
        assert!(Bundle::read(&flipped).is_err(), "flip at {at}");
        assert!(Bundle::read(&bytes[..at]).is_err(), "cut at {at}");
    }
}

#[test]
fn verify_reads_every_byte() {
    let (base, new) = checkpoints();
    let mut bytes = Vec::new();
    encode(&view(&base), &view(&new), Profile::Wire, &mut bytes).unwrap();
    let bundle = Bundle::read(&bytes).unwrap();
    assert_eq!(bundle.verify(&view(&base), &view(&new)), Ok(()));
    for at in 0..new.len() {
        let mut damaged = new.clone();
        let Some(byte) = damaged[at].3.last_mut() else { continue };
        *byte ^= 1;
        let found = bundle.verify(&view(&base), &view(&damaged));
        assert!(matches!(&found, Err(Error::InTensor { name, .. }) if name == damaged[at].0), "{found:?}");
        let other = bundle.verify(&view(&damaged), &view(&new));
        assert!(matches!(other, Err(Error::OtherBase { what: "contents", .. })));
    }
    assert!(matches!(bundle.verify(&view(&base), &view(&new[1..])), Err(Error::TableMismatch { .. })));
}
