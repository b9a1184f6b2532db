//! UCX in this process: RDMA, TCP and shared memory.
//!
//! [`Ucx`] is a [`Fabric`](super::Fabric). What its links do in one call, a [`UcxLink`] does in two, so that
//! several transfers may be under way: a transfer takes a [`Bucket`] of registered memory, and
//! [`UcxLink::finish`] gives it back.
//!
//! UCX has no threads, and neither does this module: transfers progress only while one side is in a call that
//! waits. UCX chooses the transport from its settings (`TLS`, `NET_DEVICES`), which come from the environment
//! as `UCX_TLS` and so on, or from [`UcxOptions`]. UCX trusts what its peers send: take addresses only
//! from peers that have authenticated themselves.
#![expect(unsafe_code, reason = "UCX is foreign functions on raw memory")]

mod bucket;
mod fabric;
mod link;

use std::ffi::{CStr, CString};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::{fmt, ptr};

use derive_setters::Setters;
use driftless_transport::Error as TransportError;
use driftless_ucx_sys::{self as sys, Ucp};

use crate::error::{Error, Result};

pub use bucket::Bucket;
pub use link::{INFLIGHT_MAX, Ticket, UcxLink};

/// Who is waited for, in errors about UCX itself.
const SELF: &str = "this process";

/// Where UCX is, and how it is set.
#[derive(Clone, Debug, Default, Setters)]
#[setters(prefix = "with_", strip_option)]
#[non_exhaustive]
pub struct UcxOptions {
    /// The file of libucp; none: as the system's loader finds `libucp.so.0`.
    #[setters(into)]
    pub library: Option<PathBuf>,
    /// UCX's settings by name without `UCX_`, such as `TLS`; they win over the environment.
    pub settings: Vec<(String, String)>,
}

/// UCX in this process. Clones are the same.
#[derive(Clone)]
pub struct Ucx {
    context: Arc<Context>,
}

/// What links and buckets hold on to.
struct Context {
    ucp: &'static Ucp,
    handle: sys::ucp_context_h,
    /// A transfer was left behind unfinished: what UCX holds for it would make its clean-up end the process.
    tainted: AtomicBool,
    /// The transports do not tell when a peer ends. UCX complains aloud when it is asked to, so that it is
    /// asked once.
    unwatched: AtomicBool,
}

impl Context {
    fn is_unwatched(&self) -> bool {
        self.unwatched.load(SeqCst)
    }

    fn set_unwatched(&self) {
        self.unwatched.store(true, SeqCst);
    }
}

// SAFETY: the context is made with `mt_workers_shared`, by which UCX guards what its workers share; the
// functions called with the context from several threads (worker_create, mem_map, mem_unmap) are those for
// which ucp.h says so. The test `links_of_one_fabric_work_on_threads` runs them at once.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Ucx {
    /// Opens UCX.
    ///
    /// # Errors
    /// [`Error::Library`] if libucp is not there or too old;
    /// [`BadSetting`](driftless_transport::Error::BadSetting) for a setting it does not know; [`Error::Link`]
    /// if it cannot be set up, such as for a transport that this machine lacks.
    pub fn open(options: &UcxOptions) -> Result<Self> {
        let ucp = sys::open(options.library.as_deref())
            .map_err(|source| Error::Library { what: "UCX", source: source.into() })?;
        let config = Config::read(ucp)?;
        // So that only this process writes to its memory in a tagged transfer: the receiver fetches, and what
        // is left of a transfer that was given up ends with its link.
        config.set("RNDV_SCHEME", "get_zcopy")?;
        for (name, value) in &options.settings {
            config.set(name, value)?;
        }
        let params = sys::ucp_params_t {
            field_mask: u64::from(sys::UCP_PARAM_FIELD_FEATURES | sys::UCP_PARAM_FIELD_MT_WORKERS_SHARED),
            features: u64::from(sys::UCP_FEATURE_TAG),
            request_size: 0,
            request_init: None,
            request_cleanup: None,
            tag_sender_mask: 0,
            mt_workers_shared: 1,
            estimated_num_eps: 0,
            estimated_num_ppn: 0,
            name: ptr::null(),
        };
        let mut handle = ptr::null_mut();
        // SAFETY: params and configuration are valid for the call, and the handle is written before it is
        // read.
        let status = unsafe {
            ucp.ucp_init_version(
                sys::UCP_API_MAJOR,
                sys::UCP_API_MINOR,
                &raw const params,
                config.handle,
                &raw mut handle,
            )
        };
        check(ucp, SELF, "set up UCX in", status)?;
        Ok(Self {
            context: Arc::new(Context {
                ucp,
                handle,
                tainted: AtomicBool::new(false),
                unwatched: AtomicBool::new(false),
            }),
        })
    }

    /// UCX's version, such as `1.22.0`.
    #[must_use]
    pub fn version(&self) -> String {
        sys::version(self.context.ucp)
    }

    /// A link to `peer`, which is what errors call it.
    ///
    /// # Errors
    /// [`Error::Link`] if UCX cannot make one.
    pub fn link(&self, peer: impl Into<String>) -> Result<UcxLink> {
        UcxLink::new(self.context.clone(), peer.into())
    }

    /// Memory for transfers, zeroed and registered.
    ///
    /// # Errors
    /// [`Error::Link`] if there is no memory, or none that can be registered (`ulimit -l` is the limit for
    /// RDMA).
    pub fn bucket(&self, bytes: usize) -> Result<Bucket> {
        Bucket::new(self.context.clone(), bytes)
    }
}

impl fmt::Debug for Ucx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ucx").field("version", &self.version()).finish()
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.tainted.load(SeqCst) {
            return;
        }
        // SAFETY: links and buckets hold the context, so that none is left.
        unsafe {
            self.ucp.ucp_cleanup(self.handle);
        }
    }
}

/// UCX's settings, from the environment.
struct Config {
    ucp: &'static Ucp,
    handle: *mut sys::ucp_config_t,
}

impl Config {
    fn read(ucp: &'static Ucp) -> Result<Self> {
        let mut handle = ptr::null_mut();
        // SAFETY: null stands for no prefix and no file; the handle is written before it is read.
        let status = unsafe { ucp.ucp_config_read(ptr::null(), ptr::null(), &raw mut handle) };
        check(ucp, SELF, "read UCX's settings of", status)?;
        Ok(Self { ucp, handle })
    }

    fn set(&self, name: &str, value: &str) -> Result<()> {
        let bad = |found: String| TransportError::BadSetting {
            name: "UCX setting",
            expected: "a name without UCX_ and a value that UCX knows (ucx_info -cf lists them)".to_owned(),
            found,
        };
        let (Ok(c_name), Ok(c_value)) = (CString::new(name), CString::new(value)) else {
            return Err(bad("text with a zero byte".to_owned()).into());
        };
        // SAFETY: both are strings that end with 0, and UCX copies them.
        let status = unsafe { self.ucp.ucp_config_modify(self.handle, c_name.as_ptr(), c_value.as_ptr()) };
        Ok(check(self.ucp, SELF, "set UCX in", status).map_err(|_| bad(format!("{name}={value}")))?)
    }
}

impl Drop for Config {
    fn drop(&mut self) {
        // SAFETY: it was read and is used no more.
        unsafe {
            self.ucp.ucp_config_release(self.handle);
        }
    }
}

/// What UCX calls a status.
fn words(ucp: &Ucp, status: sys::ucs_status_t) -> String {
    // SAFETY: any status has a constant string that ends with 0, unknown ones too.
    let text = unsafe { CStr::from_ptr(ucp.ucs_status_string(status)) };
    text.to_string_lossy().into_owned()
}

fn check(ucp: &Ucp, peer: &str, action: &'static str, status: sys::ucs_status_t) -> Result<()> {
    if status == sys::UCS_OK {
        return Ok(());
    }
    Err(Error::Link { peer: peer.to_owned(), action, status: words(ucp, status) })
}
