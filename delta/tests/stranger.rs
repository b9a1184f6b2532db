//! The page docs/format/delta.md is enough to write a decoder: `common/stranger.rs` is one.

mod common;
#[path = "common/stranger.rs"]
mod stranger;

use common::{ALL, PROFILES, noisy, random_bytes};
use driftless_delta::{
    BLOCK_ELEMENTS, DigestTable, Element, Encoder, Motion, Profile, Serial, Source, encode, encode_full,
};
use stranger::decode;

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
fn the_page_is_enough_to_decode_deltas_after_others() {
    for (code, element) in (0..).zip(ALL) {
        for (elements, density) in [(3000, 0.2), (66_000, 0.02)] {
            let (first, second) = noisy(element, elements, density, 25);
            // Back, on, and back again, each time but for some elements.
            let mut third = [&first[..first.len() / 2], &second[first.len() / 2..]].concat();
            (0..third.len()).step_by(301).for_each(|at| third[at] = third[at].wrapping_add(1));
            let versions = [first.clone(), second.clone(), third, second, first];
            let mut digests = DigestTable::of(element, &versions[0]).unwrap();
            let source = |bytes, digests| Source { element, bytes, digests };
            let mut motion = Motion::start(source(&versions[0], &digests)).unwrap();
            let mut theirs = stranger::start(code, &versions[0]);
            let (mut encoder, mut needed) = (Encoder::new(), 0);
            for step in versions.windows(2) {
                let mut payload = Vec::new();
                let base = Source { element, bytes: &step[0], digests: &digests };
                encoder.encode_after(&Serial, base, &motion, &step[1], Profile::Wire, &mut payload).unwrap();
                needed += usize::from(payload[0] >> 4 == 4);
                assert!(stranger::decode_after(&step[0], Some(&theirs), &payload) == step[1], "{element:?}");
                stranger::advance(code, &mut theirs, &step[0], &step[1]);
                motion.advance(encoder.moves()).unwrap();
                digests = encoder.digests().clone();
            }
            assert!(needed > 1 || element == Element::Bytes, "{element:?} {elements}: {needed}");
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
