//! Buckets in CUDA memory that the ranks of engines open.

#![allow(unsafe_code, reason = "the CUDA driver is foreign functions on raw addresses")]

use std::ffi::c_char;

use cudarc::driver::sys;
use driftless_transport::Snapshot;

use super::counters::Counters;
use super::{CudaPlace, Place, Share};
use crate::error::Result;
use crate::push::Bucket;
use crate::push::device::{Device, cuda};

/// Memory of one device, for engines whose ranks see that device: their own, or one that theirs can read.
#[derive(Debug)]
pub struct CudaShare {
    device: Device,
    uuid: String,
    /// Made with the first bucket of a push.
    counters: Option<Counters>,
    ranks: usize,
}

impl CudaShare {
    /// Opens the device with this number, of those that this process sees.
    ///
    /// # Errors
    /// [`Error::Root`](crate::Error::Root) when there is no CUDA driver or no such device.
    pub fn open(ordinal: usize) -> Result<Self> {
        let device = Device::open(ordinal)?;
        let uuid = uuid(device.uuid()?);
        Ok(Self { device, uuid, counters: None, ranks: 0 })
    }

    /// UUID of the device, as torch prints it.
    pub fn uuid(&self) -> &str {
        &self.uuid
    }
}

impl Share for CudaShare {
    fn device(&self) -> &'static str {
        "cuda"
    }

    fn local(&self) -> bool {
        true
    }

    fn place(
        &mut self,
        slot: usize,
        weights: &dyn Snapshot,
        bucket: &Bucket,
        ranks: u32,
    ) -> Result<Vec<Place>> {
        self.device.bind()?;
        let address = self.device.place(slot, weights, bucket)?;
        let handle = handle(address)?;
        // Whoever is told reads at once.
        self.device.settle()?;
        let counters = match &mut self.counters {
            Some(counters) => counters,
            none => none.insert(Counters::new()?),
        };
        self.ranks = ranks as usize;
        let own = slot * self.ranks..(slot + 1) * self.ranks;
        counters.arm(own.clone());
        let place = |counter: usize| {
            let (device, counters, counter) = (self.uuid.clone(), counters.name.clone(), counter as u64);
            Place::Cuda(CudaPlace { device, handle, bytes: bucket.bytes, counters, counter })
        };
        Ok(own.map(place).collect())
    }

    fn released(&self, slot: usize) -> bool {
        let own = slot * self.ranks..(slot + 1) * self.ranks;
        self.counters.as_ref().is_none_or(|counters| counters.released(own))
    }

    fn close(&mut self) {
        self.device.vacate();
        self.counters = None;
    }
}

/// What another process opens the allocation at an address with.
fn handle(address: u64) -> Result<[u8; 64]> {
    let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
    // SAFETY: the pointer is to a local that outlives the call; an address that is none is an error.
    let got = unsafe { sys::cuIpcGetMemHandle(&raw mut handle, address) };
    got.result().map_err(cuda("cuIpcGetMemHandle"))?;
    Ok(handle.reserved.map(|byte: c_char| byte as u8))
}

/// As torch prints it: 8, 4, 4, 4 and 12 digits.
fn uuid(bytes: [u8; 16]) -> String {
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    [&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]].join("-")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn a_machine_without_a_device_is_told_so() {
        match CudaShare::open(0) {
            Err(error) => assert!(matches!(error, Error::Root { .. }), "{error}"),
            Ok(share) => println!("skipped: this machine has a GPU, {}", share.uuid()),
        }
    }

    #[test]
    fn devices_have_torchs_names() {
        assert_eq!(uuid(std::array::from_fn(|n| n as u8 * 17)), "00112233-4455-6677-8899-aabbccddeeff");
    }
}
