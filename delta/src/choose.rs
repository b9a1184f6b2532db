//! Chooses the coder table of a segment from what changed in it. Only the encoder does this: any table
//! decodes.

use crate::bits::ESCAPE;
use crate::classes::Sample;
use crate::element::Element;
use crate::scan::{GROUP, Path};
use crate::table::{CLASSES_MAX, Class, EXPLICIT, NONE_LARGE, RUN_MAX, Table};

/// What a delta is optimised for. A decoder needs no such choice: it does what the payload says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Profile {
    /// Smallest. Decoding reads the whole base, for the classes its exponents define.
    #[default]
    Wire,
    /// Decoding reads the base only where it changes.
    Fast,
}

/// Bits that one more class costs: its parameters, and the open end of its run codes in every block.
const CLASS_COST: f64 = 8.0;
const CLASS_COST_PER_BLOCK: f64 = 1.5;

/// Counts of one exponent.
#[derive(Clone, Copy)]
struct Tally {
    members: f64,
    changed: u32,
    /// Steps by the number of bits of their size.
    sizes: [u32; 33],
}

impl Tally {
    const ZERO: Self = Self { members: 0.0, changed: 0, sizes: [0; 33] };

    fn is_empty(&self) -> bool {
        self.members == 0.0 && self.changed == 0
    }

    fn add(&mut self, other: &Self) {
        self.members += other.members;
        self.changed += other.changed;
        for (mine, other) in self.sizes.iter_mut().zip(&other.sizes) {
            *mine += other;
        }
    }
}

/// Samples from which the exponents that matter are guessed.
const SAMPLES: usize = 1024;

/// What changed in a segment, by class of the base: its exponent less that of the first class, within 0 to
/// 15.
pub(crate) struct Statistics {
    element: Element,
    profile: Profile,
    /// Exponent of the first class, once something changed; it stays unknown where there is one class only.
    first: Option<u32>,
    tallies: [Tally; CLASSES_MAX],
    blocks: u32,
    /// One row of so many is counted.
    apart: usize,
}

impl Default for Statistics {
    fn default() -> Self {
        let (element, profile) = (Element::Bytes, Profile::Fast);
        Self { element, profile, first: None, tallies: [Tally::ZERO; CLASSES_MAX], blocks: 0, apart: 1 }
    }
}

impl Statistics {
    /// Starts over for a segment of so many bytes.
    pub(crate) fn begin(&mut self, element: Element, profile: Profile, segment_bytes: usize) {
        (self.element, self.profile) = (element, profile);
        (self.first, self.blocks) = (None, 0);
        self.tallies.fill(Tally::ZERO);
        self.apart = if segment_bytes / element.size() < 0x8_0000 { 1 } else { 4 };
    }

    /// Exponent of the first class; `None` if there is only one class, or nothing changed so far.
    pub(crate) fn first(&self) -> Option<u32> {
        self.first
    }

    /// Chooses the exponents that classes may tell apart, before the first change, from samples of the
    /// segment.
    pub(crate) fn see(&mut self, base: &[u8]) {
        if self.first.is_some() || self.profile == Profile::Fast || self.element == Element::Bytes {
            return;
        }
        let mut counts = [0_u32; 256];
        let elements = base.len() / self.element.size();
        for index in (0..elements).step_by((elements / SAMPLES) | 1) {
            counts[self.element.exponent(self.element.load(base, index)) as usize & 0xff] += 1;
        }
        // The highest place that covers the most, but for one exponent above: weights are many near the
        // largest, and rare beyond.
        let highest = counts.iter().rposition(|count| *count > 0).unwrap_or(0);
        let top = (highest + 1).min(self.element.exponent(self.element.mask()) as usize);
        let mut below = [0_u32; 257];
        for (exponent, count) in counts.iter().enumerate() {
            below[exponent + 1] = below[exponent] + count;
        }
        let covered = |first: usize| below[256.min(first + CLASSES_MAX)] - below[first + 1];
        let first = (0..=top.saturating_sub(CLASSES_MAX - 1)).max_by_key(|first| covered(*first));
        self.first = first.map(|first| first as u32);
    }

    /// Counts a change.
    #[inline(always)]
    pub(crate) fn change(&mut self, base: u32, step: i32) {
        let tally = &mut self.tallies[self.class(base)];
        tally.changed += 1;
        tally.sizes[(32 - step.unsigned_abs().leading_zeros()) as usize] += 1;
    }

    #[inline(always)]
    fn class(&self, base: u32) -> usize {
        // Without a first exponent there is one class: nothing is above `u32::MAX`.
        let class = self.element.exponent(base).saturating_sub(self.first.unwrap_or(u32::MAX));
        class.min(CLASSES_MAX as u32 - 1) as usize
    }

    /// Counts the elements of a block that has changes, whose classes `planes` holds.
    pub(crate) fn block(&mut self, path: Path, elements: usize, planes: &[u64]) {
        self.blocks += 1;
        if self.first.is_none() {
            self.tallies[0].members += elements as f64;
            return;
        }
        let mut counts = path.run(Sample { planes, apart: self.apart });
        let rows = elements.div_ceil(GROUP);
        if (rows - 1).is_multiple_of(self.apart) {
            // What the last row lacks was counted for class 0.
            counts[0] -= (rows * GROUP - elements) as u64;
        }
        let apart = self.apart as f64;
        for (tally, count) in self.tallies.iter_mut().zip(counts) {
            tally.members += apart * count as f64;
        }
    }

    /// The cheapest table found.
    pub(crate) fn table(&self) -> Table {
        let mut all = Tally::ZERO;
        self.tallies.iter().for_each(|tally| all.add(tally));
        let flat = self.best_class(&all);
        match self.best_cut() {
            Some((cost, table)) if cost < flat.1 => table,
            _ => Table::new(0, [flat.0]),
        }
    }

    /// The best table of 2 classes or more, and its bits: classes are single exponents, those at both ends
    /// are merged while that saves bits.
    fn best_cut(&self) -> Option<(f64, Table)> {
        let used = |at: &usize| !self.tallies[*at].is_empty();
        let range = (0..CLASSES_MAX).find(used)?..(0..CLASSES_MAX).rev().find(used)? + 1;
        let first = self.first? + range.start as u32;
        let none = (Class::UNUSED, 0.0);
        let (mut single, mut low, mut high) = ([none; CLASSES_MAX], [none; CLASSES_MAX], [none; CLASSES_MAX]);
        let (mut below, mut above) = (Tally::ZERO, Tally::ZERO);
        for (at, tally) in self.tallies[range.clone()].iter().enumerate() {
            single[at] = self.best_class(tally);
            below.add(tally);
            low[at] = self.best_class(&below);
        }
        for (at, tally) in self.tallies[range.clone()].iter().enumerate().rev() {
            above.add(tally);
            high[at] = self.best_class(&above);
        }
        let mut best: Option<(f64, usize, usize)> = None;
        for (from, (_, low_cost)) in low[..range.len()].iter().enumerate() {
            let mut cost = *low_cost;
            for to in from + 1..range.len() {
                let total = cost + high[to].1 + 8.0;
                if best.is_none_or(|best| total < best.0) {
                    best = Some((total, from, to));
                }
                cost += single[to].1;
            }
        }
        let (cost, from, to) = best?;
        let classes =
            [low[from].0].into_iter().chain(single[from + 1..to].iter().map(|c| c.0)).chain([high[to].0]);
        Some((cost, Table::new(first + from as u32, classes)))
    }

    /// Best parameters for a class with these counts, and the bits they will take.
    fn best_class(&self, tally: &Tally) -> (Class, f64) {
        let changed = f64::from(tally.changed);
        // Half a sample more keeps a thin sample from looking certain.
        let members = tally.members.max(changed) + (self.apart - 1) as f64 / 2.0;
        let density = (changed / members.max(1.0)).min(1.0);
        let inverted = density > 0.5;
        let marked = if inverted { members - changed } else { changed };
        let (run, per_mark) = best_run(if inverted { 1.0 - density } else { density }, RUN_MAX);
        let (large_run, rice, steps) = self.best_steps(tally);
        let blocks = if tally.is_empty() { 0 } else { self.blocks };
        let fixed = CLASS_COST + CLASS_COST_PER_BLOCK * f64::from(blocks);
        (Class { inverted, run, large_run, rice }, marked * per_mark + steps + changed + fixed)
    }

    /// Best (run of large steps or [`EXPLICIT`], Rice parameter) and the bits of all step sizes.
    fn best_steps(&self, tally: &Tally) -> (u32, u32, f64) {
        let large: u32 = tally.sizes[2..].iter().sum();
        if large == 0 {
            return (NONE_LARGE, 0, 0.0);
        }
        let (rice, sizes) = self.best_rice(tally, 2);
        let (explicit_rice, explicit) = self.best_rice(tally, 1);
        let (run, per_large) = best_run(f64::from(large) / f64::from(tally.changed.max(1)), EXPLICIT - 1);
        let implied = sizes + f64::from(large) * per_large;
        if explicit < implied { (EXPLICIT, explicit_rice, explicit) } else { (run, rice, implied) }
    }

    /// Best Rice parameter for sizes from `least` up, and its bits. Sizes of one bit length are taken as
    /// their middle.
    fn best_rice(&self, tally: &Tally, least: u32) -> (u32, f64) {
        let width = self.element.bits();
        let longest = tally.sizes.iter().rposition(|count| *count > 0).unwrap_or(0) as u32;
        let cost = |rice: u32| -> u64 {
            let bits = |length: u32| {
                let middle = (3_u64 << (length - 1)) / 2 - u64::from(least);
                let quotient = (middle >> rice) as u32;
                u64::from(if quotient < ESCAPE { quotient + 1 + rice } else { ESCAPE + width })
            };
            let counts = (least..=longest).zip(&tally.sizes[least as usize..]);
            counts.map(|(length, count)| u64::from(*count) * bits(length)).sum()
        };
        let costs = (0..longest.max(1)).map(|rice| (rice, cost(rice)));
        costs.min_by_key(|(_, cost)| *cost).map_or((0, 0.0), |(rice, cost)| (rice, cost as f64))
    }
}

/// Exponent of the power of two at or below `x`, which is positive and normal. Read from its bits, as powers
/// are multiplied out here: the last digits of logarithms and powers depend on the machine, and what is
/// encoded must not.
pub(crate) fn floor_log2(x: f64) -> i32 {
    (x.to_bits() >> 52 & 0x7ff) as i32 - 1023
}

/// Best run parameter up to `max` for marks of this density, and the expected bits per mark.
fn best_run(density: f64, max: u32) -> (u32, f64) {
    if density <= 0.0 {
        return (max, 0.0);
    }
    let bits = |run: u32| {
        let full = (0..run).fold(1.0 - density, |full, _| full * full);
        f64::from(run) + 1.0 / (1.0 - full).max(f64::MIN_POSITIVE)
    };
    // A run as long as half of the gaps is near the best; so is one of its neighbours.
    let near = floor_log2(std::f64::consts::LN_2 / density).clamp(0, max as i32) as u32;
    (near.saturating_sub(1)..=max.min(near + 1))
        .map(|run| (run, bits(run)))
        .min_by(|a, b| a.1.total_cmp(&b.1))
        .unwrap_or((0, 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_power_of_two_at_or_below() {
        for exponent in -1022..=1023 {
            let power = f64::from_bits(((exponent + 1023) as u64) << 52);
            let last = f64::from_bits(power.to_bits() | ((1 << 52) - 1));
            assert_eq!([power, last].map(floor_log2), [exponent; 2]);
        }
    }
}
