//! What a delta starts from.

use crate::digest::DigestTable;
use crate::element::Element;
use crate::error::Result;

/// The tensor that a delta starts from.
#[derive(Debug, Clone, Copy)]
pub struct Source<'a> {
    /// Its element type.
    pub element: Element,
    /// Its elements, little-endian.
    pub bytes: &'a [u8],
    /// The digests of `bytes`. They are taken at their word, because a rehash would cost more than a step:
    /// digests of the result are carried over from them. [`Encoder::encode_checked`](crate::Encoder::encode_checked) and
    /// [`DigestTable::verify`] compare.
    pub digests: &'a DigestTable,
}

impl Source<'_> {
    /// Number of elements, if all lengths fit.
    pub(crate) fn elements(&self) -> Result<usize> {
        let elements = self.element.count("base", self.bytes.len())?;
        self.digests.expect_elements(elements)?;
        Ok(elements)
    }
}
