//! What engines are going to get, for `driftless follow --dry-run`.

use super::{Args, disk_options, plugin};
use crate::cli::shared::error::Result;
use driftless::bridge::Expected;
use driftless::bridge::activate::{Outlook, outlook};
use driftless::transport::activate::How;
use serde::Serialize;
use std::path::Path;

/// An engine, and what it gets.
#[derive(Serialize)]
pub(super) struct Engine {
    url: String,
    /// Absent where no `config.json` is at hand that says of which model versions are.
    #[serde(flatten)]
    gets: Option<Outlook>,
}

impl Engine {
    pub(super) fn text(&self) -> String {
        match &self.gets {
            Some(gets) => format!("{}: {gets}", self.url),
            None => format!(
                "{}: not asked: there is no config.json yet to compare it with; give --hf-checkpoint",
                self.url
            ),
        }
    }
}

/// What the engines get of versions like the one on disk or, before there is one, like the run's start.
pub(super) fn engines(args: &Args) -> Result<Vec<Engine>> {
    if args.engine.is_empty() {
        return Ok(Vec::new());
    }
    let options = disk_options(args, plugin(args)?)?;
    let has_config = |dir: &&Path| dir.join("config.json").is_file();
    let places = [Some(args.checkpoint_dir.as_path()), args.hf_checkpoint.as_deref()];
    let expected =
        places.into_iter().flatten().find(has_config).map(Expected::from_checkpoint).transpose()?;
    let engine = |url: &String| {
        let gets = expected.as_ref().map(|expected| outlook(url, expected, &options)).transpose()?;
        let gets = match gets {
            Some(Outlook::Taken { compared, .. }) if args.transport.pushes() => {
                Some(Outlook::Taken { how: How::Pushed, compared })
            }
            gets => gets,
        };
        Ok(Engine { url: url.clone(), gets })
    };
    args.engine.iter().map(engine).collect()
}
