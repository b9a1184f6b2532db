//! `driftless fleet`: the engines of a run that goes on.

use crate::cli::shared::error::Result;
use crate::cli::shared::output::{Output, short, table};
use crate::cli::shared::{keys, numbers};
use driftless::trainer::door::{EngineRow, Request, ask, ask_at};
use std::path::PathBuf;
use std::time::Duration;

const AFTER_HELP: &str = "\
Phases:
  joining   it has not answered yet
  syncing   it fits, and does not serve yet what is asked for
  serving   it gets requests
  draining  it gets no more requests, and goes once it has none
  lost      it does not answer, was refused or was late; it comes back by itself

Examples:
  driftless fleet list runs/first
  driftless fleet add runs/first 10.0.0.3:30000
  driftless fleet add runs/first https://gpu-7.internal --with-keys
  driftless fleet drain runs/first 10.0.0.1:30000 --deadline 120
  driftless fleet remove runs/first 10.0.0.2:30000
  driftless fleet list http://trainer:9760 --token-file token

Each prints the engines as they are then. The run's user asks, over fleet.sock in the run's directory; from other hosts, over
HTTP at the address of `train --fleet-listen`. Changes are kept in fleet.json: the run that goes on later has them too.";

/// How long a run may take to answer.
const ANSWER: Duration = Duration::from_secs(20);

/// List the engines of a run that goes on, add some, take some away.
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
    /// File holding the token that a run at a URL wants [default: DRIFTLESS_TOKEN].
    #[arg(long, value_name = "FILE", global = true)]
    token_file: Option<PathBuf>,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Print the engines: where each is on its way, what it serves, how many requests it has, and why it gets none.
    List {
        #[command(flatten)]
        run: Run,
    },
    /// Take an engine in. Its follower brings it the weights, as it does for the others.
    Add {
        #[command(flatten)]
        of: Engine,
        /// Send it the run's keys; without this it gets none.
        #[arg(long)]
        with_keys: bool,
    },
    /// Give an engine no more requests, wait until it has finished those that it has, and let it go.
    Drain {
        #[command(flatten)]
        of: Engine,
        /// Seconds that it may take. What it has then is aborted, and generated elsewhere.
        #[arg(long, default_value_t = 600, value_name = "SECONDS", value_parser = numbers::seconds())]
        deadline: u64,
    },
    /// Let an engine go at once. What it generates is aborted, and generated elsewhere.
    Remove {
        #[command(flatten)]
        of: Engine,
    },
}

#[derive(clap::Args)]
struct Run {
    /// Directory of the run, as `train --save` has it, or http://host:port of `train --fleet-listen`.
    #[arg(value_name = "RUN_DIR")]
    dir: PathBuf,
}

#[derive(clap::Args)]
struct Engine {
    #[command(flatten)]
    run: Run,
    /// Its address: host:port or https://host/path, with vllm+ before the URL for vLLM.
    #[arg(value_name = "ADDRESS")]
    address: String,
}

pub(crate) fn run(args: Args, output: Output) -> Result<()> {
    let (dir, request, deadline) = match args.command {
        Command::List { run } => (run.dir, Request::List, ANSWER),
        Command::Add { of, with_keys: keys } => {
            (of.run.dir, Request::Add { address: of.address, keys }, ANSWER)
        }
        Command::Drain { of, deadline: seconds } => {
            let deadline = ANSWER + Duration::from_secs(seconds);
            (of.run.dir, Request::Drain { address: of.address, seconds }, deadline)
        }
        Command::Remove { of } => (of.run.dir, Request::Remove { address: of.address }, ANSWER),
    };
    let engines = match dir.to_str().filter(|url| url.contains("://")) {
        None => ask(&dir, &request, deadline)?,
        Some(url) => {
            let token = keys::secret(args.token_file.as_deref(), "DRIFTLESS_TOKEN")?;
            ask_at(url, token.as_deref(), &request, deadline)?
        }
    };
    output.print(&engines, |engines| shown(engines))
}

fn shown(engines: &[EngineRow]) -> String {
    let row = |engine: &EngineRow| {
        let EngineRow { address, phase, serving, in_flight, why } = engine;
        let serving = serving.as_deref().map_or_else(|| "-".to_owned(), short);
        let why = why.as_deref().map_or_else(String::new, short);
        vec![address.clone(), phase.clone(), serving, in_flight.to_string(), why]
    };
    table(&["address", "phase", "serving", "in flight", "why"], engines.iter().map(row))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_are_shown_in_columns() {
        let row = |address: &str, phase: &str, serving: Option<&str>, why: Option<&str>| EngineRow {
            address: address.to_owned(),
            phase: phase.to_owned(),
            serving: serving.map(str::to_owned),
            in_flight: 12,
            why: why.map(str::to_owned),
        };
        let shown = shown(&[
            row("http://a:1", "serving", Some("3f0c9a12b7de:5"), None),
            row("https://gpu-7.internal", "lost", None, Some("it was\nrefused")),
        ]);
        let lines: Vec<&str> = shown.lines().collect();
        assert_eq!(lines.len(), 3, "{shown}");
        let at = |line: usize, word: &str| lines[line].find(word);
        assert_eq!(at(0, "phase"), at(1, "serving"));
        assert_eq!(at(0, "phase"), at(2, "lost"));
        assert_eq!(at(0, "why"), at(2, "it was refused"), "{shown}");
    }
}
