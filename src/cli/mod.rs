//! The command line: a file per subcommand, and helpers that they share (`error`, `keys`, `mapped`,
//! `numbers`, `output`, `paths`, `progress`, `ranks`, `report`, `serving`, `signals`, `slime`, `store`,
//! `transport`).

mod coordinate;
mod data;
mod delta;
mod error;
#[cfg(feature = "failpoints")]
mod failpoints;
mod follow;
mod gc;
mod inspect;
mod keygen;
mod keys;
mod log;
mod mapped;
mod numbers;
mod output;
mod paths;
mod progress;
mod publish;
mod ranks;
mod relay;
mod repair;
mod report;
#[cfg(feature = "torch")]
mod serve;
mod serving;
#[cfg(feature = "torch")]
mod sft;
mod signals;
mod slime;
mod store;
mod task;
mod train;
mod transport;

use clap::{Parser, Subcommand};
use output::Output;
use std::ffi::OsString;
use std::io::IsTerminal;

pub use error::{buffer_code, transport_code};
pub use publish::default_baseline;
pub use store::open as open_store;

const AFTER_HELP: &str = "\
Exit codes:
  0  done
  1  failed; the message says what, where and what to do, and the state on disk is intact
  2  the command line is wrong
  3  something stored is damaged, unsigned or of another run: nothing of it was used
  4  a peer did not answer in time
  5  an engine is left paused, because its weights may be anything or it could not be told to continue
  129, 130, 143  interrupted by SIGHUP, SIGINT or SIGTERM before it was done; the store is as after any other failure.
            A service that such a signal ends after the step it is in has done what it is for, and ends with 0.
            A second signal ends it at once.
  141  the reader of the results has closed the pipe

Logs go to standard error; RUST_LOG=debug shows more. Results go to standard output, as JSON with --json.";

/// Keeps inference engines in step with an RL trainer: lossless weight deltas, crash-safe publications, a
/// durable rollout log.
#[derive(Parser)]
#[command(version, after_help = AFTER_HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Print results as JSON, for scripts.
    #[arg(long, global = true)]
    json: bool,
    /// End with SIGKILL when the process that started this one ends, however it ends; for supervisors
    /// (Linux).
    #[arg(long, global = true)]
    die_with_parent: bool,
}

#[derive(Subcommand)]
enum Command {
    /// Train a policy: SFT, or the RL loop with external engines.
    Train(Box<train::Args>),
    /// Serve a checkpoint with the embedded engine, which speaks SGLang's HTTP routes.
    #[cfg(feature = "torch")]
    Serve(serve::Args),
    #[cfg(not(feature = "torch"))]
    #[command(hide = true, disable_help_flag = true)]
    Serve(Absent),
    /// Publish a Hugging Face checkpoint directory as the next version of a run.
    Publish(Box<publish::Args>),
    /// Keep a local checkpoint directory, and the engines that load it, at a run's newest version.
    Follow(Box<follow::Args>),
    /// Bring the followers of many hosts to each version together.
    Coordinate(coordinate::Args),
    Data(data::Args),
    /// Encode, apply and look at a delta between two checkpoint directories.
    Delta(delta::Args),
    /// Show what a store holds: its runs, a run's chain, one version.
    Inspect(inspect::Args),
    Gc(gc::Args),
    Keygen(keygen::Args),
    Relay(relay::Args),
    Repair(repair::Args),
    /// Look at a rollout log.
    Log(log::Args),
}

/// What is asked of a command that this build does not have.
#[cfg(not(feature = "torch"))]
#[derive(clap::Args)]
struct Absent {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    _ignored: Vec<std::ffi::OsString>,
}

/// A refusal of what this build does not have.
#[cfg(not(feature = "torch"))]
fn absent(what: &str, or: &str) -> error::Error {
    error::Error::Usage {
        what: what.to_owned(),
        expected: format!(
            "{or}a build with libtorch: `cargo install --locked --path . --features torch`, see docs/operations.md"
        ),
        found: "one without the feature torch".to_owned(),
    }
}

/// Parses the arguments (the first is the program's name), runs, prints; returns the exit code that `--help`
/// documents. Once in a process: it takes over logging, SIGINT and SIGTERM.
pub fn main(args: impl IntoIterator<Item = OsString>) -> u8 {
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(error) => return refuse(&error),
    };
    tracing_subscriber::fmt()
        // It would be told of standard error that is closed on standard error.
        .log_internal_errors(false)
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "warn".into()),
        )
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr)
        .init();
    #[cfg(feature = "failpoints")]
    let _scenario = match failpoints::arm() {
        Ok(scenario) => scenario,
        Err(error) => return fail(&error),
    };
    if cli.die_with_parent {
        die_with_parent();
    }
    mapped::name_unreadable_files();
    let output = Output { json: cli.json };
    let outcome = match cli.command {
        Command::Train(args) => train::run(*args, output),
        #[cfg(feature = "torch")]
        Command::Serve(args) => serve::run(args, output),
        #[cfg(not(feature = "torch"))]
        Command::Serve(_) => Err(absent("`driftless serve`", "")),
        Command::Publish(args) => publish::run(*args, output),
        Command::Follow(args) => follow::run(*args, output),
        Command::Coordinate(args) => coordinate::run(args, output),
        Command::Data(args) => data::run(&args, output),
        Command::Delta(args) => delta::run(args, output),
        Command::Inspect(args) => inspect::run(args, output),
        Command::Gc(args) => gc::run(args, output),
        Command::Keygen(args) => keygen::run(args, output),
        Command::Relay(args) => relay::run(args, output),
        Command::Repair(args) => repair::run(&args, output),
        Command::Log(args) => log::run(args, output),
    };
    match outcome {
        Ok(()) => 0,
        Err(error) => fail(&error),
    }
}

/// Otherwise a supervisor that is killed would leave processes behind that hold its directories.
fn die_with_parent() {
    let parent = rustix::process::getppid();
    let asked = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    // It may have ended before it was asked about; then nobody is left to end with.
    if asked.is_err() || rustix::process::getppid() != parent {
        tracing::warn!("the parent process cannot be watched");
    }
}

/// Prints the error with its causes.
fn fail(error: &error::Error) -> u8 {
    if !error.is_closed_pipe() {
        output::say(&format!("error: {error}"));
        let mut cause = std::error::Error::source(error);
        while let Some(error) = cause {
            output::say(&format!("  because: {error}"));
            cause = error.source();
        }
        if let Some(hint) = error.hint() {
            output::say(&format!("  hint: {hint}"));
        }
    }
    error.exit_code()
}

/// Prints what clap has to say: help on standard output, complaints on standard error.
fn refuse(error: &clap::Error) -> u8 {
    let text = error.render().to_string();
    let printed = if error.use_stderr() && output::without_secrets(&text) != text {
        output::say(&text);
        Ok(())
    } else {
        error.print()
    };
    match printed {
        Err(source) if !error.use_stderr() => fail(&error::Error::Output(source)),
        _ => u8::try_from(error.exit_code()).unwrap_or(2),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_command_line_contradicts_itself_nowhere() {
        <super::Cli as clap::CommandFactory>::command().debug_assert();
    }

    #[test]
    fn what_no_clock_can_count_to_is_refused() {
        let follow = ["driftless", "follow", "--store", "memory:", "--run", "r", "--checkpoint-dir", "d"];
        let parse = |flag: &str, value: &str| {
            <super::Cli as clap::Parser>::try_parse_from(follow.iter().copied().chain([flag, value]))
        };
        for flag in ["--activate-deadline", "--poll-ms"] {
            assert!(parse(flag, "60").is_ok(), "{flag}");
            let refused = parse(flag, &u64::MAX.to_string()).err().map(|error| error.kind());
            assert_eq!(refused, Some(clap::error::ErrorKind::ValueValidation), "{flag}");
        }
    }
}
