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
    /// Each engine loads the checkpoint directory.
    #[default]
    Disk,
    /// Each engine loads the checkpoint directory, whose objects come over UCX from a --relay ucx://…;
    /// refuses to start without libucp. What the relay does not give comes from the store.
    Ucx,
    /// As `disk`, and --store must be an object store: s3://…, gs://… or az://….
    Object,
    /// All engines at once receive the full weights from a GPU of this host, which no engine uses.
    Nccl,
}

#[derive(Debug, clap::Args)]
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
    /// Number of the GPU to send from; NCCL refuses one that an engine uses.
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    nccl_device: usize,
    /// The engines are on a GPU of this process, which they load from by CUDA IPC: same host, same user, same
    /// /dev/shm. Those with --enable-memory-saver give their key-value cache back meanwhile, and abort what
    /// they run. Not with another transport.
    #[arg(long, requires = "engine", conflicts_with_all = ["update_weight_transport", "engine_checkpoint_dir"])]
    pub(crate) colocate: bool,
    /// Number of that GPU, of those that this process sees; an engine that does not see it ends.
    #[arg(long, value_name = "NUMBER", default_value_t = 0, requires = "colocate")]
    colocate_device: usize,
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

    /// Refuses a store and relays that do not go with the choice.
    pub(crate) fn check(&self, store: &str, relays: &[String]) -> Result<()> {
        let refuse = |expected: &str, found: String| {
            let value = self.update_weight_transport.to_possible_value();
            let value = value.as_ref().map_or("", |value| value.get_name());
            let what = format!("--update-weight-transport {value}");
            Err(Error::Usage { what, expected: expected.to_owned(), found })
        };
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
    pub(crate) fn push(
        &self,
        engines: &[String],
        options: PushOptions,
        host: String,
    ) -> Result<Box<dyn Activate>> {
        if !self.colocate {
            return Ok(Box::new(PushActivator::new(engines, self.group(host)?, options)?));
        }
        let share = CudaShare::open(self.colocate_device)?;
        let bucket = ColocationOptions::default().with_bucket_bytes(self.update_weight_buffer_size);
        let options = options.with_release(vec![MemoryTag::KvCache]);
        Ok(Box::new(PushActivator::new(engines, Colocation::new(share, bucket)?, options)?))
    }

    /// Whether weights go into the engines' memory.
    pub(crate) fn pushes(&self) -> bool {
        self.colocate || self.update_weight_transport == Transport::Nccl
    }

    /// Rank 0 of all these engines.
    fn group(&self, host: String) -> Result<Group<NcclRoot>> {
        let cumem = std::env::var(NCCL_SETTINGS[0].0).is_ok_and(|value| value != "0");
        let nccl = NcclOptions::new(self.nccl_library.clone().unwrap_or_default());
        let mut nccl = nccl.with_device(self.nccl_device).with_cumem(cumem);
        nccl.version = self.nccl_version;
        let options = GroupOptions::new(self.group_host.clone().unwrap_or(host))
            .with_listen(self.group_listen)
            .with_bucket_bytes(self.update_weight_buffer_size);
        Ok(Group::new(NcclRoot::open(&nccl)?, options)?)
    }
}

/// Refuses a store for `--update-weight-transport object` that is none.
pub(crate) fn check_object_store(store: &str) -> Result<()> {
    if OBJECT_STORES.iter().any(|scheme| store.starts_with(scheme)) {
        return Ok(());
    }
    let kind = store.split_once("://").map_or("a path", |(scheme, _)| scheme);
    Err(Error::Usage {
        what: "--update-weight-transport object".to_owned(),
        expected: "--store s3://…, gs://… or az://… (--update-weight-transport disk takes any store)"
            .to_owned(),
        found: format!("--store of the kind `{kind}`"),
    })
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
fn with_settings(settings: &[(bool, &[(&str, &str)])]) -> Result<()> {
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
