//! Options for how weights reach a host and its engines: files that engines load (from the store or over
//! UCX), or pushes into their memory (over NCCL or within a GPU).

use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::numbers;
use clap::ValueEnum as _;
use driftless::bridge::push::colocate::{Colocation, ColocationOptions, CudaShare};
use driftless::bridge::push::nccl::{Group, GroupOptions, NcclOptions, NcclRoot};
use driftless::bridge::push::{PushActivator, PushOptions};
use driftless::bridge::sglang::MemoryTag;
use driftless::relay::fabric::Fabric;
use driftless::relay::fabric::ucx::{Ucx, UcxOptions};
use driftless::store::os::host_name;
use driftless::store::redact;
use driftless::transport::activate::Activate;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

/// What NCCL reads from the environment by itself, and what SGLang sets for itself unless it is set.
const NCCL_SETTINGS: [(&str, &str); 2] = [("NCCL_CUMEM_ENABLE", "0"), ("NCCL_NVLS_ENABLE", "0")];

/// What an object store's URL begins with.
const OBJECT_STORES: [&str; 3] = ["s3://", "gs://", "az://"];

/// UCX otherwise prints what it has to say on standard output, among this program's results.
const UCX_SETTINGS: [(&str, &str); 1] = [("UCX_LOG_FILE", "stderr")];

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Transport {
    /// Each engine loads the checkpoint directory that its follower keeps.
    #[default]
    Disk,
    /// Of followers: as `disk`, with the objects over UCX from a --relay ucx://…; refuses to start without
    /// libucp. What the relay does not give comes from the store.
    Ucx,
    /// As `disk`, and --store must be an object store: s3://…, gs://… or az://….
    Object,
    /// All engines at once receive the full weights from a GPU of this host, which no engine uses.
    Nccl,
}

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct TransportArgs {
    /// How weights reach the engines.
    #[arg(long, value_enum, default_value_t)]
    update_weight_transport: Transport,
    /// The libnccl.so.2 that the engines' torch uses (site-packages/nvidia/nccl/lib).
    #[arg(long, value_name = "FILE", required_if_eq("update_weight_transport", "nccl"))]
    nccl_library: Option<PathBuf>,
    /// Version that library must have, as the engines' torch.cuda.nccl.version() says [default: any].
    #[arg(long, value_name = "MAJOR.MINOR.PATCH", value_parser = version)]
    nccl_version: Option<[u32; 3]>,
    /// Number of the GPU to send from; NCCL refuses one that an engine uses [default: 0; of train, its --device].
    #[arg(long, value_name = "NUMBER")]
    nccl_device: Option<usize>,
    /// The engines are on a GPU of this process, which they load from by CUDA IPC: same host, same user, same
    /// /dev/shm. Those with --enable-memory-saver give their key-value cache back meanwhile, and abort what
    /// they run. Not with another transport.
    #[arg(long, conflicts_with = "update_weight_transport")]
    colocate: bool,
    /// Number of that GPU, of those that this process sees; an engine that does not see it ends [default: 0; of
    /// train, its --device].
    #[arg(long, value_name = "NUMBER", requires = "colocate")]
    colocate_device: Option<usize>,
    /// Host name or address under which the engines reach this one [default: the host's name].
    #[arg(long, value_name = "HOST")]
    group_host: Option<String>,
    /// Address at which the engines' ranks are awaited; anyone who reaches it can join or disturb the group.
    #[arg(long, value_name = "ADDR:PORT", default_value = "0.0.0.0:0")]
    group_listen: SocketAddr,
    /// Bytes of one bucket: this GPU holds two, an engine's one and what it needs to take it apart.
    #[arg(long, value_name = "BYTES", default_value_t = 1 << 30, value_parser = numbers::buffer())]
    update_weight_buffer_size: u64,
}

impl TransportArgs {
    /// Gives the libraries that will be opened their settings.
    pub(crate) fn prepare(&self, relays: &[String]) -> Result<()> {
        let nccl = self.update_weight_transport == Transport::Nccl;
        let ucx = relays.iter().any(|url| is_ucx(url));
        with_settings(&[(nccl, &NCCL_SETTINGS[..]), (ucx, &UCX_SETTINGS)])
    }

    /// Refuses a store and relays of a follower that do not go with the choice.
    pub(crate) fn check(&self, store: &str, relays: &[String]) -> Result<()> {
        let refuse = |expected: &str, found: String| Err(Error::usage(self.flag(), expected, found));
        match self.update_weight_transport {
            Transport::Ucx if !relays.iter().any(|url| is_ucx(url)) => {
                let shown: Vec<_> = relays.iter().map(|url| redact(url)).collect();
                let found = if relays.is_empty() { "no --relay".to_owned() } else { shown.join(", ") };
                refuse("--relay ucx://host:port, as driftless relay --listen-ucx serves it", found)
            }
            Transport::Object => check_object_store(store),
            _ => Ok(()),
        }
    }

    /// Refuses what does not go with a trainer whose weights are on the GPU `device`, if they are on one; `learner`:
    /// they are in a process of its own. A push is from the trainer's GPU, which becomes the default.
    pub(crate) fn of_trainer(
        mut self,
        store: Option<&str>,
        learner: bool,
        device: Option<usize>,
    ) -> Result<Self> {
        match (self.update_weight_transport, store) {
            (Transport::Ucx, _) => {
                let expected = "disk, object or nccl; relays serve followers, which take this flag";
                return Err(Error::usage(self.flag(), expected, "ucx"));
            }
            (Transport::Object, Some(store)) => check_object_store(store)?,
            _ => {}
        }
        if self.pushes() && learner {
            let expected =
                "no --learner: its weights are not here; a follower pushes them from its checkpoint";
            return Err(Error::usage(self.flag(), expected, "both"));
        }
        let (flag, chosen) = match self.colocate {
            true => ("--colocate-device", &mut self.colocate_device),
            false => ("--nccl-device", &mut self.nccl_device),
        };
        if let Some(device) = device
            && let found = *chosen.get_or_insert(device)
            && found != device
        {
            return Err(Error::usage(flag, format!("{device}, where --device has the weights"), found));
        }
        Ok(self)
    }

    /// The flag that chooses the way of the weights, as it is given.
    fn flag(&self) -> String {
        if self.colocate {
            return "--colocate".to_owned();
        }
        let value = self.update_weight_transport.to_possible_value();
        format!("--update-weight-transport {}", value.as_ref().map_or("", |value| value.get_name()))
    }

    /// Says in the log which way the weights go, and why.
    pub(crate) fn log(&self) {
        let way = match self.update_weight_transport {
            _ if self.colocate => "full weights within a GPU that the engine shares",
            Transport::Disk => "from the store to a checkpoint that engines load",
            Transport::Object => "from an object store to a checkpoint that engines load",
            Transport::Ucx => "from a relay over UCX, else from the store, to a checkpoint that engines load",
            Transport::Nccl => "full weights over NCCL into the engines' memory",
        };
        tracing::info!(way, "how weights reach the engines");
    }

    /// One activator of all these engines, whichever way the weights go.
    pub(crate) fn push(&self, engines: &[String], options: PushOptions) -> Result<Box<dyn Activate>> {
        if !self.colocate {
            return Ok(Box::new(PushActivator::new(engines, self.group()?, options)?));
        }
        let share = CudaShare::open(self.colocate_device.unwrap_or(0))?;
        let bucket = ColocationOptions::default().with_bucket_bytes(self.update_weight_buffer_size);
        let options = options.with_release(vec![MemoryTag::KvCache]);
        Ok(Box::new(PushActivator::new(engines, Colocation::new(share, bucket)?, options)?))
    }

    /// Whether weights go into the engines' memory.
    pub(crate) fn pushes(&self) -> bool {
        self.colocate || self.update_weight_transport == Transport::Nccl
    }

    /// Rank 0 of all these engines.
    fn group(&self) -> Result<Group<NcclRoot>> {
        let cumem = std::env::var(NCCL_SETTINGS[0].0).is_ok_and(|value| value != "0");
        let nccl = NcclOptions::new(self.nccl_library.clone().unwrap_or_default());
        let mut nccl = nccl.with_device(self.nccl_device.unwrap_or(0)).with_cumem(cumem);
        nccl.version = self.nccl_version;
        let options = GroupOptions::new(self.group_host.clone().unwrap_or_else(host_name))
            .with_listen(self.group_listen)
            .with_bucket_bytes(self.update_weight_buffer_size);
        Ok(Group::new(NcclRoot::open(&nccl)?, options)?)
    }
}

/// Refuses a store for `--update-weight-transport object` that is none.
fn check_object_store(store: &str) -> Result<()> {
    if OBJECT_STORES.iter().any(|scheme| store.starts_with(scheme)) {
        return Ok(());
    }
    let kind = store.split_once("://").map_or("a path", |(scheme, _)| scheme);
    let expected = "--store s3://…, gs://… or az://… (--update-weight-transport disk takes any store)";
    let found = format!("--store of the kind `{kind}`");
    Err(Error::usage("--update-weight-transport object", expected, found))
}

fn is_ucx(url: &str) -> bool {
    url.starts_with("ucx://")
}

/// UCX, for what is served over it.
pub(crate) fn open_ucx() -> Result<Arc<dyn Fabric>> {
    Ok(Arc::new(Ucx::open(&UcxOptions::default())?))
}

/// What UCX reads from the environment by itself.
pub(crate) fn with_ucx_settings() -> Result<()> {
    with_settings(&[(true, &UCX_SETTINGS)])
}

/// Starts this program again with the settings that are wanted, unless they are made: a process must not
/// change its environment once it has threads.
pub(crate) fn with_settings(settings: &[(bool, &[(&str, &str)])]) -> Result<()> {
    use std::os::unix::process::CommandExt as _;
    let wanted = settings.iter().filter(|(wanted, _)| *wanted).flat_map(|(_, settings)| *settings);
    let unset: Vec<_> = wanted.filter(|(name, _)| std::env::var_os(name).is_none()).collect();
    if unset.is_empty() {
        return Ok(());
    }
    let fail = |source| Error::Io { path: PathBuf::from("/proc/self/exe"), source };
    let program = std::env::current_exe().map_err(fail)?;
    let mut again = std::process::Command::new(program);
    again.args(std::env::args_os().skip(1)).envs(unset.into_iter().copied());
    // Comes back only when it failed.
    Err(fail(again.exec()))
}

fn version(text: &str) -> Result<[u32; 3], String> {
    let parts: Vec<u32> = text.split('.').map(str::parse).collect::<Result<_, _>>().unwrap_or_default();
    parts.try_into().map_err(|_| "three numbers, such as 2.28.9, are expected".to_owned())
}
