//! What the vector paths have in common.

use crate::scan::PLANES;

/// Calls the function for the mantissa of `element`: shifts of vectors want a constant.
macro_rules! with_mantissa {
    ($element:expr, $one:ident, $two:ident, $four:ident, $($argument:expr),*) => {
        match $element {
            // Opaque bytes have one class, which no coder asks for.
            Element::Bytes => $one::<7>($($argument),*),
            Element::F8E4M3 => $one::<3>($($argument),*),
            Element::F8E5M2 => $one::<2>($($argument),*),
            Element::F16 => $two::<10>($($argument),*),
            Element::Bf16 => $two::<7>($($argument),*),
            Element::F32 => $four::<23>($($argument),*),
        }
    };
}
pub(super) use with_mantissa;

/// Puts a row into its place in each plane.
#[inline(always)]
pub(super) fn store(planes: &mut [u64], rows: usize, row: usize, words: [u64; PLANES]) {
    (0..PLANES).for_each(|bit| planes[bit * rows + row] = words[bit]);
}
