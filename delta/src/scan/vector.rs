//! What the vector paths have in common.

use crate::scan::PLANES;

/// Groups of two tensors, side by side.
pub(super) type Groups<'a> = std::iter::Zip<std::slice::ChunksExact<'a, u8>, std::slice::ChunksExact<'a, u8>>;

/// A path: the proof that the processor has some features, and calls of what is compiled for them.
macro_rules! vector_path {
    ($(#[$doc:meta])* $name:ident($features:literal, $changed:ident, $planes:ident): $detected:expr) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) struct $name(());

        impl $name {
            pub(super) fn detect() -> Option<Self> {
                ($detected).then_some(Self(()))
            }

            /// `base` and `new` are whole groups.
            pub(super) fn changed(self, size: usize, base: &[u8], new: &[u8], masks: &mut [u64]) -> bool {
                let groups = base.chunks_exact(64 * size).zip(new.chunks_exact(64 * size));
                // SAFETY: `self` proves the features.
                unsafe { $changed(size, groups, masks) }
            }

            /// `base` is whole groups, no more than there are rows.
            pub(super) fn planes(self, element: Element, base: &[u8], first: u32, last: u32, planes: &mut [u64]) {
                // SAFETY: `self` proves the features.
                unsafe { $planes(element, base, first, last, planes) }
            }

            pub(super) fn run<W: Work>(self, work: W) -> W::Output {
                #[target_feature(enable = $features)]
                fn run<W: Work>(work: W) -> W::Output {
                    work.run()
                }
                // SAFETY: `self` proves the features.
                unsafe { run(work) }
            }
        }
    };
}
pub(super) use vector_path;

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
