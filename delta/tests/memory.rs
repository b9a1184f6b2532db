//! The steady state allocates nothing: what an encoder, a decoder and a patch need, they keep.
#![expect(unsafe_code, reason = "an allocator that counts")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use common::{ALL, PROFILES, Pools, noisy, random_bytes};
use driftless_delta::{Decoder, DigestTable, Element, Encoder, Patch, Pool, Profile, Serial, Source};

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

fn count() {
    ALLOCATIONS.with(|count| count.set(count.get() + 1));
}

// SAFETY: every call goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promises are those `System` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, old: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { System.realloc(old, layout, size) }
    }

    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(old, layout) };
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Sparse blocks, some that changed altogether, and unchanged ones: so many in all.
fn tensors(element: Element, blocks: usize) -> (Vec<u8>, Vec<u8>) {
    let (mut base, mut new) = noisy(element, 70_000, 0.01, 1);
    let random = random_bytes(2 * 65_536 * element.size(), 2);
    let fill = |bytes: &mut Vec<u8>, tail: &[u8]| {
        bytes.extend_from_slice(tail);
        bytes.resize(blocks * 65_536 * element.size(), 3);
    };
    fill(&mut base, &vec![7; random.len()]);
    fill(&mut new, &random);
    let last = new.len() - 5;
    new[last] ^= 1;
    (base, new)
}

fn allocations(pool: &dyn Pool, element: Element, profile: Profile, blocks: usize) -> usize {
    let (base, new) = tensors(element, blocks);
    let digests = DigestTable::of(element, &base).unwrap();
    let (mut encoder, mut decoder, mut patch) = (Encoder::new(), Decoder::new(), Patch::new());
    let (mut payload, mut journal, mut tensor) = (Vec::new(), Vec::new(), base.clone());
    let source = Source { element, bytes: &base, digests: &digests };
    let mut step = || {
        payload.clear();
        encoder.encode(pool, source, &new, profile, &mut payload).unwrap();
        decoder.decode(pool, source, &payload, &mut patch).unwrap();
        patch.apply_to(&mut tensor).unwrap();
        patch.write_to(&mut journal);
    };
    step();
    step();
    let before = ALLOCATIONS.get();
    assert!(before > 0, "the allocator counts");
    (0..3).for_each(|_| step());
    let allocations = ALLOCATIONS.get() - before;
    assert!(tensor == new);
    allocations
}

#[test]
fn encoder_and_decoder_reused_allocate_nothing() {
    for element in ALL {
        for profile in PROFILES {
            assert_eq!(allocations(&Serial, element, profile, 5), 0, "{element:?} {profile:?}");
        }
    }
    // The jobs of a pool do not either; this one has no threads, which would allocate themselves.
    assert_eq!(allocations(&Pools::Backwards, Element::Bf16, Profile::Wire, 34), 0);
}
