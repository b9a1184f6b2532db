//! A [`Share`] without a GPU: buckets travel in the calls, into engines on the CPU.

use driftless_bridge::push::colocate::{Place, Share};
use driftless_bridge::push::{Bucket, Bytes, Weights};
use driftless_bridge::{Error, Result};

/// Places each bucket in the call itself.
#[derive(Debug, Default)]
pub(crate) struct InlineShare;

impl Share for InlineShare {
    fn device(&self) -> &'static str {
        "cpu"
    }

    fn local(&self) -> bool {
        false
    }

    fn place(
        &mut self,
        _slot: usize,
        weights: &dyn Weights,
        bucket: &Bucket,
        ranks: u32,
    ) -> Result<Vec<Place>> {
        let mut bytes = Vec::new();
        for &index in &bucket.tensors {
            match weights.bytes(index)? {
                Bytes::Host(part) => bytes.extend_from_slice(&part),
                Bytes::Device(_) => {
                    let source = "weights in a device's memory cannot travel in a call".into();
                    return Err(Error::Root { what: "the weights".into(), source });
                }
            }
        }
        let place = Place::Inline(bytes.into());
        Ok(vec![place; ranks as usize])
    }

    fn released(&self, _slot: usize) -> bool {
        true
    }

    fn close(&mut self) {}
}
