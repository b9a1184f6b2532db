//! `--rm-type remote_rm`: a service that scores, asked as slime asks it.

use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Value, json};

use super::{Given, Reward};
use crate::error::{Result, short};
use crate::sample::Answer;
use crate::service::Service;

const EXPECTED: &str = "one number from the service";
const ADVICE: &str =
    "look at the service's own log; it has to answer with one number, or an object with `score` or `reward`";

/// Longest answer: it is a number. Of longer ones, as many as arrive at once would take gigabytes.
const ANSWER_BYTES_MAX: usize = 1 << 20;

/// A service behind a URL: `POST {"prompt", "response", "label"}`, answered by a number or `{"score":
/// number}`.
#[derive(Debug)]
pub struct Remote {
    service: Service,
}

impl Remote {
    /// A service that has `deadline` for each answer.
    ///
    /// # Errors
    /// [`Error::Input`](crate::Error::Input) for what is no URL.
    pub fn new(url: &str, deadline: Duration) -> Result<Self> {
        Ok(Remote { service: Service::new("rm_url", url, deadline, ANSWER_BYTES_MAX)? })
    }

    async fn ask(&self, answer: &Answer) -> Result<f32> {
        let question = json!({
            "prompt": answer.prompt, "response": answer.response, "label": answer.label, "metadata": answer.metadata,
        });
        let said = self.service.ask(question.to_string().into_bytes()).await;
        let said = said.map_err(|silent| answer.silent(EXPECTED, silent.found, silent.todo))?;
        let value: Value = serde_json::from_slice(&said).map_err(|_| {
            answer.refused(EXPECTED, format_args!("`{}`", short(&String::from_utf8_lossy(&said))), ADVICE)
        })?;
        let score = ["score", "reward"].iter().find_map(|name| value.get(name)).unwrap_or(&value);
        answer.number(score, ADVICE)
    }
}

#[async_trait]
impl Reward for Remote {
    async fn score(&self, answers: &[Answer]) -> Result<Vec<Result<Given>>> {
        let asked = answers.iter().map(async |answer| match self.ask(answer).await {
            // It will be there again, for all of them.
            Err(error) if error.is_away() => Err(error),
            asked => Ok(asked.map(Given::from)),
        });
        futures_util::future::try_join_all(asked).await
    }
}
