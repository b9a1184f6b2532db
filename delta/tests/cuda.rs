//! The codec on a real device against the crate's own. Without a device each test says why it is skipped, unless
//! `DRIFTLESS_GPU_REQUIRED` is set, as lane `gpu` does; `src/cuda/tests.rs` runs the kernels on the processor then.
#![allow(unsafe_code, reason = "tensors at addresses that do not suit")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{ALL, PROFILES, Pools, Random, noisy, random_bytes};
use driftless_delta::cuda::{Codec, Error, Tensor};
use driftless_delta::{Digest, DigestTable, Element, Encoder, Profile, Serial, Source};

const BLOCK: usize = 65_536;

fn codec() -> Option<Codec> {
    match Codec::open(0) {
        Ok(codec) => Some(codec),
        Err(error) => {
            assert!(std::env::var_os("DRIFTLESS_GPU_REQUIRED").is_none(), "{error}");
            eprintln!("skipped: {error}");
            None
        }
    }
}

/// Encodes and applies on the device: payload, digests and result are those of the crate.
fn check(codec: &mut Codec, what: &str, element: Element, base: &[u8], new: &[u8]) {
    let digests = DigestTable::of(element, base).unwrap();
    for profile in PROFILES {
        let what = format!("{what}: {element:?} {profile:?}, {} bytes", base.len());
        let (mut encoder, mut expected) = (Encoder::new(), Vec::new());
        let source = Source { element, bytes: base, digests: &digests };
        let changed = encoder.encode(&Pools::Threads(8), source, new, profile, &mut expected).unwrap();
        let mut tensor = codec.upload(base).unwrap();
        let fresh = codec.upload(new).unwrap();
        let encoded = codec.encode(element, &tensor, &fresh, &digests, profile).unwrap();
        assert_eq!(encoded.changed, changed, "{what}");
        assert_eq!(encoded.digests, encoder.digests(), "{what}");
        let differ = encoded.payload.iter().zip(&expected).position(|(a, b)| a != b);
        assert!(encoded.payload == expected, "{what}: byte {differ:?}");
        let mut table = digests.clone();
        assert_eq!(codec.apply(element, &mut tensor, &mut table, &expected), Ok(changed), "{what}");
        let mut result = vec![0; base.len()];
        codec.download(&tensor, &mut result).unwrap();
        assert!(result == new, "{what}: another result");
        assert_eq!(table, *encoder.digests(), "{what}");
    }
}

#[test]
fn densities_and_segments() {
    let Some(mut codec) = codec() else { return };
    for (seed, density) in (1..).zip([0.0, 0.0001, 0.003, 0.01, 0.05, 0.3, 1.0]) {
        let (base, new) = noisy(Element::Bf16, 67 * BLOCK + 4099, density, seed);
        check(&mut codec, &format!("density {density}"), Element::Bf16, &base, &new);
    }
}

#[test]
fn tails() {
    let Some(mut codec) = codec() else { return };
    for elements in [0, 1, 2, 7, 8, 9, 63, 64, 65, 127, 129, 1000, 2049, BLOCK - 1, BLOCK, BLOCK + 1] {
        for density in [0.02, 1.0] {
            let (base, new) = noisy(Element::Bf16, elements, density, elements as u64);
            check(&mut codec, "tail", Element::Bf16, &base, &new);
        }
    }
}

#[test]
fn every_pattern_and_blocks_that_are_new() {
    let Some(mut codec) = codec() else { return };
    let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    for change in [|bits: u16| bits ^ 1, |bits: u16| !bits, |bits: u16| bits.wrapping_mul(40_503)] {
        let new: Vec<u8> = (0..=u16::MAX).flat_map(|bits| change(bits).to_le_bytes()).collect();
        check(&mut codec, "patterns", Element::Bf16, &all, &new);
    }
    // Noise is left as it is, other weights take the entropy code; between them changes and blocks of the
    // base.
    let (mut base, mut new) = noisy(Element::Bf16, 7 * BLOCK + 55, 0.01, 3);
    let block = 2 * BLOCK;
    for at in [0, 2, 3] {
        base[at * block..(at + 1) * block].copy_from_slice(&random_bytes(block, at as u64));
        new[at * block..(at + 1) * block].copy_from_slice(&random_bytes(block, 10 + at as u64));
    }
    new[4 * block..5 * block].copy_from_slice(&noisy(Element::Bf16, BLOCK, 0.0, 77).0);
    new[5 * block..6 * block].copy_from_slice(&base[5 * block..6 * block]);
    check(&mut codec, "new blocks", Element::Bf16, &base, &new);
}

#[test]
fn other_elements() {
    let Some(mut codec) = codec() else { return };
    for element in ALL {
        for (elements, density) in [(1, 1.0), (3 * BLOCK + 5001, 0.02), (70_001, 0.7)] {
            let (base, new) = noisy(element, elements, density, 7);
            check(&mut codec, &format!("density {density}"), element, &base, &new);
        }
    }
}

#[test]
fn digests_of_slices_and_elements_that_are_not_finite() {
    let Some(mut codec) = codec() else { return };
    for element in ALL {
        let (base, _) = noisy(element, 3 * BLOCK + 5001, 0.0, 7);
        for start in [0, 4, 1000, 1024, BLOCK, BLOCK + 12, 100_004] {
            let bytes = &base[start * element.size()..];
            let tensor = codec.upload(bytes).unwrap();
            let table = codec.digest(element, start as u64, &tensor).unwrap();
            assert_eq!(table.total(), Digest::of(element, start as u64, bytes), "{element:?} from {start}");
        }
        let mut new = base.clone();
        new[BLOCK * element.size()..][..element.size()].fill(0xff);
        let digests = DigestTable::of(element, &base).unwrap();
        let (old, fresh) = (codec.upload(&base).unwrap(), codec.upload(&new).unwrap());
        let encoded = codec.encode_checked(element, &old, &fresh, &digests, Profile::Wire).unwrap();
        assert_eq!((encoded.changed, encoded.not_finite), (1, element != Element::Bytes), "{element:?}");
    }
}

#[test]
fn codecs_of_a_device_work_at_the_same_time() {
    let Some(codec) = codec() else { return };
    let (base, new) = noisy(Element::Bf16, 67 * BLOCK + 4099, 0.01, 3);
    let digests = DigestTable::of(Element::Bf16, &base).unwrap();
    let source = Source { element: Element::Bf16, bytes: &base, digests: &digests };
    let mut expected = Vec::new();
    Encoder::new().encode(&Pools::Threads(8), source, &new, Profile::Wire, &mut expected).unwrap();
    let (mut old, fresh) = (codec.room(base.len()).unwrap(), codec.upload(&new).unwrap());
    codec.copy(&codec.upload(&base).unwrap(), &mut old).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let mut codec = codec.fork().unwrap();
            let (old, fresh, digests, expected) = (&old, &fresh, &digests, &expected);
            scope.spawn(move || {
                for _ in 0..20 {
                    let encoded =
                        codec.encode_checked(Element::Bf16, old, fresh, digests, Profile::Wire).unwrap();
                    assert!(encoded.payload == *expected);
                }
            });
        }
    });
}

#[test]
fn rows_that_change_whole() {
    let Some(mut codec) = codec() else { return };
    for every in [2, 3, 7] {
        let (base, _) = noisy(Element::Bf16, 5 * BLOCK, 0.0, every);
        let mut new = base.clone();
        (0..new.len())
            .step_by(2)
            .filter(|at| !(at / 8192).is_multiple_of(every as usize))
            .for_each(|at| new[at] ^= 1);
        check(&mut codec, "rows", Element::Bf16, &base, &new);
    }
}

#[test]
fn a_damaged_payload_changes_nothing() {
    let Some(mut codec) = codec() else { return };
    let mut random = Random(5);
    for profile in PROFILES {
        let (base, new) = noisy(Element::Bf16, 3 * BLOCK, 0.05, 8);
        let digests = DigestTable::of(Element::Bf16, &base).unwrap();
        let source = Source { element: Element::Bf16, bytes: &base, digests: &digests };
        let mut payload = Vec::new();
        Encoder::new().encode(&Serial, source, &new, profile, &mut payload).unwrap();
        let mut tensor = codec.upload(&base).unwrap();
        for _ in 0..200 {
            let mut damaged = payload.clone();
            let at = random.next() as usize % payload.len();
            match random.next() % 2 {
                0 => damaged[at] ^= 1 << (random.next() % 8),
                _ => damaged[at..].fill_with(|| random.next() as u8),
            }
            let mut table = digests.clone();
            let applied = codec.apply(Element::Bf16, &mut tensor, &mut table, &damaged);
            assert!(matches!(applied, Err(Error::Codec(_))), "{applied:?}");
            assert!(table == digests);
        }
        let mut left = vec![0; base.len()];
        codec.download(&tensor, &mut left).unwrap();
        assert!(left == base, "a damaged payload was written");
    }
}

#[test]
fn a_baseline_in_pinned_memory_and_addresses_that_do_not_suit() {
    let Some(mut codec) = codec() else { return };
    let (base, new) = noisy(Element::Bf16, 3 * BLOCK + 17, 0.01, 12);
    let digests = DigestTable::of(Element::Bf16, &base).unwrap();
    let mut pinned = codec.pinned(base.len()).unwrap();
    pinned.copy_from_slice(&base);
    let mut tensor = codec.adopt(pinned);
    let fresh = codec.upload(&new).unwrap();
    let encoded = codec.encode(Element::Bf16, &tensor, &fresh, &digests, Profile::Wire).unwrap();
    let (payload, expected) = (encoded.payload.to_vec(), encoded.digests.clone());
    let mut table = digests.clone();
    codec.apply(Element::Bf16, &mut tensor, &mut table, &payload).unwrap();
    assert_eq!(table, expected);
    assert!(tensor.into_pinned().is_some_and(|pinned| pinned[..] == new[..]));
    // SAFETY: the memory is that of `fresh`, which nobody writes to.
    let (odd, elsewhere) =
        unsafe { (Tensor::borrowed(0, fresh.address() + 2, 2), Tensor::borrowed(7, fresh.address(), 2)) };
    let digests = DigestTable::of(Element::Bf16, &[0; 2]).unwrap();
    let refused = codec.encode(Element::Bf16, &odd, &odd, &digests, Profile::Fast).map(|_| ());
    assert!(matches!(refused, Err(Error::Misaligned { .. })), "{refused:?}");
    let refused = codec.encode(Element::Bf16, &elsewhere, &elsewhere, &digests, Profile::Fast).map(|_| ());
    assert!(matches!(refused, Err(Error::OtherDevice { .. })), "{refused:?}");
}
