//! Prompts that a hook makes.

use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::DataSource;
use crate::data::{RowReader, Tokenizer, vocabulary};
use crate::error::{Place, Result};
use crate::hook::{Fault, Hook};
use crate::sample::Prompt;

const EXPECTED: &str = "{\"row\": {…}} with the fields of a row of `prompt_data`";

/// Prompts of `--data-source-command`. The hook has to make the same row whenever it is asked
/// for a number.
#[derive(Debug)]
pub struct Sourced {
    hook: Hook,
    reader: RowReader,
    /// Where its rows are said to be from.
    path: Arc<Path>,
}

#[derive(Serialize)]
struct Question {
    number: u64,
}

#[derive(Deserialize)]
struct Row {
    row: Box<RawValue>,
}

impl Sourced {
    /// Takes rows from `hook` and reads them as `reader` does those of files.
    #[must_use]
    pub fn new(hook: Hook, reader: RowReader) -> Self {
        Sourced { hook, reader, path: Path::new("data_source_command").into() }
    }
}

#[async_trait]
impl DataSource for Sourced {
    /// Engines refuse ids that the model does not have.
    fn check(&self, checkpoint: &Path) -> Result<()> {
        vocabulary(checkpoint).map(drop)
    }

    async fn ready(&self) -> Result<()> {
        self.prompt(0).await.map(drop)
    }

    async fn prompt(&self, number: u64) -> Result<Prompt> {
        let refused = |fault| self.hook.refused(format_args!("prompt {number}"), fault);
        let asked = self.hook.ask("prompt", &Question { number }, EXPECTED).await;
        let Row { row } = asked.map_err(refused)?;
        let place = Place { path: self.path.clone(), line: number };
        let read = self.reader.read(row.get(), place);
        Ok(read.map_err(|why| refused(Fault::of(EXPECTED, why)))?.into())
    }

    fn tokenizer(&self) -> &Tokenizer {
        self.reader.tokenizer()
    }
}
