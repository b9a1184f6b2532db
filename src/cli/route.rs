//! The figures that `driftless plan` saves, and how `driftless follow` applies them to each version.

use crate::cli::error::{Error, Result};
use crate::cli::paths;
use driftless::bridge::{Carrier, Entry, Figures, Form, Published, route};
use driftless::transport::relay::Relays;
use driftless::transport::{Arrival, Routed, Router};
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::sync::Arc;

/// The number in a [`Saved`].
const FORMAT: u32 = 1;

/// What was measured, as a file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Saved {
    driftless_plan: u32,
    figures: Figures,
}

/// Writes figures for [`read`].
pub(crate) fn save(path: &Path, figures: &Figures) -> Result<()> {
    let saved = Saved { driftless_plan: FORMAT, figures: *figures };
    let text = serde_json::to_string_pretty(&saved).map_err(|source| json(path, source))?;
    std::fs::write(path, text + "\n").map_err(|source| Error::Io { path: path.to_owned(), source })
}

/// Reads figures that [`save`] wrote.
pub(crate) fn read(path: &Path) -> Result<Figures> {
    let text = paths::read("--plan", path, paths::SMALL)?;
    let saved: Saved = serde_json::from_slice(&text).map_err(|source| json(path, source))?;
    if saved.driftless_plan != FORMAT {
        let what = format!("driftless_plan in {}", path.display());
        let found = saved.driftless_plan.to_string();
        return Err(Error::Usage { what, expected: FORMAT.to_string(), found });
    }
    Ok(saved.figures)
}

fn json(path: &Path, source: serde_json::Error) -> Error {
    Error::Json { what: path.display().to_string(), source }
}

/// Chooses a follower's ways by the cost model: into the engines once, from the trainer's side for each version.
#[derive(Debug)]
pub(crate) struct Planned {
    pub(crate) figures: Figures,
    /// The ways that this follower has.
    pub(crate) ways: Vec<(Carrier, Entry)>,
    /// Whether somebody has ruled out some.
    pub(crate) pinned: bool,
    /// The relays that objects may come from, if there are any.
    pub(crate) relays: Option<Arc<Relays>>,
}

impl Planned {
    /// Chooses how weights enter the engines, which a running follower does not change: it hangs on the figures alone, as all
    /// weights enter whatever came. The other ways in are forgotten.
    pub(crate) fn settle(&mut self) -> Result<Entry> {
        let Figures { model_bytes, delta_bytes: bytes, .. } = self.figures;
        let usual = Published { model_bytes, bytes, form: Form::Delta };
        let routes = route(&self.figures, &usual, &self.ways)?;
        let entry = routes.best.entry;
        self.ways.retain(|way| way.1 == entry);
        let pinned = self.pinned;
        tracing::info!(reason = %routes, pinned, "how a usual version reaches the engines");
        Ok(entry)
    }
}

impl Router for Planned {
    fn route(&self, arrival: &Arrival) -> Routed {
        let form = if arrival.full { Form::Full } else { Form::Delta };
        let version = Published { model_bytes: arrival.model_bytes, bytes: arrival.bytes, form };
        let (way, reason) = match route(&self.figures, &version, &self.ways) {
            Ok(routes) => (Some((routes.best.carrier, routes.best.entry)), routes.to_string()),
            Err(error) => (None, error.to_string()),
        };
        let ucx = way.is_some_and(|(carrier, _)| carrier == Carrier::Ucx);
        if let Some(relays) = &self.relays {
            relays.use_ucx(ucx);
        }
        let carrier = if ucx { "ucx" } else { "store" };
        let way = match way {
            Some((_, Entry::Nccl)) => format!("{carrier}+nccl"),
            _ => carrier.to_owned(),
        };
        let reason = if self.pinned { format!("{reason}; pinned") } else { reason };
        Routed { version: arrival.version, bytes: arrival.bytes, way, reason }
    }
}
