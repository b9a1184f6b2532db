//! Where else `driftless train` tells how the run is doing.

#[cfg(feature = "torch")]
use crate::cli::shared::error::Error;
use crate::cli::shared::error::Result;
use crate::cli::shared::output::say;
use crate::cli::shared::{keys, paths};
use driftless::http::Server;
use driftless::trainer::door::Listen;
use driftless::trainer::events::{Prometheus, Sink, TensorBoard};
use std::net::SocketAddr;
use std::path::PathBuf;

#[derive(clap::Args)]
#[command(next_help_heading = "Watching")]
pub(super) struct WatchArgs {
    /// Directory for TensorBoard's event files, with the scalars of metrics.jsonl.
    #[arg(long, value_name = "DIR")]
    tensorboard_dir: Option<PathBuf>,
    /// Address at which Prometheus reads the run's figures: GET /metrics. Port 0: the system chooses, and the address is
    /// printed.
    #[arg(long, value_name = "ADDR")]
    metrics_listen: Option<SocketAddr>,
    /// File holding the token that it has to bring; needed to listen beyond loopback [default: DRIFTLESS_TOKEN].
    #[arg(long, value_name = "FILE", requires = "metrics_listen")]
    metrics_token_file: Option<PathBuf>,
}

/// What was asked for; it is told, and read, until this is dropped.
pub(super) struct Watched {
    pub(super) sinks: Vec<Box<dyn Sink>>,
    pub(super) _server: Option<Server>,
}

impl WatchArgs {
    /// Refuses what SFT would not tell.
    #[cfg(feature = "torch")]
    pub(super) fn check_sft(&self) -> Result<()> {
        let asked = [
            ("--tensorboard-dir", self.tensorboard_dir.is_some()),
            ("--metrics-listen", self.metrics_listen.is_some()),
        ];
        match asked.into_iter().find(|(_, asked)| *asked) {
            Some((flag, _)) => Err(Error::usage(flag, "a run that generates", "--loss-type sft_loss")),
            None => Ok(()),
        }
    }

    /// Opens what was asked for, for the run of this name.
    pub(super) fn open(&self, run: &str) -> Result<Watched> {
        let mut sinks: Vec<Box<dyn Sink>> = Vec::new();
        if let Some(dir) = &self.tensorboard_dir {
            paths::check_place("--tensorboard-dir", dir)?;
            sinks.push(Box::new(TensorBoard::new(dir)));
        }
        let Some(addr) = self.metrics_listen else { return Ok(Watched { sinks, _server: None }) };
        let token = keys::secret(self.metrics_token_file.as_deref(), "DRIFTLESS_TOKEN")?;
        let page = Prometheus::new(run);
        let server = page.serve(&Listen { addr, token })?;
        say(&format!("rl: metrics at http://{}/metrics", server.addr()));
        sinks.push(Box::new(page));
        Ok(Watched { sinks, _server: Some(server) })
    }
}
