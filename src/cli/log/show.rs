//! `driftless log show`: what the policy wrote.

use super::texts::{Texts, log_of};
use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::numbers;
use crate::cli::shared::output::{Output, printable};
use driftless::buffer::{self, Group, Kind, Reader, Record};
use driftless::trainer::rollout::{EvaluationNote, FailedAnswer};
use driftless::trainer::sample::{answer_of, label_text, part_of};
use driftless::trainer::{Failure, ledger};
use serde_json::value::RawValue;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::PathBuf;

/// Characters of a label that are shown.
const LABEL_SHOWN: usize = 200;

#[derive(clap::Args)]
pub(super) struct Args {
    /// Directory of a run, as `train --save` has it, or of its log.
    run: PathBuf,
    /// Training step whose samples are shown [default: the newest with samples].
    #[arg(long, value_name = "N", value_parser = numbers::ordinal())]
    step: Option<u64>,
    /// Answers of the evaluation after so many steps, of which none is learned from [default: of the newest].
    #[arg(long, conflicts_with = "left_out")]
    evaluation: bool,
    /// Answers that no step learns from, and why: their group failed, was filtered, or is too old. `--step` is the one that
    /// they were generated for.
    #[arg(long)]
    left_out: bool,
    /// Begin with the highest reward.
    #[arg(long, conflicts_with = "worst")]
    best: bool,
    /// Begin with the lowest reward.
    #[arg(long)]
    worst: bool,
    /// Begin with the largest mismatch, and print it: how far the learner's log-prob of a token was from the engine's before
    /// the step, in nats.
    #[arg(long, conflicts_with_all = ["best", "worst", "evaluation", "left_out"])]
    mismatch: bool,
    /// How many samples.
    #[arg(short = 'n', long, value_name = "N", default_value_t = 4)]
    samples: usize,
    /// Checkpoint directory with the tokenizer [default: the run's own].
    #[arg(long, value_name = "DIR")]
    hf_checkpoint: Option<PathBuf>,
}

/// A sample with its texts.
#[derive(serde::Serialize)]
struct Shown {
    step: u64,
    /// Number of the prompt in the run.
    prompt_id: u64,
    /// Number of the answer in the run.
    answer: u64,
    /// Which part of its answer the sample is, from 0.
    part: usize,
    /// None where it was not given.
    reward: Option<f32>,
    /// As it was given, before a hook processed it.
    #[serde(skip_serializing_if = "Option::is_none")]
    raw_reward: Option<f32>,
    /// The furthest that learner and engine were apart on a token before the step, in nats.
    #[serde(skip_serializing_if = "Option::is_none")]
    mismatch: Option<f32>,
    /// The set that it was measured on.
    #[serde(skip_serializing_if = "Option::is_none")]
    set: Option<String>,
    /// Why no step learns from it.
    #[serde(skip_serializing_if = "Option::is_none")]
    dropped: Option<String>,
    /// Which failure that is, where an answer of its group failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    outcome: Option<Failure>,
    /// Answers of its group that failed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    failed: Vec<FailedAnswer>,
    finish: String,
    response_tokens: usize,
    /// Versions of the weights that wrote it.
    versions: Vec<u64>,
    engine: String,
    source: String,
    label: Option<Box<RawValue>>,
    prompt: String,
    response: String,
}

pub(super) fn run(args: &Args, output: Output) -> Result<()> {
    let log = log_of(&args.run)?;
    let ledger = log.parent().map_or_else(|| Ok(BTreeMap::new()), ledger::read)?;
    let texts = Texts::open(&log, args.hf_checkpoint.as_deref())?;
    let Step { number, mut records } = match (args.evaluation, args.left_out) {
        (true, _) => apart(args, &texts, |record| Ok(record.scalars().evaluation))?,
        (_, true) => apart(args, &texts, |record| {
            let note = texts.note(record)?;
            Ok(!record.scalars().evaluation && (note.dropped.is_some() || note.failed_of(record).is_some()))
        })?,
        _ => samples(args, &texts, &ledger)?,
    };
    let reward = |record: &Record| record.scalars().reward;
    if args.best {
        records.sort_by(|a, b| reward(b).total_cmp(&reward(a)));
    } else if args.worst {
        records.sort_by(|a, b| reward(a).total_cmp(&reward(b)));
    }
    let learned = if args.mismatch { texts.reader().learned(number)? } else { None };
    let mismatch = |record: &Record| learned.as_ref()?.row(record.position())?.mismatch;
    if args.mismatch {
        let apart = |record: &Record| mismatch(record).unwrap_or(-1.0);
        records.sort_by(|a, b| apart(b).total_cmp(&apart(a)));
    }
    for record in records.iter().take(args.samples) {
        let shown = Shown { mismatch: mismatch(record), ..shown(&texts, number, record)? };
        output.print(&shown, render)?;
    }
    Ok(())
}

/// The samples of a step.
struct Step {
    number: u64,
    records: Vec<Record>,
}

/// The samples of a step that are in no group, found by reading the whole log.
fn apart(args: &Args, texts: &Texts, is_wanted: impl Fn(&Record) -> Result<bool>) -> Result<Step> {
    let log = texts.reader();
    let mut steps: BTreeMap<u64, Vec<Record>> = BTreeMap::new();
    // What is damaged is told by `log verify`.
    for record in log.iter(log.oldest()).flatten().filter(|record| record.kind() == Kind::Sample) {
        if is_wanted(&record)? {
            steps.entry(record.scalars().rollout_id).or_default().push(record);
        }
    }
    let found = match (steps.keys().next(), steps.keys().next_back()) {
        (Some(first), Some(last)) => format!("answers of step {first} to {last}"),
        _ => "none in the log".to_owned(),
    };
    let step = match args.step {
        Some(number) => steps.remove_entry(&number),
        None => steps.pop_last(),
    };
    let step = step.map(|(number, records)| Step { number, records });
    let kind = if args.evaluation { "answers of an evaluation" } else { "answers that are left out" };
    step.ok_or_else(|| Error::usage(format!("{kind} in {}", args.run.display()), "some at this step", found))
}

/// The samples of the step that is asked for: by the run's ledger, or, without one, by the step that the log says they
/// were generated for.
fn samples(args: &Args, texts: &Texts, ledger: &BTreeMap<u64, Vec<u64>>) -> Result<Step> {
    let log = texts.reader();
    let steps = if ledger.is_empty() { log.rollouts() } else { ledger.keys().copied().collect() };
    let wrong = |expected: String, found: String| {
        Error::usage(format!("step of {}", args.run.display()), expected, found)
    };
    let (Some(first), Some(last)) = (steps.first(), steps.last()) else {
        return Err(wrong("one with samples".to_owned(), "an empty log".to_owned()));
    };
    let number = args.step.unwrap_or(*last);
    if !steps.contains(&number) {
        return Err(wrong(format!("one with samples, from {first} to {last}"), number.to_string()));
    }
    let groups = match ledger.get(&number) {
        Some(taken) => groups(log, taken)?,
        None => log.groups(number, 1),
    };
    Ok(Step { number, records: groups.into_iter().flat_map(|group| group.records).collect() })
}

/// The groups of these numbers. The log finds them by the step that their prompts were taken for.
pub(in crate::cli) fn groups(log: &Reader, numbers: &[u64]) -> Result<Vec<Group>> {
    let prompts = numbers.iter().map(|number| log.prompt(*number)).collect::<buffer::Result<Vec<_>>>()?;
    let ids =
        prompts.iter().flatten().map(|prompt| (prompt.scalars().rollout_id, prompt.scalars().sample_id));
    let ids: BTreeSet<(u64, u64)> = ids.collect();
    Ok(ids.into_iter().filter_map(|(seat, number)| log.group_of(seat, number, 1)).collect())
}

/// Numbers of the prompt and of the answer in the run, and of the sample in its answer.
pub(in crate::cli) fn ids(record: &Record) -> (u64, u64, usize) {
    let scalars = record.scalars();
    match scalars.evaluation {
        // Ids of an evaluation count down.
        true => (u64::MAX - scalars.group_id, u64::MAX - scalars.sample_id, 0),
        false => (scalars.group_id, answer_of(scalars.sample_id), part_of(scalars.sample_id)),
    }
}

fn shown(texts: &Texts, step: u64, record: &Record) -> Result<Shown> {
    let scalars = record.scalars();
    let note = texts.note(record)?;
    let raw = record.rewards().first().copied().filter(|raw| *raw != scalars.reward);
    let mut versions: Vec<_> = record.spans().iter().map(|span| span.version).collect();
    versions.dedup();
    let (prompt_id, answer, part) = ids(record);
    let (dropped, outcome) = match note.failed_of(record) {
        Some(failed) => (Some(failed.why.clone()), Some(failed.outcome)),
        None => (note.dropped, note.outcome),
    };
    Ok(Shown {
        step,
        prompt_id,
        answer,
        part,
        reward: record.is_scored().then_some(scalars.reward),
        raw_reward: raw,
        mismatch: None,
        set: scalars.evaluation.then(|| EvaluationNote::of(record).set),
        dropped,
        outcome,
        failed: note.failed,
        finish: format!("{:?}", record.finish()).to_lowercase(),
        response_tokens: record.response().len(),
        versions,
        engine: record.engine().to_owned(),
        source: note.source.map_or_else(String::new, String::from),
        label: note.label,
        prompt: texts.prompt(record)?,
        response: texts.response(record)?.unwrap_or_default(),
    })
}

/// A label that need not end: tests of a program may be one.
fn short(label: &str) -> String {
    let start: String = label.chars().take(LABEL_SHOWN).collect();
    let end = if start.len() < label.len() { "…" } else { "" };
    printable(&start) + end
}

/// A sample for people: a line of facts, the prompt, the answer.
fn render(shown: &Shown) -> String {
    let versions: Vec<_> = shown.versions.iter().map(u64::to_string).collect();
    let part = if shown.part > 0 { format!(" part {}", shown.part) } else { String::new() };
    let label = shown.label.as_ref().map(|label| short(&label_text(label)));
    let label = label.map_or_else(String::new, |label| format!(", label {label}"));
    let reward = shown.reward.map_or_else(|| "none".to_owned(), |reward| reward.to_string());
    let mismatch = shown.mismatch.map_or_else(String::new, |nats| format!(", mismatch up to {nats:.3} nats"));
    let raw = shown.raw_reward.map_or_else(String::new, |raw| format!(" (given {raw})"));
    let set = shown.set.as_ref().map_or_else(String::new, |set| format!("set {}, ", printable(set)));
    let dropped = shown.dropped.as_ref();
    let outcome = shown.outcome.map_or_else(String::new, |outcome| format!("{}: ", outcome.name()));
    let dropped = dropped.map_or_else(String::new, |why| format!(", left out: {outcome}{}", printable(why)));
    let Shown { step, prompt_id, answer, finish, response_tokens, .. } = shown;
    let (source, engine) = (printable(&shown.source), printable(&shown.engine));
    let mut text = format!(
        "reward {reward}{raw}{label}: {set}step {step}, prompt {prompt_id} ({source}), answer {answer}{part}, \
         {finish} of {response_tokens} tokens by version {} at {engine}{mismatch}{dropped}\n",
        versions.join(", "),
    );
    // Writing to a String does not fail.
    for FailedAnswer { answer, outcome, why, .. } in &shown.failed {
        let _ = writeln!(text, "  ! answer {answer} failed: {}: {}", outcome.name(), printable(why));
    }
    for (mark, body) in [("  > ", &shown.prompt), ("  < ", &shown.response)] {
        for line in body.lines() {
            let _ = writeln!(text, "{mark}{}", printable(line));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn render_marks_prompt_and_answer_and_escapes_both() {
        let shown = Shown {
            step: 12,
            prompt_id: 96,
            answer: 384,
            part: 0,
            reward: Some(0.5),
            raw_reward: None,
            mismatch: Some(0.25),
            set: None,
            dropped: None,
            outcome: None,
            failed: Vec::new(),
            finish: "stop".to_owned(),
            response_tokens: 3,
            versions: vec![7, 8],
            engine: "http://host:30000".to_owned(),
            source: "prompts.jsonl:17".to_owned(),
            label: RawValue::from_string("\"4\\u001b[2J\"".to_owned()).ok(),
            prompt: "What is\n2 + 2?".to_owned(),
            response: "\u{1b}]0;x\u{7}4\n\n".to_owned(),
        };
        assert_eq!(
            render(&shown),
            "reward 0.5, label 4\\u{1b}[2J: step 12, prompt 96 (prompts.jsonl:17), answer 384, stop of 3 tokens by \
             version 7, 8 at http://host:30000, mismatch up to 0.250 nats\n  > What is\n  > 2 + 2?\n  < \\u{1b}]0;x\\u{7}4\n  < \n"
        );
        let why = Some("filtered: \u{1b}[2J".to_owned());
        let other = Shown {
            reward: None,
            raw_reward: Some(2.0),
            set: Some("test".to_owned()),
            dropped: why,
            ..shown
        };
        let line = render(&other).lines().next().map(str::to_owned).unwrap();
        assert!(
            line.starts_with("reward none (given 2), label 4") && line.contains(": set test, step 12"),
            "{line}"
        );
        assert!(line.ends_with(", left out: filtered: \\u{1b}[2J"), "{line}");
        let answer =
            serde_json::from_str(r#"{"answer": 7, "outcome": "parser", "why": "\u001b[2J"}"#).unwrap();
        let failed = render(&Shown { outcome: Some(Failure::Environment), failed: vec![answer], ..other });
        assert!(failed.contains(", left out: environment: filtered"), "{failed}");
        assert!(failed.contains("\n  ! answer 7 failed: parser: \\u{1b}[2J\n"), "{failed}");
    }
}
