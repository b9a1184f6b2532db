//! Passes over dense bytes: which elements changed, which class each belongs to. One bit per element, 64 to a group.

use crate::Element;
use crate::table::Table;

/// Sets bit `i % 64` of `masks[i / 64]` where element `i` differs. The slices have one length.
pub(crate) fn changed(element: Element, base: &[u8], new: &[u8], masks: &mut Vec<u64>) {
    masks.clear();
    let size = element.size();
    masks.extend(base.chunks(64 * size).zip(new.chunks(64 * size)).map(|(base, new)| {
        if base == new {
            return 0;
        }
        (0..base.len() / size)
            .fold(0, |mask, i| mask | (u64::from(element.load(base, i) != element.load(new, i)) << i))
    }));
}

/// Masks of every class of `table`, class after class, `groups` words each.
pub(crate) fn classes(element: Element, base: &[u8], table: &Table, masks: &mut Vec<u64>) {
    masks.clear();
    let size = element.size();
    let groups = (base.len() / size).div_ceil(64);
    let last = table.classes.len() - 1;
    masks.resize(groups * (last + 1), 0);
    for (group, base) in base.chunks(64 * size).enumerate() {
        for i in 0..base.len() / size {
            let exponent = element.exponent(element.load(base, i));
            let class = (exponent.saturating_sub(table.first) as usize).min(last);
            masks[class * groups + group] |= 1 << i;
        }
    }
}

/// Positions of the set bits of `mask`, ascending.
pub(crate) fn ones(mut mask: u64) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let at = mask.trailing_zeros();
        (mask != 0).then(|| {
            mask &= mask - 1;
            at
        })
    })
}

/// Position of the `rank`-th set bit of `mask`, which has more than `rank`.
pub(crate) fn select(mut mask: u64, rank: u32) -> u32 {
    for _ in 0..rank {
        mask &= mask - 1;
    }
    mask.trailing_zeros()
}
