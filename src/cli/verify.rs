//! `driftless verify`: whether a run trained on what its engines drew, and whether trajectories of anybody hold together.

use crate::cli::log::texts::{TOKENIZER_BYTES_MAX, log_in};
use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::output::{Output, printable};
use crate::cli::shared::{paths, progress};
use driftless::agent::{Tokenizer, atif};
use driftless::trainer::ledger;
use driftless::verify::{Report, Unchecked, verify};
use std::path::{Path, PathBuf};

/// Most bytes of a file of trajectories.
const ATIF_BYTES_MAX: u64 = 1 << 29;

const AFTER_HELP: &str = "\
Examples:
  driftless verify runs/first
  driftless verify runs/first --json | jq .first
  driftless verify --atif trajectories --tokenizer models/Qwen3-0.6B/tokenizer.json

Checked of each sample that ledger.jsonl names: every token that is trained on is in one reply of an engine; its id,
log-probability and version, and all ids before it, are those of which a digest was made when the reply came; no other sample of
its answer trains on it; and no version is newer than the step. Checked of the ledger: no group is learned from twice, all answers of a group are in the log, and its own
digest of each sample. The run's directory is only read, also while the run goes on.

Checked of a trajectory, as far as its writer says enough: its version, the order of its steps, that the prompt of a turn begins
with what the turn before read and drew, that there are as many ids, log-probabilities and tokens as it says, and that
log-probabilities are finite and at most 0; with --tokenizer, that the ids say the texts. Those of `driftless log export --atif`
have the digests of their engines' replies, too, by which any other id, log-probability or version is found.

Faults are named, the first 20 of them, and the exit code is 3.";

/// Check that a run trained on exactly what its engines drew, by digests that were made of their replies; or files of
/// trajectories.
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {
    /// Directory of the run, as `train --save` has it.
    #[arg(value_name = "RUN", required_unless_present = "atif", conflicts_with = "atif")]
    run: Option<PathBuf>,
    /// Files in ATIF, Harbor's format of trajectories, whoever wrote them, or directories with such files (`.json`,
    /// `.jsonl`). A file has one trajectory, or several one after another.
    #[arg(long, value_name = "FILE", num_args = 1..)]
    atif: Vec<PathBuf>,
    /// With --atif, `tokenizer.json` of the model: ids are compared with texts.
    #[arg(long, value_name = "FILE", requires = "atif")]
    tokenizer: Option<PathBuf>,
}

pub(crate) fn run(args: Args, output: Output) -> Result<()> {
    match args.run {
        Some(run) => of_run(run, output),
        None => of_files(&args.atif, args.tokenizer.as_deref(), output),
    }
}

fn of_files(paths: &[PathBuf], tokenizer: Option<&Path>, output: Output) -> Result<()> {
    let open = |path: &Path| {
        let bytes = paths::read("--tokenizer", path, TOKENIZER_BYTES_MAX)?;
        Ok::<_, Error>(Tokenizer::from_bytes(path, &bytes)?)
    };
    let mut checker = atif::Checker::new(tokenizer.map(open).transpose()?);
    progress::during("verify", "files", |work| -> Result<()> {
        for path in paths {
            for file in files(path)? {
                checker.file(&file.display().to_string(), &paths::read("--atif", &file, ATIF_BYTES_MAX)?)?;
                work.add(1);
            }
        }
        Ok(())
    })?;
    let report = checker.into_report();
    output.print(&report, shown_of_files)?;
    match report.faults {
        0 => Ok(()),
        damaged => Err(Error::Damaged { what: format!("{} files", report.files), damaged }),
    }
}

/// The file, or those of the directory in the order of their names.
fn files(path: &Path) -> Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let io = |source| Error::Io { path: path.to_owned(), source };
    let entries = std::fs::read_dir(path).map_err(io)?;
    let entries = entries.collect::<std::io::Result<Vec<_>>>().map_err(io)?;
    let is_one = |path: &PathBuf| path.extension().is_some_and(|end| end == "json" || end == "jsonl");
    let mut files: Vec<_> = entries.iter().map(std::fs::DirEntry::path).filter(is_one).collect();
    files.sort();
    if files.is_empty() {
        let found = "a directory without any";
        return Err(Error::usage(format!("--atif {}", path.display()), "files named .json or .jsonl", found));
    }
    Ok(files)
}

fn of_run(run: PathBuf, output: Output) -> Result<()> {
    paths::check_dir("RUN", &run)?;
    if !run.join(ledger::FILE).is_file() {
        let expected = format!("the directory of a run, with {} and its log", ledger::FILE);
        return Err(Error::usage(run.display().to_string(), expected, "one without a ledger"));
    }
    let report = progress::during("verify", "", |_| verify(&run, &log_in(run.clone())))?;
    output.print(&report, shown)?;
    match report.faults {
        0 => Ok(()),
        damaged => Err(Error::Damaged { what: run.display().to_string(), damaged }),
    }
}

fn shown(report: &Report) -> String {
    let mut lines: Vec<_> = report.first.iter().map(ToString::to_string).collect();
    let Report { steps, groups, answers, samples, replies, tokens, samples_learned, faults, .. } = report;
    lines.push(format!(
        "{steps} steps, {groups} groups, {answers} answers, {samples} samples: {tokens} trained tokens in {replies} replies \
         checked, {samples_learned} digests of the ledger compared, {faults} faults"
    ));
    let Unchecked { earlier_release, tokens, removed, steps_without_version, .. } = report.unchecked;
    let unchecked = [
        (earlier_release, format!("samples of an earlier release, without digests: {tokens} trained tokens")),
        (removed, "groups of which retention removed records".to_owned()),
        (steps_without_version, "steps whose newest version is unknown".to_owned()),
    ];
    let unchecked = unchecked.iter().filter(|(count, _)| *count > 0);
    lines.extend(unchecked.map(|(count, what)| format!("not checked: {count} {what}")));
    lines.join("\n")
}

fn shown_of_files(report: &atif::Report) -> String {
    let mut lines: Vec<_> = report.first.iter().map(|fault| printable(&fault.to_string())).collect();
    let atif::Report { files, trajectories, steps, turns, tokens, log_probs, continued, .. } = report;
    let atif::Report { texts, replies, faults, unchecked, .. } = report;
    lines.push(format!(
        "{files} files, {trajectories} trajectories, {steps} steps: {turns} turns of {tokens} tokens, {log_probs} \
         log-probabilities, {continued} prompts that go on, {texts} texts, {replies} replies checked, {faults} faults"
    ));
    let unchecked = [
        (unchecked.without_ids, "turns without token ids"),
        (unchecked.without_log_probs, "turns without log-probabilities"),
        (unchecked.without_prompt, "turns without ids of the prompt"),
        (unchecked.aggregated, "turns of several requests in one"),
        (
            unchecked.without_digest,
            "turns without digests of replies: another id or log-probability may show nowhere",
        ),
    ];
    let unchecked = unchecked.iter().filter(|(count, _)| *count > 0);
    lines.extend(unchecked.map(|(count, what)| format!("not checked: {count} {what}")));
    lines.join("\n")
}
