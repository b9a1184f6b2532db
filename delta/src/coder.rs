//! The change coder: positions and steps of one class of one block, as runs and Rice codes.
//!
//! Ranks count the members of a class in the block. A run code with parameter `k` is a string of tokens: `0`
//! skips 2ᵏ members (or the rest), `1` and `k` bits skip that many and mark the next member. It needs no
//! count and no end mark, and costs about 0.05 bits per marked member more than the entropy of a geometric
//! gap.

use crate::bits::{BitReader, BitWriter};
use crate::element::Element;
use crate::error::{Error, Result};
use crate::table::{Class, EXPLICIT, NONE_LARGE, RUN_MAX};

/// Bits of the number that a block adds to the run parameters of its classes.
pub(crate) const SHIFT_BITS: u32 = 3;
/// What the number is counted from.
pub(crate) const SHIFT_BIAS: i32 = 3;

pub(crate) fn corrupt(why: &'static str) -> Error {
    Error::Corrupt { what: "change block", offset: 0, why }
}

/// Marks `ranks` (ascending) among `members`.
#[inline(always)]
fn put_runs(bits: &mut BitWriter<'_>, run: u32, members: u32, ranks: impl Iterator<Item = u32>) {
    let mut next = 0;
    for rank in ranks {
        let gap = rank - next;
        bits.unary(gap >> run, gap & ((1 << run) - 1), run);
        next = rank + 1;
    }
    bits.zeros((members - next).div_ceil(1 << run));
}

/// Calls `mark` for every marked rank, ascending. All ranks are below `members`.
#[inline(always)]
fn get_runs(bits: &mut BitReader<'_>, run: u32, members: u32, mut mark: impl FnMut(u32)) -> Result<()> {
    let mut next = 0;
    while next < members {
        let limit = (members - next).div_ceil(1 << run);
        let skips = bits.unary(limit);
        if skips == limit {
            break;
        }
        let rank = next + (skips << run) + bits.get(run);
        if rank >= members || bits.overrun() {
            return Err(corrupt("a position lies beyond the block"));
        }
        mark(rank);
        next = rank + 1;
    }
    Ok(())
}

/// The run parameter of `class` in a block with this shift. Inverted classes are not shifted.
fn shifted(class: &Class, shift: i32) -> u32 {
    if class.inverted { class.run } else { (class.run as i32 + shift).clamp(0, RUN_MAX as i32) as u32 }
}

/// Writes the changes of one class: `steps[i]` at `ranks[i]`, ranks ascending and below `members`.
#[inline(always)]
pub(crate) fn put_class(
    bits: &mut BitWriter<'_>,
    element: Element,
    class: &Class,
    shift: i32,
    members: u32,
    ranks: &[u16],
    steps: &[i32],
) {
    let run = shifted(class, shift);
    if class.inverted {
        let mut changed = ranks.iter().map(|rank| u32::from(*rank)).peekable();
        put_runs(bits, run, members, (0..members).filter(|rank| changed.next_if_eq(rank).is_none()));
    } else {
        put_runs(bits, run, members, ranks.iter().map(|rank| u32::from(*rank)));
    }
    let explicit = class.large_run == EXPLICIT;
    let least = if explicit { 1 } else { 2 };
    let large = || (0_u32..).zip(steps).filter(|(_, step)| step.unsigned_abs() >= least);
    if class.large_run < EXPLICIT {
        put_runs(bits, class.large_run, steps.len() as u32, large().map(|(at, _)| at));
    }
    for signs in steps.chunks(32) {
        let signs_bits =
            signs.iter().enumerate().fold(0, |all, (at, step)| all | (u32::from(*step < 0) << at));
        bits.put(signs_bits, signs.len() as u32);
    }
    for (_, step) in large() {
        bits.rice(step.unsigned_abs() - least, class.rice, element.bits());
    }
}

/// Reads what [`put_class`] wrote into `ranks` and `steps`, replacing what they held.
#[inline(always)]
pub(crate) fn get_class(
    bits: &mut BitReader<'_>,
    element: Element,
    class: &Class,
    shift: i32,
    members: u32,
    ranks: &mut Vec<u16>,
    steps: &mut Vec<i32>,
) -> Result<()> {
    ranks.clear();
    steps.clear();
    let run = shifted(class, shift);
    if class.inverted {
        let mut next = 0;
        get_runs(bits, run, members, |rank| {
            ranks.extend((next..rank).map(|rank| rank as u16));
            next = rank + 1;
        })?;
        ranks.extend((next..members).map(|rank| rank as u16));
    } else {
        get_runs(bits, run, members, |rank| ranks.push(rank as u16))?;
    }
    let count = ranks.len();
    if class.large_run == EXPLICIT {
        steps.resize(count, 1);
        read_signs(bits, steps);
        for step in steps.iter_mut() {
            *step = step.wrapping_mul(bits.rice(class.rice, element.bits()).wrapping_add(1) as i32);
        }
    } else {
        // A large step waits as ±2 for its size, which comes after all signs.
        steps.resize(count, 1);
        if class.large_run < NONE_LARGE {
            get_runs(bits, class.large_run, count as u32, |at| steps[at as usize] = 2)?;
        }
        read_signs(bits, steps);
        for step in steps.iter_mut().filter(|step| step.unsigned_abs() == 2) {
            *step = (*step >> 1).wrapping_mul(bits.rice(class.rice, element.bits()).wrapping_add(2) as i32);
        }
    }
    if bits.overrun() {
        return Err(corrupt("bits end too early"));
    }
    Ok(())
}

#[inline(always)]
fn read_signs(bits: &mut BitReader<'_>, steps: &mut [i32]) {
    for chunk in steps.chunks_mut(32) {
        let signs = bits.get(chunk.len() as u32);
        for (at, step) in chunk.iter_mut().enumerate() {
            if signs >> at & 1 == 1 {
                *step = -*step;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Members of a class. Miri has no time for whole blocks.
    const MOST: u32 = if cfg!(miri) { 40 } else { 65_536 };

    #[test]
    fn classes_round_trip() {
        let sets: [(u32, Vec<u16>); 5] = [
            (0, vec![]),
            (1, vec![0]),
            (MOST, (0..MOST).map(|rank| rank as u16).collect()),
            (MOST, vec![(MOST - 1) as u16]),
            (MOST.min(1000), (0..MOST.min(1000) as u16).filter(|i| i % 7 != 3).collect()),
        ];
        for (members, ranks) in sets {
            let steps: Vec<i32> =
                ranks.iter().map(|r| [1, -1, 1, 2, -3, i32::MIN, i32::MAX][*r as usize % 7]).collect();
            for (run, large_run, rice) in
                [(0, 0, 0), (4, NONE_LARGE, 0), (5, 3, 1), (16, EXPLICIT, 4), (2, EXPLICIT, 31), (3, 1, 2)]
            {
                for inverted in [false, true] {
                    let class = Class { inverted, run, large_run, rice };
                    let steps: Vec<i32> = steps
                        .iter()
                        .map(|step| if large_run == NONE_LARGE { step.signum() } else { *step })
                        .collect();
                    let mut bytes = Vec::new();
                    let mut bits = BitWriter::new(&mut bytes);
                    put_class(&mut bits, Element::F32, &class, 1, members, &ranks, &steps);
                    bits.finish();
                    let mut bits = BitReader::new(&bytes);
                    let (mut ranks_out, mut steps_out) = (vec![9], vec![9]);
                    get_class(&mut bits, Element::F32, &class, 1, members, &mut ranks_out, &mut steps_out)
                        .unwrap();
                    assert_eq!((&ranks_out, &steps_out), (&ranks, &steps));
                    assert_eq!(bits.finish("test"), Ok(bytes.len()));
                }
            }
        }
    }
}
