//! The command line: a file a subcommand, beside `shared/`, which has what several of them need.
//!
//! A subcommand is a module with `Args`, whose comment is its help, and `run`; it is named once more in
//! `commands!`.

#[cfg(not(feature = "torch"))]
mod absent;
mod completions;
mod config;
mod coordinate;
mod dashboard;
mod data;
mod delta;
mod doctor;
mod eval;
mod fleet;
mod follow;
mod gateway;
mod gateway_key;
mod gc;
mod init;
mod inspect;
mod keygen;
mod log;
mod man;
mod publish;
#[cfg(feature = "torch")]
mod quantize;
mod relay;
mod repair;
#[cfg(feature = "torch")]
mod replay;
mod rollout;
#[cfg(feature = "torch")]
mod serve;
mod shared;
mod status;
mod top;
mod trace;
mod train;
#[cfg(feature = "torch")]
mod train_rank;
mod try_;
mod verify;

use clap::{CommandFactory as _, FromArgMatches as _, Parser};
use shared::error::{Error, Result};
use shared::logs::{self, LogFormat};
use shared::output::{self, Output};
use std::ffi::OsString;
use std::path::PathBuf;

pub use publish::default_baseline;
pub use shared::error::{bridge_code, buffer_code, transport_code};
pub use shared::store::open as open_store;

const AFTER_HELP: &str = "\
A first version, of a checkpoint directory of yours (here: model), brought to another one, as beside an engine:
  driftless publish --store versions --run first --new-run --checkpoint model
  driftless follow --store versions --run first --checkpoint-dir copy --once
  driftless status versions first
The next version: `publish` once more, with --resume in place of --new-run. `driftless init` begins a training run.

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

Logs go to standard error; RUST_LOG=debug shows more. Results go to standard output. With --json these are JSON,
and so is the error that the command ends with. With --log-format json each line on standard error is an object.";

/// The version, and what it was built from.
const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("DRIFTLESS_BUILD"), ")");

/// Keeps inference engines in step with an RL trainer: lossless weight deltas, crash-safe publications, a
/// durable rollout log.
#[derive(Parser)]
#[command(version = VERSION, after_help = AFTER_HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Print results, and the error that the command ends with, as JSON, for scripts.
    #[arg(long, global = true, help_heading = "With every command")]
    json: bool,
    /// TOML file of flags, of all commands or in tables such as [train]; flags that are given here go before it.
    #[arg(long, global = true, value_name = "FILE", help_heading = "With every command")]
    config: Option<PathBuf>,
    /// What lines on standard error are: text, or a JSON object each, with time, level, message and fields.
    #[arg(
        long,
        global = true,
        value_enum,
        value_name = "FORMAT",
        default_value_t = LogFormat::Text,
        help_heading = "With every command"
    )]
    log_format: LogFormat,
    /// End with SIGKILL when the process that started this one ends, however it ends; for supervisors.
    #[arg(long, global = true, help_heading = "With every command")]
    die_with_parent: bool,
}

/// The subcommands, in the order of the help.
macro_rules! commands {
    ($($(#[$when:meta])* $name:ident: $module:ident,)*) => {
        #[derive(clap::Subcommand)]
        enum Command {
            $($(#[$when])* $name(Box<$module::Args>),)*
        }

        impl Command {
            fn run(self, output: Output) -> Result<()> {
                match self {
                    $($(#[$when])* Self::$name(args) => $module::run(*args, output),)*
                }
            }
        }
    };
}

commands! {
    Train: train,
    Rollout: rollout,
    Try: try_,
    #[cfg(feature = "torch")]
    TrainRank: train_rank,
    #[cfg(feature = "torch")]
    Serve: serve,
    #[cfg(not(feature = "torch"))]
    Serve: absent,
    #[cfg(feature = "torch")]
    Quantize: quantize,
    #[cfg(not(feature = "torch"))]
    Quantize: absent,
    #[cfg(feature = "torch")]
    Replay: replay,
    #[cfg(not(feature = "torch"))]
    Replay: absent,
    Eval: eval,
    Publish: publish,
    Follow: follow,
    Fleet: fleet,
    Gateway: gateway,
    GatewayKey: gateway_key,
    Coordinate: coordinate,
    Dashboard: dashboard,
    Data: data,
    Delta: delta,
    Status: status,
    Top: top,
    Doctor: doctor,
    Init: init,
    Inspect: inspect,
    Gc: gc,
    Keygen: keygen,
    Relay: relay,
    Repair: repair,
    Log: log,
    Verify: verify,
    Trace: trace,
    Completions: completions,
    Man: man,
}

/// Parses the arguments (the first is the program's name), runs, prints; returns the exit code that `--help`
/// documents. Once in a process: it takes over logging, SIGINT and SIGTERM.
pub fn main(args: impl IntoIterator<Item = OsString>) -> u8 {
    let args: Vec<OsString> = args.into_iter().collect();
    let (told, is_json) = (args.len(), args.iter().any(|arg| arg == "--json"));
    logs::foresee(&args);
    let args = match config::expanded(&command(), args) {
        Ok(args) => args,
        Err(error) => {
            Output::new(is_json);
            return output::fail(&error);
        }
    };
    let parsed = command().try_get_matches_from(&args);
    let cli = match parsed.and_then(|matches| Ok((Cli::from_arg_matches(&matches)?, matches))) {
        Ok((cli, matches)) => cli.with_effective(&matches),
        Err(error) => {
            let code = refuse(&error, is_json);
            if args.len() > told && error.use_stderr() && !is_json {
                output::say("Arguments that were not given are from --config.");
            }
            return code;
        }
    };
    let output = Output::new(cli.json);
    logs::begin(cli.log_format);
    #[cfg(feature = "failpoints")]
    let _scenario = match shared::failpoints::arm() {
        Ok(scenario) => scenario,
        Err(error) => return output::fail(&error),
    };
    if cli.die_with_parent {
        die_with_parent();
    }
    shared::mapped::name_unreadable_files();
    match cli.command.run(output) {
        Ok(()) => {
            logs::flush();
            0
        }
        Err(error) => output::fail(&error),
    }
}

impl Cli {
    /// A run keeps what it was told.
    fn with_effective(mut self, matches: &clap::ArgMatches) -> Self {
        if let (Command::Train(train), Some((name, matches))) = (&mut self.command, matches.subcommand()) {
            train.effective = config::effective(&command(), name, matches, VERSION);
        }
        self
    }
}

/// The command line as it is parsed.
fn command() -> clap::Command {
    with_whole_examples(Cli::command())
}

/// Examples can be copied: clap would wrap them as it wraps the rest, but leaves alone what a template holds.
fn with_whole_examples(mut command: clap::Command) -> clap::Command {
    const TEMPLATE: &str = "{about-with-newline}\n{usage-heading} {usage}\n\n{all-args}";
    let names: Vec<_> = command.get_subcommands().map(|sub| sub.get_name().to_owned()).collect();
    for name in names {
        command = command.mut_subcommand(name, with_whole_examples);
    }
    match command.get_after_help().map(ToString::to_string) {
        None => command,
        Some(examples) => command
            .after_help(clap::builder::Resettable::Reset)
            .help_template(format!("{TEMPLATE}\n\n{examples}")),
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

/// Prints what clap has to say: help on standard output, complaints on standard error.
fn refuse(error: &clap::Error, json: bool) -> u8 {
    let code = u8::try_from(error.exit_code()).unwrap_or(2);
    let text = error.render().to_string();
    let message = text.trim().trim_start_matches("error: ");
    match error.use_stderr() {
        true if json => output::write_err(&output::error_json(code, message, &[], None)),
        true if logs::is_json() => output::tell_error(code, message, &[], None),
        true if output::without_secrets(&text) != text => output::say(&text),
        // Nobody can be told that nobody listens.
        true => _ = error.print(),
        false => return error.print().map_or_else(|source| output::fail(&Error::Output(source)), |()| code),
    }
    code
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
