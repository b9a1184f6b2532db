//! `driftless verify`: whether a run trained on what its engines drew.

use crate::cli::log::texts::log_in;
use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::output::Output;
use crate::cli::shared::paths;
use driftless::trainer::ledger;
use driftless::trainer::verify::{Report, Unchecked, verify};
use std::path::PathBuf;

const AFTER_HELP: &str = "\
Examples:
  driftless verify runs/first
  driftless verify runs/first --json | jq .first

Checked of each sample that ledger.jsonl names: every token that is trained on is in one reply of an engine; its id,
log-probability and version, and all ids before it, are those of which a digest was made when the reply came; and no version is
newer than the step. Checked of the ledger: no group is learned from twice, all answers of a group are in the log, and its own
digest of each sample. The run's directory is only read, also while the run goes on. Faults are named, the first 20 of them, and
the exit code is 3.";

/// Check that a run trained on exactly what its engines drew, by digests that were made of their replies.
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {
    /// Directory of the run, as `train --save` has it.
    #[arg(value_name = "RUN")]
    run: PathBuf,
}

pub(crate) fn run(args: Args, output: Output) -> Result<()> {
    let run = args.run;
    paths::check_dir("RUN", &run)?;
    if !run.join(ledger::FILE).is_file() {
        let expected = format!("the directory of a run, with {} and its log", ledger::FILE);
        return Err(Error::usage(run.display().to_string(), expected, "one without a ledger"));
    }
    let report = verify(&run, &log_in(run.clone()))?;
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
