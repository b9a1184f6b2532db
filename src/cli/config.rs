//! `--config FILE`: flags of commands from a TOML file, and the file that a run keeps of its own.
//!
//! Flags are told once, where clap has them. A file becomes arguments behind those that were given, without those that were
//! given too or that contradict them.

use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::paths;
use clap::builder::ValueRange;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use toml::{Table, Value};

/// Its flag.
const FLAG: &str = "config";
/// What no file says: it is of one call, or names the file.
const NEVER: [&str; 5] = [FLAG, "json", "die-with-parent", "help", "version"];
/// Flags that a build without libtorch lacks, and that commands of such builds meet in a file of several commands.
const OF_LIBTORCH: [&str; 4] = ["device", "num-threads", "deterministic", "actor-num-gpus-per-node"];
/// Longest file.
const BYTES_MAX: u64 = 1 << 20;
/// How alike two names are, of 1, of which one may be meant by the other.
const ALIKE: f64 = 0.8;

/// The arguments with those of the file that they name, if they name one.
///
/// # Errors
/// A file that is not there or no TOML, and one that says what no command knows.
pub(crate) fn expanded(command: &Command, args: Vec<OsString>) -> Result<Vec<OsString>> {
    // Help, and mistakes that no file mends, are for the parser.
    let Ok(given) = command.clone().ignore_errors(true).try_get_matches_from(&args) else { return Ok(args) };
    let Some(file) = given.get_one::<PathBuf>(FLAG) else { return Ok(args) };
    let settings = read(file)?;
    let (mut at, mut chosen, mut of) = (command, &given, vec![(command, &given)]);
    let mut path = Vec::new();
    while let Some((name, matches)) = chosen.subcommand() {
        let Some(sub) = at.find_subcommand(name) else { break };
        (at, chosen) = (sub, matches);
        of.push((sub, matches));
        path.push(name);
    }
    check(command, &settings, &path, &mut Vec::new()).map_err(|why| refused(file, why))?;
    let more = chosen_of(&settings, &path, &of).map_err(|why| refused(file, why))?;
    // Behind the last command, and in front of what is no flag any more.
    let end = args.iter().position(|arg| arg == "--").unwrap_or(args.len());
    let mut all = args[..end].to_vec();
    all.extend(more.into_iter().map(OsString::from));
    all.extend_from_slice(&args[end..]);
    Ok(all)
}

fn refused(file: &Path, why: String) -> Error {
    let expected = "a file of flags in TOML, such as `num-rollout = 100`".to_owned();
    Error::Usage { what: format!("--{FLAG}"), expected, found: format!("{}: {why}", file.display()) }
}

fn read(path: &Path) -> Result<Table> {
    let bytes = paths::read(&format!("--{FLAG}"), path, BYTES_MAX)?;
    let text = String::from_utf8(bytes).map_err(|_| refused(path, "bytes that are no UTF-8".to_owned()))?;
    text.parse()
        .map_err(|error: toml::de::Error| refused(path, error.to_string().trim().replace('\n', "\n  ")))
}

/// The flags of a command, and of those below it.
fn flags<'a>(command: &'a Command, below: bool, all: &mut BTreeSet<&'a str>) {
    all.extend(command.get_arguments().filter_map(Arg::get_long).filter(|name| !NEVER.contains(name)));
    command.get_subcommands().filter(|_| below).for_each(|command| flags(command, below, all));
}

/// Says what a table has that the command at this path does not: at the top any flag of any command, below it those of
/// the command. Tables of commands that do not `run` now are their own: a build without libtorch lacks some of their flags.
fn check(command: &Command, table: &Table, run: &[&str], path: &mut Vec<String>) -> Result<(), String> {
    let mut known = BTreeSet::new();
    flags(command, true, &mut known);
    if path.is_empty() {
        known.extend(OF_LIBTORCH);
    }
    for (key, value) in table {
        match (value, command.find_subcommand(key)) {
            (Value::Table(table), Some(sub)) => {
                let runs = run.get(path.len()) == Some(&key.as_str());
                path.push(key.clone());
                if runs {
                    check(sub, table, run, path)?;
                }
                path.pop();
            }
            (Value::Table(_), None) => {
                let names = command.get_subcommands().map(Command::get_name);
                return Err(unknown(&format!("[{key}]"), "command", key, names, path));
            }
            _ if known.contains(key.as_str()) => {}
            _ => return Err(unknown(&format!("`{key}`"), "flag", key, known.iter().copied(), path)),
        }
    }
    Ok(())
}

fn unknown<'a>(
    shown: &str,
    what: &str,
    key: &str,
    known: impl Iterator<Item = &'a str>,
    path: &[String],
) -> String {
    let of = if path.is_empty() { String::new() } else { format!(" of `{}`", path.join(" ")) };
    let near = known.map(|name| (strsim::jaro_winkler(name, key), name)).filter(|(alike, _)| *alike > ALIKE);
    let near = near.max_by(|(one, _), (other, _)| one.total_cmp(other));
    let meant = near.map_or_else(String::new, |(_, name)| format!("; is `{name}` meant?"));
    format!("{shown} is no {what}{of}{meant}")
}

/// The arguments that a file's settings are for the command at this path, whose parents and itself are `of` with what was
/// given of them. What stands in the command's own table goes before what stands above it.
fn chosen_of(settings: &Table, path: &[&str], of: &[(&Command, &ArgMatches)]) -> Result<Vec<String>, String> {
    let mut values: BTreeMap<&str, &Value> = BTreeMap::new();
    let mut table = Some(settings);
    for depth in 0..=path.len() {
        let Some(found) = table else { break };
        values.extend(
            found.iter().filter(|(_, value)| !value.is_table()).map(|(key, value)| (key.as_str(), value)),
        );
        table = path.get(depth).and_then(|name| found.get(*name)).and_then(Value::as_table);
    }
    let mut args = Vec::new();
    for (command, matches) in of {
        let given: Vec<&Arg> = command.get_arguments().filter(|arg| is_given(matches, arg)).collect();
        for arg in command.get_arguments() {
            let Some((name, value)) = arg.get_long().and_then(|name| values.remove_entry(name)) else {
                continue;
            };
            if given.iter().any(|given| given.get_id() == arg.get_id() || contradict(command, given, arg)) {
                continue;
            }
            args.extend(arguments(name, arg, value)?);
        }
    }
    Ok(args)
}

fn is_given(matches: &ArgMatches, arg: &Arg) -> bool {
    let source = matches
        .try_contains_id(arg.get_id().as_str())
        .is_ok()
        .then(|| matches.value_source(arg.get_id().as_str()));
    matches!(source.flatten(), Some(ValueSource::CommandLine | ValueSource::EnvVariable))
}

fn contradict(command: &Command, one: &Arg, other: &Arg) -> bool {
    let names = |of: &Arg, arg: &Arg| {
        command.get_arg_conflicts_with(of).iter().any(|found| found.get_id() == arg.get_id())
    };
    names(one, other) || names(other, one)
}

/// What is written on a command line for this value of a flag.
fn arguments(name: &str, arg: &Arg, value: &Value) -> Result<Vec<String>, String> {
    let texts = texts(value)
        .ok_or_else(|| format!("`{name}` is {}, which is no value of a flag", value.type_str()))?;
    if matches!(arg.get_action(), ArgAction::SetTrue) {
        return match value {
            Value::Boolean(true) => Ok(vec![format!("--{name}")]),
            Value::Boolean(false) => Ok(Vec::new()),
            other => Err(format!("`{name}` is {}, expected true or false", other.type_str())),
        };
    }
    let each = arg.get_num_args().map_or(1, |range: ValueRange| range.min_values());
    if each <= 1 {
        return Ok(texts.into_iter().map(|text| format!("--{name}={text}")).collect());
    }
    if texts.len() % each != 0 {
        return Err(format!("`{name}` has {} values, expected {each} of each", texts.len()));
    }
    Ok(texts.chunks(each).flat_map(|each| [&[format!("--{name}")], each].concat()).collect())
}

/// The scalars of a value, in order.
fn texts(value: &Value) -> Option<Vec<String>> {
    match value {
        Value::String(text) => Some(vec![text.clone()]),
        Value::Integer(number) => Some(vec![number.to_string()]),
        Value::Float(number) => Some(vec![number.to_string()]),
        Value::Boolean(is) => Some(vec![is.to_string()]),
        Value::Array(values) => values.iter().map(texts).collect::<Option<Vec<_>>>().map(|all| all.concat()),
        Value::Datetime(_) | Value::Table(_) => None,
    }
}

/// A file that says what was given to a command, by flag, file and environment, for `--config`.
pub(crate) fn effective(command: &Command, name: &str, matches: &ArgMatches, version: &str) -> String {
    let Some(command) = command.find_subcommand(name) else { return String::new() };
    let mut table = Table::new();
    for arg in command.get_arguments().filter(|arg| is_given(matches, arg)) {
        let Some(long) = arg.get_long().filter(|long| !NEVER.contains(long)) else { continue };
        let value = if matches!(arg.get_action(), ArgAction::SetTrue) {
            Value::Boolean(true)
        } else {
            let raw = matches.get_raw(arg.get_id().as_str()).into_iter().flatten();
            let mut values: Vec<_> = raw.map(scalar).collect();
            let is_one = values.len() == 1 && !matches!(arg.get_action(), ArgAction::Append);
            if is_one { values.remove(0) } else { Value::Array(values) }
        };
        table.insert(long.to_owned(), value);
    }
    let dir = std::env::current_dir().unwrap_or_default();
    let dir = dir.display().to_string().replace(char::is_control, " ");
    let settings = Table::from_iter([(name.to_owned(), Value::Table(table))]);
    format!("# What `driftless {name}` was told, in {dir}; driftless {version}.\n{settings}")
}

/// A number where that says the same.
fn scalar(raw: &OsStr) -> Value {
    let text = raw.to_string_lossy();
    let number = text.parse::<i64>().map(Value::Integer).or_else(|_| text.parse().map(Value::Float));
    number
        .ok()
        .filter(|number| texts(number).is_some_and(|again| again == [&*text]))
        .unwrap_or_else(|| Value::String(text.into_owned()))
}

/// Writes what a run was told into its directory, in the place of what an earlier start was. The run goes on without it.
pub(crate) fn keep(save: &Path, effective: &str) {
    let wrote = write(save, effective);
    wrote.unwrap_or_else(|error| tracing::warn!(%error, "run.toml is not kept in --save"));
}

fn write(save: &Path, effective: &str) -> std::io::Result<()> {
    let (path, partial) = (save.join("run.toml"), save.join("run.toml.partial"));
    // A hook's command may hold a secret.
    std::fs::create_dir_all(save)?;
    let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(&partial)?;
    file.write_all(effective.as_bytes())?;
    std::fs::rename(&partial, &path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(args: &[&str]) -> Vec<OsString> {
        args.iter().map(OsString::from).collect()
    }

    fn expand(text: &str, args: &[&str]) -> Result<Vec<String>, String> {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("run.toml");
        std::fs::write(&file, text).expect("a file");
        let file = file.display().to_string();
        let args: Vec<&str> =
            args.iter().map(|arg| if *arg == "FILE" { file.as_str() } else { *arg }).collect();
        let expanded = expanded(&crate::cli::command(), words(&args)).map_err(|error| error.to_string())?;
        let shown = expanded.iter().map(|arg| arg.to_string_lossy().into_owned());
        Ok(shown.filter(|arg| *arg != file && arg != "--config").collect())
    }

    #[test]
    fn file_says_what_was_not_given() {
        let text = "store = 'memory:'\nrun = 'a'\n[train]\nrun = 'b'\nlr = 1e-6\napply-chat-template = true\npartial-rollout = false\n\
                    rollout-external-engine-addrs = ['a:1', 'b:1']\neval-prompt-data = ['x', 'x.jsonl', 'y', 'y.jsonl']\n\
                    [log.show]\nstep = 3\n[follow]\npoll-ms = 20\n";
        let train =
            expand(text, &["driftless", "train", "--config", "FILE", "--lr", "2"]).expect("arguments");
        let mut expected = vec![
            "--apply-chat-template",
            "--eval-prompt-data",
            "x",
            "x.jsonl",
            "--eval-prompt-data",
            "y",
            "y.jsonl",
            "--rollout-external-engine-addrs=a:1",
            "--rollout-external-engine-addrs=b:1",
            "--run=b",
            "--store=memory:",
        ];
        let mut found: Vec<_> = train[4..].iter().map(String::as_str).collect();
        expected.sort_unstable();
        found.sort_unstable();
        assert_eq!(
            (&train[..4], found),
            (&["driftless", "train", "--lr", "2"].map(str::to_owned)[..], expected)
        );
        let show =
            expand(text, &["driftless", "--config", "FILE", "log", "show", "runs/a"]).expect("arguments");
        assert_eq!(show, ["driftless", "log", "show", "runs/a", "--step=3"]);
        let follow =
            expand(text, &["driftless", "follow", "--config", "FILE", "--run", "c"]).expect("arguments");
        assert_eq!(follow[2..], ["--run", "c", "--store=memory:", "--poll-ms=20"].map(str::to_owned));
    }

    #[test]
    fn value_that_is_named_like_a_command_is_a_value() {
        let text = "[fleet.drain]\ndeadline = 3\n";
        let args =
            ["driftless", "fleet", "--config", "FILE", "--token-file", "drain", "drain", "remove", "a:1"];
        let found = expand(text, &args).expect("arguments");
        assert_eq!(
            found[2..],
            ["--token-file", "drain", "drain", "remove", "a:1", "--deadline=3"].map(str::to_owned)
        );
        let behind = ["driftless", "fleet", "--config", "FILE", "drain", "--", "remove", "-a"];
        let found = expand(text, &behind).expect("arguments");
        assert_eq!(found[2..], ["drain", "--deadline=3", "--", "remove", "-a"].map(str::to_owned));
    }

    #[test]
    fn file_of_several_commands_serves_a_build_without_some_flags() {
        let text = "num-threads = 4\n[train]\nflag-of-another-build = 'cuda:0'\n[follow]\npoll-ms = 20\n";
        let follow = expand(text, &["driftless", "follow", "--config", "FILE"]).expect("arguments");
        assert_eq!(follow[2..], ["--poll-ms=20"].map(str::to_owned));
        let train = expand(text, &["driftless", "train", "--config", "FILE"]).expect_err("its own table");
        assert!(train.contains("`flag-of-another-build` is no flag of `train`"), "{train}");
        let mut all = BTreeSet::new();
        let command = crate::cli::command();
        flags(&command, true, &mut all);
        if cfg!(feature = "torch") {
            assert!(OF_LIBTORCH.iter().all(|name| all.contains(name)), "{all:?}");
        }
    }

    #[test]
    fn flag_goes_before_a_setting_that_contradicts_it() {
        let text = "[train]\ntrain-async = true\n";
        let args = expand(text, &["driftless", "train", "--config", "FILE", "--max-staleness", "2"])
            .expect("arguments");
        assert_eq!(args, ["driftless", "train", "--max-staleness", "2"]);
    }

    #[test]
    fn what_no_command_knows_is_refused_with_what_may_be_meant() {
        for (text, says) in [
            ("max-stalness = 2", "`max-stalness` is no flag; is `max-staleness` meant?"),
            ("[train]\npoll-ms = 2", "`poll-ms` is no flag of `train`"),
            ("[trian]\nlr = 2", "[trian] is no command; is `train` meant?"),
            ("[train]\npartial-rollout = 1", "`partial-rollout` is integer, expected true or false"),
            ("[train]\nlr = 2026-01-01", "`lr` is datetime, which is no value of a flag"),
            ("[train]\neval-prompt-data = 'x'", "`eval-prompt-data` has 1 values, expected 2 of each"),
            ("json = true", "`json` is no flag"),
            ("lr = ", "line 1"),
        ] {
            let refused = expand(text, &["driftless", "train", "--config", "FILE"]).expect_err(text);
            assert!(refused.contains("--config") && refused.contains(says), "{text}: {refused}");
        }
        let missing =
            expanded(&crate::cli::command(), words(&["driftless", "gc", "--config", "/nowhere/run.toml"]));
        assert!(missing.expect_err("no file").to_string().contains("/nowhere/run.toml"));
        assert!(expand("", &["driftless", "train", "--config", "FILE", "--help"]).is_ok());
    }

    #[test]
    fn effective_file_gives_the_same_arguments_again() {
        let command = crate::cli::command();
        let given = [
            "driftless",
            "train",
            "--save",
            "2.0",
            "--run",
            "1.0",
            "--lr",
            "1e-6",
            "--num-rollout",
            "7",
            "--partial-rollout",
            "--over-sampling-batch-size",
            "64",
            "--rollout-external-engine-addrs",
            "a:1",
            "b:1",
            "--eval-prompt-data",
            "x",
            "x.jsonl",
        ];
        let parse = |args: Vec<OsString>| {
            command.clone().ignore_errors(true).try_get_matches_from(args).expect("arguments")
        };
        let text = |args| effective(&command, "train", parse(args).subcommand().expect("train").1, "0");
        let first = text(words(&given));
        assert!(first.contains("num-rollout = 7") && first.contains("lr = \"1e-6\""), "{first}");
        let again = expand(&first, &["driftless", "train", "--config", "FILE"]).expect("arguments");
        assert_eq!(text(again.into_iter().map(OsString::from).collect()), first);
    }
}
