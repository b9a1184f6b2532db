//! What comes out does not depend on the pool, whatever that does.

mod common;

use common::{ALL, PROFILES, Pools, noisy, random_bytes};
use driftless_delta::{BLOCK_ELEMENTS, Decoder, DigestTable, Element, Encoder, Error, Patch, Serial, Source};

const POOLS: [Pools; 5] = [Pools::Backwards, Pools::Threads(2), Pools::Threads(7), Pools::Lazy, Pools::Wild];

/// Three segments: all modes of a block, and runs of equal ones across the segments' borders.
fn tensors(element: Element) -> (Vec<u8>, Vec<u8>) {
    let block = BLOCK_ELEMENTS * element.size();
    let (mut base, mut new) = noisy(element, 66 * BLOCK_ELEMENTS + 77, 0.0, 1);
    let (changed, moved) = noisy(element, 4 * BLOCK_ELEMENTS, 0.01, 2);
    for at in [0, 20, 40, 62] {
        base[at * block..(at + 4) * block].copy_from_slice(&changed);
        new[at * block..(at + 4) * block].copy_from_slice(&moved);
    }
    new[31 * block..33 * block].copy_from_slice(&random_bytes(2 * block, 3));
    new[50 * block..51 * block].fill(9);
    let last = new.len() - 1;
    new[last] ^= 1;
    (base, new)
}

#[test]
fn payloads_and_patches_are_the_same() {
    for element in [Element::Bytes, Element::F8E4M3] {
        let (base, new) = tensors(element);
        let digests = DigestTable::of(element, &base).unwrap();
        let source = Source { element, bytes: &base, digests: &digests };
        for profile in PROFILES {
            let (mut payload, mut patch) = (Vec::new(), Patch::new());
            let changed = Encoder::new().encode(&Serial, source, &new, profile, &mut payload).unwrap();
            Decoder::new().decode(&Serial, source, &payload, &mut patch).unwrap();
            let mut tensor = base.clone();
            patch.apply_to(&mut tensor).unwrap();
            assert!(tensor == new && patch.changed() == changed);
            for pool in POOLS {
                let (mut encoder, mut other, mut other_patch) = (Encoder::new(), vec![], Patch::new());
                assert_eq!(encoder.encode(&pool, source, &new, profile, &mut other), Ok(changed));
                assert!(other == payload, "{pool:?} {element:?} {profile:?}");
                Decoder::new().decode(&pool, source, &payload, &mut other_patch).unwrap();
                assert!(other_patch == patch && other_patch.digests() == encoder.digests(), "{pool:?}");
            }
        }
    }
}

#[test]
fn full_payloads_are_the_same() {
    let (element, mut payload) = (Element::F8E4M3, Vec::new());
    let (_, new) = tensors(element);
    Encoder::new().encode_full(&Serial, element, &new, &mut payload).unwrap();
    for pool in POOLS {
        let (mut encoder, mut other, mut out) = (Encoder::new(), Vec::new(), vec![0; new.len()]);
        encoder.encode_full(&pool, element, &new, &mut other).unwrap();
        assert!(other == payload, "{pool:?}");
        let digests = Decoder::new().decode_full(&pool, element, &payload, &mut out).unwrap();
        assert!(out == new && digests == *encoder.digests(), "{pool:?}");
    }
}

#[test]
fn the_first_error_counts() {
    let (element, mut payload) = (Element::F8E4M3, Vec::new());
    let (base, new) = tensors(element);
    let digests = DigestTable::of(element, &base).unwrap();
    let source = Source { element, bytes: &base, digests: &digests };
    Encoder::new().encode(&Serial, source, &new, PROFILES[0], &mut payload).unwrap();
    for at in (11..payload.len()).step_by(payload.len() / 20) {
        let mut flipped = payload.clone();
        flipped[at] ^= 0x10;
        let mut patch = Patch::new();
        let expected = Decoder::new().decode(&Serial, source, &flipped, &mut patch);
        for pool in POOLS {
            let found = Decoder::new().decode(&pool, source, &flipped, &mut patch);
            // A result that is wrong in two ways may be refused for either, but never accepted.
            assert_eq!(found, expected, "{pool:?} {at}");
            assert!(expected.is_ok() || patch.changed() == 0);
        }
    }
}

#[test]
fn one_of_each_does_for_all_tensors() {
    let (mut encoder, mut decoder, mut patch) = (Encoder::new(), Decoder::new(), Patch::new());
    let mut payload = Vec::new();
    for elements in [300_000, 5, 0, 70_000, 64, 65_537, 1] {
        for element in ALL {
            for profile in PROFILES {
                let (base, new) = noisy(element, elements, 0.02, elements as u64);
                let digests = DigestTable::of(element, &base).unwrap();
                let source = Source { element, bytes: &base, digests: &digests };
                payload.clear();
                encoder.encode(&Pools::Threads(2), source, &new, profile, &mut payload).unwrap();
                let mut fresh = Vec::new();
                Encoder::new().encode(&Serial, source, &new, profile, &mut fresh).unwrap();
                assert_eq!(payload, fresh, "nothing is left of the tensor before");
                decoder.decode(&Serial, source, &payload, &mut patch).unwrap();
                let mut tensor = base.clone();
                patch.apply_to(&mut tensor).unwrap();
                assert!(tensor == new);
                payload[0] ^= 0xf0;
                let refused = decoder.decode(&Serial, source, &payload, &mut patch);
                assert!(matches!(refused, Err(Error::Unsupported { .. })));
            }
        }
    }
}
