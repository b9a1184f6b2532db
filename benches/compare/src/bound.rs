//! What the information allows: order-0 entropies of "changed or not" and of the ulp step, plain and by base exponent, per tensor.

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

/// The bounds for one bf16 tensor, in bits.
#[must_use]
pub fn bound(base: &[u8], new: &[u8]) -> Bound {
    let mut members = [[0_u64; 2]; 256];
    let mut steps: HashMap<(usize, i32), u64> = HashMap::new();
    for (a, b) in base.chunks_exact(2).zip(new.chunks_exact(2)) {
        let (a, b) = (u16::from_le_bytes([a[0], a[1]]), u16::from_le_bytes([b[0], b[1]]));
        let exponent = usize::from(a >> 7 & 0xff);
        members[exponent][usize::from(a != b)] += 1;
        if a != b {
            *steps.entry((exponent, ordered(b) - ordered(a))).or_default() += 1;
        }
    }
    let mut all_steps: HashMap<i32, u64> = HashMap::new();
    let mut conditional = members.iter().map(|counts| entropy(counts.iter().copied())).sum();
    for exponent in 0..256 {
        let own = steps.iter().filter(|((at, _), _)| *at == exponent);
        conditional += entropy(own.clone().map(|(_, count)| *count));
        own.for_each(|((_, step), count)| *all_steps.entry(*step).or_default() += count);
    }
    let sums = members.iter().fold([0, 0], |sum, counts| [sum[0] + counts[0], sum[1] + counts[1]]);
    Bound { plain: entropy(sums.into_iter()) + entropy(all_steps.into_values()), conditional }
}
