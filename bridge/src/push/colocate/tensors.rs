//! Buckets into engines through memory that they open.

use std::net::{TcpListener, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use derive_setters::Setters;
use driftless_http::runtime::{self, wait};
use driftless_transport::Snapshot;
use driftless_transport::snapshot::TensorInfo;
use tokio::runtime::Handle;

use super::payload::payload;
use super::{Place, Share};
use crate::error::{Error, Result};
use crate::push::{Bucket, Calls, Member, Push, Pushed, begin_sessions, end_sessions, plan};
use crate::sglang::ServerInfo;
use crate::sglang::wire::TensorUpdate;

const CALL: &str = "/update_weights_from_tensor";
/// How long the ranks of engines are waited for of which one has refused: it may never have opened the
/// memory, another may still read.
const AFTER_FAILURE: Duration = Duration::from_secs(1);

/// Options of a [`Colocation`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Setters)]
#[setters(prefix = "with_", strip_option)]
#[non_exhaustive]
pub struct ColocationOptions {
    /// Most bytes of one bucket. The device holds two of them while a push is under way, and none before and
    /// after.
    pub bucket_bytes: u64,
    /// How long ranks may hold a bucket's memory after their engine has answered.
    pub release: Duration,
}

impl Default for ColocationOptions {
    /// 1 GiB; 30 s.
    fn default() -> Self {
        Self { bucket_bytes: 1 << 30, release: Duration::from_secs(30) }
    }
}

/// Engines, and memory that they open. Blocking.
#[derive(Debug)]
pub struct Colocation<S> {
    share: S,
    options: ColocationOptions,
    runtime: Handle,
    members: Vec<Member>,
    /// Whether the members were looked at.
    formed: bool,
}

impl<S: Share> Colocation<S> {
    /// No engines yet.
    ///
    /// # Errors
    /// [`Error::SetUp`] when the threads of this process's connections cannot be started.
    pub fn new(share: S, options: ColocationOptions) -> Result<Self> {
        let runtime = runtime::handle().map_err(Error::threads)?;
        Ok(Self { share, options, runtime, members: Vec::new(), formed: false })
    }

    /// The memory.
    pub fn share(&self) -> &S {
        &self.share
    }

    fn push_all(&mut self, weights: &dyn Snapshot, buckets: &[Bucket], label: Option<&str>) -> Result<()> {
        let Some(first) = buckets.first() else { return Ok(()) };
        let mut places = self.place(0, weights, first)?;
        for (n, bucket) in buckets.iter().enumerate() {
            let label = label.filter(|_| n + 1 == buckets.len());
            let calls = self.announce(weights.tensors(), bucket, &places, label)?;
            let next = buckets.get(n + 1).map(|next| self.place(n + 1, weights, next)).transpose();
            // What failed here is told when the engines have finished with what they were told.
            let loaded = calls.wait();
            let patience = if loaded.is_ok() { self.options.release } else { AFTER_FAILURE };
            let released = self.released(n, patience);
            loaded.and(released)?;
            match next? {
                Some(next) => places = next,
                None => break,
            }
        }
        Ok(())
    }

    fn place(&mut self, n: usize, weights: &dyn Snapshot, bucket: &Bucket) -> Result<Vec<Place>> {
        let ranks = self.members.iter().map(|member| member.ranks).sum();
        self.share.place(n % 2, weights, bucket, ranks)
    }

    /// Tells every engine where its ranks find a bucket.
    fn announce(
        &self,
        tensors: &[TensorInfo],
        bucket: &Bucket,
        places: &[Place],
        label: Option<&str>,
    ) -> Result<Calls> {
        let mut places = places.iter();
        let mut updates = Vec::with_capacity(self.members.len());
        for member in &self.members {
            let own = places.by_ref().take(member.ranks as usize);
            let pickles = own.map(|place| Ok(STANDARD.encode(payload(tensors, bucket, place)?)));
            updates.push(Arc::new(TensorUpdate {
                serialized_named_tensors: pickles.collect::<Result<_>>()?,
                load_format: "flattened_bucket",
                weight_version: label.map(str::to_owned),
                flush_cache: false,
            }));
        }
        Ok(Calls::send(&self.runtime, &self.members, |index, engine| {
            let update = updates[index].clone();
            async move { engine.update_weights_from_tensor(&update).await }
        }))
    }

    /// Waits until every rank has let go of a bucket, which it does once its copies have ended.
    fn released(&self, n: usize, after: Duration) -> Result<()> {
        let begin = Instant::now();
        while !self.share.released(n % 2) {
            if begin.elapsed() > after {
                let engines = self.members.iter().map(|member| member.engine.url().to_owned()).collect();
                return Err(Error::Unreleased { after, engines });
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        Ok(())
    }
}

impl<S: Share> Push for Colocation<S> {
    /// An engine that cannot open the memory ends when it is told to.
    fn admit(&self, engine: &str, server: &ServerInfo) -> Result<()> {
        let expected = self.share.device();
        match server.device.as_deref() {
            Some(found) if found == expected => Ok(()),
            found => Err(Error::refused(engine, "device", expected, found.unwrap_or("none"))),
        }
    }

    fn set_members(&mut self, members: Vec<Member>, same_processes: bool) {
        self.members = members;
        self.formed &= same_processes;
    }

    fn form(&mut self) -> Result<()> {
        if self.members.is_empty() {
            return Err(Error::Fleet { found: Vec::new() });
        }
        if self.formed {
            return Ok(());
        }
        for member in &self.members {
            let url = member.engine.url();
            if self.share.local() && !is_local(url) {
                return Err(Error::refused(url, "its address", "one of this host", url));
            }
            if !wait(&self.runtime, member.engine.has_post(CALL))? {
                return Err(Error::refused(url, CALL, "a call of the engine", "no such call"));
            }
        }
        self.formed = true;
        Ok(())
    }

    fn push(&mut self, weights: &dyn Snapshot, label: Option<&str>) -> Result<Pushed> {
        let buckets = plan(weights.tensors(), self.options.bucket_bytes)?;
        self.form()?;
        let begin = Instant::now();
        let begun = begin_sessions(&self.runtime, &self.members);
        let outcome = begun.and_then(|()| self.push_all(weights, &buckets, label));
        // A session that is left open keeps engines from every other update.
        let ended = end_sessions(&self.runtime, &self.members);
        self.share.close();
        outcome.and(ended)?;
        let bytes = buckets.iter().map(|bucket| bucket.bytes).sum();
        let pushed = Pushed { bytes, buckets: buckets.len(), took: begin.elapsed() };
        tracing::info!(bytes, buckets = pushed.buckets, took = ?pushed.took, "pushed within the device");
        Ok(pushed)
    }
}

/// Whether an engine's URL leads to this host: one can listen at an address of one's own only.
fn is_local(url: &str) -> bool {
    let host = url.strip_prefix("http://").unwrap_or(url).trim_end_matches('/');
    let Ok(mut addresses) = host.to_socket_addrs() else { return false };
    addresses.any(|address| TcpListener::bind((address.ip(), 0)).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_this_host_are_known() {
        assert!(is_local("http://127.0.0.1:30000") && is_local("http://localhost:1"));
        // An address for documentation (RFC 5737), which no host has.
        assert!(!is_local("http://192.0.2.1:30000") && !is_local("no port"));
    }
}
