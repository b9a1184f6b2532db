//! A service over HTTP that is asked in JSON: rewards and hooks ask by it.

use std::fmt;
use std::time::Duration;

use driftless_http::client_builder;
use tokio::sync::Semaphore;

use crate::error::{Result, input, short};
use crate::failure::Failure;

/// Questions that a service has at once; more wait here.
const AT_ONCE: usize = 256;

/// What to do where an answer is not what it has to be.
pub(crate) const LOOK: &str =
    "look at what it wrote on standard error or in its own log; docs/hooks.md has what it is asked";

/// Why nothing came that could be an answer.
#[derive(Debug)]
pub(crate) struct Silent {
    pub(crate) found: String,
    pub(crate) todo: &'static str,
    pub(crate) failure: Failure,
}

impl Silent {
    pub(crate) fn new(found: impl fmt::Display) -> Self {
        Silent { found: found.to_string(), todo: LOOK, failure: Failure::Environment }
    }

    pub(crate) fn late(deadline: Duration) -> Self {
        let found = format!("nothing after {} s", deadline.as_secs_f64());
        let todo = "make it faster, or give it longer with `HookOptions::deadline`";
        Silent { found, todo, failure: Failure::Deadline }
    }
}

/// A service behind a URL, which is sent JSON by POST and answers with JSON.
#[derive(Debug)]
pub(crate) struct Service {
    url: String,
    client: reqwest::Client,
    deadline: Duration,
    answer_bytes_max: usize,
    places: Semaphore,
}

impl Service {
    /// A service that has `deadline` for each answer, of at most so many bytes. `flag` is what it was named with.
    ///
    /// # Errors
    /// [`Error::Input`](crate::Error::Input) for what is no URL.
    pub(crate) fn new(flag: &str, url: &str, deadline: Duration, answer_bytes_max: usize) -> Result<Self> {
        let refused = |error: reqwest::Error| input(flag, "http://host:port/path", error.without_url());
        if !url.starts_with("http://") && !url.starts_with("https://") {
            return Err(input(flag, "http://host:port/path", "another kind of URL"));
        }
        let client = client_builder(deadline).timeout(deadline).build().map_err(refused)?;
        client.post(url).build().map_err(refused)?;
        let places = Semaphore::new(AT_ONCE);
        Ok(Service { url: url.to_owned(), client, deadline, answer_bytes_max, places })
    }

    /// The body that answers `question`, which is JSON.
    pub(crate) async fn ask(&self, question: Vec<u8>) -> Result<Vec<u8>, Silent> {
        let _place = self.places.acquire().await.map_err(Silent::new)?;
        let silent = |error: reqwest::Error| match error.is_timeout() {
            true => Silent::late(self.deadline),
            false => Silent::new(error.without_url()),
        };
        let request = self.client.post(&self.url).header("content-type", "application/json");
        let mut reply = request.body(question).send().await.map_err(silent)?;
        let (status, mut bytes) = (reply.status(), Vec::new());
        while let Some(chunk) = reply.chunk().await.map_err(silent)? {
            bytes.extend_from_slice(&chunk);
            if bytes.len() > self.answer_bytes_max {
                return Err(Silent::new(format_args!("more than {} bytes", self.answer_bytes_max)));
            }
        }
        if !status.is_success() {
            let text = String::from_utf8_lossy(&bytes);
            return Err(Silent::new(format_args!("HTTP {}: `{}`", status.as_u16(), short(&text))));
        }
        Ok(bytes)
    }
}
