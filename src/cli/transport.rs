//! How weights reach an engine: from a checkpoint directory that it loads, or over NCCL into its memory.

use crate::cli::error::{Error, Result};
use driftless::bridge::{
    ClientOptions, DistributedActivator, DistributedOptions, Group, GroupOptions, NcclOptions, NcclRoot,
    PauseMode,
};
use driftless::transport::Activate;
use std::net::SocketAddr;
use std::path::PathBuf;

/// What NCCL reads from the environment by itself, and what SGLang sets for itself unless it is set.
const NCCL_SETTINGS: [(&str, &str); 2] = [("NCCL_CUMEM_ENABLE", "0"), ("NCCL_NVLS_ENABLE", "0")];

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Transport {
    /// Each engine loads the checkpoint directory.
    #[default]
    Disk,
    /// All engines at once receive the full weights from a GPU of this host, which no engine uses.
    Nccl,
}

#[derive(Debug, clap::Args)]
pub(crate) struct TransportArgs {
    /// How weights reach the engines.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) update_weight_transport: Transport,
    /// The libnccl.so.2 that the engines' torch uses (site-packages/nvidia/nccl/lib).
    #[arg(long, value_name = "FILE", required_if_eq("update_weight_transport", "nccl"))]
    nccl_library: Option<PathBuf>,
    /// Version that library must have, as the engines' torch.cuda.nccl.version() says [default: any].
    #[arg(long, value_name = "MAJOR.MINOR.PATCH", value_parser = version)]
    nccl_version: Option<[u32; 3]>,
    /// Number of the GPU to send from; NCCL refuses one that an engine uses.
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    nccl_device: usize,
    /// Host name or address under which the engines reach this one [default: the host's name].
    #[arg(long, value_name = "HOST")]
    group_host: Option<String>,
    /// Address at which the engines' ranks are awaited; anyone who reaches it can join or disturb the group.
    #[arg(long, value_name = "ADDR:PORT", default_value = "0.0.0.0:0")]
    group_listen: SocketAddr,
    /// Bytes of one bucket: this GPU holds two, an engine's one and what it needs to take it apart.
    #[arg(long, value_name = "BYTES", default_value_t = 1 << 30)]
    update_weight_buffer_size: u64,
}

impl TransportArgs {
    /// Starts this program again with NCCL's settings, unless they are made: a process must not change its environment once it has threads.
    pub(crate) fn prepare(&self) -> Result<()> {
        use std::os::unix::process::CommandExt as _;
        let unset: Vec<_> =
            NCCL_SETTINGS.iter().filter(|(name, _)| std::env::var_os(name).is_none()).collect();
        if self.update_weight_transport != Transport::Nccl || unset.is_empty() {
            return Ok(());
        }
        let fail = |source| Error::Io { path: PathBuf::from("/proc/self/exe"), source };
        let program = std::env::current_exe().map_err(fail)?;
        let mut again = std::process::Command::new(program);
        again.args(std::env::args_os().skip(1)).envs(unset.into_iter().copied());
        // Comes back only when it failed.
        Err(fail(again.exec()))
    }

    /// One activator of all these engines.
    pub(crate) fn group(
        &self,
        engines: &[String],
        client: ClientOptions,
        pause: PauseMode,
        base: Option<PathBuf>,
        host: String,
    ) -> Result<Box<dyn Activate>> {
        let mut nccl = NcclOptions::new(self.nccl_library.clone().unwrap_or_default());
        nccl.version = self.nccl_version;
        nccl.device = self.nccl_device;
        nccl.cumem = std::env::var(NCCL_SETTINGS[0].0).is_ok_and(|value| value != "0");
        let mut options = GroupOptions::new(self.group_host.clone().unwrap_or(host));
        options.listen = self.group_listen;
        options.bucket_bytes = self.update_weight_buffer_size;
        let group = Group::new(NcclRoot::open(&nccl)?, options)?;
        let options = DistributedOptions { client, pause, base };
        Ok(Box::new(DistributedActivator::new(engines, group, options)?))
    }
}

fn version(text: &str) -> Result<[u32; 3], String> {
    let parts: Vec<u32> = text.split('.').map(str::parse).collect::<Result<_, _>>().unwrap_or_default();
    parts.try_into().map_err(|_| "three numbers, such as 2.28.9, are expected".to_owned())
}
