//! NCCL, opened from the very file that torch uses: that of the engines, or that of a learner.
//!
//! The crate `cudarc` brings the types; its own loader looks for names that the Python wheels do not have,
//! and cannot be given a path.
#![allow(unsafe_code, reason = "NCCL is foreign functions on raw addresses")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cudarc::driver::sys::CUstream;
use cudarc::nccl::sys::{ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t, ncclResult_t, ncclUniqueId};

use crate::error::{Error, Result};

/// `NCCL_CONFIG_INITIALIZER` of nccl.h: the magic number, and the marks of a field that is not set.
const CONFIG_MAGIC: u32 = 0xcafe_beef;
const UNSET: c_int = c_int::MIN;
/// The release whose `ncclConfig_t` this is: later ones take the fields that it has, earlier ones those that
/// they know.
const CONFIG_VERSION: u32 = 22_800;

/// The functions of the library that are used: each one's field here, its name, and its type in nccl.h.
macro_rules! functions {
    ($($field:ident = $name:literal: fn($($argument:ty),*) -> $result:ty;)*) => {
        #[derive(Debug)]
        struct Functions {
            $($field: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Functions {
            fn of(library: &libloading::Library) -> Result<Self, libloading::Error> {
                // SAFETY: the types are those of nccl.h, by cudarc's bindings, unchanged from 2.18 to 2.30; a file
                // without a name fails.
                Ok(unsafe { Self { $($field: *library.get($name)?,)* } })
            }
        }
    };
}

functions! {
    get_version = b"ncclGetVersion": fn(*mut c_int) -> ncclResult_t;
    get_unique_id = b"ncclGetUniqueId": fn(*mut ncclUniqueId) -> ncclResult_t;
    comm_init_rank_config = b"ncclCommInitRankConfig":
        fn(*mut ncclComm_t, c_int, ncclUniqueId, c_int, *mut ncclConfig_t) -> ncclResult_t;
    comm_get_async_error = b"ncclCommGetAsyncError": fn(ncclComm_t, *mut ncclResult_t) -> ncclResult_t;
    comm_abort = b"ncclCommAbort": fn(ncclComm_t) -> ncclResult_t;
    broadcast = b"ncclBroadcast":
        fn(*const c_void, *mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, CUstream) -> ncclResult_t;
    reduce_scatter = b"ncclReduceScatter":
        fn(*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, CUstream) -> ncclResult_t;
    all_gather = b"ncclAllGather":
        fn(*const c_void, *mut c_void, usize, ncclDataType_t, ncclComm_t, CUstream) -> ncclResult_t;
    get_last_error = b"ncclGetLastError": fn(ncclComm_t) -> *const c_char;
}

/// An open NCCL.
#[derive(Debug)]
pub struct Nccl {
    path: PathBuf,
    version: [u32; 3],
    functions: Functions,
    /// Keeps the functions above where they are.
    _handle: libloading::Library,
}

impl Nccl {
    /// Opens the library at `path`, and refuses another version than `expected`, if one is. A bare name finds
    /// the one that is open already, or that the loader finds.
    ///
    /// # Errors
    /// [`Error::Nccl`] when it is missing, not NCCL, or has another version.
    pub fn open(path: &Path, expected: Option<[u32; 3]>) -> Result<Arc<Self>> {
        let fail = |what: &str, source: libloading::Error| {
            let advice = "give the libnccl.so.2 that torch uses (site-packages/nvidia/nccl/lib)";
            Error::Nccl { what: format!("{what} {}; {advice}", path.display()), source: source.into() }
        };
        // SAFETY: the file runs its initialisers. It is the user's choice, as the file of an engine's torch
        // is.
        let handle = unsafe { libloading::Library::new(path) }.map_err(|error| fail("cannot open", error))?;
        let functions =
            Functions::of(&handle).map_err(|error| fail("not an NCCL of 2.14 or later:", error))?;
        let mut code = 0;
        // SAFETY: the pointer is to a local that outlives the call.
        check("ncclGetVersion", unsafe { (functions.get_version)(&raw mut code) })?;
        let version = version_of(code);
        if let Some(expected) = expected.filter(|expected| *expected != version) {
            let what = format!("the library {}; nothing was posted", path.display());
            let [expected, found] =
                [expected, version].map(|version| version.map(|n| n.to_string()).join("."));
            let source = format!("expected NCCL {expected}, as the engine's torch has it, found {found}");
            return Err(Error::Nccl { what, source: source.into() });
        }
        Ok(Arc::new(Self { path: path.to_owned(), version, functions, _handle: handle }))
    }

    /// Major, minor, patch.
    pub fn version(&self) -> [u32; 3] {
        self.version
    }

    /// A new id, under which the ranks of one communicator find each other.
    ///
    /// # Errors
    /// [`Error::Nccl`] if there is no network interface, for instance.
    pub fn unique_id(&self) -> Result<[u8; 128]> {
        let mut id = ncclUniqueId { internal: [0; 128] };
        // SAFETY: the pointer is to a local that outlives the call.
        check("ncclGetUniqueId", unsafe { (self.functions.get_unique_id)(&raw mut id) })?;
        Ok(id.internal.map(|byte| byte as u8))
    }
}

/// A rank's end of a communicator. Its calls do not wait for peers: they begin something, and
/// [`Communicator::settled`] says whether that has ended. Dropping it aborts what has not.
#[derive(Debug)]
pub struct Communicator {
    library: Arc<Nccl>,
    comm: ncclComm_t,
}

// SAFETY: NCCL binds a communicator to a device, not to a thread; `&mut` keeps two threads from using it at
// once.
unsafe impl Send for Communicator {}

impl Communicator {
    /// Begins to join `world` ranks as `rank`, on the current device.
    ///
    /// # Errors
    /// [`Error::Nccl`] for more ranks than it counts, or if it refuses at once.
    pub fn join(library: &Arc<Nccl>, id: [u8; 128], rank: u32, world: u32) -> Result<Self> {
        let id = ncclUniqueId { internal: id.map(|byte| byte as c_char) };
        let count = |ranks: u32| {
            c_int::try_from(ranks)
                .map_err(|error| Error::Nccl { what: format!("{ranks} ranks"), source: error.into() })
        };
        let (rank, world) = (count(rank)?, count(world)?);
        let mut config = config();
        let mut comm = std::ptr::null_mut();
        let init = library.functions.comm_init_rank_config;
        // SAFETY: the pointers are to locals that outlive the call, which copies the configuration.
        let begun = unsafe { init(&raw mut comm, world, id, rank, &raw mut config) };
        if comm.is_null() {
            check("ncclCommInitRankConfig", begun)?;
        }
        let mut joining = Self { library: library.clone(), comm };
        joining.begun("ncclCommInitRankConfig", begun)?;
        Ok(joining)
    }

    /// Whether what was begun has ended: everyone has joined, or a transfer is in the stream.
    ///
    /// # Errors
    /// [`Error::Nccl`] when it never will.
    pub fn settled(&mut self) -> Result<bool> {
        let mut state = ncclResult_t::ncclSuccess;
        // SAFETY: the communicator is alive until this value is dropped, and the pointer is to a local.
        let asked = unsafe { (self.library.functions.comm_get_async_error)(self.comm, &raw mut state) };
        self.begun("ncclCommGetAsyncError", asked)?;
        match state {
            ncclResult_t::ncclInProgress => Ok(false),
            state => self.begun("the communicator", state).map(|()| true),
        }
    }

    /// Begins to broadcast bytes of device memory from rank 0 to every rank.
    ///
    /// # Errors
    /// [`Error::Nccl`] if it refuses at once.
    ///
    /// # Safety
    /// `length` bytes at `address` are memory of the communicator's device, and stay as they are until the
    /// stream has passed this point or this value is dropped. `stream` is alive that long, and of that
    /// device.
    pub unsafe fn broadcast(&mut self, address: u64, length: usize, stream: CUstream) -> Result<()> {
        let bytes = address as *mut c_void;
        let kind = ncclDataType_t::ncclUint8;
        // SAFETY: the caller's promise; the communicator is alive. In place: root's receive buffer is its
        // send buffer.
        let begun =
            unsafe { (self.library.functions.broadcast)(bytes, bytes, length, kind, 0, self.comm, stream) };
        self.begun("ncclBroadcast", begun)
    }

    /// Begins to add up f32 of all ranks: of the world's equal parts at `address`, of `count` elements each,
    /// this rank's becomes the sum.
    ///
    /// # Errors
    /// [`Error::Nccl`] if it refuses at once.
    ///
    /// # Safety
    /// As for [`Communicator::broadcast`], of the `world × count` elements, which nothing else looks at
    /// meanwhile. `rank` is this one.
    pub unsafe fn reduce_scatter(
        &mut self,
        address: u64,
        count: usize,
        rank: usize,
        stream: CUstream,
    ) -> Result<()> {
        let (all, own) = (address as *const c_void, (address + (4 * rank * count) as u64) as *mut c_void);
        let (kind, sum) = (ncclDataType_t::ncclFloat32, ncclRedOp_t::ncclSum);
        // SAFETY: the caller's promise; the communicator is alive. In place: the part is within the whole.
        let begun =
            unsafe { (self.library.functions.reduce_scatter)(all, own, count, kind, sum, self.comm, stream) };
        self.begun("ncclReduceScatter", begun)
    }

    /// Begins to give every rank the others' parts: of the world's equal parts at `address`, of `bytes` each,
    /// each becomes that of the rank whose it is.
    ///
    /// # Errors
    /// [`Error::Nccl`] if it refuses at once.
    ///
    /// # Safety
    /// As for [`Communicator::reduce_scatter`].
    pub unsafe fn all_gather(
        &mut self,
        address: u64,
        bytes: usize,
        rank: usize,
        stream: CUstream,
    ) -> Result<()> {
        let (all, own) = (address as *mut c_void, (address + (rank * bytes) as u64) as *const c_void);
        let kind = ncclDataType_t::ncclUint8;
        // SAFETY: the caller's promise; the communicator is alive. In place: the part is within the whole.
        let begun = unsafe { (self.library.functions.all_gather)(own, all, bytes, kind, self.comm, stream) };
        self.begun("ncclAllGather", begun)
    }

    /// A call that has begun, or ended, well.
    fn begun(&mut self, call: &str, result: ncclResult_t) -> Result<()> {
        if matches!(result, ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress) {
            return Ok(());
        }
        // SAFETY: the communicator is alive; the text is NCCL's own and is copied before another call could
        // change it.
        let text = unsafe {
            let text = (self.library.functions.get_last_error)(self.comm);
            if text.is_null() { String::new() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
        };
        Err(failed(call, result, &format!("{} ({})", text.trim(), self.library.path.display())))
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // SAFETY: it is alive, and nothing uses it after this. Aborting ends whatever it still does; a
        // failure leaves nothing to be done.
        let _ = unsafe { (self.library.functions.comm_abort)(self.comm) };
    }
}

fn config() -> ncclConfig_t {
    ncclConfig_t {
        size: size_of::<ncclConfig_t>(),
        magic: CONFIG_MAGIC,
        version: CONFIG_VERSION,
        // The one field that matters: a blocking call could not be given up.
        blocking: 0,
        cgaClusterSize: UNSET,
        minCTAs: UNSET,
        maxCTAs: UNSET,
        netName: std::ptr::null(),
        splitShare: UNSET,
        trafficClass: UNSET,
        commName: std::ptr::null(),
        collnetEnable: UNSET,
        CTAPolicy: UNSET,
        shrinkShare: UNSET,
        nvlsCTAs: UNSET,
        nChannelsPerNetPeer: UNSET,
        nvlinkCentricSched: UNSET,
    }
}

/// NCCL's number for a version: 22809 is 2.28.9.
fn version_of(code: c_int) -> [u32; 3] {
    let code = u32::try_from(code).unwrap_or(0);
    [code / 10_000, code / 100 % 100, code % 100]
}

fn check(call: &str, result: ncclResult_t) -> Result<()> {
    match result {
        ncclResult_t::ncclSuccess => Ok(()),
        result => Err(failed(call, result, "")),
    }
}

fn failed(call: &str, result: ncclResult_t, text: &str) -> Error {
    Error::Nccl { what: format!("{call} failed"), source: format!("{result:?}: {text}").into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_read_as_nccl_writes_them() {
        assert_eq!(version_of(22_809), [2, 28, 9]);
        assert_eq!(version_of(23_002), [2, 30, 2]);
        assert_eq!(version_of(-1), [0, 0, 0]);
    }

    #[test]
    fn a_library_that_is_none_is_an_error() {
        let missing = Nccl::open(Path::new("/nowhere/libnccl.so.2"), None).unwrap_err();
        assert!(missing.to_string().contains("/nowhere/libnccl.so.2"), "{missing}");
        // A shared library that every Linux process has, and that is not NCCL.
        let other = Nccl::open(Path::new("libc.so.6"), None).unwrap_err();
        assert!(other.to_string().contains("not an NCCL"), "{other}");
    }
}
