//! The promise: what was encoded comes back bit for bit, and nothing else ever does.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::ops::Range;

use common::{ALL, PROFILES, apply, noisy, random_bytes};
use driftless_delta::patch::JournaledPatch;
use driftless_delta::{
    BLOCK_ELEMENTS, Digest, DigestTable, Element, Error, Patch, Profile, decode, decode_full, encode,
    encode_full,
};
use proptest::prelude::*;

fn round_trip(element: Element, base: &[u8], new: &[u8], profile: Profile) -> usize {
    let digests = DigestTable::of(element, base).unwrap();
    let mut payload = vec![0xaa];
    let encoded = encode(element, base, new, &digests, profile, &mut payload).unwrap();
    let payload = &payload[1..];
    assert_eq!(encoded.digests, DigestTable::of(element, new).unwrap(), "carried digests");
    let size = element.size();
    let changed = base.chunks(size).zip(new.chunks(size)).filter(|(a, b)| a != b).count() as u64;
    assert_eq!(encoded.changed, changed);
    let (patch, result) = apply(element, base, payload).unwrap();
    assert!(result == new);
    assert_eq!(patch.changed(), changed);
    assert_eq!(patch.digests(), &encoded.digests);
    blocks_know(element, base, new, &patch);
    let journaled = Patch::from_bytes(&patch.to_bytes()).unwrap();
    assert_eq!(journaled, patch);
    assert!(journaled.blocks().all(|block| block.old.is_none()), "a journal has no values of the base");
    let mut twice = result.clone();
    journaled.apply_to(&mut twice).unwrap();
    assert!(twice == new, "applying again changes nothing");
    // Into memory that held something else, and from there.
    let mut journal = vec![0xaa; 1000];
    patch.write_to(&mut journal);
    assert_eq!(journal, patch.to_bytes());
    let mut tensor = base.to_vec();
    let journaled = JournaledPatch::from_bytes(&journal).unwrap();
    assert_eq!(journaled.tensor_bytes(), patch.tensor_bytes());
    journaled.apply_to(&mut tensor).unwrap();
    assert!(tensor == new);
    payload.len()
}

/// The blocks of a decoded patch have the values of both sides, and nothing that is alike, but in whole blocks.
fn blocks_know(element: Element, base: &[u8], new: &[u8], patch: &Patch) {
    let size = element.size();
    let mut seen = 0;
    for block in patch.blocks() {
        let Some(positions) = block.positions else {
            let start = block.first * size;
            assert_eq!((block.values, block.old), (&new[start..start + block.values.len()], None));
            seen += block.values.chunks(size).zip(base[start..].chunks(size)).filter(|(a, b)| a != b).count();
            continue;
        };
        let old = block.old.unwrap();
        assert_eq!((positions.len() * size, old.len()), (block.values.len(), block.values.len()));
        for (at, (after, before)) in positions.iter().zip(block.values.chunks(size).zip(old.chunks(size))) {
            let at = (block.first + usize::from(u16::from_le_bytes(*at))) * size;
            assert_eq!((after, before), (&new[at..at + size], &base[at..at + size]));
            assert_ne!(after, before);
        }
        seen += positions.len();
    }
    assert_eq!(seen as u64, patch.changed());
}

fn element() -> impl Strategy<Value = Element> {
    prop::sample::select(ALL.to_vec())
}

fn profile() -> impl Strategy<Value = Profile> {
    prop::sample::select(PROFILES.to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_bytes_round_trip(
        element in element(), profile in profile(),
        pair in (0_usize..600).prop_flat_map(|n| (
            prop::collection::vec(any::<u8>(), n * 4), prop::collection::vec(any::<u8>(), n * 4))),
    ) {
        round_trip(element, &pair.0, &pair.1, profile);
    }

    #[test]
    fn weights_round_trip(
        element in element(), profile in profile(), seed: u64,
        elements in prop_oneof![1_usize..300, 65_000_usize..66_100, 131_000_usize..140_000],
        density in prop_oneof![0.0..0.02, 0.0..1.0],
    ) {
        let (base, new) = noisy(element, elements, density, seed);
        round_trip(element, &base, &new, profile);
    }

    #[test]
    fn runs_are_what_differs(element in element(), seed: u64, density in 0.0..1.0, gap in 1_u64..40) {
        let (base, new) = noisy(element, 1000, density, seed);
        let digests = DigestTable::of(element, &base).unwrap();
        let mut payload = Vec::new();
        encode(element, &base, &new, &digests, Profile::Fast, &mut payload).unwrap();
        let mut patch = Patch::new();
        decode(element, &base, &digests, &payload, &mut patch).unwrap();
        let mut end = 0;
        for (offset, bytes) in patch.byte_runs() {
            prop_assert!(offset >= end && !bytes.is_empty());
            end = offset + bytes.len() as u64;
            prop_assert_eq!(&new[offset as usize..end as usize], bytes);
        }
        prop_assert!(end <= new.len() as u64);
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for (at, bytes) in patch.byte_runs() {
            let next = at..at + bytes.len() as u64;
            match ranges.last_mut().filter(|last| next.start - last.end < gap) {
                Some(last) => last.end = next.end,
                None => ranges.push(next),
            }
        }
        prop_assert_eq!(patch.byte_ranges(gap), ranges);
    }

    #[test]
    fn digests_add_up(seed: u64, cut in 0_usize..3000) {
        let bytes = random_bytes(3000, seed);
        let (left, right) = bytes.split_at(cut);
        prop_assert_eq!(
            Digest::of(Element::Bytes, 70_000, &bytes),
            Digest::of(Element::Bytes, 70_000, left) + Digest::of(Element::Bytes, 70_000 + cut as u64, right)
        );
    }
}

#[test]
fn all_bf16_patterns_as_base_and_target() {
    let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    for profile in PROFILES {
        for shift in [0_u16, 1, 2, 127, 0x7fff, 0x8000, 0x8001, 0xffff] {
            let new: Vec<u8> =
                (0..=u16::MAX).flat_map(|bits| bits.wrapping_add(shift).to_le_bytes()).collect();
            round_trip(Element::Bf16, &all, &new, profile);
            let sparse: Vec<u8> = (0..=u16::MAX)
                .flat_map(|bits| bits.wrapping_add(if bits % 97 == 5 { shift } else { 0 }).to_le_bytes())
                .collect();
            round_trip(Element::Bf16, &all, &sparse, profile);
        }
    }
}

#[test]
fn empty_and_single() {
    for element in ALL {
        for profile in PROFILES {
            assert!(round_trip(element, &[], &[], profile) <= 32);
            let size = element.size();
            round_trip(element, &[0x80, 0, 0, 0][..size], &[0, 0, 0, 0x80][..size], profile);
        }
    }
}

#[test]
fn blocks_end_where_they_like() {
    for element in ALL {
        for elements in [2, 3, 63, 64, 65, 4095, 4096, 4097, 65_535, 65_536, 65_537, 131_071, 131_073] {
            let (base, new) = noisy(element, elements, 0.003, 7);
            // The ends of blocks change whatever the noise did.
            let mut new = new;
            for at in [0, elements - 1, elements.min(65_536) - 1, elements.min(65_537) - 1] {
                new[at * element.size()] ^= 2;
            }
            for profile in PROFILES {
                round_trip(element, &base, &new, profile);
            }
        }
    }
}

#[test]
fn beyond_4_gib() {
    // Zeros that the system hands out without memory behind them; their digests are those of nothing.
    let (element, bytes) = (Element::F32, (4_usize << 30) + (9 << 18) + 4);
    let (mut base, mut new) = (vec![0; bytes], vec![0; bytes]);
    let digests = DigestTable::from_bytes(&vec![0; bytes.div_ceil(BLOCK_ELEMENTS * 4) * 16]).unwrap();
    for at in [0, 1 << 31, (4 << 30) - 1, 4 << 30, (4 << 30) + 5, bytes - 1] {
        new[at] = 0x5a;
    }
    let mut payload = Vec::new();
    let encoded = encode(element, &base, &new, &digests, Profile::Wire, &mut payload).unwrap();
    assert_eq!(encoded.changed, 6);
    let mut patch = Patch::new();
    decode(element, &base, &digests, &payload, &mut patch).unwrap();
    patch.apply_to(&mut base).unwrap();
    let runs: Vec<_> = patch.byte_runs().map(|(offset, bytes)| (offset, bytes.len())).collect();
    let last = (bytes - 4) as u64;
    assert_eq!(runs, [(0, 4), (1 << 31, 4), ((4 << 30) - 4, 4), (4 << 30, 8), (last, 4)], "blocks end runs");
    assert!(runs.iter().all(|(at, length)| {
        let range = *at as usize..*at as usize + length;
        base[range.clone()] == new[range]
    }));
    for block in [0, 8192, 16_384, digests.blocks().len() - 1] {
        let start = block * BLOCK_ELEMENTS * 4;
        let bytes = &new[start..bytes.min(start + BLOCK_ELEMENTS * 4)];
        let digest = Digest::of(element, (block * BLOCK_ELEMENTS) as u64, bytes);
        assert_eq!(encoded.digests.blocks()[block], digest);
    }
}

#[test]
fn a_table_verifies_its_bytes_alone() {
    for element in ALL {
        let (base, _) = noisy(element, 3 * BLOCK_ELEMENTS + 10, 0.0, 8);
        let table = DigestTable::of(element, &base).unwrap();
        assert_eq!(table.verify(element, &base), Ok(()));
        for at in [0, BLOCK_ELEMENTS * element.size(), base.len() - 1] {
            let mut damaged = base.clone();
            damaged[at] ^= 0x40;
            let block = (at / (BLOCK_ELEMENTS * element.size())) as u64;
            let found = table.verify(element, &damaged);
            assert!(
                matches!(found, Err(Error::BlockMismatch { block: found, .. }) if found == block),
                "{found:?}"
            );
        }
        let short = table.verify(element, &base[..BLOCK_ELEMENTS * element.size()]);
        assert!(matches!(short, Err(Error::LengthMismatch { .. })));
    }
}

#[test]
fn odd_lengths_are_refused() {
    let table = DigestTable::of(Element::Bf16, &[0; 4]).unwrap();
    let mut out = vec![1];
    let odd = encode(Element::Bf16, &[0; 5], &[0; 5], &table, Profile::Wire, &mut out);
    assert!(matches!(odd, Err(Error::OddLength { size: 2, bytes: 5, .. })));
    let longer = encode(Element::Bf16, &[0; 4], &[0; 6], &table, Profile::Wire, &mut out);
    assert!(matches!(longer, Err(Error::LengthMismatch { expected: 4, found: 6, .. })));
    assert!(encode_full(Element::F32, &[0; 6], &mut out).is_err());
    assert!(DigestTable::of(Element::F32, &[0; 6]).is_err());
    assert_eq!(out, [1], "nothing was appended");
}

#[test]
fn fixed_costs_hold() {
    for element in ALL {
        let elements = 3 * BLOCK_ELEMENTS + 17;
        let base = random_bytes(elements * element.size(), 1);
        let other = random_bytes(elements * element.size(), 2);
        for profile in PROFILES {
            assert!(round_trip(element, &base, &base, profile) <= 32, "nothing changed");
            let all = round_trip(element, &base, &other, profile);
            assert!(all as f64 <= base.len() as f64 * 1.001, "{element:?}: {all} bytes for {}", base.len());
        }
        let mut full = Vec::new();
        encode_full(element, &base, &mut full).unwrap();
        assert!(full.len() as f64 <= base.len() as f64 * 1.001);
    }
}

#[test]
fn full_payloads_round_trip() {
    for element in ALL {
        for elements in [0, 1, 1000, BLOCK_ELEMENTS, 2 * BLOCK_ELEMENTS + 5] {
            let (_, new) = noisy(element, elements, 0.5, 3);
            let mut payload = Vec::new();
            let encoded = encode_full(element, &new, &mut payload).unwrap();
            let mut out = vec![0x55; new.len()];
            let digests = decode_full(element, &payload, &mut out).unwrap();
            assert!(out == new && digests == encoded.digests);
            let table = DigestTable::of(element, &new).unwrap();
            let kind = decode(element, &new, &table, &payload, &mut Patch::new());
            assert!(matches!(kind, Err(Error::KindMismatch { .. })));
        }
    }
}

#[test]
fn a_wrong_base_is_refused_first() {
    let (base, new) = noisy(Element::Bf16, 70_000, 0.01, 4);
    let digests = DigestTable::of(Element::Bf16, &base).unwrap();
    let mut payload = Vec::new();
    encode(Element::Bf16, &base, &new, &digests, Profile::Wire, &mut payload).unwrap();
    let wrong = DigestTable::of(Element::Bf16, &new).unwrap();
    let mut patch = Patch::new();
    let refused = decode(Element::Bf16, &new, &wrong, &payload, &mut patch);
    assert!(matches!(refused, Err(Error::BaseMismatch { .. })));
    assert_eq!(patch.byte_runs().count(), 0);
    let element = decode(Element::F16, &base, &digests, &payload, &mut patch);
    assert!(matches!(element, Err(Error::ElementMismatch { .. })));
    let short = DigestTable::of(Element::Bf16, &base[2..]).unwrap();
    assert!(matches!(
        decode(Element::Bf16, &base[2..], &short, &payload, &mut patch),
        Err(Error::BaseMismatch { .. })
    ));
    let mut tensor = vec![0; 10];
    assert!(patch.apply_to(&mut tensor).is_err());
}
