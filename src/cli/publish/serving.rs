//! A publisher that serves what it publishes.

use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::output::Output;
use crate::cli::shared::transport::{open_ucx, with_ucx_settings};
use crate::cli::shared::{keys, numbers};
use driftless::relay::{Recent, RelayOptions, Server, serve};
use driftless::store::Store;
use driftless::store::wait::Stop;
use driftless::transport::gc::{GcOptions, leases};
use driftless::transport::{Run, Version};
use serde_json::json;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of objects that are served from memory; the relay's cache gets them from there when they are asked
/// for.
const RECENT_BYTES: u64 = 1 << 30;
/// Time between the first two looks at the leases, each of which reads one object a follower.
const POLL_MIN: Duration = Duration::from_secs(1);
/// Time between later ones.
const POLL_MAX: Duration = Duration::from_secs(16);

#[derive(clap::Args)]
pub(crate) struct ServingArgs {
    /// Serve the store's objects from this process, to followers with --relay ucx://ADDR:PORT: from before
    /// the version is committed until a signal, or as --until-followed says. The new version is served from
    /// memory. Needs libucp 1.14 or newer.
    #[arg(long, value_name = "ADDR:PORT", requires = "relay_cache_dir")]
    pub(crate) listen_ucx: Option<SocketAddr>,
    /// Directory for the objects that are served; one process at a time owns it.
    #[arg(long, value_name = "DIR", requires = "listen_ucx")]
    relay_cache_dir: Option<PathBuf>,
    /// GiB of objects to keep there; the least recently used go first.
    #[arg(long, value_name = "GIB", default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..1 << 20))]
    relay_cache_gib: u64,
    /// File holding the token that these followers must bring; needed to listen beyond loopback [default:
    /// DRIFTLESS_TOKEN].
    #[arg(long, value_name = "FILE", requires = "listen_ucx")]
    relay_token_file: Option<PathBuf>,
    /// End when every follower that holds a lease on the model has the version, and after so many seconds in
    /// any case.
    #[arg(long, value_name = "SECONDS", requires = "listen_ucx", value_parser = numbers::seconds())]
    until_followed: Option<u64>,
}

impl ServingArgs {
    /// Gives the library that will be opened its settings.
    pub(crate) fn prepare(&self) -> Result<()> {
        if self.listen_ucx.is_some() { with_ucx_settings() } else { Ok(()) }
    }

    /// Begins to serve `store`, if that was asked for, says where, and has what is put from now on go through
    /// memory.
    pub(crate) fn start(&self, store: &mut Arc<dyn Store>, output: Output) -> Result<Option<Server>> {
        let (Some(listen), Some(dir)) = (self.listen_ucx, &self.relay_cache_dir) else { return Ok(None) };
        let mut options = RelayOptions::new((Ipv4Addr::LOCALHOST, 0).into(), dir);
        options.cache_bytes = self.relay_cache_gib << 30;
        options.token = keys::secret(self.relay_token_file.as_deref(), "DRIFTLESS_TOKEN")?;
        options.fabric = Some((listen, open_ucx()?));
        *store = Arc::new(Recent::new(store.clone(), RECENT_BYTES));
        let server = serve(store.clone(), options).map_err(Error::Relay)?;
        let url = format!("http://{}", server.addr());
        let ucx = server.fabric_addr().map(|addr| format!("ucx://{addr}"));
        output.print(&json!({ "url": url, "ucx_url": ucx }), |_| {
            format!("serving on {}, status and metrics on {url}", ucx.unwrap_or_default())
        })?;
        Ok(Some(server))
    }

    /// Waits as long as there is somebody to serve. The version is published, whatever becomes of that.
    pub(crate) fn linger(&self, run: &Run, model: &str, version: Version, stop: &Stop) {
        let Some(seconds) = self.until_followed else {
            while !stop.wait(Duration::from_secs(3600)) {}
            return;
        };
        let (begun, limit) = (Instant::now(), Duration::from_secs(seconds));
        let mut poll = POLL_MIN;
        loop {
            let behind = behind(run, model, version);
            if behind.is_empty() {
                return;
            }
            let left = limit.saturating_sub(begun.elapsed());
            if left.is_zero() {
                return tracing::warn!(%version, seconds, ?behind, "ends before all followers have the version");
            }
            if stop.wait(poll.min(left)) {
                return;
            }
            poll = (2 * poll).min(POLL_MAX);
        }
    }
}

/// Followers with a live lease that do not have the version, or why they are not known.
fn behind(run: &Run, model: &str, version: Version) -> Vec<String> {
    match leases(run, &GcOptions::new(model)) {
        Ok(leases) => {
            let late = leases.into_iter().filter(|lease| lease.live && lease.version < Some(version));
            late.map(|lease| lease.follower).collect()
        }
        Err(error) => {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(error, "the leases could not be read");
            vec!["unknown".to_owned()]
        }
    }
}
