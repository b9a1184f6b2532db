//! A link to one peer: sending and receiving.
#![expect(unsafe_code, reason = "UCX is foreign functions on raw memory")]

mod end;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicI32, AtomicU64};
use std::time::{Duration, Instant};
use std::{fmt, mem, ptr, slice, thread};

use driftless_ucx_sys as sys;

use super::{Bucket, Context, SELF, check, words};
use crate::error::{Error, Result};

/// Transfers of one link that are not finished.
pub const INFLIGHT_MAX: usize = 64;
/// Longest address that is taken from a peer: UCX's have some hundred bytes for each network device.
const ADDRESS_BYTES_MAX: usize = 64 << 10;
/// Rounds without news before the processor is offered to others, and before it is left for [`NAP`] at a
/// time.
const ROUNDS: [u32; 2] = [2_000, 10_000];
const NAP: Duration = Duration::from_micros(50);
/// Rounds between two looks at the clock, and time between two calls of a watch.
const CLOCK_ROUNDS: u32 = 32;
const WATCH: Duration = Duration::from_millis(20);

/// A transfer under way, to be [finished](UcxLink::finish).
#[derive(Debug)]
#[must_use = "the bucket comes back from `UcxLink::finish`"]
pub struct Ticket {
    link: u64,
    number: u64,
}

/// A transfer, and the memory that it uses.
struct Flight {
    bucket: Bucket,
    /// Null when it is done.
    request: *mut std::ffi::c_void,
    receives: bool,
    action: &'static str,
    outcome: sys::ucs_status_t,
    bytes: usize,
}

/// The way to one peer and back. Its calls are made by one thread at a time; UCX works only inside them.
pub struct UcxLink {
    id: u64,
    peer: String,
    context: Arc<Context>,
    worker: sys::ucp_worker_h,
    endpoint: Option<Endpoint>,
    flights: BTreeMap<u64, Flight>,
    next: u64,
    /// The status with which UCX lost the peer; its error handler writes it.
    lost: Arc<AtomicI32>,
    /// A transfer was given up: what follows it could be taken for its remains.
    broken: bool,
}

struct Endpoint {
    handle: sys::ucp_ep_h,
    /// UCX watches for the peer's end.
    watched: bool,
}

// SAFETY: the worker is made for serialised use from any thread, and all its uses borrow the link mutably or
// end it. The requests and buckets belong to the link. `links_of_one_fabric_work_on_threads` moves links to
// threads.
unsafe impl Send for UcxLink {}

/// UCX's word that the peer is gone.
unsafe extern "C" fn on_lost(lost: *mut std::ffi::c_void, _: sys::ucp_ep_h, status: sys::ucs_status_t) {
    // SAFETY: `connect` passed the pointer of the link's `Arc`, which lives until its worker, whose progress
    // calls this, is destroyed. A peer that is killed in the middle of a transfer passes here in
    // `tests/fabric/main.rs`.
    let lost = unsafe { &*lost.cast::<AtomicI32>() };
    lost.store(status.into(), SeqCst);
}

impl UcxLink {
    pub(super) fn new(context: Arc<Context>, peer: String) -> Result<Self> {
        static LINKS: AtomicU64 = AtomicU64::new(0);
        // SAFETY: the structure is numbers and pointers, for which zero is a value, and the mask says which
        // are read.
        let mut params: sys::ucp_worker_params_t = unsafe { mem::zeroed() };
        params.field_mask = u64::from(sys::UCP_WORKER_PARAM_FIELD_THREAD_MODE);
        params.thread_mode = sys::UCS_THREAD_MODE_SERIALIZED;
        let mut worker = ptr::null_mut();
        // SAFETY: the context lives as long as the link; the handle is written before it is read.
        let status =
            unsafe { context.ucp.ucp_worker_create(context.handle, &raw const params, &raw mut worker) };
        check(context.ucp, SELF, "start UCX in", status)?;
        Ok(Self {
            id: LINKS.fetch_add(1, SeqCst),
            peer,
            context,
            worker,
            endpoint: None,
            flights: BTreeMap::new(),
            next: 0,
            lost: Arc::new(AtomicI32::new(sys::UCS_OK.into())),
            broken: false,
        })
    }

    pub(super) fn peer(&self) -> &str {
        &self.peer
    }

    /// What a peer needs in order to [connect](UcxLink::connect) to this link.
    ///
    /// # Errors
    /// [`Error::Link`] if UCX has none.
    pub fn address(&self) -> Result<Vec<u8>> {
        let ucp = self.context.ucp;
        let (mut address, mut length) = (ptr::null_mut(), 0);
        // SAFETY: the worker lives; both results are written before they are read.
        let status = unsafe { ucp.ucp_worker_get_address(self.worker, &raw mut address, &raw mut length) };
        check(ucp, SELF, "tell the address of", status)?;
        // SAFETY: UCX wrote that many bytes there, which are released once, afterwards.
        unsafe {
            let bytes = slice::from_raw_parts(address.cast::<u8>(), length).to_vec();
            ucp.ucp_worker_release_address(self.worker, address);
            Ok(bytes)
        }
    }

    /// Memory for transfers, as [`Ucx::bucket`](super::Ucx::bucket).
    ///
    /// # Errors
    /// As there.
    pub fn bucket(&self, bytes: usize) -> Result<Bucket> {
        Bucket::new(self.context.clone(), bytes)
    }

    /// Makes the peer's link with this [address](UcxLink::address) the one that is sent to. UCX believes what is
    /// in the address: it must come from a peer that showed who it is.
    ///
    /// Where a transport can tell that a peer has ended, UCX is asked to. Shared memory cannot; then only
    /// deadlines and watches end a wait.
    ///
    /// # Errors
    /// [`Error::Link`] if the link has a peer, the address is none, or no transport leads there.
    pub fn connect(&mut self, address: &[u8]) -> Result<()> {
        if self.endpoint.is_some() {
            return Err(self.refused("connect to", "the link is connected already"));
        }
        if address.len() < 8 || address.len() > ADDRESS_BYTES_MAX {
            let status = format!("an address has 8 to {ADDRESS_BYTES_MAX} bytes, not {}", address.len());
            return Err(self.refused("connect to", status));
        }
        // UCX is not told the address's length. Of one that was cut short it reads zeros, not what lies
        // behind.
        let mut padded = address.to_vec();
        padded.resize(address.len() + ADDRESS_BYTES_MAX, 0);
        let modes = if self.context.is_unwatched() { &[false][..] } else { &[true, false][..] };
        let mut status = sys::UCS_OK;
        for &watched in modes {
            let handle;
            (status, handle) = self.create(&padded, watched);
            if status == sys::UCS_OK {
                self.endpoint = Some(Endpoint { handle, watched });
                return Ok(());
            }
            if watched && matches!(status, sys::UCS_ERR_UNREACHABLE | sys::UCS_ERR_UNSUPPORTED) {
                self.context.set_unwatched();
                continue;
            }
            break;
        }
        check(self.context.ucp, &self.peer, "connect to", status)
    }

    fn create(&mut self, address: &[u8], watched: bool) -> (sys::ucs_status_t, sys::ucp_ep_h) {
        // SAFETY: the structure is numbers and pointers, for which zero is a value, and the mask says which
        // are read.
        let mut params: sys::ucp_ep_params_t = unsafe { mem::zeroed() };
        params.field_mask = u64::from(
            sys::UCP_EP_PARAM_FIELD_REMOTE_ADDRESS
                | sys::UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE
                | sys::UCP_EP_PARAM_FIELD_ERR_HANDLER,
        );
        params.address = address.as_ptr().cast();
        params.err_mode =
            if watched { sys::UCP_ERR_HANDLING_MODE_PEER } else { sys::UCP_ERR_HANDLING_MODE_NONE };
        params.err_handler.cb = Some(on_lost);
        params.err_handler.arg = Arc::as_ptr(&self.lost).cast_mut().cast();
        let mut handle = ptr::null_mut();
        let status =
            // SAFETY: the address outlives the call, the handler's argument the worker; the handle is written
            // before it is read. That the address is UCX's is the peer's word, as `connect` says.
            unsafe { self.context.ucp.ucp_ep_create(self.worker, &raw const params, &raw mut handle) };
        (status, handle)
    }

    /// Sends a part of a bucket to the peer, which [receives](UcxLink::receive) it under the same tag.
    ///
    /// # Errors
    /// [`Error::Link`] without a peer, for a range outside the bucket, or if UCX refuses; [`Error::LinkLost`]
    /// if the peer is gone; [`Busy`](driftless_transport::Error::Busy) if [`INFLIGHT_MAX`] transfers are
    /// under way. The bucket is dropped then.
    pub fn send(&mut self, bucket: Bucket, range: Range<usize>, tag: u64) -> Result<Ticket> {
        let endpoint = self.endpoint("send to")?;
        self.start("send to", bucket, range, false, |ucp, _, memory, bytes, param| {
            // SAFETY: `start` gives the range of a bucket that the flight owns until UCX is done with it, and
            // the endpoint lives as long as the link.
            unsafe { ucp.ucp_tag_send_nbx(endpoint, memory.cast(), bytes, tag, param) }
        })
    }

    /// Takes what a peer sends under `tag` into a part of a bucket.
    ///
    /// # Errors
    /// As [`UcxLink::send`]; but whoever receives needs no connection.
    pub fn receive(&mut self, bucket: Bucket, range: Range<usize>, tag: u64) -> Result<Ticket> {
        self.start("receive from", bucket, range, true, |ucp, worker, memory, bytes, param| {
            // SAFETY: `start` gives the range of a bucket that the flight owns until UCX is done with it; no
            // reference to it exists meanwhile.
            unsafe { ucp.ucp_tag_recv_nbx(worker, memory.cast(), bytes, tag, u64::MAX, param) }
        })
    }

    /// Waits until a transfer is done, and gives back its bucket and the bytes that it moved. `watch` is
    /// asked every 20 ms; what it fails with says that the peer is gone.
    ///
    /// After an error the link is of no use. Buckets of transfers that were given up end with the link.
    ///
    /// # Errors
    /// [`Error::LinkTimeout`] when `deadline` is over; [`Error::LinkLost`] when UCX or `watch` says that the
    /// peer is gone; [`Error::Link`] if the transfer fails, such as for a message longer than the bucket, or
    /// belongs to another link.
    pub fn finish(
        &mut self,
        ticket: Ticket,
        deadline: Duration,
        watch: &mut dyn FnMut() -> std::result::Result<(), String>,
    ) -> Result<(Bucket, usize)> {
        let flight = self.flights.get(&ticket.number).filter(|_| ticket.link == self.id);
        let Some(action) = flight.map(|flight| flight.action) else {
            return Err(self.refused("finish a transfer with", "the ticket is another link's"));
        };
        self.wait(action, deadline, watch, |link| link.is_done(ticket.number).then_some(()))?;
        let status = self.flights.get(&ticket.number).map(|flight| flight.outcome);
        if let Err(error) = check(self.context.ucp, &self.peer, action, status.unwrap_or(sys::UCS_OK)) {
            self.broken = true;
            return Err(error);
        }
        match self.flights.remove(&ticket.number) {
            Some(flight) => Ok((flight.bucket, flight.bytes)),
            None => Err(self.refused(action, "the transfer is finished already")),
        }
    }

    fn endpoint(&self, action: &'static str) -> Result<sys::ucp_ep_h> {
        match &self.endpoint {
            Some(endpoint) => Ok(endpoint.handle),
            None => Err(self.refused(action, "the link is not connected")),
        }
    }

    /// Begins a transfer and keeps its bucket.
    fn start(
        &mut self,
        action: &'static str,
        bucket: Bucket,
        range: Range<usize>,
        receives: bool,
        call: impl FnOnce(
            &sys::Ucp,
            sys::ucp_worker_h,
            *mut u8,
            usize,
            *const sys::ucp_request_param_t,
        ) -> sys::ucs_status_ptr_t,
    ) -> Result<Ticket> {
        self.check_alive(action)?;
        if self.flights.len() >= INFLIGHT_MAX {
            let what = format!("the link to {}", self.peer);
            return Err(
                driftless_transport::Error::Busy { what, with: format!("{INFLIGHT_MAX} transfers") }.into()
            );
        }
        if range.start > range.end || range.end > bucket.len() {
            let status = format!("{range:?} is outside the bucket of {} bytes", bucket.len());
            return Err(self.refused(action, status));
        }
        // SAFETY: the structure is numbers, pointers and optional functions, for which zero is a value, and
        // the mask says which are read.
        let mut param: sys::ucp_request_param_t = unsafe { mem::zeroed() };
        if receives {
            // Only of a request can be learned how long the message was.
            param.op_attr_mask = sys::UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
        }
        let bytes = range.len();
        let memory = bucket.pointer().wrapping_add(range.start);
        let begun = call(self.context.ucp, self.worker, memory, bytes, &raw const param);
        let mut flight = Flight { bucket, request: begun, receives, action, outcome: sys::UCS_OK, bytes };
        if let Some(status) = failure(begun) {
            flight.request = ptr::null_mut();
            check(self.context.ucp, &self.peer, action, status)?;
        }
        self.next += 1;
        self.flights.insert(self.next, flight);
        Ok(Ticket { link: self.id, number: self.next })
    }

    fn is_done(&mut self, number: u64) -> bool {
        let ucp = self.context.ucp;
        let Some(flight) = self.flights.get_mut(&number) else { return true };
        if flight.request.is_null() {
            return true;
        }
        let mut info = sys::ucp_tag_recv_info_t { sender_tag: 0, length: 0 };
        // SAFETY: the request is one that UCX gave and was not freed; the information is written if it is
        // that of a receive.
        let status = unsafe {
            if flight.receives {
                ucp.ucp_tag_recv_request_test(flight.request, &raw mut info)
            } else {
                ucp.ucp_request_check_status(flight.request)
            }
        };
        if status == sys::UCS_INPROGRESS {
            return false;
        }
        // SAFETY: it is done, and freed once: the pointer goes.
        unsafe {
            ucp.ucp_request_free(flight.request);
        }
        flight.request = ptr::null_mut();
        flight.outcome = status;
        if flight.receives {
            flight.bytes = info.length;
        }
        true
    }

    fn progress(&mut self) -> bool {
        // SAFETY: the worker lives and is used by one thread at a time.
        unsafe { self.context.ucp.ucp_worker_progress(self.worker) != 0 }
    }

    fn check_alive(&self, action: &'static str) -> Result<()> {
        let lost = |reason| Err(Error::LinkLost { peer: self.peer.clone(), action, reason });
        match sys::ucs_status_t::try_from(self.lost.load(SeqCst)) {
            Ok(sys::UCS_OK) if self.broken => lost("an earlier transfer failed".to_owned()),
            Ok(sys::UCS_OK) => Ok(()),
            status => lost(words(self.context.ucp, status.unwrap_or(sys::UCS_ERR_LAST))),
        }
    }

    /// Lets UCX work until `ready` has something, the deadline is over or the peer is gone.
    fn wait<T>(
        &mut self,
        action: &'static str,
        deadline: Duration,
        watch: &mut dyn FnMut() -> std::result::Result<(), String>,
        mut ready: impl FnMut(&mut Self) -> Option<T>,
    ) -> Result<T> {
        let begin = Instant::now();
        let (mut idle, mut rounds, mut watched) = (0u32, 0u32, begin);
        loop {
            let moved = self.progress();
            if let Some(value) = ready(self) {
                return Ok(value);
            }
            idle = if moved { 0 } else { idle.saturating_add(1) };
            rounds = rounds.wrapping_add(1);
            if rounds.is_multiple_of(CLOCK_ROUNDS) || idle > ROUNDS[1] {
                let now = Instant::now();
                let mut outcome = self.check_alive(action);
                if outcome.is_ok() && now - watched >= WATCH {
                    watched = now;
                    let lost = |reason| Error::LinkLost { peer: self.peer.clone(), action, reason };
                    outcome = watch().map_err(lost);
                }
                if outcome.is_ok() && now - begin >= deadline {
                    let (peer, waited) = (self.peer.clone(), now - begin);
                    outcome = Err(Error::LinkTimeout { peer, action, waited });
                }
                if let Err(error) = outcome {
                    self.broken = true;
                    return Err(error);
                }
            }
            match idle {
                _ if idle > ROUNDS[1] => thread::sleep(NAP),
                _ if idle > ROUNDS[0] => thread::yield_now(),
                _ => std::hint::spin_loop(),
            }
        }
    }

    fn refused(&self, action: &'static str, status: impl Into<String>) -> Error {
        Error::Link { peer: self.peer.clone(), action, status: status.into() }
    }
}

impl fmt::Debug for UcxLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("UcxLink");
        text.field("peer", &self.peer).field("inflight", &self.flights.len()).finish_non_exhaustive()
    }
}

/// The status that a pointer stands for, if it is an error: the topmost addresses are.
fn failure(pointer: sys::ucs_status_ptr_t) -> Option<sys::ucs_status_t> {
    let value = pointer as isize;
    (value < 0 && value >= isize::from(sys::UCS_ERR_LAST)).then_some(value as sys::ucs_status_t)
}
