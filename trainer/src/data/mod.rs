//! Prompts from files: rows, chat templates, tokens, and what is refused.

mod config;
mod example;
mod order;
#[cfg(feature = "parquet")]
mod parquet;
mod rows;
mod source;

pub use config::{context, vocabulary};
pub use driftless_agent::Tokenizer;
pub use example::{Example, Refused, RowReader};
pub use order::Order;
pub use rows::Why;
pub use source::Source;

use std::path::Path;
use std::sync::Arc;

use derive_setters::Setters;
use rows::Row;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::error::{Error, Result, input};
use crate::options::bounds::{self, count, named};
use driftless_agent::chat::LossMask;

pub use crate::error::Place;

/// Rows that are read before all threads tokenise them.
const CHUNK: usize = 4096;
/// Refused rows that are kept for messages; the others are counted.
const REFUSED_KEPT: usize = 20;
/// Why a file gives nothing.
const NO_ROWS: &str = "there are no rows";

/// Which prompts, and how rows become prompts. Field names follow slime's, and are flags.
#[derive(Debug, Clone, Setters, clap::Args, serde::Serialize)]
#[command(next_help_heading = "Data")]
#[setters(prefix = "with_", strip_option)]
#[non_exhaustive]
pub struct DataOptions {
    /// The files, in order.
    #[arg(skip)]
    #[serde(skip)]
    pub prompt_data: Vec<Source>,
    /// Field with the prompt: text, or a list of chat messages.
    #[arg(long, value_name = "FIELD", default_value = "input")]
    #[setters(into)]
    pub input_key: String,
    /// Field with what rewards compare the answer with; every row must have it.
    #[arg(long, value_name = "FIELD")]
    #[setters(into)]
    pub label_key: Option<String>,
    /// Field with an object that rewards are given; rows may lack it.
    #[arg(long, value_name = "FIELD", default_value = "metadata")]
    #[setters(into)]
    pub metadata_key: String,
    /// Field with the tools of a chat, as a list or its text; rows may lack it.
    #[arg(long, value_name = "FIELD", default_value = "tools")]
    #[setters(into)]
    pub tool_key: String,
    /// Render prompts through the checkpoint's chat template. A prompt that is text becomes a message of the
    /// user.
    #[arg(long)]
    pub apply_chat_template: bool,
    /// JSON object of further variables for the template, such as {"enable_thinking": false}; also where conversations of a
    /// hook's clients are written.
    #[arg(long, value_name = "JSON")]
    #[setters(into)]
    pub apply_chat_template_kwargs: Option<String>,
    /// Leave out prompts of more tokens than these.
    #[arg(long, value_name = "TOKENS", value_parser = count::<usize>())]
    pub rollout_max_prompt_len: Option<usize>,
    /// Tokens that prompt and response may have together.
    #[arg(long, value_name = "TOKENS", value_parser = count::<usize>())]
    pub rollout_max_context_len: Option<usize>,
    /// Take rows for whole conversations, and learn what the assistant says: generation (what the template tags so),
    /// qwen, qwen3 or qwen3_5 (turns of ChatML) [default for --loss-type sft_loss: generation].
    #[arg(long = "loss-mask-type", value_name = "TYPE", value_parser = named::<LossMask>)]
    #[serde(skip)]
    pub loss_mask: Option<LossMask>,
    /// Count broken rows, instead of ending with the first.
    #[arg(long)]
    pub skip_bad_prompts: bool,
}

impl Default for DataOptions {
    /// No files; slime's names of fields.
    fn default() -> Self {
        bounds::defaults()
    }
}

/// The prompts of some files, in their order.
#[derive(Debug)]
pub struct Dataset {
    /// What is trained on.
    pub examples: Vec<Example>,
    /// The first rows that are not, at most 20.
    pub refused: Vec<Refused>,
    /// Rows that were broken.
    pub bad: u64,
    /// Rows whose prompts are too long.
    pub too_long: u64,
    /// The tokenizer that made the tokens.
    pub tokenizer: Arc<Tokenizer>,
}

/// The fields of a file's first row that `source` names, without a look at what they mean.
///
/// # Errors
/// [`Error::Row`] for a row that is no JSON object, [`Error::NoPrompts`] for a file without rows, and what a file is refused
/// for.
pub fn first_row(source: &Source) -> Result<Map<String, Value>> {
    let start = source.rows.start;
    let one = Source { path: source.path.clone(), rows: start..start.saturating_add(1).min(source.rows.end) };
    let mut first = None;
    rows::each(&one, &rows::Wanted { all: true, ..Default::default() }, |row| {
        first = Some(row);
        Ok(())
    })?;
    let nothing = || Error::NoPrompts { files: source.to_string(), rows: 0, first: NO_ROWS.to_owned() };
    let row = first.ok_or_else(nothing)?;
    let bad = |why: Why| Error::Row {
        place: Place { path: source.path.as_path().into(), line: row.line },
        expected: "a row of fields".to_owned(),
        found: why.to_string(),
        todo: "mend it",
    };
    let value = |(name, json): (String, Box<RawValue>)| match serde_json::from_str(json.get()) {
        Ok(value) => Ok((name, value)),
        Err(error) => Err(Why::bad("JSON", rows::said(&error))),
    };
    row.fields.and_then(|fields| fields.into_iter().map(value).collect()).map_err(bad)
}

impl Dataset {
    /// Reads all files with the tokenizer, and if asked for the chat template, of a checkpoint directory.
    ///
    /// # Errors
    /// [`Error::Row`] for the first broken row, unless they are skipped; [`Error::NoPrompts`] if nothing is
    /// left; else what the files or the checkpoint are refused for.
    pub fn load(options: &DataOptions, checkpoint: &Path) -> Result<Self> {
        Self::read(&RowReader::open(options.clone(), checkpoint)?)
    }

    /// Reads all files of the reader's options.
    ///
    /// # Errors
    /// Those of [`Dataset::load`].
    pub fn read(reader: &RowReader) -> Result<Self> {
        let (options, tokenizer) = (&reader.options, reader.tokenizer.clone());
        let mut data = Dataset { examples: Vec::new(), refused: Vec::new(), bad: 0, too_long: 0, tokenizer };
        let wanted = reader.wanted();
        for source in &options.prompt_data {
            let path: Arc<Path> = source.path.as_path().into();
            let mut chunk = Vec::new();
            rows::each(source, &wanted, |row| {
                chunk.push(row);
                if chunk.len() == CHUNK {
                    data.take(reader, &path, std::mem::take(&mut chunk))
                } else {
                    Ok(())
                }
            })?;
            data.take(reader, &path, chunk)?;
        }
        if data.examples.is_empty() {
            return Err(data.nothing(options));
        }
        Ok(data)
    }

    /// Makes prompts of rows, on all threads, and keeps them in order.
    fn take(&mut self, reader: &RowReader, path: &Arc<Path>, rows: Vec<Row>) -> Result<()> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let make = |rows: &[Row]| -> Vec<_> { rows.iter().map(|row| reader.example(row, path)).collect() };
        let made: Vec<Vec<Result<Example, Refused>>> = std::thread::scope(|scope| {
            let parts = rows.chunks(rows.len().div_ceil(threads).max(1));
            let running: Vec<_> = parts.map(|part| scope.spawn(move || make(part))).collect();
            let join = |part: std::thread::ScopedJoinHandle<'_, _>| {
                part.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            running.into_iter().map(join).collect()
        });
        for example in made.into_iter().flatten() {
            match example {
                Ok(example) => self.examples.push(example),
                Err(refused) => self.refuse(refused, reader.options.skip_bad_prompts)?,
            }
        }
        Ok(())
    }

    fn refuse(&mut self, refused: Refused, skip: bool) -> Result<()> {
        match &refused.why {
            Why::TooLong { .. } => self.too_long += 1,
            Why::Bad { expected, found } if !skip => {
                let (expected, found) = (expected.clone(), found.clone());
                // Where the first row lacks a field, likely all do: leaving them out would leave nothing.
                let todo = match self.examples.is_empty() && expected.contains('`') {
                    true => "mend it, or say by `input_key` and `label_key` which fields the rows have",
                    false => "mend it, or leave such rows out with `skip_bad_prompts`",
                };
                return Err(Error::Row { place: refused.place, expected, found, todo });
            }
            Why::Bad { .. } => self.bad += 1,
        }
        if self.refused.len() < REFUSED_KEPT {
            self.refused.push(refused);
        }
        Ok(())
    }

    fn nothing(&self, options: &DataOptions) -> Error {
        let files: Vec<_> =
            options.prompt_data.iter().map(|source| source.path.display().to_string()).collect();
        if files.is_empty() {
            return input("prompt_data", "a file", "none");
        }
        let first = self.refused.first().map_or_else(|| NO_ROWS.to_owned(), Refused::to_string);
        Error::NoPrompts { files: files.join(", "), rows: self.bad + self.too_long, first }
    }
}
