//! A weight-update group: its members, how it forms, how a push runs, and how it is given up.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use derive_setters::Setters;
use driftless_http::runtime;
use driftless_transport::Snapshot;
use driftless_transport::snapshot::TensorInfo;
use tokio::runtime::Handle;

use super::{Meeting, Rendezvous, RendezvousOptions, Root};
use crate::engine::torch_name;
use crate::error::{Error, Result};
use crate::push::{Bucket, Calls, Member, Push, Pushed, begin_sessions, end_sessions, plan};
use crate::sglang::wire::{DistributedUpdate, GroupInit};
use crate::sglang::{Client, ServerInfo};

/// How the bytes of a bucket travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UpdateMode {
    /// One broadcast of all bytes of a bucket.
    Flattened,
    /// One broadcast a tensor, for engines that do not know flattened buckets.
    PerTensor,
}

/// Options of a [`Group`].
#[derive(Debug, Clone, Setters)]
#[setters(prefix = "with_", strip_option)]
#[non_exhaustive]
pub struct GroupOptions {
    /// Name of the group at the engines. Two processes that push into one engine need two names.
    #[setters(into)]
    pub name: String,
    /// Address at which the ranks of the engines are awaited; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Host name or address under which the engines reach this process.
    #[setters(into)]
    pub host: String,
    /// How bytes travel.
    pub mode: UpdateMode,
    /// Most bytes of one bucket; rank 0 and every engine hold two and one of them.
    pub bucket_bytes: u64,
    /// How long the ranks may take to join, once every engine has been called.
    pub join: Duration,
    /// How long the broadcasts of one bucket may take, once the one before has been loaded.
    pub transfer: Duration,
    /// Bounds of the store where the ranks meet.
    pub rendezvous: RendezvousOptions,
}

impl GroupOptions {
    /// Engines reach this process under `host`: any port, flattened buckets of 1 GiB, 2 minutes for joining
    /// and for each bucket.
    pub fn new(host: impl Into<String>) -> Self {
        let minutes = Duration::from_secs(120);
        Self {
            name: "driftless".into(),
            listen: SocketAddr::from(([0, 0, 0, 0], 0)),
            host: host.into(),
            mode: UpdateMode::Flattened,
            bucket_bytes: 1 << 30,
            join: minutes,
            transfer: minutes,
            rendezvous: RendezvousOptions::default(),
        }
    }
}

/// Engines, and the rank 0 that pushes weights into all of them at once. Blocking.
///
/// A push that fails gives the group up; the next one forms it anew.
#[derive(Debug)]
pub struct Group<R> {
    root: R,
    options: GroupOptions,
    runtime: Handle,
    members: Vec<Member>,
    formed: Option<Formed>,
}

#[derive(Debug)]
struct Formed {
    rendezvous: Rendezvous,
    joined: bool,
}

impl<R: Root> Group<R> {
    /// A group without engines.
    ///
    /// # Errors
    /// [`Error::SetUp`] when the threads of this process's connections cannot be started.
    pub fn new(root: R, options: GroupOptions) -> Result<Self> {
        let runtime = runtime::handle().map_err(Error::threads)?;
        Ok(Self { root, options, runtime, members: Vec::new(), formed: None })
    }

    fn meet(&mut self) -> Result<()> {
        // A process of that name that died has left its group behind.
        self.destroy().wait()?;
        let rendezvous = Rendezvous::start(self.options.listen, self.options.rendezvous)?;
        let world = 1 + self.members.iter().map(|member| member.ranks).sum::<u32>();
        self.root.open(&Meeting { group: &self.options.name, world, rendezvous: &rendezvous })?;
        let init = |index: usize| GroupInit {
            master_address: self.options.host.clone(),
            master_port: rendezvous.address().port(),
            rank_offset: 1 + self.members[..index].iter().map(|member| member.ranks).sum::<u32>(),
            world_size: world,
            group_name: self.options.name.clone(),
            backend: self.root.backend().into(),
        };
        let calls = self.call(|index, engine| {
            let init = init(index);
            async move { engine.init_weights_update_group(&init).await }
        });
        self.formed = Some(Formed { rendezvous, joined: false });
        calls.wait()?;
        tracing::info!(group = self.options.name, world, "group formed");
        Ok(())
    }

    /// Tells the engines that the group has ended.
    ///
    /// # Errors
    /// The first failed reply of an engine.
    pub fn dissolve(&mut self) -> Result<()> {
        if self.formed.is_none() {
            return Ok(());
        }
        let calls = self.destroy();
        self.abandon();
        calls.wait()
    }

    fn destroy(&self) -> Calls {
        self.call(|_, engine| {
            let name = self.options.name.clone();
            async move { engine.destroy_weights_update_group(&name).await }
        })
    }

    fn push_all(&mut self, weights: &dyn Snapshot, buckets: &[Bucket], label: Option<&str>) -> Result<()> {
        let Some(first) = buckets.first() else { return Ok(()) };
        let mut loading: Option<Calls> = None;
        self.root.gather(0, weights, first)?;
        for (n, bucket) in buckets.iter().enumerate() {
            let label = label.filter(|_| n + 1 == buckets.len());
            let mut calls = self.announce(weights.tensors(), bucket, label);
            self.join(&mut calls)?;
            self.root.broadcast(n % 2, &self.lengths(weights.tensors(), bucket))?;
            if let Some(next) = buckets.get(n + 1) {
                self.root.gather((n + 1) % 2, weights, next)?;
            }
            if let Some(Err(error)) = loading.take().map(Calls::wait) {
                // An engine waits for what was announced to it, come what may; only then is it fit to be told
                // anything else.
                let _ = self.sent(n % 2, &mut calls).and_then(|()| calls.wait());
                return Err(error);
            }
            self.sent(n % 2, &mut calls)?;
            loading = Some(calls);
        }
        loading.map_or(Ok(()), Calls::wait)
    }

    fn announce(&self, tensors: &[TensorInfo], bucket: &Bucket, label: Option<&str>) -> Calls {
        let infos = || bucket.tensors.iter().map(|&index| &tensors[index]);
        let update = DistributedUpdate {
            names: infos().map(|info| info.name.clone()).collect(),
            dtypes: infos().map(|info| torch_name(info.dtype)).collect(),
            shapes: infos().map(|info| info.shape.clone()).collect(),
            group_name: self.options.name.clone(),
            load_format: (self.options.mode == UpdateMode::Flattened).then_some("flattened_bucket"),
            weight_version: label.map(str::to_owned),
            flush_cache: false,
        };
        let update = std::sync::Arc::new(update);
        self.call(move |_, engine| {
            let update = update.clone();
            async move { engine.update_weights_from_distributed(&update).await }
        })
    }

    fn lengths(&self, tensors: &[TensorInfo], bucket: &Bucket) -> Vec<u64> {
        match self.options.mode {
            UpdateMode::Flattened => vec![bucket.bytes],
            UpdateMode::PerTensor => {
                // The planner let no size through that does not fit.
                bucket.tensors.iter().filter_map(|&index| tensors[index].byte_len().ok()).collect()
            }
        }
    }

    fn join(&mut self, calls: &mut Calls) -> Result<()> {
        if self.formed.as_ref().is_some_and(|formed| formed.joined) {
            return Ok(());
        }
        self.wait("joining", self.options.join, calls, R::joined)?;
        if let Some(formed) = &mut self.formed {
            formed.joined = true;
        }
        Ok(())
    }

    fn sent(&mut self, slot: usize, calls: &mut Calls) -> Result<()> {
        self.wait("receiving a bucket", self.options.transfer, calls, |root| root.sent(slot))
    }

    /// Waits for rank 0 while the engines' replies are watched: a failure there is the only sign that a
    /// broadcast will never end.
    fn wait(
        &mut self,
        what: &'static str,
        after: Duration,
        calls: &mut Calls,
        done: impl Fn(&mut R) -> Result<bool>,
    ) -> Result<()> {
        let begin = Instant::now();
        loop {
            if done(&mut self.root)? {
                return Ok(());
            }
            calls.check()?;
            let waited = begin.elapsed();
            if waited > after {
                let waiting =
                    self.formed.as_ref().map_or_else(Vec::new, |formed| formed.rendezvous.waited_for());
                let engines = self.members.iter().map(|member| member.engine.url().to_owned()).collect();
                return Err(Error::Group { group: self.options.name.clone(), what, after, engines, waiting });
            }
            // A transfer takes milliseconds, and each of these waits is on its way.
            match waited.as_millis() {
                0..5 => std::thread::yield_now(),
                5..200 => std::thread::sleep(Duration::from_micros(50)),
                _ => std::thread::sleep(Duration::from_millis(2)),
            }
        }
    }

    fn call<F, T>(&self, call: F) -> Calls
    where
        F: Fn(usize, Client) -> T,
        T: Future<Output = Result<()>> + Send + 'static,
    {
        Calls::send(&self.runtime, &self.members, call)
    }

    /// Gives the group up on this side; the engines are told when it is formed anew.
    fn abandon(&mut self) {
        self.root.abort();
        self.formed = None;
    }
}

impl<R: Root> Push for Group<R> {
    /// NCCL fails at the engine, and hangs here, when the two do not map memory in the same way.
    fn admit(&self, engine: &str, server: &ServerInfo) -> Result<()> {
        let theirs = server.enable_symm_mem.unwrap_or(false);
        let Some(ours) = self.root.cumem().filter(|ours| *ours != theirs) else { return Ok(()) };
        let what = "enable_symm_mem, which sets its NCCL_CUMEM_ENABLE,";
        let expected = format!("{ours}, as NCCL_CUMEM_ENABLE of this process");
        Err(Error::refused(engine, what, expected, theirs.to_string()))
    }

    /// Says which engines belong to it. If they are not those of before, or one of them is another process
    /// than before, the group is given up: the next push forms it anew.
    fn set_members(&mut self, members: Vec<Member>, same_processes: bool) {
        let key = |member: &Member| (member.engine.url().to_owned(), member.ranks);
        let same = self.members.iter().map(key).eq(members.iter().map(key));
        if self.formed.is_some() && !(same && same_processes) {
            tracing::info!(group = self.options.name, "the group's engines have changed");
            self.abandon();
        }
        self.members = members;
    }

    /// Forms the group, unless it is formed: listens, begins to join, then calls the engines. With NCCL the
    /// ranks join in the first push.
    ///
    /// # Errors
    /// [`Error::Fleet`] without engines, [`Error::Listen`], [`Error::Root`], and the errors of the engines'
    /// calls, of which the first is told.
    fn form(&mut self) -> Result<()> {
        if self.formed.is_some() {
            return Ok(());
        }
        if self.members.is_empty() {
            return Err(Error::Fleet { found: Vec::new() });
        }
        let outcome = self.meet();
        if outcome.is_err() {
            self.abandon();
        }
        outcome
    }

    /// Pushes weights into every engine, which carry `label` afterwards if there is one. Their caches are not
    /// flushed.
    ///
    /// # Errors
    /// As [`Group::form`]; [`Error::TooLarge`] before anything is posted; [`Error::Group`] when ranks do not
    /// join or receive in time; the first failed reply of an engine. After any of the latter the weights of
    /// any of the engines may be a mixture.
    fn push(&mut self, weights: &dyn Snapshot, label: Option<&str>) -> Result<Pushed> {
        let buckets = plan(weights.tensors(), self.options.bucket_bytes)?;
        self.form()?;
        let begin = Instant::now();
        let outcome = begin_sessions(&self.runtime, &self.members)
            .and_then(|()| self.push_all(weights, &buckets, label));
        if outcome.is_err() {
            // Engines that wait for rank 0 hear nothing else before it is gone.
            self.abandon();
        }
        // A session that is left open keeps engines from every other update.
        let ended = end_sessions(&self.runtime, &self.members);
        if let Err(error) = outcome.and(ended) {
            self.abandon();
            return Err(error);
        }
        let bytes = buckets.iter().map(|bucket| bucket.bytes).sum();
        let pushed = Pushed { bytes, buckets: buckets.len(), took: begin.elapsed() };
        tracing::info!(group = self.options.name, bytes, buckets = pushed.buckets, took = ?pushed.took, "pushed");
        Ok(pushed)
    }
}
