//! The kernels, compiled for this processor (`kernels/twin.cpp`), against the crate's encoder and decoder;
//! and for devices, as far as that goes without one.

use driftless_testkit::compiler;
use driftless_testkit::random::Random;

use super::encode::{Outcome, Pair};
use super::machine::Placed;
use super::twin::{self, Twin};
use super::{Codec, Error, Result, Tensor, decode, device, encode};
use crate::choose::Profile;
use crate::digest::{Digest, DigestTable};
use crate::element::tests::ALL;
use crate::element::{BLOCK_ELEMENTS, Element};
use crate::encode::Encoder;
use crate::pool::Serial;
use crate::source::Source;

/// Whether there are kernels for this processor; says why not.
pub(super) fn compiled(element: Element) -> bool {
    let compiled = twin::compiled(element).map(drop);
    compiled.inspect_err(|error| compiler::missing(error)).is_ok()
}

pub(super) fn machine() -> Twin {
    Twin::new(0, usize::MAX)
}

/// Memory on 16 bytes.
#[derive(Default)]
struct Bytes(Vec<u128>);

impl Bytes {
    fn new(bytes: &[u8]) -> Self {
        let mut own = vec![0_u128; bytes.len().div_ceil(16).max(1)];
        for (word, bytes) in own.iter_mut().zip(bytes.chunks(16)) {
            let mut whole = [0; 16];
            whole[..bytes.len()].copy_from_slice(bytes);
            *word = u128::from_ne_bytes(whole);
        }
        Self(own)
    }

    fn placed(&self, bytes: usize) -> Placed {
        Placed { address: self.0.as_ptr() as u64, bytes }
    }

    fn to_vec(&self, bytes: usize) -> Vec<u8> {
        self.0.iter().flat_map(|word| word.to_ne_bytes()).take(bytes).collect()
    }
}

/// Both sides of the codec on the twin.
#[derive(Default)]
struct Both {
    encode: encode::State,
    decode: decode::State,
}

impl Both {
    fn encode(&mut self, element: Element, base: &[u8], new: &[u8], profile: Profile) -> (Vec<u8>, Outcome) {
        let digests = DigestTable::of(element, base).unwrap();
        let (old, fresh) = (Bytes::new(base), Bytes::new(new));
        let pair = Pair {
            element,
            base: old.placed(base.len()),
            new: fresh.placed(new.len()),
            digests: &digests,
            profile,
        };
        let outcome = self.encode.encode(&machine(), pair).unwrap();
        (self.encode.payload(outcome.bytes).to_vec(), outcome)
    }

    fn apply(
        &mut self,
        element: Element,
        base: &[u8],
        digests: &mut DigestTable,
        payload: &[u8],
    ) -> (Vec<u8>, Result<u64>) {
        let tensor = Bytes::new(base);
        let applied = self.decode.apply(&machine(), element, tensor.placed(base.len()), digests, payload);
        (tensor.to_vec(base.len()), applied)
    }

    /// The twin's payload is the crate's, and each decodes the other's.
    fn check(&mut self, what: &str, element: Element, base: &[u8], new: &[u8], profile: Profile) -> Vec<u8> {
        let digests = DigestTable::of(element, base).unwrap();
        let (mut encoder, mut expected) = (Encoder::new(), Vec::new());
        let source = Source { element, bytes: base, digests: &digests };
        let changed = encoder.encode(&Serial, source, new, profile, &mut expected).unwrap();
        let (payload, outcome) = self.encode(element, base, new, profile);
        let what = format!("{what}: {element:?} {profile:?}, {} bytes", base.len());
        assert_eq!(outcome.changed, changed, "{what}");
        assert_eq!(outcome.not_finite, encoder.not_finite, "{what}");
        assert_eq!(self.encode.digests(), encoder.digests(), "{what}");
        let differ = payload.iter().zip(&expected).position(|(a, b)| a != b);
        assert!(
            payload == expected,
            "{what}: {} bytes for {}, byte {differ:?}",
            payload.len(),
            expected.len()
        );
        let mut table = digests.clone();
        let (result, applied) = self.apply(element, base, &mut table, &expected);
        assert_eq!(applied, Ok(changed), "{what}");
        assert!(result == new, "{what}: another result");
        assert_eq!(table, *encoder.digests(), "{what}");
        expected
    }
}

/// A weight of a normal kind, in the element type's upper bits.
fn weight(random: &mut Random, element: Element) -> u32 {
    let bits = (random.normal() as f32 * 0.02).to_bits();
    match element {
        Element::F32 => bits,
        Element::F16 => (bits >> 13 & 0x7fff) as u16 as u32 | bits >> 16 & 0x8000,
        Element::Bf16 => bits >> 16,
        _ => bits >> 20 & 0x7f | bits >> 24 & 0x80,
    }
}

fn put(element: Element, bytes: &mut [u8], at: usize, value: u32) {
    let size = element.size();
    bytes[at * size..(at + 1) * size].copy_from_slice(&value.to_le_bytes()[..size]);
}

/// Weights, and a copy in which small ones change more often, mostly by one ulp: what a step of an optimiser
/// does.
fn pair(element: Element, elements: usize, density: f64, seed: u64) -> (Vec<u8>, Vec<u8>) {
    let mut random = Random(seed);
    let mut base = vec![0; elements * element.size()];
    (0..elements).for_each(|at| put(element, &mut base, at, weight(&mut random, element)));
    let mut new = base.clone();
    for at in 0..elements {
        let old = element.load(&base, at);
        let scale = if element.exponent(old).is_multiple_of(3) { 1.8 } else { 0.6 };
        if random.unit() < density * scale || density >= 1.0 {
            let step = match random.next() % 40 {
                0..=17 => 1,
                18..=35 => -1,
                36 => 2,
                37 => -3,
                38 => 9,
                _ => random.next() as i32,
            };
            put(element, &mut new, at, element.stepped(old, step));
        }
    }
    (base, new)
}

const PROFILES: [Profile; 2] = [Profile::Fast, Profile::Wire];

#[test]
fn bf16_payloads_are_the_same_at_all_densities() {
    if !compiled(Element::Bf16) {
        return;
    }
    let mut both = Both::default();
    for (seed, density) in (1..).zip([0.0, 0.0001, 0.003, 0.01, 0.05, 0.3, 0.55, 0.9, 1.0]) {
        let (base, new) = pair(Element::Bf16, BLOCK_ELEMENTS + 4099, density, seed);
        for profile in PROFILES {
            both.check(&format!("density {density}"), Element::Bf16, &base, &new, profile);
        }
    }
}

#[test]
fn segments_have_tables_of_their_own() {
    if !compiled(Element::Bf16) {
        return;
    }
    // 33 blocks and a tail: a segment whose rows are sampled, with blocks of different densities and none,
    // and a short one.
    let elements = 33 * BLOCK_ELEMENTS + 777;
    let (base, mut new) = pair(Element::Bf16, elements, 0.01, 40);
    let block = 2 * BLOCK_ELEMENTS;
    for same in [0..1, 5..8, 30..32] {
        new[same.start * block..same.end * block]
            .copy_from_slice(&base[same.start * block..same.end * block]);
    }
    let (_, dense) = pair(Element::Bf16, elements, 0.2, 40);
    new[9 * block..10 * block].copy_from_slice(&dense[9 * block..10 * block]);
    let mut both = Both::default();
    PROFILES
        .into_iter()
        .for_each(|profile| drop(both.check("segments", Element::Bf16, &base, &new, profile)));
    // Nothing in the first segment.
    new[..32 * block].copy_from_slice(&base[..32 * block]);
    PROFILES
        .into_iter()
        .for_each(|profile| drop(both.check("second segment", Element::Bf16, &base, &new, profile)));
}

#[test]
fn short_tensors_and_tails() {
    if !compiled(Element::Bf16) {
        return;
    }
    let mut both = Both::default();
    for elements in [0, 1, 2, 7, 8, 9, 31, 63, 64, 65, 127, 128, 129, 255, 257, 1000, 2047, 2049, 65_535] {
        for density in [0.0, 0.02, 1.0] {
            let (base, new) = pair(Element::Bf16, elements, density, elements as u64);
            PROFILES
                .into_iter()
                .for_each(|profile| drop(both.check("tail", Element::Bf16, &base, &new, profile)));
        }
    }
}

#[test]
fn every_bf16_pattern_and_blocks_that_are_new() {
    if !compiled(Element::Bf16) {
        return;
    }
    let mut both = Both::default();
    let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    for change in
        [|bits: u16| bits ^ 1, |bits: u16| !bits, |bits: u16| bits.wrapping_mul(40_503).wrapping_add(77)]
    {
        let mut new = all.clone();
        (0..=u16::MAX).for_each(|bits| put(Element::Bf16, &mut new, bits.into(), change(bits).into()));
        PROFILES
            .into_iter()
            .for_each(|profile| drop(both.check("patterns", Element::Bf16, &all, &new, profile)));
    }
    // Unrelated weights take the entropy code, noise is left as it is; between them changes and blocks of the
    // base.
    let (mut base, mut new) = pair(Element::Bf16, 6 * BLOCK_ELEMENTS + 55, 0.01, 3);
    let block = 2 * BLOCK_ELEMENTS;
    let mut random = Random(9);
    for at in [0, 2, 3] {
        base[at * block..(at + 1) * block].fill_with(|| random.next() as u8);
        new[at * block..(at + 1) * block].fill_with(|| random.next() as u8);
    }
    (4 * BLOCK_ELEMENTS..5 * BLOCK_ELEMENTS)
        .for_each(|at| put(Element::Bf16, &mut new, at, weight(&mut random, Element::Bf16)));
    new[5 * block..6 * block].copy_from_slice(&base[5 * block..6 * block]);
    PROFILES
        .into_iter()
        .for_each(|profile| drop(both.check("new blocks", Element::Bf16, &base, &new, profile)));
}

#[test]
fn other_elements_are_the_same() {
    let mut both = Both::default();
    for element in ALL {
        if !compiled(element) {
            return;
        }
        for (elements, density) in [(1, 1.0), (70_001, 0.0), (70_001, 0.02), (4099, 0.7), (5000, 1.0)] {
            let (base, new) = pair(element, elements, density, 7);
            PROFILES.into_iter().for_each(|profile| {
                drop(both.check(&format!("density {density}"), element, &base, &new, profile))
            });
        }
    }
}

#[test]
fn rows_that_change_whole() {
    if !compiled(Element::Bf16) {
        return;
    }
    // Rows of an embedding: long runs of changed and of unchanged elements, more of either.
    let mut both = Both::default();
    for every in [2, 3, 7] {
        let (base, mut new) = pair(Element::Bf16, BLOCK_ELEMENTS, 0.0, every);
        for at in (0..BLOCK_ELEMENTS).filter(|at| !(at / 1024).is_multiple_of(every as usize)) {
            let old = Element::Bf16.load(&base, at);
            put(Element::Bf16, &mut new, at, Element::Bf16.stepped(old, 1 - 2 * (at as i32 & 1)));
        }
        PROFILES
            .into_iter()
            .for_each(|profile| drop(both.check("rows", Element::Bf16, &base, &new, profile)));
    }
    // Few enough to be listed, but all where one warp looks.
    let (base, mut new) = pair(Element::Bf16, BLOCK_ELEMENTS, 0.0, 11);
    for at in 9000..9600 {
        let old = Element::Bf16.load(&base, at);
        put(Element::Bf16, &mut new, at, Element::Bf16.stepped(old, 1));
    }
    PROFILES.into_iter().for_each(|profile| drop(both.check("one row", Element::Bf16, &base, &new, profile)));
}

#[test]
fn damaged_payloads_change_nothing() {
    if !compiled(Element::Bf16) {
        return;
    }
    let mut both = Both::default();
    let mut random = Random(5);
    for profile in PROFILES {
        let (base, new) = pair(Element::Bf16, 3000, 0.1, 8);
        let payload = both.check("whole", Element::Bf16, &base, &new, profile);
        let digests = DigestTable::of(Element::Bf16, &base).unwrap();
        for _ in 0..100 {
            let mut damaged = payload.clone();
            match random.next() % 3 {
                0 => damaged.truncate(random.next() as usize % payload.len()),
                1 => damaged[random.next() as usize % payload.len()] ^= 1 << (random.next() % 8),
                _ => {
                    let at = random.next() as usize % payload.len();
                    damaged[at..].fill_with(|| random.next() as u8);
                }
            }
            if damaged == payload {
                continue;
            }
            let mut table = digests.clone();
            let (result, applied) = both.apply(Element::Bf16, &base, &mut table, &damaged);
            assert!(matches!(applied, Err(Error::Codec(_))), "{applied:?}");
            assert!(result == base && table == digests, "written in spite of {applied:?}");
        }
    }
}

#[test]
fn a_payload_for_another_base_is_refused() {
    if !compiled(Element::Bf16) {
        return;
    }
    let mut both = Both::default();
    let (base, new) = pair(Element::Bf16, 3000, 0.1, 8);
    let payload = both.check("whole", Element::Bf16, &base, &new, Profile::Wire);
    let mut digests = DigestTable::of(Element::Bf16, &new).unwrap();
    let (_, applied) = both.apply(Element::Bf16, &new, &mut digests, &payload);
    assert!(matches!(applied, Err(Error::Codec(crate::Error::BaseMismatch { .. }))), "{applied:?}");
}

#[test]
fn a_bit_that_flipped_in_the_base_or_its_digests_is_noticed() {
    let mut both = Both::default();
    let mut random = Random(12);
    for element in ALL {
        if !compiled(element) {
            return;
        }
        let (base, new) = pair(element, BLOCK_ELEMENTS + 4099, 0.02, 12);
        let table = DigestTable::of(element, &base).unwrap();
        let fresh = Bytes::new(&new);
        let mut check = |base: &[u8], digests: &DigestTable| {
            let old = Bytes::new(base);
            let (base, new) = (old.placed(base.len()), fresh.placed(new.len()));
            let outcome = both
                .encode
                .encode_checked(&machine(), Pair { element, base, new, digests, profile: Profile::Wire });
            outcome.map(|outcome| outcome.changed)
        };
        assert!(check(&base, &table).is_ok_and(|changed| changed > 0), "{element:?}");
        for _ in 0..20 {
            let mut rotten = base.clone();
            let bit = random.next() as usize % (8 * rotten.len());
            rotten[bit / 8] ^= 1 << (bit % 8);
            let block = (bit / 8 / element.size() / BLOCK_ELEMENTS) as u64;
            let error = check(&rotten, &table).unwrap_err();
            let Error::Codec(crate::Error::BlockMismatch { block: named, expected, found }) = error else {
                panic!("{element:?}, bit {bit}: {error:?}")
            };
            assert_eq!((named, expected), (block, table.blocks()[block as usize]), "{element:?}, bit {bit}");
            assert_eq!(found, DigestTable::of(element, &rotten).unwrap().blocks()[block as usize]);
        }
        let mut bytes = table.to_bytes();
        bytes[5] ^= 4;
        let error = check(&base, &DigestTable::from_bytes(&bytes).unwrap()).unwrap_err();
        assert!(matches!(error, Error::Codec(crate::Error::BlockMismatch { block: 0, .. })), "{error:?}");
    }
}

#[test]
fn an_element_that_becomes_nan_or_infinite_is_noticed() {
    let mut both = Both::default();
    for element in ALL {
        if !compiled(element) {
            return;
        }
        let (base, _) = pair(element, 300, 0.0, 4);
        // The highest exponent with all of the mantissa, one bit of it and none, the exponent below; both
        // signs.
        let (most, mantissa) = (element.mask() >> 1, (1 << element.mantissa_bits()) - 1);
        for magnitude in [most, most & !mantissa | 1, most & !mantissa, (most & !mantissa).wrapping_sub(1)] {
            for pattern in [magnitude & most, magnitude | !most & element.mask()] {
                let mut new = base.clone();
                put(element, &mut new, 147, pattern);
                let (_, outcome) = both.encode(element, &base, &new, Profile::Fast);
                assert_eq!(outcome.not_finite, !element.is_finite(pattern), "{element:?} {pattern:x}");
                // What was there before is no change.
                let (_, outcome) = both.encode(element, &new, &new, Profile::Fast);
                assert!(!outcome.not_finite, "{element:?} {pattern:x}");
            }
        }
    }
}

#[test]
fn digest_of_a_slice_is_its_share_of_the_tensors() {
    let mut random = Random(21);
    for element in ALL {
        if !compiled(element) {
            return;
        }
        let size = element.size();
        let (bytes, _) = pair(element, 2 * BLOCK_ELEMENTS + 4099, 0.0, 5);
        let mut codec = Codec::on(Box::new(machine()));
        let starts = [0, 4, 8, 1000, 1024, BLOCK_ELEMENTS, BLOCK_ELEMENTS + 12];
        for start in starts.into_iter().chain((0..8).map(|_| random.next() as usize % 70_000 / 4 * 4)) {
            let tensor = codec.upload(&bytes[start * size..]).unwrap();
            let table = codec.digest(element, start as u64, &tensor).unwrap();
            let expected = Digest::of(element, start as u64, &bytes[start * size..]);
            assert_eq!(table.total(), expected, "{element:?} from {start}");
            if start == 0 {
                assert_eq!(table, DigestTable::of(element, &bytes).unwrap());
            }
        }
        let tensor = codec.upload(&bytes[size..]).unwrap();
        let odd = codec.digest(element, 1, &tensor).map(drop);
        assert_eq!(odd.is_err(), size < 4, "{element:?}: {odd:?}");
        assert_eq!(codec.digest(element, 0, &codec.room(0).unwrap()), Ok(DigestTable::default()));
    }
}

#[test]
fn codecs_of_a_device_work_at_once_on_what_the_others_made() {
    if !compiled(Element::Bf16) {
        return;
    }
    let (base, new) = pair(Element::Bf16, BLOCK_ELEMENTS + 77, 0.01, 6);
    let digests = DigestTable::of(Element::Bf16, &base).unwrap();
    let mut codec = Codec::on(Box::new(Twin::new(3, 1 << 24)));
    let fresh = codec.upload(&new).unwrap();
    // A base in the device's memory, and one in the host's.
    let pinned = codec.pinned(base.len()).unwrap();
    let mut olds = [codec.room(base.len()).unwrap(), codec.adopt(pinned)];
    let source = codec.upload(&base).unwrap();
    olds.iter_mut().for_each(|old| codec.copy(&source, old).unwrap());
    drop(source);
    let alone = codec.encode_checked(Element::Bf16, &olds[0], &fresh, &digests, Profile::Wire).unwrap();
    let expected = alone.payload.to_vec();
    let mut others = [codec.fork().unwrap(), codec.fork().unwrap()];
    std::thread::scope(|scope| {
        for (other, old) in others.iter_mut().zip(&olds) {
            let (digests, fresh, expected) = (&digests, &fresh, &expected);
            scope.spawn(move || {
                assert_eq!(other.device(), 3);
                let encoded = other.encode_checked(Element::Bf16, old, fresh, digests, Profile::Wire);
                assert!(encoded.unwrap().payload == *expected);
            });
        }
    });
    let short = codec.copy(&fresh, &mut codec.room(8).unwrap());
    assert!(matches!(short, Err(Error::Codec(crate::Error::LengthMismatch { .. }))), "{short:?}");
    let full = codec.room(1 << 24).map(drop);
    assert!(matches!(full, Err(Error::Driver { .. })), "{full:?}");
    // SAFETY: nothing is read there, because the device is another one.
    let elsewhere = unsafe { Tensor::borrowed(4, fresh.address(), 16) };
    let refused = codec.copy(&elsewhere, &mut codec.room(16).unwrap());
    assert!(matches!(refused, Err(Error::OtherDevice { expected: 3, found: 4, .. })), "{refused:?}");
}

#[test]
fn cudas_compiler_takes_the_kernels() {
    if let Err(error) = device::compiler() {
        eprintln!("skipped: {error}");
        return;
    }
    for architecture in ["compute_80", "compute_90"] {
        for element in ALL {
            device::compile(architecture, element).map(drop).unwrap();
        }
    }
}

#[test]
fn driver_tells_its_release_and_devices_or_what_is_missing() {
    match device::Driver::look() {
        Ok(driver) => {
            assert!(driver.version[0] > 0, "{driver:?}");
            assert!(driver.devices.iter().all(|(name, bytes)| !name.is_empty() && *bytes > 0), "{driver:?}");
        }
        Err(Error::NoLibrary { searched, .. }) => assert!(searched.contains(".so")),
        Err(error) => assert!(matches!(error, Error::Driver { .. }), "{error}"),
    }
}

#[test]
fn without_cuda_an_error_names_what_is_missing() {
    match Codec::open(0) {
        Ok(_) => eprintln!("skipped: there is a device"),
        Err(Error::NoLibrary { searched, .. }) => assert!(searched.contains(".so")),
        Err(error) => assert!(matches!(error, Error::Driver { .. }), "{error}"),
    }
}
