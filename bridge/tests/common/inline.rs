//! A [`Share`] without a GPU: buckets travel in the calls, into engines on the CPU.

use driftless_bridge::Result;
use driftless_bridge::push::Bucket;
use driftless_bridge::push::colocate::{Place, Share};
use driftless_transport::Snapshot;

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
        weights: &dyn Snapshot,
        bucket: &Bucket,
        ranks: u32,
    ) -> Result<Vec<Place>> {
        let mut bytes = Vec::new();
        for &index in &bucket.tensors {
            bytes.extend_from_slice(&weights.bytes(index).unwrap());
        }
        let place = Place::Inline(bytes.into());
        Ok(vec![place; ranks as usize])
    }

    fn released(&self, _slot: usize) -> bool {
        true
    }

    fn close(&mut self) {}
}
