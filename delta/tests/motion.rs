//! Steps coded in the light of those before.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{ALL, PROFILES, Pools, Random, noisy, random_bytes};
use driftless_delta::{
    BLOCK_ELEMENTS, Decoder, DigestTable, Element, Encoder, Error, Motion, Patch, Profile, Result, Serial,
    Source,
};

fn source<'a>(element: Element, bytes: &'a [u8], digests: &'a DigestTable) -> Source<'a> {
    Source { element, bytes, digests }
}

/// Versions of a tensor whose steps resemble each other: the same elements move again, some of them back.
fn versions(element: Element, elements: usize, density: f64, seed: u64) -> Vec<Vec<u8>> {
    let (first, moved) = noisy(element, elements, density, seed);
    let mut random = Random(seed);
    let mut versions = vec![first.clone(), moved.clone()];
    for step in 0..3_u8 {
        let mut next = versions[versions.len() - 1].clone();
        let size = element.size();
        for at in 0..elements {
            let range = at * size..(at + 1) * size;
            if first[range.clone()] != moved[range.clone()] && random.unit() < 0.5 {
                let back = versions[(random.next() % 2) as usize][range.clone()].to_vec();
                next[range].copy_from_slice(&back);
            } else if random.unit() < density {
                next[range.start] = next[range.start].wrapping_add(1 + (step & 1) * 254);
            }
        }
        versions.push(next);
    }
    versions
}

/// Sends the versions one after the other; returns the bytes of each payload with the motion, and without.
fn send(element: Element, versions: &[Vec<u8>], profile: Profile) -> Vec<[usize; 2]> {
    let mut digests = DigestTable::of(element, &versions[0]).unwrap();
    let mut sent = Motion::start(source(element, &versions[0], &digests)).unwrap();
    let mut seen = sent.clone();
    let (mut encoder, mut decoder, mut patch) = (Encoder::new(), Decoder::new(), Patch::new());
    let mut sizes = Vec::new();
    for step in versions.windows(2) {
        let base = source(element, &step[0], &digests);
        let (mut plain, mut payload) = (Vec::new(), Vec::new());
        encoder.encode(&Serial, base, &step[1], profile, &mut plain).unwrap();
        encoder.encode_after(&Serial, base, &sent, &step[1], profile, &mut payload).unwrap();
        sent.advance(encoder.moves()).unwrap();
        for payload in [&plain, &payload] {
            decoder.decode_after(&Serial, base, &seen, payload, &mut patch).unwrap();
            let mut tensor = step[0].clone();
            patch.apply_to(&mut tensor).unwrap();
            assert!(tensor == step[1], "{element:?} {profile:?}");
        }
        seen.advance(decoder.moves()).unwrap();
        assert!(sent == seen, "{element:?} {profile:?}");
        assert_eq!(sent.at(), patch.digests().total());
        assert_eq!(Motion::from_bytes(&sent.to_bytes()).unwrap(), sent);
        sizes.push([payload.len(), plain.len()]);
        digests = patch.digests().clone();
    }
    sizes
}

#[test]
fn every_type_arrives() {
    for element in ALL {
        for profile in PROFILES {
            for (elements, density) in [(0, 0.0), (1, 1.0), (500, 0.3), (70_000, 0.02), (3000, 0.9)] {
                send(element, &versions(element, elements, density, 31), profile);
            }
        }
    }
}

#[test]
fn steps_that_repeat_cost_less() {
    for element in [Element::Bf16, Element::F16] {
        let sizes = send(element, &versions(element, 200_000, 0.01, 32), Profile::Wire);
        assert_eq!(sizes[0][0], sizes[0][1], "nothing has moved before the first step");
        for [with, without] in &sizes[1..] {
            assert!((*with as f64) < 0.95 * *without as f64, "{element:?} {sizes:?}");
        }
    }
}

#[test]
fn whole_blocks_move_too() {
    // A block that is sent as it is, one in the entropy code, one of changes; then changes in each.
    let block = 2 * BLOCK_ELEMENTS;
    let (first, near) = noisy(Element::Bf16, 3 * BLOCK_ELEMENTS, 0.02, 33);
    let other = noisy(Element::Bf16, BLOCK_ELEMENTS, 0.0, 34).0;
    let second = [&random_bytes(block, 35), &other, &near[2 * block..]].concat();
    let mut third = second.clone();
    (0..third.len()).step_by(202).for_each(|at| third[at] = third[at].wrapping_add(1));
    send(Element::Bf16, &[first, second, third], Profile::Wire);
}

/// A step that only the motion decodes: the base, its digests, the motion, the payload, the result.
fn second_step(elements: usize) -> (Vec<u8>, DigestTable, Motion, Vec<u8>, Vec<u8>) {
    let all = versions(Element::Bf16, elements, 0.1, 36);
    let [first, second, third] = [0, 1, 2].map(|step: usize| all[step].clone());
    let digests = DigestTable::of(Element::Bf16, &first).unwrap();
    let base = source(Element::Bf16, &first, &digests);
    let mut motion = Motion::start(base).unwrap();
    let (mut encoder, mut payload) = (Encoder::new(), Vec::new());
    encoder.encode_after(&Serial, base, &motion, &second, Profile::Wire, &mut payload).unwrap();
    motion.advance(encoder.moves()).unwrap();
    let digests = encoder.digests().clone();
    payload.clear();
    let base = source(Element::Bf16, &second, &digests);
    encoder.encode_after(&Serial, base, &motion, &third, Profile::Wire, &mut payload).unwrap();
    assert_eq!(payload[0], 0x44, "it needs the motion");
    (second, digests, motion, payload, third)
}

#[test]
fn without_the_motion_or_with_another_it_is_refused() {
    let (base, digests, motion, payload, _) = second_step(40_000);
    let base = source(Element::Bf16, &base, &digests);
    let (mut decoder, mut patch) = (Decoder::new(), Patch::new());
    let expected = u16::from_le_bytes([payload[1], payload[2]]);
    let refused = decoder.decode(&Serial, base, &payload, &mut patch);
    assert_eq!(refused, Err(Error::MotionMismatch { expected, found: None }));
    let fresh = Motion::start(base).unwrap();
    let refused = decoder.decode_after(&Serial, base, &fresh, &payload, &mut patch);
    assert!(
        matches!(refused, Err(Error::MotionMismatch { expected: e, found: Some(f) }) if e == expected && f != e)
    );
    // One that claims to be the right one, but holds other moves: only the result tells.
    let mut bytes = motion.to_bytes();
    let at = bytes.len() / 4;
    bytes[at] ^= 1;
    assert!(Motion::from_bytes(&bytes).is_err());
    let (other, ..) = second_step(40_001);
    let other_digests = DigestTable::of(Element::Bf16, &other).unwrap();
    let elsewhere = source(Element::Bf16, &other, &other_digests);
    let lengths = decoder.decode_after(&Serial, elsewhere, &motion, &payload, &mut patch);
    assert_eq!(lengths, Err(Error::LengthMismatch { what: "motion", expected: 40_001, found: 40_000 }));
    let moved = noisy(Element::Bf16, 40_000, 0.1, 77).0;
    let moved_digests = DigestTable::of(Element::Bf16, &moved).unwrap();
    let elsewhere = source(Element::Bf16, &moved, &moved_digests);
    let refused: Result<u64> =
        Encoder::new().encode_after(&Serial, elsewhere, &motion, &moved, Profile::Wire, &mut Vec::new());
    let (expected, found) = (moved_digests.total(), digests.total());
    assert_eq!(refused, Err(Error::MotionElsewhere { expected, found }));
    let bytes = vec![0; 40_000];
    let digests = DigestTable::of(Element::Bytes, &bytes).unwrap();
    let refused = decoder.decode_after(
        &Serial,
        source(Element::Bytes, &bytes, &digests),
        &motion,
        &payload,
        &mut patch,
    );
    assert_eq!(refused, Err(Error::ElementMismatch { expected: Element::Bytes, found: Element::Bf16 }));
    assert_eq!(patch.changed(), 0);
}

#[test]
fn a_motion_goes_only_where_its_tensor_does() {
    let (base, digests, mut motion, payload, new) = second_step(5000);
    let before = motion.clone();
    let (mut decoder, mut patch) = (Decoder::new(), Patch::new());
    let base = source(Element::Bf16, &base, &digests);
    decoder.decode_after(&Serial, base, &motion, &payload, &mut patch).unwrap();
    motion.advance(decoder.moves()).unwrap();
    assert!(motion.digest() != before.digest() && motion.moved() >= before.moved());
    let (expected, found) = (digests.total(), patch.digests().total());
    assert_eq!(motion.advance(decoder.moves()), Err(Error::MotionElsewhere { expected, found }));
    // A step that changes nothing.
    let (base, after) = (source(Element::Bf16, &new, patch.digests()), motion.clone());
    let (mut encoder, mut out) = (Encoder::new(), Vec::new());
    encoder.encode_after(&Serial, base, &motion, &new, Profile::Wire, &mut out).unwrap();
    motion.advance(encoder.moves()).unwrap();
    assert_eq!((motion, out.len()), (after, 9));
}

#[test]
fn every_flip_truncation_and_invented_body() {
    for elements in [3000, 66_000] {
        let (base, digests, motion, payload, new) = second_step(elements);
        let base = source(Element::Bf16, &base, &digests);
        let (mut decoder, mut patch) = (Decoder::new(), Patch::new());
        let mut try_one = |payload: &[u8]| {
            let decoded = decoder.decode_after(&Serial, base, &motion, payload, &mut patch);
            if decoded.is_ok() {
                let mut tensor = base.bytes.to_vec();
                patch.apply_to(&mut tensor).unwrap();
                assert!(tensor == new, "accepted a wrong result");
                let mut other = motion.clone();
                other.advance(decoder.moves()).unwrap();
                assert_eq!(other.at(), patch.digests().total());
            } else {
                assert_eq!(patch.changed(), 0);
            }
            decoded.is_ok()
        };
        assert!(try_one(&payload));
        for at in (0..payload.len()).step_by(payload.len().div_ceil(1000)) {
            assert!(!try_one(&payload[..at]), "cut at {at}");
            for bit in (at % 2..8).step_by(2) {
                let mut flipped = payload.clone();
                flipped[at] ^= 1 << bit;
                try_one(&flipped);
            }
        }
        let mut random = Random(7);
        for _ in 0..500 {
            let length = random.next() as usize % 200;
            try_one(&[&payload[..11], &random_bytes(length, random.next())].concat());
        }
    }
}

#[test]
fn kept_motions_are_what_was_kept() {
    let (.., motion, _, _) = second_step(2001);
    let bytes = motion.to_bytes();
    for at in 0..bytes.len() {
        for bit in 0..8 {
            let mut flipped = bytes.clone();
            flipped[at] ^= 1 << bit;
            assert!(Motion::from_bytes(&flipped).is_err(), "flip at {at}");
        }
        assert!(Motion::from_bytes(&bytes[..at]).is_err());
    }
}

#[test]
fn what_comes_out_does_not_depend_on_the_pool() {
    let steps = versions(Element::F8E4M3, 34 * BLOCK_ELEMENTS + 9, 0.003, 37);
    let mut digests = DigestTable::of(Element::F8E4M3, &steps[0]).unwrap();
    let mut motion = Motion::start(source(Element::F8E4M3, &steps[0], &digests)).unwrap();
    for step in steps.windows(2) {
        let base = source(Element::F8E4M3, &step[0], &digests);
        let (mut encoder, mut payload, mut patch) = (Encoder::new(), Vec::new(), Patch::new());
        encoder.encode_after(&Serial, base, &motion, &step[1], Profile::Wire, &mut payload).unwrap();
        for pool in [Pools::Threads(3), Pools::Backwards, Pools::Wild] {
            let (mut other, mut out, mut decoder) = (Encoder::new(), Vec::new(), Decoder::new());
            other.encode_after(&pool, base, &motion, &step[1], Profile::Wire, &mut out).unwrap();
            assert!(out == payload && other.moves() == encoder.moves(), "{pool:?}");
            decoder.decode_after(&pool, base, &motion, &payload, &mut patch).unwrap();
            assert!(decoder.moves() == encoder.moves() && patch.digests() == encoder.digests(), "{pool:?}");
        }
        motion.advance(encoder.moves()).unwrap();
        digests = encoder.digests().clone();
    }
}
