//! `driftless inspect`.

use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::output::{Output, table};
use crate::cli::shared::run::{
    Link, density, kind, kind_text, leases_json, leases_table, model, stored_bytes,
};
use crate::cli::shared::{numbers, paths, store};
use driftless::store::{Store, redact};
use driftless::transport::gc::{GcOptions, leases_at};
use driftless::transport::manifest::{MANIFEST_BYTES_MAX, Manifest};
use driftless::transport::{Error as Transport, Run, Version};
use serde_json::json;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

/// Show what a store holds: its runs, a run's chain and followers, one version.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A run by the URL of its store and its name, s3://bucket/prefix/my-run; or a store, for all its runs.
    #[arg(value_name = "URL", group = "named", conflicts_with_all = ["store", "manifest"])]
    url: Option<String>,
    /// Store to look into: file:///dir, a path, s3://bucket/prefix, gs://…, az://….
    #[arg(long, value_name = "URL")]
    store: Option<String>,
    /// Run whose chain to show; without it, all runs of the store.
    #[arg(long, value_name = "NAME", group = "named", requires = "store")]
    run: Option<String>,
    /// Model of the run [default: the only one].
    #[arg(long, requires = "named")]
    model: Option<String>,
    /// One version, with its tensors.
    #[arg(long, requires = "named", value_parser = numbers::ordinal())]
    version: Option<u64>,
    /// A manifest in a file.
    #[arg(long, value_name = "FILE", conflicts_with = "store")]
    manifest: Option<PathBuf>,
}

pub(crate) fn run(args: Args, output: Output) -> Result<()> {
    if let Some(path) = &args.manifest {
        let bytes = paths::read("--manifest", path, MANIFEST_BYTES_MAX)?;
        return version(&Manifest::parse(&bytes)?, output);
    }
    let (url, name) = match &args.url {
        Some(url) => place(url),
        None => (args.store.ok_or_else(nothing_named)?, args.run),
    };
    let store = store::open(&url)?;
    let whole = args.model.is_none() && args.version.is_none();
    let run = match (name, &args.url) {
        (None, None) => return runs(&store, output),
        (None, Some(url)) if whole && has_runs(url)? => return runs(&store, output),
        (None, Some(url)) => return Err(no_run(url)),
        (Some(name), url) => match (Run::open(store, &name), url) {
            // It may be that of a store.
            (Err(Transport::NoSuchRun { .. }), Some(url)) if whole && has_runs(url)? => {
                return runs(&store::open(url)?, output);
            }
            (opened, _) => opened?,
        },
    };
    match (model(&run, args.model)?, args.version) {
        (Some(model), Some(number)) => version(&run.get(&model, Version(number))?.manifest, output),
        (Some(model), None) => chain(&run, &model, output),
        (None, _) => {
            let value =
                json!({"run": run.name(), "run_id": run.id(), "model": null, "chain": [], "followers": []});
            output.print(&value, |_| format!("run {} ({}) has no version yet", run.name(), run.id()))
        }
    }
}

fn nothing_named() -> Error {
    Error::usage("inspect", "the URL of a run, --store URL, or --manifest FILE", "none of them")
}

fn has_runs(url: &str) -> Result<bool> {
    Ok(!Run::names(store::open(url)?.as_ref())?.is_empty())
}

fn no_run(url: &str) -> Error {
    let expected = "the URL of a store with runs, or of a run, as s3://bucket/prefix/my-run";
    Error::usage("inspect", expected, redact(url))
}

/// The store and the run that a URL names: its last segment is the run. One without is a store's.
fn place(url: &str) -> (String, Option<String>) {
    let (path, parameters) = url.split_at(url.find('?').unwrap_or(url.len()));
    match path.trim_end_matches('/').rsplit_once('/') {
        // Without a path there is a bucket and no run.
        Some((store, run)) if !store.ends_with('/') => (format!("{store}{parameters}"), Some(run.to_owned())),
        _ => (url.to_owned(), None),
    }
}

fn runs(store: &Arc<dyn Store>, output: Output) -> Result<()> {
    let mut runs = Vec::new();
    for name in Run::names(store.as_ref())? {
        let run = Run::open(store.clone(), &name)?;
        for model in run.models()? {
            let newest = run.newest_version(&model)?.map(|version| version.0);
            runs.push(json!({"run": name, "run_id": run.id(), "model": model, "newest": newest}));
        }
    }
    const COLUMNS: [&str; 4] = ["run", "run_id", "model", "newest"];
    let text = |value: &serde_json::Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    output.print(&runs, |runs| {
        table(&COLUMNS, runs.iter().map(|run| COLUMNS.map(|name| text(&run[name])).to_vec()))
    })
}

fn chain(run: &Run, model: &str, output: Output) -> Result<()> {
    let (versions, oldest) = (run.versions(model)?, run.oldest(model)?);
    let links = versions.into_iter().map(|version| match run.get(model, version) {
        Err(Transport::Collected { .. }) => Ok(Link::collected(version)),
        committed => Link::of(&committed?),
    });
    let links = links.collect::<Result<Vec<_>>>()?;
    let followers = leases_at(run, &GcOptions::new(model), Some(SystemTime::now()))?;
    let shown = json!({
        "run": run.name(), "run_id": run.id(), "model": model, "oldest": oldest, "chain": links,
        "followers": leases_json(&followers),
    });
    output.print(&shown, |_| {
        // A reference stores nothing that could be compared with anything; of a collected version nothing is
        // left.
        let stored = |link: &Link, text: String| match link.kind {
            "reference" | "collected" => "-".to_owned(),
            _ => text,
        };
        let row = |link: &Link| {
            vec![
                link.version.to_string(),
                kind_text(link.kind, link.anchor).to_owned(),
                link.base.map_or_else(|| "-".to_owned(), |base| base.to_string()),
                if link.kind == "collected" { "-".to_owned() } else { link.trainer_step.to_string() },
                link.bytes.to_string(),
                stored(link, format!("{:.1}x", link.full_bytes as f64 / link.bytes.max(1) as f64)),
                link.density.map_or_else(|| "-".to_owned(), |density| format!("{:.3} %", 100.0 * density)),
                link.manifest_digest.chars().take(16).collect(),
            ]
        };
        let header = ["version", "kind", "base", "step", "bytes", "full/bytes", "changed", "manifest"];
        let collected = match oldest.0 {
            0 => String::new(),
            oldest => format!("; versions below {oldest} were collected"),
        };
        let followers = match followers.as_slice() {
            [] => "no follower has a lease".to_owned(),
            followers => leases_table(followers),
        };
        let chain = table(&header, links.iter().map(row));
        format!("run {} ({}), model {model}{collected}\n{chain}\n{followers}", run.name(), run.id())
    })
}

fn version(manifest: &Manifest, output: Output) -> Result<()> {
    let bytes = stored_bytes(manifest)?;
    output.print(manifest, |manifest| {
        let row = |tensor: &driftless::transport::manifest::Tensor| {
            vec![
                tensor.name.clone(),
                tensor.dtype.to_string(),
                format!("{:?}", tensor.shape),
                tensor.pieces.iter().map(|piece| piece.length).sum::<u64>().to_string(),
                tensor.aliases.join(", "),
            ]
        };
        let base =
            manifest.base.as_ref().map_or_else(String::new, |base| format!(", on version {}", base.version));
        let elements = manifest.elements();
        let changed = match density(manifest) {
            Some(density) => format!("{:.3} % of {elements} elements changed", 100.0 * density),
            None => format!("{elements} elements"),
        };
        let objects = match manifest.objects.len() {
            1 => "1 object".to_owned(),
            objects => format!("{objects} objects"),
        };
        let tensors =
            table(&["tensor", "dtype", "shape", "bytes", "aliases"], manifest.tensors.iter().map(row));
        let Manifest { run_id, model, version, trainer_step, .. } = manifest;
        let kind = kind(manifest);
        format!(
            "run {run_id}, model {model}, version {version}: {kind}{base}\n\
             step {trainer_step}, {bytes} bytes in {objects} and the manifest, {changed}\n{tensors}"
        )
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_run_is_the_last_segment_of_its_url() {
        for (url, store, run) in [
            ("s3://bucket/root/my-run", "s3://bucket/root", "my-run"),
            ("s3://bucket/my-run/?endpoint=http://h/x", "s3://bucket?endpoint=http://h/x", "my-run"),
            ("file:///srv/store/r", "file:///srv/store", "r"),
            ("store/r", "store", "r"),
        ] {
            assert_eq!(super::place(url), (store.to_owned(), Some(run.to_owned())), "{url}");
        }
        for url in ["s3://bucket", "store", "s3://bucket/?region=x/y"] {
            assert_eq!(super::place(url), (url.to_owned(), None));
        }
    }
}
