//! `driftless gc`.

use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::output::{Output, table};
use crate::cli::shared::run::{leases_json, leases_table, model, number};
use crate::cli::shared::{numbers, progress, store};
use driftless::transport::gc::{Collection, GcOptions, Removed, collect};
use driftless::transport::{Run, Version};
use serde_json::json;
use std::time::Duration;

const HELP: &str = "\
What is kept: the newest anchor and every version behind it, what followers with a live lease need, and the --keep newest
versions. A run without an anchor keeps everything: publish or train with --anchor-every or --anchor-share. It may run at
any time, beside publishers and followers, and may be stopped at any time; a reader that needs a version which is gone goes
on from the anchor. Leases of followers that have been away for a day are removed.

Examples:
  driftless gc --store file:///shared/store --run my-run --dry-run
  driftless gc --store file:///shared/store --run my-run --keep 16";

/// Remove the versions of a run that no follower needs.
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct Args {
    /// Store that the run is in: file:///dir, a path, s3://bucket/prefix, gs://…, az://….
    #[arg(long, value_name = "URL")]
    store: String,
    /// Name of the run.
    #[arg(long, value_name = "NAME")]
    run: String,
    /// Model of the run [default: the only one].
    #[arg(long)]
    model: Option<String>,
    /// Keep at least this many of the newest versions.
    #[arg(long, value_name = "VERSIONS", default_value_t = 1, value_parser = numbers::count::<u64>())]
    keep: u64,
    /// Age in seconds at which a lease expires; followers renew theirs every minute.
    #[arg(long, value_name = "SECONDS", default_value_t = 900, value_parser = numbers::seconds())]
    lease_ttl: u64,
    /// Only show what would be removed.
    #[arg(long)]
    dry_run: bool,
}

pub(crate) fn run(args: Args, output: Output) -> Result<()> {
    let run = Run::open(store::open(&args.store)?, &args.run)?;
    let model = model(&run, args.model)?
        .ok_or_else(|| Error::usage(format!("run `{}`", run.name()), "a version to keep", "none yet"))?;
    let mut options = GcOptions::new(model);
    options.keep = args.keep;
    options.lease_ttl = Duration::from_secs(args.lease_ttl);
    options.dry_run = args.dry_run;
    let collection = progress::during("gc", "", |_| collect(&run, &options))?;
    let value = json!({
        "run": run.name(),
        "run_id": run.id(),
        "model": options.model,
        "dry_run": args.dry_run,
        "newest": collection.newest,
        "anchor": collection.anchor,
        "floor": collection.floor,
        "leases": leases_json(&collection.leases),
        "removed": collection.removed,
    });
    output.print(&value, |_| text(&collection, args.dry_run))
}

fn text(collection: &Collection, dry_run: bool) -> String {
    let mut parts = vec![format!(
        "newest version {}, newest anchor {}, kept from version {}",
        number(collection.newest),
        number(collection.anchor),
        collection.floor
    )];
    if !collection.leases.is_empty() {
        parts.push(leases_table(&collection.leases));
    }
    if !collection.removed.is_empty() {
        let row = |removed: &Removed| {
            vec![
                removed.version.to_string(),
                if removed.collected { "the version" } else { "what failed attempts left" }.to_owned(),
                removed.objects.to_string(),
                removed.bytes.to_string(),
            ]
        };
        parts.push(table(&["version", "removed", "objects", "bytes"], collection.removed.iter().map(row)));
    }
    let bytes: u64 = collection.removed.iter().map(|removed| removed.bytes).sum();
    let verb = if dry_run { "would be removed" } else { "removed" };
    parts.push(format!("{bytes} bytes {verb}"));
    // Version 0 begins every chain; only a later anchor lets what is before it go.
    if collection.newest > Some(Version(0)) && collection.anchor <= Some(Version(0)) {
        parts.push(
            "nothing can go until there is a later anchor: `driftless publish` and `driftless train` make them with \
             --anchor-every or --anchor-share"
                .into(),
        );
    }
    parts.join("\n")
}
