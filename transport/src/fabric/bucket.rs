//! Registered memory, for transfers of our own and for peers to read and write.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::Arc;

use driftless_ucx_sys as sys;

use super::{Context, SELF, check};
use crate::error::{Error, Result};

/// Longest packed key that is taken from a peer: UCX's have some tens of bytes for each network device.
const KEY_BYTES_MAX: usize = 64 << 10;

/// Memory for transfers, registered once and used again.
pub struct Bucket {
    context: Arc<Context>,
    memory: NonNull<u8>,
    bytes: usize,
    handle: sys::ucp_mem_h,
}

// SAFETY: the memory belongs to the bucket alone, and UCX lets any thread unregister it. `links_of_one_fabric_work_on_threads` moves buckets to
// threads.
#[allow(unsafe_code, reason = "see above")]
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
        #[allow(unsafe_code, reason = "foreign call")]
        let status = unsafe { context.ucp.ucp_mem_map(context.handle, &raw const params, &raw mut handle) };
        check(context.ucp, SELF, "make a bucket in", status)?;
        let mut found = sys::ucp_mem_attr_t {
            field_mask: u64::from(sys::UCP_MEM_ATTR_FIELD_ADDRESS | sys::UCP_MEM_ATTR_FIELD_LENGTH),
            address: ptr::null_mut(),
            length: 0,
            mem_type: sys::UCS_MEMORY_TYPE_HOST,
        };
        // SAFETY: the handle is that of the memory; what was asked for is written.
        #[allow(unsafe_code, reason = "foreign call")]
        let status = unsafe { context.ucp.ucp_mem_query(handle, &raw mut found) };
        // From here on it is given back when dropped.
        let memory = NonNull::new(found.address.cast()).unwrap_or(NonNull::dangling());
        let bucket = Self { context, memory, bytes: length.min(found.length), handle };
        check(bucket.context.ucp, SELF, "make a bucket in", status)?;
        // SAFETY: so many bytes are there, for nobody else yet; not every way to allocate them writes to them.
        #[allow(unsafe_code, reason = "memory of UCX")]
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
        // SAFETY: the memory is initialised, and while a transfer may write to it the link owns the bucket, so that nobody has this reference.
        // The tests of transfers that are given up would find the bucket's memory freed or shared otherwise.
        #[allow(unsafe_code, reason = "see above")]
        unsafe {
            slice::from_raw_parts(self.memory.as_ptr(), self.bytes)
        }
    }
}

impl DerefMut for Bucket {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the bucket is borrowed mutably.
        #[allow(unsafe_code, reason = "see above")]
        unsafe {
            slice::from_raw_parts_mut(self.memory.as_ptr(), self.bytes)
        }
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
        #[allow(unsafe_code, reason = "foreign call")]
        let status = unsafe { self.context.ucp.ucp_mem_unmap(self.context.handle, self.handle) };
        if let Err(error) = check(self.context.ucp, SELF, "free memory of", status) {
            tracing::warn!(%error, bytes = self.bytes, "memory is not given back");
        }
    }
}

/// Memory that peers read and write by themselves, at any moment. It is never lent as a slice, only copied.
#[derive(Debug)]
pub struct Window {
    bucket: Bucket,
}

impl Window {
    /// Opens a bucket to whoever gets the [key](Window::key).
    #[must_use]
    pub fn new(bucket: Bucket) -> Self {
        Self { bucket }
    }

    /// What a peer needs to read and write the window, for as long as it exists.
    ///
    /// # Errors
    /// [`Error::Link`] if UCX cannot pack it.
    pub fn key(&self) -> Result<WindowKey> {
        let context = &self.bucket.context;
        let (mut packed, mut length) = (ptr::null_mut(), 0);
        // SAFETY: the handle is the registration's; both results are written before they are read.
        #[allow(unsafe_code, reason = "foreign call")]
        let status = unsafe {
            context.ucp.ucp_rkey_pack(context.handle, self.bucket.handle, &raw mut packed, &raw mut length)
        };
        check(context.ucp, SELF, "pack a key of", status)?;
        // SAFETY: UCX packed that many bytes there, which are released once, afterwards.
        #[allow(unsafe_code, reason = "foreign memory")]
        let rkey = unsafe {
            let rkey = slice::from_raw_parts(packed.cast::<u8>(), length).to_vec();
            context.ucp.ucp_rkey_buffer_release(packed);
            rkey
        };
        Ok(WindowKey { address: self.bucket.pointer() as u64, bytes: self.bucket.bytes as u64, rkey })
    }

    /// Copies out of the window, from `offset`.
    ///
    /// # Panics
    /// If the window ends before.
    pub fn read(&self, offset: usize, to: &mut [u8]) {
        assert!(offset.checked_add(to.len()).is_some_and(|end| end <= self.bucket.bytes));
        // SAFETY: inside the allocation, by the line above, which `windows_end_where_they_end` would miss; there is no reference to it. What a peer
        // writes at the same time may be copied in part, as bytes, which have no invalid values.
        #[allow(unsafe_code, reason = "memory that others write")]
        unsafe {
            ptr::copy(self.bucket.pointer().add(offset), to.as_mut_ptr(), to.len());
        }
    }

    /// Copies into the window, at `offset`.
    ///
    /// # Panics
    /// If the window ends before.
    pub fn write(&self, offset: usize, from: &[u8]) {
        assert!(offset.checked_add(from.len()).is_some_and(|end| end <= self.bucket.bytes));
        // SAFETY: as in `read`; the window is not `Sync`, so that no other thread copies at the same time.
        #[allow(unsafe_code, reason = "memory that others write")]
        unsafe {
            ptr::copy(from.as_ptr(), self.bucket.pointer().add(offset), from.len());
        }
    }
}

/// What it takes to reach a [`Window`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WindowKey {
    pub(super) address: u64,
    pub(super) bytes: u64,
    pub(super) rkey: Vec<u8>,
}

impl WindowKey {
    /// As bytes: address and size as little-endian numbers of 64 bits, then UCX's packed key.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        [&self.address.to_le_bytes()[..], &self.bytes.to_le_bytes(), &self.rkey].concat()
    }

    /// From [`WindowKey::to_bytes`] of a peer that is trusted.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the bytes are too few or too many.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let parts = bytes.split_first_chunk().and_then(|(address, rest)| {
            let (size, rkey) = rest.split_first_chunk()?;
            Some((*address, *size, rkey))
        });
        match parts.filter(|(_, _, rkey)| !rkey.is_empty() && rkey.len() <= KEY_BYTES_MAX) {
            Some((address, size, rkey)) => Ok(Self {
                address: u64::from_le_bytes(address),
                bytes: u64::from_le_bytes(size),
                rkey: rkey.to_vec(),
            }),
            None => Err(Error::Corrupt {
                subject: "the key of a window".to_owned(),
                what: "length",
                expected: format!("17 to {} bytes", KEY_BYTES_MAX + 16),
                found: bytes.len().to_string(),
            }),
        }
    }
}
