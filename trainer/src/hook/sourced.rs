//! Prompts that a hook makes.

use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::{Fault, Hook};
use crate::data::RowReader;
use crate::error::{Place, Result};
use crate::reward::Reward;
use crate::sample::{Answer, Prompt};
use crate::tasks::{Task, vocabulary};

const EXPECTED: &str = "{\"row\": {…}} with the fields of a row of `prompt_data`";

/// Prompts of `--data-source-command`, with a reward. The hook has to make the same row whenever it is asked
/// for a number.
#[derive(Debug)]
pub struct Sourced {
    hook: Hook,
    reader: RowReader,
    reward: Arc<dyn Reward>,
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
    pub fn new(hook: Hook, reader: RowReader, reward: Arc<dyn Reward>) -> Self {
        Sourced { hook, reader, reward, path: Path::new("data_source_command").into() }
    }
}

#[async_trait]
impl Task for Sourced {
    /// Engines refuse ids that the model does not have.
    fn check(&self, checkpoint: &Path) -> Result<()> {
        vocabulary(checkpoint).map(drop)
    }

    async fn ready(&self) -> Result<()> {
        self.reward.ready().await?;
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

    fn decode(&self, response: &[i32]) -> Result<String> {
        self.reader.tokenizer().decode(response)
    }

    fn encode(&self, text: &str) -> Result<Vec<i32>> {
        self.reader.tokenizer().encode(text)
    }

    async fn reward(&self, group: &[Answer]) -> Result<Vec<f32>> {
        self.reward.score(group).await
    }
}
