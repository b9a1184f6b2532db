//! Shared by the tests of the crate: seeded data.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::sync::atomic::{AtomicUsize, Ordering};

use driftless_delta::{DigestTable, Element, Patch, Pool, Profile, Result, decode};
pub(crate) use driftless_testkit::random::Random;

pub(crate) const ALL: [Element; 6] =
    [Element::Bytes, Element::F8E4M3, Element::F8E5M2, Element::F16, Element::Bf16, Element::F32];

pub(crate) const PROFILES: [Profile; 2] = [Profile::Wire, Profile::Fast];

pub(crate) fn random_bytes(length: usize, seed: u64) -> Vec<u8> {
    let mut random = Random(seed);
    (0..length).map(|_| random.next() as u8).collect()
}

/// Weights around 0.02 and a copy in which about `density` of the elements moved by a few patterns.
pub(crate) fn noisy(element: Element, elements: usize, density: f64, seed: u64) -> (Vec<u8>, Vec<u8>) {
    let mut random = Random(seed);
    let (mut base, mut new) = (Vec::new(), Vec::new());
    for _ in 0..elements {
        let weight = (random.normal() * 0.02) as f32;
        let bits = match element {
            Element::F32 => weight.to_bits(),
            Element::Bf16 => weight.to_bits() >> 16,
            Element::F16 => half::f16::from_f32_const(weight).to_bits().into(),
            _ => (random.next() as u8).into(),
        };
        let step = if random.unit() < density { (random.normal() * 2.0).round() as i32 } else { 0 };
        let moved = bits.wrapping_add(step as u32);
        base.extend_from_slice(&bits.to_le_bytes()[..element.size()]);
        new.extend_from_slice(&moved.to_le_bytes()[..element.size()]);
    }
    (base, new)
}

/// Decodes and applies to a copy of the base.
pub(crate) fn apply(element: Element, base: &[u8], payload: &[u8]) -> Result<(Patch, Vec<u8>)> {
    let digests = DigestTable::of(element, base)?;
    let mut patch = Patch::new();
    decode(element, base, &digests, payload, &mut patch)?;
    let mut tensor = base.to_vec();
    patch.apply_to(&mut tensor)?;
    Ok((patch, tensor))
}

/// Pools, some of which do not do what they should.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Pools {
    /// On this thread, the last job first.
    Backwards,
    Threads(usize),
    /// Leaves out every other job.
    Lazy,
    /// Does jobs twice, and some that do not exist.
    Wild,
}

impl Pool for Pools {
    fn threads(&self) -> usize {
        if let Self::Threads(threads) = self { *threads } else { 2 }
    }

    fn run(&self, jobs: usize, job: &(dyn Fn(usize) + Sync)) {
        match self {
            Self::Backwards => (0..jobs).rev().for_each(job),
            Self::Threads(threads) => {
                let next = AtomicUsize::new(0);
                let take = || next.fetch_add(1, Ordering::Relaxed);
                let work = || std::iter::repeat_with(take).take_while(|at| *at < jobs).for_each(job);
                std::thread::scope(|scope| (0..*threads).for_each(|_| drop(scope.spawn(work))));
            }
            Self::Lazy => (0..jobs).step_by(2).for_each(job),
            Self::Wild => (0..jobs + 3).chain(0..jobs).chain([usize::MAX]).for_each(job),
        }
    }
}
