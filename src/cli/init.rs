//! `driftless init`: a commented `run.toml` for a model, prompts and engines, after a look at each.

use crate::cli::data::{self, source};
use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::keys::CallArgs;
use crate::cli::shared::output::{Output, columns, folded, short};
use crate::cli::shared::{paths, progress};
use driftless::bridge::connect;
use driftless::bridge::engine::{About, Deadlines};
use driftless::http::runtime;
use driftless::store::chain_text;
use driftless::trainer::data::{DataOptions, Dataset, RowReader, Source, first_row};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

const HELP: &str = "\
It looks at the model's config.json and chat template, reads the prompts as a run would, and asks each engine what it runs. An
engine that does not answer is noted in the file, and is no error. A file that is there is not written over.

Example:
  driftless init --hf-checkpoint models/Qwen3-0.6B --prompt-data train.jsonl --engine 10.0.0.1:30000 --store s3://bucket/prefix
  driftless train --config run.toml
  driftless follow --config run.toml";

/// Names of fields that mostly hold a prompt, and of those that hold what is right.
const INPUTS: [&str; 9] =
    ["prompt", "question", "problem", "instruction", "messages", "input", "query", "text", "content"];
const LABELS: [&str; 7] = ["answer", "label", "solution", "target", "ground_truth", "final_answer", "output"];
/// What an engine may take to answer.
const CALL: Duration = Duration::from_secs(10);
/// Prompts of a step, where there are so many.
const BATCH: usize = 32;
/// Tokens of a response, where the model has room for so many.
const RESPONSE: u64 = 1024;

/// Write a commented run.toml for a model, prompts and engines, after a look at each.
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct Args {
    /// Checkpoint directory of the model.
    #[arg(long, value_name = "DIR")]
    hf_checkpoint: PathBuf,
    /// Prompts to learn on: JSONL or Parquet.
    #[arg(long, value_name = "FILE", value_parser = source)]
    prompt_data: Source,
    /// Field with the prompt [default: the first that is named like one].
    #[arg(long, value_name = "FIELD")]
    input_key: Option<String>,
    /// Field with what rewards compare the answer with [default: the first that is named like one].
    #[arg(long, value_name = "FIELD")]
    label_key: Option<String>,
    /// Running engine, as host:port or https://host/path, with vllm+ before the URL for vLLM; may be given several times.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:30000")]
    engine: Vec<String>,
    /// Store of the versions: file:///dir, a path, s3://bucket/prefix, gs://…, az://….
    #[arg(long, value_name = "URL", default_value = "store")]
    store: String,
    /// Name of the run in the store.
    #[arg(long, value_name = "NAME", default_value = "first")]
    run: String,
    /// File to write.
    #[arg(long, short, value_name = "FILE", default_value = "run.toml")]
    out: PathBuf,
    #[command(flatten)]
    call: CallArgs,
}

/// What was found.
struct Looked {
    /// The model's `config.json`.
    config: Value,
    has_template: bool,
    /// Names of the first row's fields.
    fields: Vec<String>,
    input_key: String,
    label_key: Option<String>,
    /// Whether the first row's label is a number.
    is_number: bool,
    prompts: usize,
    refused: u64,
    /// Tokens of the longest prompt.
    longest: usize,
    engines: Vec<(String, Result<About, String>)>,
}

pub(crate) fn run(args: Args, output: Output) -> Result<()> {
    if args.out.exists() {
        let found = args.out.display().to_string();
        return Err(Error::usage("--out", "a file that is not there yet", found));
    }
    paths::check_checkpoint("--hf-checkpoint", &args.hf_checkpoint)?;
    let looked = progress::during("init", "", |_| look(&args))?;
    let text = written(&args, &looked);
    let mut file =
        std::fs::OpenOptions::new().write(true).create_new(true).open(&args.out).map_err(io(&args.out))?;
    file.write_all(text.as_bytes()).map_err(io(&args.out))?;
    let silent: Vec<&str> = looked
        .engines
        .iter()
        .filter(|(_, about)| about.is_err())
        .map(|(address, _)| address.as_str())
        .collect();
    let out = args.out.display().to_string();
    output.print(&json!({"file": out, "prompts": looked.prompts, "silent": silent}), |_| {
        let silent = (!silent.is_empty()).then(|| format!("no answer: {}", silent.join(", ")));
        let columns = columns();
        let prose = |line: &str| folded(line, columns);
        let mut lines: Vec<_> = silent.iter().flat_map(|line| prose(line)).collect();
        lines.extend(prose(&format!("wrote {out}; read it, and then:")));
        // What is to be copied stays whole.
        lines.push(format!("  driftless train --config {out}"));
        lines.extend(prose("and beside each engine:"));
        lines.push(format!("  driftless follow --config {out}"));
        lines.join("\n")
    })
}

fn look(args: &Args) -> Result<Looked> {
    let path = args.hf_checkpoint.join("config.json");
    let bytes = paths::read("--hf-checkpoint", &path, 1 << 20)?;
    let config = serde_json::from_slice(&bytes)
        .map_err(|source| Error::Json { what: path.display().to_string(), source })?;
    let files = [args.prompt_data.clone()];
    let options = data::options(&DataOptions::default(), "--prompt-data", &files)?;
    let row = first_row(&args.prompt_data)?;
    let fields: Vec<String> = row.keys().cloned().collect();
    let known =
        |names: &[&str]| names.iter().find(|name| row.contains_key(**name)).map(|name| (*name).to_owned());
    let input_key = args.input_key.clone().or_else(|| known(&INPUTS)).ok_or_else(|| {
        Error::usage(
            "--input-key",
            format!("the field of {} with the prompt", args.prompt_data),
            fields.join(", "),
        )
    })?;
    let label_key = args.label_key.clone().or_else(|| known(&LABELS));
    let label = label_key.as_ref().and_then(|key| row.get(key));
    let is_number = label.is_some_and(|label| label.is_number() || label.as_str().is_some_and(is_number));
    let mut options = options.with_input_key(&input_key).with_skip_bad_prompts(true);
    options.label_key.clone_from(&label_key);
    let templated = RowReader::open(options.clone().with_apply_chat_template(true), &args.hf_checkpoint);
    let has_template = templated.is_ok();
    let data = Dataset::read(&templated.or_else(|_| RowReader::open(options, &args.hf_checkpoint))?)?;
    let longest = data.examples.iter().map(|example| example.tokens.len()).max().unwrap_or_default();
    Ok(Looked {
        config,
        has_template,
        fields,
        input_key,
        label_key,
        is_number,
        prompts: data.examples.len(),
        refused: data.bad + data.too_long,
        longest,
        engines: args
            .engine
            .iter()
            .map(|address| Ok((address.clone(), ask(args, address)?)))
            .collect::<Result<_>>()?,
    })
}

fn is_number(text: &str) -> bool {
    text.trim().replace(',', "").parse::<f64>().is_ok()
}

fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.to_path_buf();
    move |source| Error::Io { path, source }
}

/// What an engine runs, or why it does not say.
fn ask(args: &Args, address: &str) -> Result<Result<About, String>> {
    let deadlines = Deadlines::default().with_connect(CALL).with_info(CALL);
    let client = args.call.client("--engine", &args.engine)?.with_deadlines(deadlines);
    let engine = connect(address, client)?;
    let runtime = match runtime::handle() {
        Ok(runtime) => runtime,
        Err(error) => return Ok(Err(chain_text(&error))),
    };
    Ok(runtime::wait(&runtime, engine.about()).map_err(|error| chain_text(&error)))
}

/// The file.
fn written(args: &Args, looked: &Looked) -> String {
    let mut file = File(format!(
        "# Written by `driftless init`. Flags on the command line go before it.\n\
         #   driftless train --config {0}\n#   driftless follow --config {0}    beside each engine\n\n",
        args.out.display().to_string().replace(char::is_control, " ")
    ));
    file.say("Where versions go: a place that trainer and followers reach.");
    file.set("store", args.store.as_str());
    file.set("run", args.run.as_str());
    file.say(&model(looked));
    file.set("hf-checkpoint", args.hf_checkpoint.display().to_string());
    trained(&mut file, args, looked);
    file.0 += "\n[follow]\n";
    file.say("The engine beside it, and the directory that it keeps for it: in memory is quickest.");
    file.set(
        "engine",
        vec![looked.engines.first().map_or("127.0.0.1:30000", |(address, _)| address.as_str())],
    );
    file.set("checkpoint-dir", format!("/dev/shm/{}", args.run));
    file.0
}

fn trained(file: &mut File, args: &Args, looked: &Looked) {
    file.0 += "\n[train]\n";
    file.say("Checkpoints, the rollout log, metrics: a disk of this host.");
    file.set("save", format!("runs/{}", args.run));
    let Looked { prompts, refused, longest, fields, .. } = looked;
    file.say(&format!(
        "{prompts} prompts, {refused} rows refused; the longest prompt has {longest} tokens. Fields: {}.",
        short(&fields.join(", "))
    ));
    file.set("prompt-data", vec![args.prompt_data.to_string()]);
    file.set("input-key", looked.input_key.as_str());
    match looked.has_template {
        true => file.set("apply-chat-template", true),
        false => file.say("The model has no chat template: prompts are taken as they are."),
    }
    match &looked.label_key {
        Some(label) => {
            file.set("label-key", label.as_str());
            file.say("How answers are rewarded: exact, math, dapo, f1, regex, …; or a hook of your own (docs/hooks.md).");
            file.set("rm-type", if looked.is_number { "math" } else { "exact" });
        }
        None => file
            .say("No field looks like what is right: give label-key and rm-type, or a hook (docs/hooks.md)."),
    }
    for (address, about) in &looked.engines {
        file.say(&match about {
            Ok(About { release, model, .. }) => {
                format!(
                    "{address}: release {}, model {}.",
                    release.as_deref().unwrap_or("unknown"),
                    short(model)
                )
            }
            Err(why) => format!("{address} did not answer: {}", short(why)),
        });
    }
    file.set(
        "rollout-external-engine-addrs",
        looked.engines.iter().map(|(address, _)| address.as_str()).collect::<Vec<_>>(),
    );
    file.say("A step learns from so many prompts with so many answers each, of at most so many tokens.");
    file.set("rollout-batch-size", BATCH.min(*prompts).max(1) as i64);
    file.set("n-samples-per-prompt", 8);
    file.set("rollout-max-response-len", response_len(looked));
    if let Some(positions) = positions(looked).and_then(|positions| i64::try_from(positions).ok()) {
        file.say("Tokens of a prompt and its answer: the model has no positions for more.");
        file.set("rollout-max-context-len", positions);
    }
    file.say("Steps: without this, as many as the prompts are enough for.");
    file.0 += "# num-rollout = 100\n";
    file.say("Generate while the step trains, with weights of at most two steps ago (docs/rollouts.md).");
    file.0 += "# max-staleness = 2\n# use-tis = true\n";
}

fn model(looked: &Looked) -> String {
    let architecture =
        looked.config["architectures"][0].as_str().unwrap_or("a model without a named architecture");
    let positions =
        positions(looked).map_or_else(String::new, |positions| format!(", {positions} positions"));
    let template = if looked.has_template { "a chat template" } else { "no chat template" };
    format!("{}{positions}, {template}.", short(architecture))
}

fn positions(looked: &Looked) -> Option<u64> {
    looked.config["max_position_embeddings"].as_u64()
}

/// What is left of the model's positions, half of them at least.
fn response_len(looked: &Looked) -> i64 {
    let positions = positions(looked).unwrap_or(u64::MAX);
    let left = positions.saturating_sub(looked.longest as u64).max(positions / 2).clamp(1, RESPONSE);
    i64::try_from(left).unwrap_or(i64::MAX)
}

/// A TOML file that is being written. Writing to a String does not fail.
struct File(String);

impl File {
    fn say(&mut self, comment: &str) {
        let _ = writeln!(self.0, "# {}", comment.replace(char::is_control, " "));
    }

    fn set(&mut self, key: &str, value: impl Into<toml::Value>) {
        let _ = writeln!(self.0, "{key} = {}", value.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comment_is_one_line_that_no_terminal_obeys() {
        let mut file = File(String::new());
        file.say("release 1.0\r\n\u{1b}[2Jstore = 'theirs'");
        file.set("store", "ours");
        let table: toml::Table = file.0.parse().expect("TOML");
        assert_eq!((table.len(), table["store"].as_str()), (1, Some("ours")));
        assert!(file.0.chars().all(|letter| letter == '\n' || !letter.is_control()), "{:?}", file.0);
    }
}
