//! The texts behind the token ids of a log.

use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::paths;
use driftless::buffer::{Kind, Reader, Record};
use driftless::trainer::data::Tokenizer;
use driftless::trainer::rollout::{EvaluationNote, PromptNote};
use std::path::{Path, PathBuf};

/// Most bytes of a tokenizer.
pub(in crate::cli) const TOKENIZER_BYTES_MAX: u64 = 1 << 30;

/// The log that `dir` is, or that the run in `dir` has.
pub(super) fn log_of(dir: &Path) -> Result<PathBuf> {
    paths::check_dir("run or log", dir)?;
    Ok(log_in(dir.to_owned()))
}

/// The same of a directory that may be absent.
pub(in crate::cli) fn log_in(dir: PathBuf) -> PathBuf {
    let inside = dir.join("log");
    if inside.is_dir() { inside } else { dir }
}

/// A log with the tokenizer that its ids are of.
pub(in crate::cli) struct Texts {
    reader: Reader,
    tokenizer: Tokenizer,
}

impl Texts {
    /// With the tokenizer of `checkpoint`, or of the baseline that the run keeps beside its log.
    pub(super) fn open(log: &Path, checkpoint: Option<&Path>) -> Result<Self> {
        let reader = Reader::open(log)?;
        let tokenizer = Self::tokenizer(&reader, log, checkpoint)?;
        Ok(Texts { reader, tokenizer })
    }

    /// The tokenizer alone.
    pub(in crate::cli) fn tokenizer(
        reader: &Reader,
        log: &Path,
        checkpoint: Option<&Path>,
    ) -> Result<Tokenizer> {
        let beside = log.parent().unwrap_or(Path::new(".")).join("baseline");
        let checkpoint = checkpoint.unwrap_or(&beside);
        let file = checkpoint.join("tokenizer.json");
        let wrong = |expected, found| Err(Error::usage(file.display().to_string(), expected, found));
        if !file.is_file() {
            return wrong(
                "the tokenizer of the log, or --hf-checkpoint with a directory that has it",
                "none",
            );
        }
        let found = *blake3::hash(&paths::read("tokenizer", &file, TOKENIZER_BYTES_MAX)?).as_bytes();
        // A log that was made without a tokenizer has the digest of nothing.
        let unknown = [[0; 32], *blake3::hash(b"").as_bytes()];
        let expected = reader.identity().map(|identity| identity.tokenizer_digest);
        if expected.is_some_and(|expected| expected != found && !unknown.contains(&expected)) {
            return wrong("the tokenizer that the log was written with", "another one");
        }
        Ok(Tokenizer::open(checkpoint)?)
    }

    pub(super) fn reader(&self) -> &Reader {
        &self.reader
    }

    pub(super) fn decode(&self, ids: &[i32]) -> Result<String> {
        Ok(self.tokenizer.decode(ids)?)
    }

    pub(super) fn prompt(&self, record: &Record) -> Result<String> {
        let prompt = &record.tokens()[..record.prompt_len().min(record.tokens().len())];
        Ok(self.tokenizer.decode(prompt)?)
    }

    /// What the policy wrote; none in a prompt's record.
    pub(super) fn response(&self, record: &Record) -> Result<Option<String>> {
        match record.kind() {
            Kind::Prompt | Kind::Score => Ok(None),
            _ => Ok(Some(self.tokenizer.decode(record.response())?)),
        }
    }

    /// What the log says of the prompt that a record is of.
    pub(super) fn note(&self, record: &Record) -> Result<PromptNote> {
        let prompt = match record.kind() {
            _ if record.scalars().evaluation => return Ok(EvaluationNote::of(record).prompt),
            Kind::Prompt => Some(record.clone()),
            _ => self.reader.prompt(record.scalars().group_id)?,
        };
        Ok(prompt.as_ref().map(PromptNote::of).unwrap_or_default())
    }
}
