//! The run that a command is about, its versions, and the leases that its followers have on it.

use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::output::table;
use crate::cli::shared::slime::Layout;
use driftless::transport::gc::Lease;
use driftless::transport::manifest::{Kind, Manifest};
use driftless::transport::run::Committed;
use driftless::transport::{Run, Version};
use serde::Serialize;
use serde_json::{Value, json};

/// The run that a command publishes to, or follows.
#[derive(clap::Args)]
pub(crate) struct RunArgs {
    /// Store of the run: file:///dir, a path, s3://bucket/prefix, gs://…, az://….
    #[arg(long, value_name = "URL")]
    pub(crate) store: String,
    /// How versions lie in the store.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) layout: Layout,
    /// Name of the run in the store.
    #[arg(long, value_name = "NAME", required_unless_present = "layout")]
    run: Option<String>,
    /// Model of the run.
    #[arg(long, default_value = "policy")]
    pub(crate) model: String,
}

impl RunArgs {
    /// The run's name, which only our own layout has.
    pub(crate) fn name(&self) -> Result<String> {
        match (&self.run, self.layout) {
            (Some(run), _) => Ok(run.clone()),
            (None, Layout::Slime) => Ok("slime".to_owned()),
            (None, Layout::Driftless) => Err(Error::usage("run", "--run NAME", "none")),
        }
    }
}

/// The run's model: the one asked for, or the only one; `None` for a run that has no version yet. A run without one may
/// be asked for any model.
pub(crate) fn model(run: &Run, asked: Option<String>) -> Result<Option<String>> {
    let models = run.models()?;
    match (asked, models.as_slice()) {
        (Some(model), models) if models.is_empty() || models.contains(&model) => Ok(Some(model)),
        (Some(model), models) => {
            let expected = format!("a model of run `{}`: {}", run.name(), models.join(", "));
            Err(Error::usage("--model", expected, model))
        }
        (None, []) => Ok(None),
        (None, [only]) => Ok(Some(only.clone())),
        (None, models) => {
            let what = format!("run `{}` has {} models", run.name(), models.len());
            Err(Error::usage(what, "--model to choose one", models.join(", ")))
        }
    }
}

/// The kind of a version, as results have it.
pub(crate) fn kind(manifest: &Manifest) -> &'static str {
    match manifest.kind {
        Kind::Full => "full",
        Kind::Delta => "delta",
        Kind::Reference => "reference",
    }
}

/// The kind of a version for people, who want to know of anchors too. A version in full is one anyway.
pub(crate) fn kind_text(kind: &'static str, anchor: bool) -> &'static str {
    if anchor && kind == "delta" { "delta, anchor" } else { kind }
}

/// Bytes of a publication: its objects and its manifest, as `publish` counts them.
pub(crate) fn stored_bytes(manifest: &Manifest) -> Result<u64> {
    Ok(manifest.object_bytes() + manifest.to_bytes()?.len() as u64)
}

/// Changed elements / all elements, of a version that is a difference to another.
pub(crate) fn density(manifest: &Manifest) -> Option<f64> {
    let density = || manifest.changed as f64 / manifest.elements().max(1) as f64;
    (manifest.kind == Kind::Delta).then(density)
}

/// One line of a chain.
#[derive(Clone, Default, Serialize)]
pub(crate) struct Link {
    pub(crate) version: u64,
    pub(crate) kind: &'static str,
    pub(crate) anchor: bool,
    pub(crate) base: Option<u64>,
    pub(crate) trainer_step: u64,
    /// Of the objects and the manifest.
    pub(crate) bytes: u64,
    pub(crate) full_bytes: u64,
    /// `None` where nothing says which elements changed.
    pub(crate) density: Option<f64>,
    pub(crate) manifest_digest: String,
}

impl Link {
    pub(crate) fn of(committed: &Committed) -> Result<Link> {
        let manifest = &committed.manifest;
        Ok(Link {
            version: manifest.version.0,
            kind: kind(manifest),
            anchor: manifest.is_anchor(),
            base: manifest.base.as_ref().map(|base| base.version.0),
            trainer_step: manifest.trainer_step,
            bytes: stored_bytes(manifest)?,
            full_bytes: manifest.tensor_bytes(),
            density: density(manifest),
            manifest_digest: committed.digest.to_string(),
        })
    }

    /// A version that was collected by an earlier release, or while this command looked.
    pub(crate) fn collected(version: Version) -> Link {
        Link { version: version.0, kind: "collected", base: version.0.checked_sub(1), ..Link::default() }
    }
}

/// Leases as JSON has them.
pub(crate) fn leases_json(leases: &[Lease]) -> Vec<Value> {
    let lease = |lease: &Lease| {
        json!({
            "follower": lease.follower, "version": lease.version, "needs": lease.needs,
            "age_seconds": lease.age.map(|age| age.as_secs_f64()), "live": lease.live,
        })
    };
    leases.iter().map(lease).collect()
}

/// Leases for people.
pub(crate) fn leases_table(leases: &[Lease]) -> String {
    let row = |lease: &Lease| {
        vec![
            lease.follower.clone(),
            number(lease.version),
            lease.needs.to_string(),
            lease.age.map_or_else(|| "unknown".to_owned(), |age| format!("{} s ago", age.as_secs())),
            if lease.live { "live" } else { "ran out" }.to_owned(),
        ]
    };
    table(&["follower", "version", "needs", "renewed", "lease"], leases.iter().map(row))
}

/// A version's number, or `none`.
pub(crate) fn number(version: Option<Version>) -> String {
    version.map_or_else(|| "none".to_owned(), |version| version.to_string())
}
