//! Registered memory for transfers.
#![expect(unsafe_code, reason = "UCX is foreign functions on raw memory")]

use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::{fmt, slice};

use driftless_ucx_sys as sys;

use super::{Context, SELF, check};
use crate::error::Result;

/// Memory for transfers, registered once and used again.
pub struct Bucket {
    context: Arc<Context>,
    memory: NonNull<u8>,
    bytes: usize,
    handle: sys::ucp_mem_h,
}

// SAFETY: the memory belongs to the bucket alone, and UCX lets any thread unregister it.
// `links_of_one_fabric_work_on_threads` moves buckets to threads.
unsafe impl Send for Bucket {}

impl Bucket {
    pub(super) fn new(context: Arc<Context>, bytes: usize) -> Result<Self> {
        // UCX allocates what it can share: peers of this host then reach it without a copy between.
        let length = bytes.max(1);
        let params = sys::ucp_mem_map_params_t {
            field_mask: u64::from(
                sys::UCP_MEM_MAP_PARAM_FIELD_ADDRESS
                    | sys::UCP_MEM_MAP_PARAM_FIELD_LENGTH
                    | sys::UCP_MEM_MAP_PARAM_FIELD_FLAGS,
            ),
            address: ptr::null_mut(),
            length,
            flags: sys::UCP_MEM_MAP_ALLOCATE,
            prot: 0,
            memory_type: sys::UCS_MEMORY_TYPE_HOST,
        };
        let mut handle = ptr::null_mut();
        // SAFETY: no address and the flag ask UCX for memory; the handle is written before it is read.
        let status = unsafe { context.ucp.ucp_mem_map(context.handle, &raw const params, &raw mut handle) };
        check(context.ucp, SELF, "make a bucket in", status)?;
        let mut found = sys::ucp_mem_attr_t {
            field_mask: u64::from(sys::UCP_MEM_ATTR_FIELD_ADDRESS | sys::UCP_MEM_ATTR_FIELD_LENGTH),
            address: ptr::null_mut(),
            length: 0,
            mem_type: sys::UCS_MEMORY_TYPE_HOST,
        };
        // SAFETY: the handle is that of the memory; what was asked for is written.
        let status = unsafe { context.ucp.ucp_mem_query(handle, &raw mut found) };
        // From here on it is given back when dropped.
        let memory = NonNull::new(found.address.cast()).unwrap_or(NonNull::dangling());
        let bucket = Self { context, memory, bytes: length.min(found.length), handle };
        check(bucket.context.ucp, SELF, "make a bucket in", status)?;
        // SAFETY: so many bytes are there, for nobody else yet; not every way to allocate them writes to
        // them.
        unsafe {
            ptr::write_bytes(bucket.memory.as_ptr(), 0, bucket.bytes);
        }
        Ok(bucket)
    }

    pub(super) fn pointer(&self) -> *mut u8 {
        self.memory.as_ptr()
    }
}

impl Deref for Bucket {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the memory is initialised, and while a transfer may write to it the link owns the bucket,
        // so that nobody has this reference. The tests of transfers that are given up would find the bucket's
        // memory freed or shared otherwise.
        unsafe { slice::from_raw_parts(self.memory.as_ptr(), self.bytes) }
    }
}

impl DerefMut for Bucket {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the bucket is borrowed mutably.
        unsafe { slice::from_raw_parts_mut(self.memory.as_ptr(), self.bytes) }
    }
}

impl fmt::Debug for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bucket").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl Drop for Bucket {
    fn drop(&mut self) {
        // SAFETY: UCX allocated it, no transfer of this process uses it any more, and it is given back once.
        let status = unsafe { self.context.ucp.ucp_mem_unmap(self.context.handle, self.handle) };
        if let Err(error) = check(self.context.ucp, SELF, "free memory of", status) {
            tracing::warn!(%error, bytes = self.bytes, "memory is not given back");
        }
    }
}
