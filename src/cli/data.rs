//! `driftless data`, and the flags of prompt files that `driftless train` shares.

use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::output::{Output, printable};
use crate::cli::shared::paths;
use driftless::trainer::data::{DataOptions, Dataset, Example, Refused, Source};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::path::PathBuf;

const HELP: &str = "\
What is shown is what a run with the same flags reads: each prompt after the chat template, its token ids, and the rows that
are refused. A broken row ends the command, as it ends a run, unless --skip-bad-prompts is given.

Examples:
  driftless data prompts.jsonl --hf-checkpoint models/Qwen3-0.6B --input-key question --label-key answer --apply-chat-template
  driftless data 'train.parquet@[0:1000]' --hf-checkpoint models/Qwen3-0.6B --input-key messages --apply-chat-template --show 5";

/// Show what prompt files become: rendered, tokenised, and what is refused.
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct Args {
    /// JSONL or Parquet files. `FILE@[a:b]` takes rows a to b - 1, counted from 0.
    #[arg(required = true, value_name = "FILE", value_parser = source)]
    files: Vec<Source>,
    /// Checkpoint directory with the tokenizer and the chat template.
    #[arg(long, value_name = "DIR")]
    hf_checkpoint: PathBuf,
    /// How many prompts to show.
    #[arg(long, value_name = "N", default_value_t = 2)]
    show: usize,
    #[command(flatten)]
    data: DataOptions,
}

/// These options for `files`, each of which has to be there.
pub(crate) fn options(data: &DataOptions, name: &str, files: &[Source]) -> Result<DataOptions> {
    for file in files {
        paths::check_file(name, &file.path)?;
    }
    Ok(data.clone().with_prompt_data(files.to_vec()))
}

/// `FILE` or `FILE@[a:b]`, for clap.
pub(crate) fn source(text: &str) -> Result<Source, String> {
    text.parse().map_err(|error: driftless::trainer::Error| error.to_string())
}

pub(crate) fn run(args: Args, output: Output) -> Result<()> {
    paths::check_dir("--hf-checkpoint", &args.hf_checkpoint)?;
    let options = self::options(&args.data, "FILE", &args.files)?;
    let data = Dataset::load(&options, &args.hf_checkpoint)?;
    let shown = &data.examples[..args.show.min(data.examples.len())];
    let lengths = Lengths::of(&data.examples);
    let refused: Vec<_> = data.refused.iter().map(Refused::to_string).collect();
    let value = json!({
        "prompts": data.examples.len(), "bad": data.bad, "too_long": data.too_long,
        "tokens": lengths, "refused": refused,
        "examples": shown.iter().map(example).collect::<Result<Vec<_>>>()?,
    });
    output.print(&value, |_| describe(&data, &lengths, shown))
}

fn example(example: &Example) -> Result<Value> {
    let parsed = |raw: Option<&str>| {
        let value = raw.map(serde_json::from_str::<Value>).transpose();
        value.map_err(|source| Error::Json { what: example.place.to_string(), source })
    };
    Ok(json!({
        "place": example.place.to_string(), "text": example.text, "tokens": example.tokens,
        "loss_mask": example.loss_mask,
        "label": parsed(example.label.as_deref().map(|raw| raw.get()))?,
        "metadata": parsed(example.metadata.as_deref().map(|raw| raw.get()))?,
    }))
}

/// Lengths of prompts in tokens.
#[derive(serde::Serialize)]
struct Lengths {
    min: usize,
    median: usize,
    p95: usize,
    max: usize,
    total: usize,
}

impl Lengths {
    fn of(examples: &[Example]) -> Self {
        let mut sorted: Vec<_> = examples.iter().map(|example| example.tokens.len()).collect();
        sorted.sort_unstable();
        let last = sorted.len().saturating_sub(1) as f64;
        // The length that this share of the prompts does not exceed.
        let at = |share: f64| sorted.get((last * share).round() as usize).copied().unwrap_or_default();
        let total = sorted.iter().sum();
        Lengths { min: at(0.0), median: at(0.5), p95: at(0.95), max: at(1.0), total }
    }
}

fn describe(data: &Dataset, lengths: &Lengths, shown: &[Example]) -> String {
    let Dataset { bad, too_long, .. } = data;
    let Lengths { min, median, p95, max, total } = lengths;
    let mut text = format!(
        "{} prompts; refused: {bad} broken, {too_long} too long\n\
         tokens of a prompt: {min} at least, {median} in the middle, {p95} at 95 %, {max} at most; {total} in all\n",
        data.examples.len()
    );
    // Writing to a String does not fail.
    for example in shown {
        let label =
            example.label.as_ref().map_or_else(String::new, |label| format!(", label {}", label.get()));
        let _ = writeln!(text, "\n{}, {} tokens{label}", example.place, example.tokens.len());
        for line in example.text.lines() {
            let _ = writeln!(text, "    {}", printable(line));
        }
        let _ = writeln!(text, "  ids {:?}", example.tokens);
        if !example.loss_mask.is_empty() {
            let _ = writeln!(text, "  learned {:?}", example.loss_mask);
        }
    }
    for refused in &data.refused {
        let _ = write!(text, "\nrefused: {}", printable(&refused.to_string()));
    }
    text
}
