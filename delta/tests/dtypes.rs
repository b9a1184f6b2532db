//! What the model of each element type is worth: the same bytes coded as that type and as opaque bytes, next
//! to the bound.
//!
//! `cargo test --release -p driftless-delta --test dtypes -- --nocapture` prints the table of the crate's
//! README.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::BTreeMap;

use common::{Random, apply};
use driftless_delta::{DigestTable, Element, Profile, encode};

const ELEMENTS: usize = 1 << 18;

/// Weights from which a rate is found.
const PROBE: usize = 1 << 14;

/// A type of which weights are made: bits of a value, and what codes them.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Float(Element),
    /// Two numbers of four bits to a byte.
    Int4,
}

/// The nearest magnitude of an 8-bit float with so many mantissa bits, of the finite ones.
fn nearest(value: f64, mantissa: i32, bias: i32, largest: u32) -> u32 {
    let magnitude = |bits: u32| {
        let (exponent, fraction) = ((bits >> mantissa) as i32, f64::from(bits & ((1 << mantissa) - 1)));
        let unit = f64::from(1 << mantissa);
        if exponent == 0 {
            fraction / unit * 2_f64.powi(1 - bias)
        } else {
            (1.0 + fraction / unit) * 2_f64.powi(exponent - bias)
        }
    };
    let (mut low, mut high) = (0, largest);
    while high - low > 1 {
        let middle = (low + high) / 2;
        if magnitude(middle) <= value.abs() { low = middle } else { high = middle }
    }
    let bits = if value.abs() - magnitude(low) <= magnitude(high) - value.abs() { low } else { high };
    bits | u32::from(value < 0.0) << 7
}

fn bf16(value: f64) -> u32 {
    let bits = (value as f32).to_bits();
    (bits + 0x7fff + (bits >> 16 & 1)) >> 16
}

impl Kind {
    fn element(self) -> Element {
        if let Self::Float(element) = self { element } else { Element::Bytes }
    }

    /// Bits of a weight of about 0.02, scaled as quantisers do.
    fn bits(self, weight: f64) -> u32 {
        match self {
            Self::Float(Element::F32) => (weight as f32).to_bits(),
            Self::Float(Element::Bf16) => bf16(weight),
            Self::Float(Element::F16) => half::f16::from_f64(weight).to_bits().into(),
            Self::Float(Element::F8E4M3) => nearest(weight * 4480.0, 3, 7, 0x7e),
            Self::Float(Element::F8E5M2) => nearest(weight * 4480.0, 2, 15, 0x7b),
            _ => ((weight * 70.0).round().clamp(-8.0, 7.0) as i32 & 15) as u32,
        }
    }

    /// Bytes of weights before and after a step of the f32 masters, by `rate` times a clipped normal.
    fn pair(self, rate: f64, elements: usize) -> (Vec<u8>, Vec<u8>) {
        let mut random = Random(1);
        let (mut base, mut new) = (Vec::new(), Vec::new());
        let mut weight = || {
            let weight = random.normal() * 0.02;
            let moved = weight + rate * (random.normal() * 0.3).clamp(-1.0, 1.0);
            [weight, moved].map(|weight| self.bits(weight))
        };
        for _ in 0..elements {
            let pair = if self == Self::Int4 {
                let (low, high) = (weight(), weight());
                [low[0] | high[0] << 4, low[1] | high[1] << 4]
            } else {
                weight()
            };
            let size = self.element().size();
            base.extend_from_slice(&pair[0].to_le_bytes()[..size]);
            new.extend_from_slice(&pair[1].to_le_bytes()[..size]);
        }
        (base, new)
    }

    /// The rate at which about `density` of the elements change.
    fn rate(self, density: f64) -> f64 {
        let (mut low, mut high) = (1e-12_f64, 1.0_f64);
        for _ in 0..12 {
            let rate = (low * high).sqrt();
            let (base, new) = self.pair(rate, PROBE);
            let size = self.element().size();
            let changed = base.chunks(size).zip(new.chunks(size)).filter(|(a, b)| a != b).count();
            if (changed as f64) < density * PROBE as f64 { low = rate } else { high = rate }
        }
        (low * high).sqrt()
    }
}

/// Bits of an event that happened `count` times out of `total`.
fn bits(counts: impl Iterator<Item = u64> + Clone) -> f64 {
    let total = counts.clone().sum::<u64>() as f64;
    counts.filter(|count| *count > 0).map(|count| count as f64 * (total / count as f64).log2()).sum()
}

/// Entropy of what changed and by how much, both conditional on the base's exponent, in bytes.
fn bound(element: Element, base: &[u8], new: &[u8]) -> f64 {
    let size = element.size();
    let (width, mantissa) = match element {
        Element::Bytes => (8, 8),
        Element::F8E4M3 => (8, 3),
        Element::F8E5M2 => (8, 2),
        Element::F16 => (16, 10),
        Element::Bf16 => (16, 7),
        Element::F32 => (32, 23),
    };
    let load = |bytes: &[u8]| bytes.iter().rev().fold(0_i64, |all, byte| all << 8 | i64::from(*byte));
    let ordered = |bits: i64| match element {
        Element::Bytes => bits,
        _ if bits >> (width - 1) == 0 => bits,
        _ => (1 << (width - 1)) - 1 - bits,
    };
    let mut steps: BTreeMap<i64, BTreeMap<i64, u64>> = BTreeMap::new();
    for (base, new) in base.chunks(size).zip(new.chunks(size)) {
        let (base, new) = (load(base), load(new));
        let exponent = (base & ((1 << (width - 1)) - 1)) >> mantissa;
        *steps.entry(exponent).or_default().entry(ordered(new) - ordered(base)).or_default() += 1;
    }
    steps.values().map(|counts| bits(counts.values().copied())).sum::<f64>() / 8.0
}

fn size(element: Element, base: &[u8], new: &[u8], profile: Profile) -> usize {
    let digests = DigestTable::of(element, base).unwrap();
    let mut payload = Vec::new();
    encode(element, base, new, &digests, profile, &mut payload).unwrap();
    assert!(apply(element, base, &payload).unwrap().1 == new);
    payload.len()
}

#[test]
fn models_pay() {
    println!("| type | changed | as opaque bytes | `fast` | `wire` | bound | `wire` / bound |");
    println!("|---|---|---|---|---|---|---|");
    let floats = [Element::Bf16, Element::F16, Element::F8E4M3, Element::F8E5M2].map(Kind::Float);
    let cases = floats
        .into_iter()
        .chain([Kind::Int4])
        .flat_map(|kind| [0.003, 0.01, 0.05].map(|density| (kind, kind.rate(density))));
    // Nearly every f32 moves in a step.
    for (kind, rate) in cases.chain([1e-6, 1e-4].map(|rate| (Kind::Float(Element::F32), rate))) {
        let (element, (base, new)) = (kind.element(), kind.pair(rate, ELEMENTS));
        let width = element.size();
        let changed = base.chunks(width).zip(new.chunks(width)).filter(|(a, b)| a != b).count();
        let [wire, fast] = [Profile::Wire, Profile::Fast].map(|profile| size(element, &base, &new, profile));
        let opaque = size(Element::Bytes, &base, &new, Profile::Wire);
        let bound = bound(element, &base, &new);
        let ratio = |bytes: usize| base.len() as f64 / bytes as f64;
        println!(
            "| {kind:?} | {:.2} % | {:.1} | {:.1} | {:.1} | {:.1} | {:.3} |",
            100.0 * changed as f64 / ELEMENTS as f64,
            ratio(opaque),
            ratio(fast),
            ratio(wire),
            base.len() as f64 / bound,
            wire as f64 / bound,
        );
        if let Kind::Float(_) = kind {
            assert!(wire <= fast && fast <= opaque, "the model must pay");
            assert!(wire as f64 <= 0.9 * opaque as f64, "{kind:?}: {wire} of {opaque}");
        }
        // Opaque bytes have no model of what lies in them: two weights to a byte move it by one or by
        // sixteen.
        let most = if kind == Kind::Int4 { 1.3 } else { 1.15 };
        // Of steps nearly all of which are different, so few samples tell too low a bound.
        assert!(element == Element::F32 || wire as f64 <= most * bound, "{kind:?}: {wire} of {bound}");
    }
}
