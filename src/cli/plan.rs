//! `driftless plan`.

use crate::cli::error::{Error, Result};
use crate::cli::numbers::{at_least_zero, positive};
use crate::cli::output::Output;
use crate::cli::{paths, route};
use driftless::bridge::{Carrier, Choice, Figures, Form, Link, Pin, choose};
use serde_json::json;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  8 billion bf16 weights of which 1 % change, a bucket behind 1 Gb/s, or NCCL over 100 Gb/s:
    driftless plan --model-gb 16.4 --delta-gb 0.1 --nccl-gb-s 12 --store-gb-s 0.125 --store-latency-ms 300

  For followers, which choose for each version by what it weighs:
    driftless plan --model-gb 16.4 --delta-gb 0.1 --ucx-gb-s 9 --store-gb-s 0.125 --save plan.json
    driftless follow --plan plan.json --relay ucx://10.0.0.2:7421 …

  The same with the carrier given:
    driftless plan --model-gb 16.4 --delta-gb 0.1 --store-gb-s 0.125 --update-weight-transport object

Where the figures come from: `driftless inspect` says how many bytes a version's delta has, a follower's status and metrics how long it
prepares and how long its engines are paused. GB are 10^9 bytes.";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// GB of the model.
    #[arg(long, value_name = "GB", value_parser = positive)]
    model_gb: f64,
    /// GB of one version's delta.
    #[arg(long, value_name = "GB", value_parser = at_least_zero)]
    delta_gb: f64,
    /// GB of the model that the trainer encodes in a second.
    #[arg(long, value_name = "GB/S", default_value_t = 7.5, value_parser = positive)]
    encode_gb_s: f64,
    /// GB of the model to which a host applies a delta in a second [default: as many as are encoded].
    #[arg(long, value_name = "GB/S", value_parser = positive)]
    apply_gb_s: Option<f64>,
    /// GB that an engine loads from its host in a second.
    #[arg(long, value_name = "GB/S", default_value_t = 6.0, value_parser = positive)]
    load_gb_s: f64,
    /// Deltas are applied to the engine's own memory: nothing is loaded.
    #[arg(long, conflicts_with = "load_gb_s")]
    in_place: bool,
    /// GB a second that NCCL moves into the engines [default: there is no NCCL].
    #[arg(long, value_name = "GB/S", value_parser = positive)]
    nccl_gb_s: Option<f64>,
    /// GB a second that UCX moves between the hosts [default: there is no UCX].
    #[arg(long, value_name = "GB/S", value_parser = positive)]
    ucx_gb_s: Option<f64>,
    /// GB a second that a host gets out of the store while the others do [default: there is no store].
    #[arg(long, value_name = "GB/S", value_parser = positive)]
    store_gb_s: Option<f64>,
    /// Milliseconds before a version's first byte comes out of the store: requests and polls.
    #[arg(long, value_name = "MS", default_value_t = 250.0, value_parser = at_least_zero)]
    store_latency_ms: f64,
    /// Write the figures, without what is pinned, to this file, for `follow --plan`.
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    /// Only this way.
    #[arg(long, value_enum)]
    update_weight_transport: Option<PlannedTransport>,
    /// Only this much.
    #[arg(long, value_enum)]
    update_weight_mode: Option<PlannedMode>,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum PlannedTransport {
    Nccl,
    Ucx,
    Disk,
    Object,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum PlannedMode {
    Full,
    Delta,
}

pub(crate) fn run(args: &Args, output: Output) -> Result<()> {
    if args.nccl_gb_s.or(args.ucx_gb_s).or(args.store_gb_s).is_none() {
        return Err(Error::Usage {
            what: "links".to_owned(),
            expected: "--store-gb-s, --nccl-gb-s or --ucx-gb-s, as far as there are any".to_owned(),
            found: "none of them".to_owned(),
        });
    }
    let link = |rate: Option<f64>, latency| rate.map(|rate| Link { rate: rate * 1e9, latency });
    let figures = Figures {
        model_bytes: (args.model_gb * 1e9).round() as u64,
        delta_bytes: (args.delta_gb * 1e9).round() as u64,
        encode: args.encode_gb_s * 1e9,
        apply: args.apply_gb_s.unwrap_or(args.encode_gb_s) * 1e9,
        overlap: false,
        load: (!args.in_place).then_some(args.load_gb_s * 1e9),
        nccl: link(args.nccl_gb_s, 0.0),
        ucx: link(args.ucx_gb_s, 0.0),
        store: link(args.store_gb_s, args.store_latency_ms / 1e3),
    };
    let carrier = args.update_weight_transport.map(|transport| match transport {
        PlannedTransport::Nccl => Carrier::Nccl,
        PlannedTransport::Ucx => Carrier::Ucx,
        PlannedTransport::Disk | PlannedTransport::Object => Carrier::Store,
    });
    let form = args.update_weight_mode.map(|mode| match mode {
        PlannedMode::Full => Form::Full,
        PlannedMode::Delta => Form::Delta,
    });
    let choice = choose(&figures, Pin { carrier, form })?;
    if let Some(path) = &args.save {
        paths::check_output("--save", path)?;
        route::save(path, &figures)?;
    }
    output.print(&value(&choice), |_| choice.to_string().replace("; ", "\n"))
}

fn value(choice: &Choice) -> serde_json::Value {
    let ways: Vec<_> = std::iter::once(&choice.best)
        .chain(&choice.others)
        .map(|way| {
            let phases: serde_json::Map<_, _> =
                way.phases.iter().map(|(name, seconds)| ((*name).to_owned(), json!(seconds))).collect();
            json!({"carrier": way.carrier.to_string(), "form": way.form.to_string(), "seconds": way.seconds(), "phases": phases})
        })
        .collect();
    json!({ "ways": ways })
}
