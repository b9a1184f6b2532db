//! `--rm-type remote_rm`: a service that scores, asked as slime asks it.

use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Value, json};

use super::{Answer, Reward, short};
use crate::error::{Result, input};

/// Longest reply.
const REPLY_BYTES_MAX: usize = 1 << 20;
const REMEDY: &str =
    "look at the service's own log; it has to answer with one number, or an object with `score` or `reward`";

/// A service behind a URL: `POST {"prompt", "response", "label"}`, answered by a number or `{"score":
/// number}`.
#[derive(Debug)]
pub struct Remote {
    url: String,
    client: reqwest::Client,
    deadline: Duration,
}

impl Remote {
    /// A service that has `deadline` for each answer.
    ///
    /// # Errors
    /// [`Error::Input`](crate::Error::Input) for what is no URL.
    pub fn new(url: &str, deadline: Duration) -> Result<Self> {
        let refused = |error: reqwest::Error| input("--rm-url", "http://host:port/path", error.without_url());
        if !url.starts_with("http://") && !url.starts_with("https://") {
            return Err(input("--rm-url", "http://host:port/path", "another kind of URL"));
        }
        // Where the store of buckets is built too, reqwest has TLS without a provider, and would panic for
        // want of one. The only error is that there is one already, and any will do.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = reqwest::Client::builder().timeout(deadline).no_proxy();
        let client = client.redirect(reqwest::redirect::Policy::none()).build().map_err(refused)?;
        client.post(url).build().map_err(refused)?;
        Ok(Remote { url: url.to_owned(), client, deadline })
    }

    async fn ask(&self, answer: &Answer) -> Result<f32> {
        let body = json!({
            "prompt": answer.prompt, "response": answer.response, "label": answer.label, "metadata": answer.metadata,
        });
        let sent = async {
            let mut reply = self.client.post(&self.url).json(&body).send().await?;
            let (status, mut bytes) = (reply.status(), Vec::new());
            while let Some(chunk) = reply.chunk().await? {
                bytes.extend_from_slice(&chunk);
                if bytes.len() > REPLY_BYTES_MAX {
                    break;
                }
            }
            Ok::<_, reqwest::Error>((status, bytes))
        };
        let expected = "one number from the service";
        let (status, bytes) = sent.await.map_err(|error| match error.is_timeout() {
            true => answer.refused(
                expected,
                format_args!("nothing after {} s", self.deadline.as_secs_f64()),
                REMEDY,
            ),
            false => answer.refused(expected, error.without_url(), REMEDY),
        })?;
        let text = String::from_utf8_lossy(&bytes);
        let value: Value = match serde_json::from_slice(&bytes) {
            Ok(value) if status.is_success() => value,
            _ => {
                return Err(answer.refused(
                    expected,
                    format_args!("HTTP {}: `{}`", status.as_u16(), short(&text)),
                    REMEDY,
                ));
            }
        };
        let score = ["score", "reward"].iter().find_map(|name| value.get(name)).unwrap_or(&value);
        answer.number(score, REMEDY)
    }
}

#[async_trait]
impl Reward for Remote {
    async fn score(&self, answers: &[Answer]) -> Result<Vec<f32>> {
        futures_util::future::try_join_all(answers.iter().map(|answer| self.ask(answer))).await
    }
}
