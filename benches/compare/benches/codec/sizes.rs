//! Bytes of a step in every encoding.

use std::collections::HashMap;
use std::path::PathBuf;

use driftless_compare::bound::{Bound, Directions, advance, bound};
use driftless_compare::data::{Pair, checkpoints};
use driftless_compare::peers::{gaps_zstd, xor_zstd};
use driftless_delta::bundle::{self, Tensor};
use driftless_delta::{DigestTable, Element, Encoder, Motion, Profile, Serial, Source};

use crate::Verdicts;

pub(crate) const HEADER: &str = "data                       density   xor+zstd  gaps+zst      fast      wire         H     H|exp     after   H|exp,m";

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
    /// As `wire`, in the light of the steps before.
    pub(crate) after: f64,
    /// The bound given the exponent and what has moved.
    pub(crate) conditional_after: f64,
}

/// What the steps before a pair have moved, by tensor.
#[derive(Default)]
pub(crate) struct Moved {
    motions: HashMap<String, (Motion, Directions)>,
    encoder: Encoder,
}

impl Moved {
    /// Goes along with a step; returns the bytes that its payloads save when they are coded in the light of those before.
    fn step(&mut self, pairs: &[Pair]) -> i64 {
        pairs.iter().map(|pair| self.tensor(pair)).sum()
    }

    fn tensor(&mut self, Pair { name, base, new, .. }: &Pair) -> i64 {
        let Self { motions, encoder } = self;
        let digests = DigestTable::of(Element::Bf16, base).expect("whole elements");
        let source = Source { element: Element::Bf16, bytes: base, digests: &digests };
        let (motion, directions) = motions
            .entry(name.clone())
            .or_insert_with(|| (Motion::start(source).expect("its own digests"), Directions::new()));
        let (mut plain, mut after) = (Vec::new(), Vec::new());
        encoder.encode(&Serial, source, new, Profile::Wire, &mut plain).expect("equal lengths");
        encoder
            .encode_after(&Serial, source, motion, new, Profile::Wire, &mut after)
            .expect("consecutive steps");
        motion.advance(encoder.moves()).expect("consecutive steps");
        advance(directions, base, new);
        plain.len() as i64 - after.len() as i64
    }
}

impl Sizes {
    /// Sizes of a step on its own.
    pub(crate) fn of(pairs: &[Pair]) -> Sizes {
        Sizes::after(pairs, &mut Moved::default())
    }

    /// Sizes of a step after those that `moved` has seen; it goes along.
    fn after(pairs: &[Pair], moved: &mut Moved) -> Sizes {
        let [fast, wire] = [Profile::Fast, Profile::Wire].map(|profile| file(pairs, profile));
        let none = Directions::new();
        let directions =
            |pair: &Pair| moved.motions.get(&pair.name).map_or(&none, |(_, directions)| directions);
        let bits: Bound = pairs.iter().map(|pair| bound(&pair.base, &pair.new, directions(pair))).sum();
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
            after: wire.0 as f64 - moved.step(pairs) as f64,
            conditional_after: bits.after / 8.0,
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
            after: self.after + other.after,
            conditional_after: self.conditional_after + other.conditional_after,
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
        if self.after < self.wire {
            print!("{:>10.1}{:>10.1}", self.dense / self.after, self.dense / self.conditional_after);
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
        if self.after < self.wire {
            println!(
                "    wire after the steps before {:.1} % smaller, {:.3}x its bound: {:.2}x smaller than xor+zstd ({least_xor}; the bound is {:.2}x), {:.2}x than gaps+zstd",
                100.0 * (1.0 - self.after / self.wire),
                self.after / self.conditional_after,
                self.xor / self.after,
                self.xor / self.conditional_after,
                self.gaps / self.after
            );
        }
        let fast = self.xor / self.fast;
        println!("    fast {fast:.2}x smaller than xor+zstd (at least 1.5: {})", verdicts.of(fast >= 1.5));
    }
}

/// At most so many times the bound, at least so many times smaller than xor and than gaps; near the densities they are set for.
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

/// All bytes of at most `pairs` steps, evenly spaced over the versions. The first version counts as published in full: what has moved since then is
/// what the steps after the first one are coded after.
pub(crate) fn of_trace(versions: &[PathBuf], pairs: usize) -> Result<Sizes, String> {
    let steps = versions.windows(2);
    let stride = steps.len().div_ceil(pairs.max(1)).max(1);
    let (mut sum, mut moved) = (Sizes::default(), Moved::default());
    for (number, step) in steps.enumerate() {
        let pairs = checkpoints(&step[0], &step[1])?;
        if number % stride == 0 {
            sum = sum.add(Sizes::after(&pairs, &mut moved));
        } else {
            moved.step(&pairs);
        }
    }
    Ok(sum)
}
