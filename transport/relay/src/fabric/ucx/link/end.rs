//! Ends a link: releases what UCX lets go of, in the order that it wants, and keeps the rest alive.
#![expect(unsafe_code, reason = "UCX is foreign functions on raw memory")]

use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};
use std::{mem, thread};

use driftless_ucx_sys as sys;

use super::{Endpoint, UcxLink, failure};

/// How long the end of a link waits for what was given up, and for the peer to hear of it.
const END_DEADLINE: Duration = Duration::from_millis(500);

impl UcxLink {
    /// Cancels what is under way and waits for it a little; true if UCX is done with all of it.
    fn settle(&mut self) -> bool {
        for flight in self.flights.values().filter(|flight| !flight.request.is_null()) {
            // SAFETY: the request is one that UCX gave and was not freed.
            unsafe {
                self.context.ucp.ucp_request_cancel(self.worker, flight.request);
            }
        }
        let begin = Instant::now();
        let numbers: Vec<u64> = self.flights.keys().copied().collect();
        loop {
            self.progress();
            let open = numbers.iter().filter(|number| !self.is_done(**number)).count();
            if open == 0 || begin.elapsed() >= END_DEADLINE {
                return open == 0;
            }
            thread::yield_now();
        }
    }

    fn close(&mut self, endpoint: &Endpoint) {
        let ucp = self.context.ucp;
        // SAFETY: the structure is numbers, pointers and optional functions, for which zero is a value, and
        // the mask says which are read.
        let mut param: sys::ucp_request_param_t = unsafe { mem::zeroed() };
        if endpoint.watched {
            // There is nothing under way that the peer waits for: it has its own deadlines.
            param.op_attr_mask = sys::UCP_OP_ATTR_FIELD_FLAGS;
            param.flags = sys::UCP_EP_CLOSE_FLAG_FORCE;
        }
        // SAFETY: the endpoint is closed once: the link has taken it out of its field.
        let request = unsafe { ucp.ucp_ep_close_nbx(endpoint.handle, &raw const param) };
        // Over TCP whoever closes second hears that the connection is gone: it is closed, and that was
        // wanted.
        if request.is_null() || failure(request).is_some() {
            return;
        }
        let begin = Instant::now();
        // SAFETY: the request is UCX's, and freed once, afterwards: UCX finishes with it by itself.
        unsafe {
            while ucp.ucp_request_check_status(request) == sys::UCS_INPROGRESS
                && begin.elapsed() < END_DEADLINE
            {
                ucp.ucp_worker_progress(self.worker);
                thread::yield_now();
            }
            ucp.ucp_request_free(request);
        }
    }
}

impl Drop for UcxLink {
    fn drop(&mut self) {
        let ucp = self.context.ucp;
        let mut settled = self.settle();
        if let Some(endpoint) = self.endpoint.take() {
            // Flushing towards a peer that is gone would wait for it; the worker's end takes the endpoint
            // along.
            if endpoint.watched || (settled && !self.broken) {
                self.close(&endpoint);
            }
            settled = settled || self.settle();
        }
        if !settled {
            tracing::debug!(peer = self.peer, "UCX does not let go of a transfer that was given up");
            self.context.tainted.store(true, SeqCst);
        }
        // SAFETY: destroyed once. The buckets of what was given up are fields of the link and go after this,
        // when UCX writes to them no more.
        unsafe {
            ucp.ucp_worker_destroy(self.worker);
        }
    }
}
