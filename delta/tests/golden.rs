//! The encoder writes the same bytes on every machine, whatever path it takes there.
//!
//! A change of the encoder's choices, or of the format, changes these digests: the test prints the new ones.
//! Another machine must not.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{ALL, PROFILES, apply, noisy, random_bytes};
use driftless_delta::{
    BLOCK_ELEMENTS, Digest, DigestTable, Element, Patch, decode_full, encode, encode_full,
};

/// What each element type's payloads are, in the order of `ALL`: tiny ones, small ones, and those of several
/// blocks.
const TINY: [&str; 6] = [
    "f15a8609ecf6dd6f1dde48fb017d6b8a",
    "5b916cf538ed0def086818e1d0360c38",
    "8c2544975116e5954f56d5f0df1e0767",
    "a2152dc924c51a506bf0095b9495386a",
    "48774a1b905176035bccc2121c71c482",
    "506235485ffac139fe131a6d23743c7e",
];
const SMALL: [&str; 6] = [
    "c870ba8fb4056a7e7c48acbc408bf069",
    "841224967bc534af135cf1b0f5f244e9",
    "04ef54e6a1b368889ff96138b9185f37",
    "24a98e3e16289bb09730a5dcd0fc2280",
    "6c82e19d29a5d01581c2523f3eff3548",
    "a5aa95e4b26e69e1eb339efeadce3b5c",
];
const LARGE: [&str; 6] = [
    "e8b4e6600898f8888321ef03545a674b",
    "6baa1cb6307156a1044cdc5e4dd6a087",
    "7b8307eb54bc6ffbd0a4b7061d384eb7",
    "c3843e8b1ad67af57d92fe692143a018",
    "550fea4220cd8383458914e48dff3ee1",
    "09773f31eefcd71ebf8bd29138303ed9",
];

/// Both profiles and a full payload; each is decoded, too.
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
