//! The page docs/format/delta.md is enough to write a decoder: `driftless_testkit::stranger` is one.

mod common;

use common::{ALL, PROFILES, noisy, random_bytes};
use driftless_delta::{BLOCK_ELEMENTS, DigestTable, Element, encode, encode_full};
use driftless_testkit::stranger::decode;

#[test]
fn the_page_is_enough_to_decode_deltas() {
    for element in ALL {
        for (elements, density) in
            [(0, 0.0), (1, 1.0), (700, 0.05), (3000, 0.9), (66_000, 0.003), (200_000, 0.0001)]
        {
            let (base, new) = noisy(element, elements, density, 21);
            let digests = DigestTable::of(element, &base).unwrap();
            for profile in PROFILES {
                let mut payload = Vec::new();
                encode(element, &base, &new, &digests, profile, &mut payload).unwrap();
                assert!(decode(&base, &payload) == new, "{element:?} {elements} {density} {profile:?}");
            }
        }
    }
}

#[test]
fn the_page_is_enough_to_decode_unrelated_blocks() {
    // One block unchanged, one unrelated but compressible, one random: all modes of a body.
    for element in ALL {
        let size = BLOCK_ELEMENTS * element.size();
        let (base, other) =
            (noisy(element, 3 * BLOCK_ELEMENTS, 0.0, 22).0, noisy(element, BLOCK_ELEMENTS, 0.0, 23).0);
        let new = [&base[..size], &other, &random_bytes(size, 24)].concat();
        let digests = DigestTable::of(element, &base).unwrap();
        let mut payload = Vec::new();
        encode(element, &base, &new, &digests, PROFILES[0], &mut payload).unwrap();
        assert!(decode(&base, &payload) == new, "{element:?}");
        payload.clear();
        encode_full(element, &new, &mut payload).unwrap();
        assert!(decode(&[], &payload) == new, "{element:?} in full");
    }
    let mut payload = Vec::new();
    let constant = vec![0x80; 3 * BLOCK_ELEMENTS];
    encode_full(Element::Bf16, &constant, &mut payload).unwrap();
    assert!(decode(&[], &payload) == constant);
}
