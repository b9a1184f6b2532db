//! Refuses NaN and infinities, unless the version before had them at the same place.

use crate::checkpoint::Checkpoint;
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::snapshot::{Snapshot as _, TensorInfo};

/// Whether a type has NaN that the codec does not know: it takes such elements for bytes.
pub(super) fn is_opaque(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F64 | Dtype::C64 | Dtype::F8E8M0)
}

/// Refuses elements of `new`, which begin at element `start` of the tensor, that are NaN or infinite and were
/// not so in `base`.
///
/// # Errors
/// [`Error::NotFinite`].
pub fn check(tensor: &TensorInfo, start: u64, new: &[u8], base: Option<&[u8]>) -> Result<()> {
    let (dtype, size) = (tensor.dtype, tensor.dtype.size() as usize);
    if is_finite(dtype, new) {
        return Ok(());
    }
    let is_new = |at: usize| base.and_then(|base| base.get(at * size..(at + 1) * size));
    let elements = new.chunks_exact(size).enumerate();
    let mut found = elements
        .filter(|(at, bytes)| !is_finite(dtype, bytes) && is_new(*at) != Some(bytes))
        .map(|(at, _)| start + at as u64);
    let Some(first) = found.next() else { return Ok(()) };
    Err(Error::NotFinite { tensor: tensor.name.clone(), first, count: found.count() as u64 + 1 })
}

/// Refuses a checkpoint with an element that is NaN or infinite.
pub(super) fn check_all(checkpoint: &Checkpoint) -> Result<()> {
    let mut tensors = checkpoint.tensors().iter().enumerate();
    tensors.try_for_each(|(index, tensor)| check(tensor, 0, &checkpoint.bytes(index)?, None))
}

/// Whether all elements are finite; those of types that are no floats are. Bits that are all set in NaN and in
/// infinities, and in nothing else, tell.
fn is_finite(dtype: Dtype, bytes: &[u8]) -> bool {
    // No way out of the loop: it is then done for many elements at once.
    macro_rules! none {
        ($word:ty, $bits:expr) => {{
            let mut found = false;
            for bytes in bytes.as_chunks::<{ size_of::<$word>() }>().0 {
                found |= <$word>::from_le_bytes(*bytes) & $bits == $bits;
            }
            !found
        }};
    }
    match dtype {
        Dtype::F8E4M3 => none!(u8, 0x7f),
        Dtype::F8E5M2 => none!(u8, 0x7c),
        Dtype::F8E8M0 => none!(u8, 0xff),
        Dtype::F16 => none!(u16, 0x7c00),
        Dtype::Bf16 => none!(u16, 0x7f80),
        Dtype::F32 | Dtype::C64 => none!(u32, 0x7f80_0000),
        Dtype::F64 => none!(u64, 0x7ff0 << 48),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_has_its_own_nan_and_infinities() {
        for pattern in 0..=u16::MAX {
            let (bytes, f16_exponent) = (pattern.to_le_bytes(), pattern >> 10 & 0x1f);
            let wide = f32::from_bits(u32::from(pattern) << 16);
            assert_eq!(is_finite(Dtype::Bf16, &bytes), wide.is_finite(), "{pattern:04x}");
            assert_eq!(is_finite(Dtype::F32, &wide.to_le_bytes()), wide.is_finite(), "{pattern:04x}");
            assert_eq!(is_finite(Dtype::F16, &bytes), f16_exponent != 0x1f, "{pattern:04x}");
            let double = f64::from_bits(u64::from(pattern) << 48);
            assert_eq!(is_finite(Dtype::F64, &double.to_le_bytes()), double.is_finite(), "{pattern:04x}");
            let complex = [[0; 4], wide.to_le_bytes()].concat();
            assert_eq!(is_finite(Dtype::C64, &complex), wide.is_finite(), "{pattern:04x}");
            assert!(is_finite(Dtype::I16, &bytes) && is_finite(Dtype::U16, &bytes));
        }
        for byte in 0..=u8::MAX {
            // No infinities, and one NaN of each sign.
            assert_eq!(is_finite(Dtype::F8E4M3, &[byte]), byte != 0x7f && byte != 0xff);
            assert_eq!(is_finite(Dtype::F8E5M2, &[byte]), byte & 0x7f < 0x7c);
            assert_eq!(is_finite(Dtype::F8E8M0, &[byte]), byte != 0xff);
            assert!(is_finite(Dtype::U8, &[byte]));
        }
    }

    #[test]
    fn check_non_finite_of_the_base_is_accepted() {
        let tensor = TensorInfo { name: "a".to_owned(), dtype: Dtype::F32, shape: vec![9] };
        let new: Vec<u8> = [1.0, f32::NAN, 2.0, f32::INFINITY].iter().flat_map(|x| x.to_le_bytes()).collect();
        let mut base = new.clone();
        check(&tensor, 3, &new, Some(&base)).unwrap();
        base[15] = 0;
        let error = check(&tensor, 3, &new, Some(&base)).unwrap_err();
        assert!(matches!(error, Error::NotFinite { first: 6, count: 1, .. }), "{error:?}");
        let error = check(&tensor, 3, &new, None).unwrap_err();
        assert!(matches!(error, Error::NotFinite { first: 4, count: 2, .. }), "{error:?}");
    }
}
