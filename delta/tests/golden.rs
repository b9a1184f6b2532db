//! The encoder writes the same bytes on every machine, whatever path it takes there.
//!
//! A change of the encoder's choices, or of the format, changes these digests: the test prints the new ones. Another machine must not.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{ALL, PROFILES, apply, noisy, random_bytes};
use driftless_delta::{
    BLOCK_ELEMENTS, Decoder, Digest, DigestTable, Element, Encoder, Motion, Patch, Profile, Serial, Source,
    decode_full, encode, encode_full,
};

/// What each element type's payloads are, in the order of `ALL`: tiny ones, small ones, and those of several blocks.
const TINY: [&str; 6] = [
    "dbd62316f6fdf21652b3670c395d89aa",
    "60ca66febad22b72b5bc5e914d4ca4a9",
    "915e3ec78728da34fcc7d31ed1092a29",
    "8dde48e5bef0ab0980e12851aa9adac7",
    "a0647dd4ffee6df3a0702d6f5cc538ff",
    "2cbca3b34e6f0726baac31f835d57dc9",
];
const SMALL: [&str; 6] = [
    "2bc82f2e3bb2ee8d24d9c58e68f41748",
    "d4927f34c6561ed830323f1867fd1cfa",
    "e25531d53d39dc963335bf7f1c1cfbce",
    "57e2fa3a10f195dbbc55bc29ba4567d0",
    "b97ceb14185fba5ddb3ffb74824e191a",
    "7f150f6239944b34ff4c5a431c1d963a",
];
const LARGE: [&str; 6] = [
    "6e759ddef7950b541b28e50ebed50225",
    "9d4254774ebb47b5837719425eff44d8",
    "7d359347629cce3fcceb1bf944ce0812",
    "a28c7fc44bca04309d64bb66528a1120",
    "8483ad5eacfe77076f0cf87ac43a71a8",
    "cedd6fc0eac9eac80f762779b05cb853",
];

/// Both profiles, a full payload, and a second step in the light of the first; each is decoded, too.
fn payloads(element: Element, base: &[u8], new: &[u8], out: &mut Vec<u8>) {
    let digests = DigestTable::of(element, base).unwrap();
    for profile in PROFILES {
        let start = out.len();
        encode(element, base, new, &digests, profile, out).unwrap();
        let (patch, tensor) = apply(element, base, &out[start..]).unwrap();
        assert!(tensor == new);
        assert_eq!(Patch::from_bytes(&patch.to_bytes()), Ok(patch));
    }
    let (start, mut tensor) = (out.len(), vec![0; new.len()]);
    encode_full(element, new, out).unwrap();
    decode_full(element, &out[start..], &mut tensor).unwrap();
    assert!(tensor == new);
    let source = Source { element, bytes: base, digests: &digests };
    let (mut encoder, mut motion) = (Encoder::new(), Motion::start(source).unwrap());
    encoder.encode_after(&Serial, source, &motion, new, Profile::Wire, &mut Vec::new()).unwrap();
    motion.advance(encoder.moves()).unwrap();
    let digests = encoder.digests().clone();
    let back = [&base[..base.len() / 2], &new[base.len() / 2..]].concat();
    let source = Source { element, bytes: new, digests: &digests };
    let (start, mut patch) = (out.len(), Patch::new());
    encoder.encode_after(&Serial, source, &motion, &back, Profile::Wire, out).unwrap();
    Decoder::new().decode_after(&Serial, source, &motion, &out[start..], &mut patch).unwrap();
    patch.apply_to(&mut tensor).unwrap();
    assert!(tensor == back);
}

fn expect(expected: [&str; 6], payloads: impl Fn(Element, &mut Vec<u8>)) {
    let found = ALL.map(|element| {
        let mut out = Vec::new();
        payloads(element, &mut out);
        Digest::of(Element::Bytes, 0, &out).to_string()
    });
    assert_eq!(found.each_ref().map(String::as_str), expected, "\n{found:#?}");
}

/// A group and its tail: all that Miri has time for.
#[test]
fn tiny_tensors() {
    expect(TINY, |element, out| {
        let (base, new) = noisy(element, 66, 0.4, 40);
        payloads(element, &base, &new, out);
    });
}

#[test]
#[cfg_attr(miri, ignore = "what the tiny ones do, for minutes")]
fn small_tensors() {
    expect(SMALL, |element, out| {
        for (elements, density) in [(1, 1.0), (63, 0.5), (700, 0.05), (700, 0.9)] {
            let (base, new) = noisy(element, elements, density, 41);
            payloads(element, &base, &new, out);
        }
    });
}

#[test]
#[cfg_attr(miri, ignore = "what the tiny ones do, for hours")]
fn tensors_of_several_blocks() {
    expect(LARGE, |element, out| {
        for density in [0.0005, 0.01, 0.3] {
            let (base, new) = noisy(element, 2 * BLOCK_ELEMENTS + 77, density, 42);
            payloads(element, &base, &new, out);
        }
        // A block that is sent as it is, one in the entropy code, one unchanged.
        let block = BLOCK_ELEMENTS * element.size();
        let base = noisy(element, 3 * BLOCK_ELEMENTS, 0.0, 43).0;
        let other = noisy(element, BLOCK_ELEMENTS, 0.0, 44).0;
        let new = [&random_bytes(block, 45), &other, &base[2 * block..]].concat();
        payloads(element, &base, &new, out);
    });
}
