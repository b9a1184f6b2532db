//! Where else `driftless train` tells how the run is doing.

use crate::cli::dashboard;
#[cfg(feature = "torch")]
use crate::cli::shared::error::Error;
use crate::cli::shared::error::Result;
use crate::cli::shared::output::say;
use crate::cli::shared::{keys, paths};
use clap::ArgGroup;
use driftless::http::Server;
use driftless::observe::{Otlp, Prometheus, TensorBoard};
use driftless::trainer::door::Listen;
use driftless::trainer::events::Sink;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
#[command(next_help_heading = "Watching")]
#[command(group = ArgGroup::new("watched").multiple(true).args(["dashboard", "metrics_listen"]))]
pub(super) struct WatchArgs {
    /// Directory for TensorBoard's event files, with the scalars of metrics.jsonl.
    #[arg(long, value_name = "DIR")]
    tensorboard_dir: Option<PathBuf>,
    /// Address of a page that shows the run, as `driftless dashboard` does. Port 0: the system chooses, and the address is
    /// printed.
    #[arg(long, value_name = "ADDR:PORT")]
    dashboard: Option<SocketAddr>,
    /// Address at which Prometheus reads the run's figures: GET /metrics. Port 0 as above.
    #[arg(long, value_name = "ADDR:PORT")]
    metrics_listen: Option<SocketAddr>,
    /// Collector of OpenTelemetry that gets the same figures with each step, such as http://127.0.0.1:4318: OTLP over HTTP, in
    /// JSON. What it wants as headers stands in OTEL_EXPORTER_OTLP_HEADERS.
    #[arg(long, value_name = "URL")]
    otlp_endpoint: Option<String>,
    /// File holding the token that viewers and Prometheus have to bring; needed to listen beyond loopback [default:
    /// DRIFTLESS_TOKEN].
    #[arg(long, value_name = "FILE", requires = "watched")]
    watch_token_file: Option<PathBuf>,
}

/// What was asked for; it is told, and read, until this is dropped.
pub(super) struct Watched {
    pub(super) sinks: Vec<Box<dyn Sink>>,
    pub(super) servers: Vec<Server>,
}

impl WatchArgs {
    /// Refuses what SFT would not tell.
    #[cfg(feature = "torch")]
    pub(super) fn check_sft(&self) -> Result<()> {
        let asked = [
            ("--tensorboard-dir", self.tensorboard_dir.is_some()),
            ("--dashboard", self.dashboard.is_some()),
            ("--metrics-listen", self.metrics_listen.is_some()),
            ("--otlp-endpoint", self.otlp_endpoint.is_some()),
        ];
        match asked.into_iter().find(|(_, asked)| *asked) {
            Some((flag, _)) => Err(Error::usage(flag, "a run that generates", "--loss-type sft_loss")),
            None => Ok(()),
        }
    }

    /// Opens what was asked for, for the run of this name and directory.
    pub(super) fn open(&self, run: &str, save: &Path) -> Result<Watched> {
        let mut watched = Watched { sinks: Vec::new(), servers: Vec::new() };
        if let Some(dir) = &self.tensorboard_dir {
            paths::check_place("--tensorboard-dir", dir)?;
            watched.sinks.push(Box::new(TensorBoard::new(dir)));
        }
        let token = || keys::secret(self.watch_token_file.as_deref(), "DRIFTLESS_TOKEN");
        if let Some(addr) = self.dashboard {
            let server = dashboard::serve_run(save, addr, token()?)?;
            say(&format!("rl: dashboard at http://{}", server.addr()));
            watched.servers.push(server);
        }
        if let Some(addr) = self.metrics_listen {
            let page = Prometheus::new(run);
            let server = page.serve(&Listen { addr, token: token()? })?;
            say(&format!("rl: metrics at http://{}/metrics", server.addr()));
            watched.sinks.push(Box::new(page));
            watched.servers.push(server);
        }
        if let Some(endpoint) = &self.otlp_endpoint {
            // What is no UTF-8 is no header, and is refused as one.
            let headers = std::env::var_os("OTEL_EXPORTER_OTLP_HEADERS").unwrap_or_default();
            let headers = headers.to_string_lossy();
            watched.sinks.push(Box::new(Otlp::new(run, endpoint, &headers)?));
        }
        Ok(watched)
    }
}
