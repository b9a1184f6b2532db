//! `driftless dashboard`: a page that shows runs, from the files of their directories alone.

mod export;
mod lines;
mod mcp;
mod mismatch;
mod outlines;
mod prompts;
pub(super) mod read;
mod samples;
mod serve;
mod store;
mod time;

use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::output::Output;
use crate::cli::shared::signals::{PATIENCE, stop_on_signals};
use crate::cli::shared::{keys, paths, store as stores};
use driftless::http::Server;
use driftless::store::wait::Stop;
pub(crate) use export::export;
use read::{Alert, Damaged, Files, json, without_secrets};
use samples::{Ask, Samples};
use serde::Serialize;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use store::{Place, Shelf};

const HELP: &str = "\
The page shows figures, goodput, answers, engines, a time line and the store of runs that go on, have ended or have crashed.
It reads the files of `train --save`, and for its view Store the store that run.toml names. It writes nothing. Beyond loopback it wants a token, which the page asks for.

Examples:
  driftless dashboard runs/first
  driftless dashboard runs/first runs/second          # side by side, with the flags that differ
  driftless dashboard runs/first --listen 0.0.0.0:7430 --token-file token
  driftless dashboard runs/first --export first.html  # one file that opens anywhere
  driftless dashboard runs/first --export worst.html --step 120

Agents ask the same at /mcp, by the Model Context Protocol.";

/// Runs that are shown together.
const RUNS_MAX: usize = 16;

/// Path, type and content of each file of the page.
const PAGE: [(&str, &str, &[u8]); 11] = [
    ("/", "text/html; charset=utf-8", include_bytes!("page/index.html")),
    ("/page.css", "text/css; charset=utf-8", include_bytes!("page/page.css")),
    ("/uPlot.css", "text/css; charset=utf-8", include_bytes!("page/uPlot.min.css")),
    ("/uPlot.js", "text/javascript; charset=utf-8", include_bytes!("page/uPlot.iife.min.js")),
    ("/page.js", "text/javascript; charset=utf-8", include_bytes!("page/page.js")),
    ("/run.js", "text/javascript; charset=utf-8", include_bytes!("page/run.js")),
    ("/goodput.js", "text/javascript; charset=utf-8", include_bytes!("page/goodput.js")),
    ("/samples.js", "text/javascript; charset=utf-8", include_bytes!("page/samples.js")),
    ("/time.js", "text/javascript; charset=utf-8", include_bytes!("page/time.js")),
    ("/store.js", "text/javascript; charset=utf-8", include_bytes!("page/store.js")),
    ("/fleet.js", "text/javascript; charset=utf-8", include_bytes!("page/fleet.js")),
];

/// Show runs on a page: figures, goodput, answers, engines, a time line, the store.
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct Args {
    /// Directories of runs, as `train --save` has them.
    #[arg(required = true, num_args = 1.., value_name = "RUN")]
    runs: Vec<PathBuf>,
    /// Address of the page; port 0: the system chooses, and the address is printed.
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:7430")]
    listen: SocketAddr,
    /// File holding the token that viewers must bring; needed to listen beyond loopback [default: DRIFTLESS_TOKEN].
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Store of the runs, where another is asked than the one in their run.toml: file:///dir, a path, s3://bucket/prefix,
    /// gs://…, az://….
    #[arg(long, value_name = "URL")]
    store: Option<String>,
    /// Write the page with what it shows now into this file, and serve nothing. Of the answers it has the best and worst
    /// of one step.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["listen", "token_file", "store"])]
    export: Option<PathBuf>,
    /// Step whose answers are exported, with the time of it and the three before [default: the newest].
    #[arg(long, value_name = "N", requires = "export")]
    step: Option<u64>,
}

pub(crate) fn run(args: Args, output: Output) -> Result<()> {
    if args.runs.len() > RUNS_MAX {
        return Err(Error::usage("RUN", format!("at most {RUNS_MAX}"), args.runs.len()));
    }
    if let Some(file) = &args.export {
        export(&args.runs, file, args.step)?;
        let value = serde_json::json!({ "export": file.display().to_string() });
        return output.print(&value, |_| format!("page: {}", file.display()));
    }
    let token = keys::secret(args.token_file.as_deref(), "DRIFTLESS_TOKEN")?;
    if let Some(url) = &args.store {
        // What is no store is refused here, before anything is asked.
        stores::open(url)?;
    }
    let board = Board::open(&args.runs, args.store.as_deref())?;
    let server = serve::serve(board, args.listen, token)?;
    let url = format!("http://{}", server.addr());
    output.print(&serde_json::json!({ "url": url }), |_| format!("dashboard on {url}"))?;
    let stop = Stop::new();
    stop_on_signals(&stop, PATIENCE)?;
    while !stop.wait(Duration::from_secs(3600)) {}
    Ok(())
}

/// Serves the page of the run in `save`, which may be about to begin, until the server is dropped.
pub(crate) fn serve_run(save: &Path, listen: SocketAddr, token: Option<String>) -> Result<Server> {
    serve::serve(Board { runs: vec![Mutex::new(Watched::open(save, None)?)] }, listen, token)
}

/// The runs that are shown.
struct Board {
    runs: Vec<Mutex<Watched>>,
}

struct Watched {
    files: Files,
    samples: Samples,
    shelf: Shelf,
    /// The store that is asked, where it is not the one that the run was told.
    store: Option<String>,
}

/// A run, in the list of all.
#[derive(Serialize)]
struct Summary {
    name: String,
    dir: String,
    /// What it was told: when, and by which flags.
    told: String,
    settings: BTreeMap<String, String>,
    /// That are done.
    steps: u64,
    of: Option<u64>,
    alerts: Vec<Alert>,
    updated_at_ms: Option<f64>,
    damaged: Damaged,
    /// Why a file cannot be read.
    unreadable: Option<String>,
}

impl Board {
    fn open(runs: &[PathBuf], store: Option<&str>) -> Result<Self> {
        let open = |dir: &PathBuf| {
            paths::check_dir("RUN", dir)?;
            Ok(Mutex::new(Watched::open(dir, store)?))
        };
        Ok(Board { runs: runs.iter().map(open).collect::<Result<_>>()? })
    }

    /// Refuses a step that a run has not done.
    fn check_step(&self, step: u64) -> Result<()> {
        for run in &self.runs {
            let run = run.lock().unwrap_or_else(PoisonError::into_inner);
            let (last, name) = (run.files.table.last_step(), name(&run.files.dir));
            if last.is_none_or(|last| step > last) {
                let expected = match last {
                    Some(last) => format!("at most {last}, the last one of {name}"),
                    None => format!("none, as {name} has done none"),
                };
                return Err(Error::usage("--step", expected, step));
            }
        }
        Ok(())
    }

    /// What the page asks for by this name, as JSON.
    fn answer(&self, what: &str, ask: &Ask) -> Result<String> {
        if what == "runs" {
            let summary = |run: &Mutex<Watched>| run.lock().unwrap_or_else(PoisonError::into_inner).summary();
            return json(&self.runs.iter().map(summary).collect::<Vec<_>>());
        }
        let run = self.runs.get(ask.run);
        let run = run.ok_or_else(|| Error::usage("run", format!("one of {}", self.runs.len()), ask.run))?;
        let mut run = run.lock().unwrap_or_else(PoisonError::into_inner);
        run.files.look()?;
        let Watched { files, samples, shelf, store } = &mut *run;
        match what {
            "metrics" => files.table.rows(ask.epoch, ask.from, &ask.prefix),
            "fleet" => files.facts.json(&files.table),
            "samples" => samples.list(ask, &files.taken),
            "sample" => samples.one(ask.position, &files.taken),
            "time" => time::window(files, samples, ask),
            "store" => {
                let (told, flags) = files.settings();
                shelf.answer(Place::of(&told, &flags, store.as_deref()))
            }
            _ => Err(Error::usage("path", "runs, metrics, fleet, samples, sample, time or store", what)),
        }
    }
}

impl Watched {
    fn open(dir: &Path, store: Option<&str>) -> Result<Self> {
        let (files, samples) = (Files::new(dir)?, Samples::new(dir));
        Ok(Watched { files, samples, shelf: Shelf::default(), store: store.map(str::to_owned) })
    }

    fn summary(&mut self) -> Summary {
        let unreadable = self.files.look().err().map(|error| told(&error));
        let (told, flags) = self.files.settings();
        let dir = &self.files.dir;
        Summary {
            name: name(dir),
            dir: dir.display().to_string(),
            told,
            settings: without_secrets(&flags),
            steps: self.files.table.last_step().map_or(0, |last| last + 1),
            of: self.files.facts.of(),
            alerts: self.files.facts.alerts(),
            updated_at_ms: self.files.table.last("completed_at_ms").filter(|at| at.is_finite()),
            damaged: self.files.damaged(),
            unreadable,
        }
    }
}

/// The last part of a directory's path, wherever it was named from.
pub(super) fn name(dir: &Path) -> String {
    let whole = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
    whole.file_name().unwrap_or(whole.as_os_str()).to_string_lossy().into_owned()
}

/// An error with its causes, in one line.
fn told(error: &Error) -> String {
    let causes = std::iter::successors(std::error::Error::source(error), |cause| cause.source());
    std::iter::once(error.to_string()).chain(causes.map(ToString::to_string)).collect::<Vec<_>>().join(": ")
}
