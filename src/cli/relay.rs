//! `driftless relay`.

use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::output::Output;
use crate::cli::shared::signals::{PATIENCE, stop_on_signals};
use crate::cli::shared::transport::{open_ucx, with_ucx_settings};
use crate::cli::shared::{keys, paths, store};
use driftless::relay::{RelayOptions, serve};
use driftless::store::wait::Stop;
use serde_json::json;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

const HELP: &str = "\
A follower with --relay reads objects through it, and everything else from the store; it checks what it gets, and goes on with
the next relay or the store where one fails or lies. The relay reads each object from the store once, checks it, and needs read
access only. It may be killed and started again at any time.

Examples:
  driftless relay --store s3://weights/team --cache-dir /var/cache/driftless --cache-gib 200 \\
      --listen 0.0.0.0:7420 --token-file relay.token
  driftless follow --store s3://weights/team --run my-run --checkpoint-dir /dev/shm/policy \\
      --relay http://relay-0:7420 --relay http://relay-1:7420 --relay-token-file relay.token

  Beside the trainer, for followers on its fast network; UCX_TLS and UCX_NET_DEVICES choose how the bytes go:
    UCX_NET_DEVICES=mlx5_0:1 driftless relay --store file:///shared/store --cache-dir /dev/shm/relay \\
        --listen-ucx 10.0.0.2:7421 --token-file relay.token";

/// Cache the objects of a store for the followers of a region.
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct Args {
    /// Store to relay: file:///dir, a path, s3://bucket/prefix, gs://…, az://….
    #[arg(long, value_name = "URL")]
    store: String,
    /// Directory of the cache; the relay owns it.
    #[arg(long, value_name = "DIR")]
    cache_dir: PathBuf,
    /// GiB of objects to keep; the least recently used go first.
    #[arg(long, value_name = "GIB", default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..1 << 20))]
    cache_gib: u64,
    /// Address to listen on; port 0: the system chooses, and the address is printed.
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:7420")]
    listen: SocketAddr,
    /// Address to listen on over UCX as well, for followers with --relay ucx://ADDR:PORT; needs libucp 1.14
    /// or newer.
    #[arg(long, value_name = "ADDR:PORT")]
    listen_ucx: Option<SocketAddr>,
    /// File holding the token that followers must bring; needed to listen beyond loopback [default:
    /// DRIFTLESS_TOKEN].
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Connections at the same time; fewer where the process may open few files (ulimit -n).
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u16).range(1..))]
    connections: u16,
}

pub(crate) fn run(args: Args, output: Output) -> Result<()> {
    paths::check_place("--cache-dir", &args.cache_dir)?;
    if args.listen_ucx.is_some() {
        with_ucx_settings()?;
    }
    let mut options = RelayOptions::new(args.listen, &args.cache_dir);
    options.cache_bytes = args.cache_gib << 30;
    options.token = keys::secret(args.token_file.as_deref(), "DRIFTLESS_TOKEN")?;
    options.limits.connections = args.connections.into();
    if let Some(listen) = args.listen_ucx {
        options.fabric = Some((listen, open_ucx()?));
    }
    let server = serve(store::open(&args.store)?, options).map_err(Error::Relay)?;
    let url = format!("http://{}", server.addr());
    let ucx = server.fabric_addr().map(|addr| format!("ucx://{addr}"));
    let value = json!({ "url": url, "ucx_url": ucx, "store": args.store, "cache_dir": args.cache_dir.display().to_string() });
    output.print(&value, |_| {
        let also = ucx.as_ref().map(|ucx| format!(" and {ucx}")).unwrap_or_default();
        format!("relaying {} on {url}{also}", args.store)
    })?;
    let stop = Stop::new();
    stop_on_signals(&stop, PATIENCE)?;
    while !stop.wait(Duration::from_secs(3600)) {}
    Ok(())
}
