//! Bytes from outside: no reader panics or allocates beyond its input and its base.
//!
//! The first two bytes pick the reader, the element type and the size of the base. Payloads get a sound
//! header, so that their body is reached.
#![no_main]

use std::cell::RefCell;
use std::sync::OnceLock;

use driftless_delta::{Decoder, Digest, DigestTable, Element, Patch, Serial, Source, bundle};
use libfuzzer_sys::fuzz_target;

const ELEMENTS: [Element; 6] =
    [Element::Bytes, Element::F8E4M3, Element::F8E5M2, Element::F16, Element::Bf16, Element::F32];

/// Elements of the bases. One byte in sixteen picks a base of more than one block: what it costs to read is
/// lost to other inputs.
const SIZES: [usize; 16] = [0, 1, 2, 5, 40, 63, 64, 65, 100, 128, 130, 257, 500, 1000, 3, 65_540];

/// Check of a digest, as headers hold it.
fn check(digest: Digest) -> u64 {
    let sums = u128::from_le_bytes(digest.to_bytes());
    (sums as u64).wrapping_add((sums >> 64) as u64)
}

/// A base and its digests, for each size and element type.
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

#[derive(Default)]
struct Reused {
    decoder: Decoder,
    payload: Vec<u8>,
    patch: Patch,
    target: Vec<u8>,
}

thread_local! {
    static REUSED: RefCell<Reused> = RefCell::default();
}

fuzz_target!(|data: &[u8]| {
    let [first, second, body @ ..] = data else { return };
    let (code, size) = (first % 6, usize::from(second % 16));
    let element = ELEMENTS[usize::from(code)];
    REUSED.with_borrow_mut(|Reused { decoder, payload, patch, target }| match first / 6 {
        0..30 => {
            let (base, digests) = &bases()[size * ELEMENTS.len() + usize::from(code)];
            payload.clear();
            payload.push(0x10 | code);
            payload.extend(((check(digests.total()) >> 48) as u16).to_le_bytes());
            payload.extend([0; 8]);
            payload.extend(body);
            let base = Source { element, bytes: base, digests };
            if decoder.decode(&Serial, base, payload, patch).is_ok() {
                assert_eq!(check(patch.digests().total()), 0, "the header promises this");
            }
        }
        30..38 => {
            let elements = SIZES[size];
            target.resize(elements * element.size(), 0);
            payload.clear();
            payload.push(0x30 | code);
            let mut rest = elements;
            while rest >= 0x80 {
                payload.push(rest as u8 | 0x80);
                rest >>= 7;
            }
            payload.push(rest as u8);
            payload.extend([0; 8]);
            payload.extend(body);
            drop(decoder.decode_full(&Serial, element, payload, target));
        }
        38 => drop(Patch::from_bytes(body)),
        _ => drop(bundle::Bundle::read(body)),
    });
});
