//! `Codec`: deltas of single tensors, from buffer to buffer.

use crate::error::{self, codec, named};
use crate::publisher::PROFILES;
use crate::tensor::Borrowed;
use driftless::delta::{self, DigestTable, Element, Patch, Profile};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// See the stub.
#[pyclass(frozen, module = "driftless_rl")]
pub(crate) struct Codec {
    profile: Profile,
}

#[pymethods]
impl Codec {
    #[new]
    #[pyo3(signature = (profile = "wire"))]
    fn new(profile: &str) -> PyResult<Self> {
        Ok(Self { profile: named("profile", &PROFILES, profile)? })
    }

    fn encode<'py>(
        &self,
        py: Python<'py>,
        base: &Bound<'py, PyAny>,
        new: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let (base, new) = (Borrowed::new("base".to_owned(), base)?, Borrowed::new("new".to_owned(), new)?);
        let (expected, found) = (base.info.dtype, new.info.dtype);
        if expected != found {
            return Err(error::tensor("new", "its dtype", expected.name(), found.name()));
        }
        let payload = py.detach(|| -> delta::Result<Vec<u8>> {
            let (element, mut payload) = (expected.element(), Vec::new());
            let digests = DigestTable::of(element, base.bytes())?;
            delta::encode(element, base.bytes(), new.bytes(), &digests, self.profile, &mut payload)?;
            Ok(payload)
        });
        Ok(PyBytes::new(py, &payload.map_err(codec)?))
    }

    fn apply(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, PyAny>,
        payload: &Bound<'_, PyBytes>,
    ) -> PyResult<u64> {
        let mut tensor = Borrowed::writable("tensor".to_owned(), tensor)?;
        let element = tensor.info.dtype.element();
        let payload = payload.as_bytes();
        py.detach(|| patch(element, &mut tensor, payload)).map_err(codec)
    }
}

/// Decodes, and only then writes.
fn patch(element: Element, tensor: &mut Borrowed, payload: &[u8]) -> delta::Result<u64> {
    let digests = DigestTable::of(element, tensor.bytes())?;
    let mut patch = Patch::new();
    delta::decode(element, tensor.bytes(), &digests, payload, &mut patch)?;
    patch.apply_to(tensor.bytes_mut())?;
    Ok(patch.changed())
}
