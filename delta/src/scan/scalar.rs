//! The reference: element by element.

use super::GROUP;
use crate::Element;
use crate::classes::Planes;
use crate::table::Table;

pub(super) fn changed(element: Element, base: &[u8], new: &[u8], masks: &mut [u64]) -> bool {
    let group = GROUP * element.size();
    let mut any = false;
    for (mask, (base, new)) in masks.iter_mut().zip(base.chunks(group).zip(new.chunks(group))) {
        *mask = 0;
        if base != new {
            any = true;
            (0..base.len() / element.size())
                .for_each(|i| *mask |= u64::from(element.load(base, i) != element.load(new, i)) << i);
        }
    }
    any
}

/// Fills the rows of `base`, whose elements beyond its end count as class 0.
pub(super) fn planes(element: Element, base: &[u8], table: &Table, rows: &mut [Planes]) {
    let last = table.classes().len() as u32 - 1;
    for (row, base) in rows.iter_mut().zip(base.chunks(GROUP * element.size())) {
        *row = [0; 4];
        for i in 0..base.len() / element.size() {
            let exponent = element.exponent(element.load(base, i));
            let class = exponent.saturating_sub(table.first).min(last);
            (0..4).for_each(|bit| row[bit] |= u64::from(class >> bit & 1) << i);
        }
    }
}
