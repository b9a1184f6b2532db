//! Bytes from outside: flipped, cut, spliced or invented. Either a typed error, or the right result with its
//! digest as proof.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{ALL, PROFILES, Random, apply, noisy, random_bytes};
use driftless_delta::{
    Decoder, DigestTable, Element, Error, Patch, Serial, Source, decode, decode_full, encode, encode_full,
    full_digest,
};

/// A payload that is not what the encoder wrote must not turn `base` into anything but `new`.
struct Target<'a> {
    base: Source<'a>,
    new: &'a [u8],
    decoder: Decoder,
    patch: Patch,
}

impl<'a> Target<'a> {
    fn new(base: Source<'a>, new: &'a [u8]) -> Self {
        Self { base, new, decoder: Decoder::new(), patch: Patch::new() }
    }

    fn refuses(&mut self, payload: &[u8]) -> bool {
        self.decoder.decode(&Serial, self.base, payload, &mut self.patch).is_err()
    }

    fn refuse_or_equal(&mut self, payload: &[u8], what: &str) {
        if !self.refuses(payload) {
            let mut tensor = self.base.bytes.to_vec();
            self.patch.apply_to(&mut tensor).unwrap();
            assert!(tensor == self.new, "{:?}: accepted a wrong result after {what}", self.base.element);
        } else {
            assert_eq!((self.patch.changed(), self.patch.byte_runs().count()), (0, 0));
        }
    }
}

#[test]
fn every_flip_and_truncation() {
    for element in ALL {
        for profile in PROFILES {
            for (elements, density) in [(1000, 0.02), (300, 0.7), (66_000, 0.001)] {
                let (base, new) = noisy(element, elements, density, 11);
                let digests = DigestTable::of(element, &base).unwrap();
                let mut payload = Vec::new();
                encode(element, &base, &new, &digests, profile, &mut payload).unwrap();
                let mut target = Target::new(Source { element, bytes: &base, digests: &digests }, &new);
                for at in 0..payload.len() {
                    for bit in 0..8 {
                        let mut flipped = payload.clone();
                        flipped[at] ^= 1 << bit;
                        target.refuse_or_equal(&flipped, "a flip");
                    }
                    assert!(target.refuses(&payload[..at]), "cut at {at}");
                }
                payload.push(0);
                assert!(target.refuses(&payload), "a byte too many");
            }
        }
    }
}

#[test]
fn splices_of_two_payloads() {
    let mut random = Random(5);
    let (base, new) = noisy(Element::Bf16, 5000, 0.05, 12);
    let (_, other) = noisy(Element::Bf16, 5000, 0.05, 13);
    let digests = DigestTable::of(Element::Bf16, &base).unwrap();
    let [one, two] = [&new, &other].map(|new| {
        let mut payload = Vec::new();
        encode(Element::Bf16, &base, new, &digests, PROFILES[0], &mut payload).unwrap();
        payload
    });
    let mut target = Target::new(Source { element: Element::Bf16, bytes: &base, digests: &digests }, &new);
    for _ in 0..2000 {
        let (from, to) = (random.next() as usize % one.len(), random.next() as usize % two.len());
        let spliced = [&one[..from], &two[to..]].concat();
        target.refuse_or_equal(&spliced, "a splice");
    }
}

#[test]
fn invented_bodies_behind_a_sound_header() {
    let mut random = Random(6);
    for element in ALL {
        let (base, new) = noisy(element, 66_000, 0.01, 14);
        let digests = DigestTable::of(element, &base).unwrap();
        let mut payload = Vec::new();
        encode(element, &base, &new, &digests, PROFILES[0], &mut payload).unwrap();
        let mut patch = Patch::new();
        for _ in 0..300 {
            let length = random.next() as usize % 200;
            let mut invented = payload[..11].to_vec();
            invented.extend(random_bytes(length, random.next()));
            assert!(decode(element, &base, &digests, &invented, &mut patch).is_err());
            assert_eq!((patch.changed(), patch.byte_runs().count()), (0, 0));
        }
    }
}

/// What an encoder wrote that still had motion: a table of mode 6, then a block of mode 5. The base is 700
/// numbers of bf16 from 0x3c00 up, every third with its lowest bit flipped; the result has them flipped back.
const MOTION: [u8; 29] = [
    0x44, 0x4c, 0x1e, 0x8c, 0x96, 0x9c, 0x3f, 0x1f, 0x40, 0x26, 0xf0, 0x7e, 0x81, 0x37, 0x00, 0x00, 0x10,
    0x80, 0x79, 0x00, 0x00, 0x00, 0x08, 0xc0, 0x00, 0x00, 0x01, 0x0d, 0x00,
];

#[test]
fn decode_payload_with_motion_is_refused_by_name() {
    let mut base: Vec<u8> = (0..700_u16).flat_map(|i| (0x3c00 + i).to_le_bytes()).collect();
    base.iter_mut().step_by(6).for_each(|byte| *byte ^= 1);
    let digests = DigestTable::of(Element::Bf16, &base).unwrap();
    let mut patch = Patch::new();
    let kind = Error::UnsupportedMotion { what: "payload kind", found: 4 };
    assert_eq!(decode(Element::Bf16, &base, &digests, &MOTION, &mut patch), Err(kind.clone()));
    assert_eq!((patch.changed(), patch.byte_runs().count()), (0, 0));
    assert_eq!(decode_full(Element::Bf16, &MOTION, &mut base.clone()), Err(kind.clone()));
    assert_eq!(full_digest(Element::Bf16, 0, &MOTION), Err(kind.clone()));
    assert_eq!(
        kind.to_string(),
        "payload kind 4 needs the history of earlier steps (motion), which is not supported; encode the tensor \
         again with this build"
    );
    // The same body behind the header of a delta without motion: its table, and then its block.
    let mut plain = Vec::new();
    encode(Element::Bf16, &base, &vec![0; base.len()], &digests, PROFILES[0], &mut plain).unwrap();
    for (mode, body) in [(6, &MOTION[11..]), (5, &MOTION[27..])] {
        let payload = [&plain[..11], body].concat();
        let refused = Error::UnsupportedMotion { what: "block mode", found: mode };
        assert_eq!(decode(Element::Bf16, &base, &digests, &payload, &mut patch), Err(refused));
    }
}

#[test]
fn full_payloads() {
    for element in ALL {
        let (_, new) = noisy(element, 3000, 0.5, 15);
        let mut payload = Vec::new();
        encode_full(element, &new, &mut payload).unwrap();
        let mut out = vec![0; new.len()];
        for at in 0..payload.len() {
            let mut flipped = payload.clone();
            flipped[at] ^= 1 << (at % 8);
            assert!(decode_full(element, &flipped, &mut out).is_err() || out == new, "flip at {at}");
            assert!(decode_full(element, &payload[..at], &mut out).is_err());
        }
        assert!(decode_full(element, &payload, &mut out[element.size()..]).is_err());
    }
}

#[test]
fn journaled_patches() {
    let (base, new) = noisy(Element::Bf16, 2000, 0.03, 16);
    let digests = DigestTable::of(Element::Bf16, &base).unwrap();
    let mut payload = Vec::new();
    encode(Element::Bf16, &base, &new, &digests, PROFILES[1], &mut payload).unwrap();
    let (patch, _) = apply(Element::Bf16, &base, &payload).unwrap();
    let bytes = patch.to_bytes();
    for at in 0..bytes.len() {
        for bit in 0..8 {
            let mut flipped = bytes.clone();
            flipped[at] ^= 1 << bit;
            assert!(Patch::from_bytes(&flipped).is_err(), "flip at {at}");
        }
        assert!(Patch::from_bytes(&bytes[..at]).is_err());
    }
}
