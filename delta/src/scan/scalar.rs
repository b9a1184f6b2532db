//! The reference: element by element.

use crate::Element;
use crate::table::Table;

pub(super) fn changed(element: Element, base: &[u8], new: &[u8], masks: &mut Vec<u64>) {
    let group = 64 * element.size();
    masks.extend(base.chunks(group).zip(new.chunks(group)).map(|(base, new)| {
        if base == new {
            return 0;
        }
        (0..base.len() / element.size())
            .fold(0, |mask, i| mask | (u64::from(element.load(base, i) != element.load(new, i)) << i))
    }));
}

/// Fills the masks from group `first` on; they are zero before.
pub(super) fn classes(
    element: Element,
    base: &[u8],
    table: &Table,
    masks: &mut [u64],
    groups: usize,
    first: usize,
) {
    let last = table.classes.len() - 1;
    for (group, base) in (first..).zip(base.chunks(64 * element.size())) {
        for i in 0..base.len() / element.size() {
            let exponent = element.exponent(element.load(base, i));
            let class = (exponent.saturating_sub(table.first) as usize).min(last);
            masks[class * groups + group] |= 1 << i;
        }
    }
}
