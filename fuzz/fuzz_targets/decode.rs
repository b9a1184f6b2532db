//! Bytes from outside: no reader panics or allocates beyond its input and its base.
//!
//! The first byte picks the reader, the element type and the size of the base. Payloads get a sound header, so that their body is reached.
#![no_main]

use std::sync::OnceLock;

use driftless_delta::{Digest, DigestTable, Element, Patch, bundle, decode, decode_full};
use libfuzzer_sys::fuzz_target;

const ELEMENTS: [Element; 6] =
    [Element::Bytes, Element::F8E4M3, Element::F8E5M2, Element::F16, Element::Bf16, Element::F32];

/// Check of a digest, as headers hold it.
fn check(digest: Digest) -> u64 {
    let sums = u128::from_le_bytes(digest.to_bytes());
    (sums as u64).rotate_left(32) ^ (sums >> 64) as u64
}

const SIZES: [usize; 7] = [0, 1, 100, 5000, 65_536, 70_000, 140_000];

/// A base, and its digests, for each size and element type.
fn bases() -> &'static [(Vec<u8>, DigestTable)] {
    static BASES: OnceLock<Vec<(Vec<u8>, DigestTable)>> = OnceLock::new();
    BASES.get_or_init(|| {
        let all = SIZES.iter().flat_map(|elements| ELEMENTS.map(|element| (*elements, element)));
        all.map(|(elements, element)| {
            let bytes = 0..elements * element.size();
            let base: Vec<u8> = bytes.map(|at| ((at * 7) ^ (at >> 5) ^ (at >> 9)) as u8).collect();
            let digests = DigestTable::of(element, &base).expect("whole elements");
            (base, digests)
        })
        .collect()
    })
}

fuzz_target!(|data: &[u8]| {
    let Some((&first, body)) = data.split_first() else { return };
    let code = first % 6;
    let element = ELEMENTS[usize::from(code)];
    let elements = SIZES[usize::from(first / 6) % 7];
    match first / 42 {
        0..4 => {
            let (base, digests) = &bases()[usize::from(first) % 42];
            let mut payload = vec![0x10 | code];
            payload.extend(((check(digests.total()) >> 48) as u16).to_le_bytes());
            payload.extend([0; 8]);
            payload.extend(body);
            let mut patch = Patch::new();
            if decode(element, base, digests, &payload, &mut patch).is_ok() {
                assert_eq!(check(patch.digests().total()), 0, "the header promises this");
            }
        }
        4 => drop(decode_full(element, body, &mut vec![0; elements * element.size()])),
        5 => drop(Patch::from_bytes(body)),
        _ => drop(bundle::Bundle::read(body)),
    }
});
