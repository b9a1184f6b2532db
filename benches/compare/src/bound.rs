//! What the information allows: order-0 entropies of "changed or not" and of the ulp step, plain and by base
//! exponent, per tensor.

use std::collections::HashMap;

/// Bits that a bf16 tensor's changes are worth.
#[derive(Debug, Default, Clone, Copy)]
pub struct Bound {
    /// H(positions) + H(steps).
    pub plain: f64,
    /// Both conditioned on the exponent of the base.
    pub conditional: f64,
}

fn ordered(bits: u16) -> i32 {
    i32::from(if bits & 0x8000 != 0 { !bits } else { bits | 0x8000 })
}

fn entropy(counts: impl Iterator<Item = u64>) -> f64 {
    let counts: Vec<f64> = counts.map(|count| count as f64).collect();
    let total: f64 = counts.iter().sum();
    counts.iter().filter(|count| **count > 0.0).map(|count| count * (total / count).log2()).sum()
}

impl std::iter::Sum for Bound {
    fn sum<I: Iterator<Item = Bound>>(bounds: I) -> Bound {
        bounds.fold(Bound::default(), |sum, bound| Bound {
            plain: sum.plain + bound.plain,
            conditional: sum.conditional + bound.conditional,
        })
    }
}

/// Exponent of the base, and step, of each element.
fn steps(base: &[u8], new: &[u8]) -> impl Iterator<Item = (usize, i32)> {
    base.chunks_exact(2).zip(new.chunks_exact(2)).map(|(a, b)| {
        let (a, b) = (u16::from_le_bytes([a[0], a[1]]), u16::from_le_bytes([b[0], b[1]]));
        (usize::from(a >> 7 & 0xff), ordered(b) - ordered(a))
    })
}

/// Contexts there are: exponents.
const CONTEXTS: usize = 256;

/// H(positions) + H(steps), both given the context: its number, and the step, of each element.
fn given(elements: impl Iterator<Item = (usize, i32)>) -> f64 {
    let mut unchanged = [0; CONTEXTS];
    let mut changed: [HashMap<i32, u64>; CONTEXTS] = std::array::from_fn(|_| HashMap::new());
    for (context, step) in elements {
        if step == 0 {
            unchanged[context] += 1;
        } else {
            *changed[context].entry(step).or_default() += 1;
        }
    }
    // The entropy of positions, and that of steps where there is one, add up to that of steps with 0 among
    // them.
    let steps = unchanged.into_iter().zip(changed);
    steps.map(|(zeros, others)| entropy([zeros].into_iter().chain(others.into_values()))).sum()
}

/// The bounds for one bf16 tensor, in bits.
#[must_use]
pub fn bound(base: &[u8], new: &[u8]) -> Bound {
    Bound { plain: given(steps(base, new).map(|(_, step)| (0, step))), conditional: given(steps(base, new)) }
}
