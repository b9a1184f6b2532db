//! Bytes of a step in every encoding.

use std::path::PathBuf;

use driftless_compare::bound::{Bound, bound};
use driftless_compare::data::{Pair, checkpoints};
use driftless_compare::peers::{gaps_zstd, xor_zstd};
use driftless_delta::Profile;
use driftless_delta::bundle::{self, Tensor};

use crate::Verdicts;

pub(crate) const HEADER: &str =
    "data                       density   xor+zstd  gaps+zst      fast      wire         H     H|exp";

/// Bytes of one step, or of several together.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Sizes {
    /// The new state itself.
    pub(crate) dense: f64,
    changed: f64,
    pub(crate) xor: f64,
    pub(crate) gaps: f64,
    pub(crate) fast: f64,
    pub(crate) wire: f64,
    /// H(positions) + H(steps).
    pub(crate) plain: f64,
    /// Both conditioned on the exponent of the base.
    pub(crate) conditional: f64,
}

impl Sizes {
    /// Sizes of a step.
    pub(crate) fn of(pairs: &[Pair]) -> Sizes {
        let [fast, wire] = [Profile::Fast, Profile::Wire].map(|profile| file(pairs, profile));
        let bits: Bound = pairs.iter().map(|pair| bound(&pair.base, &pair.new)).sum();
        let of_pairs = |bytes: fn(&Pair) -> usize| pairs.iter().map(bytes).sum::<usize>() as f64;
        Sizes {
            dense: of_pairs(|pair| pair.new.len()),
            changed: wire.1 as f64,
            xor: of_pairs(|pair| xor_zstd::encode(&pair.base, &pair.new).0.len()),
            gaps: of_pairs(|pair| {
                let (gaps, values, _) = gaps_zstd::encode(&pair.base, &pair.new);
                gaps.len() + values.len()
            }),
            fast: fast.0 as f64,
            wire: wire.0 as f64,
            plain: bits.plain / 8.0,
            conditional: bits.conditional / 8.0,
        }
    }

    fn add(self, other: Sizes) -> Sizes {
        Sizes {
            dense: self.dense + other.dense,
            changed: self.changed + other.changed,
            xor: self.xor + other.xor,
            gaps: self.gaps + other.gaps,
            fast: self.fast + other.fast,
            wire: self.wire + other.wire,
            plain: self.plain + other.plain,
            conditional: self.conditional + other.conditional,
        }
    }

    /// Changed elements among all.
    pub(crate) fn density(&self) -> f64 {
        2.0 * self.changed / self.dense
    }

    pub(crate) fn print(&self, name: &str) {
        print!("{name:<26}{:>8.3}%", 100.0 * self.density());
        for bytes in [self.xor, self.gaps, self.fast, self.wire, self.plain, self.conditional] {
            print!("{:>10.1}", self.dense / bytes);
        }
        println!();
    }

    /// What was to be reached at this density, if anything.
    pub(crate) fn judge(&self, verdicts: &mut Verdicts) {
        let Some([most, least_xor, least_gaps]) = targets(self.density()) else { return };
        let of_bound = self.wire / self.conditional;
        println!("    wire {of_bound:.3}x the bound (at most {most}: {})", verdicts.of(of_bound <= most));
        for (peer, theirs, least) in [("xor+zstd", self.xor, least_xor), ("gaps+zstd", self.gaps, least_gaps)]
        {
            let (ours, possible) = (theirs / self.wire, theirs / self.conditional);
            let verdict = verdicts.of(ours >= least);
            println!(
                "    wire {ours:.2}x smaller than {peer} (at least {least}: {verdict}; the bound is {possible:.2}x)"
            );
        }
        let fast = self.xor / self.fast;
        println!("    fast {fast:.2}x smaller than xor+zstd (at least 1.5: {})", verdicts.of(fast >= 1.5));
    }
}

/// At most so many times the bound, at least so many times smaller than xor and than gaps; near the densities
/// they are set for.
fn targets(density: f64) -> Option<[f64; 3]> {
    match density {
        0.002..0.006 => Some([1.15, 2.7, 1.95]),
        0.006..0.1 => Some([1.08, 2.9, 2.1]),
        _ => None,
    }
}

/// Bytes of the whole delta file, and elements that changed.
fn file(pairs: &[Pair], profile: Profile) -> (usize, u64) {
    let (base, new): (Vec<Tensor<'_>>, Vec<Tensor<'_>>) =
        pairs.iter().map(|pair| pair.tensors().into()).unzip();
    let mut out = Vec::new();
    let summary = bundle::encode(&base, &new, profile, &mut out).expect("the same names and shapes");
    (out.len(), summary.changed)
}

/// All bytes of at most `pairs` steps, evenly spaced over the versions.
pub(crate) fn of_trace(versions: &[PathBuf], pairs: usize) -> Result<Sizes, String> {
    let steps = versions.windows(2);
    let stride = steps.len().div_ceil(pairs.max(1)).max(1);
    let mut sum = Sizes::default();
    for step in steps.step_by(stride) {
        sum = sum.add(Sizes::of(&checkpoints(&step[0], &step[1])?));
    }
    Ok(sum)
}
