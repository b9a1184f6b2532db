//! Hooks: what a user adds to a task in any language, as a command over JSON lines or a service over HTTP.
//!
//! A question is one line of JSON, `{"id": 1, "hook": "rm", …}`, and so is its answer: `{"id": 1, …}`, or
//! `{"id": 1, "error": "why", "outcome": "environment"}`. A question holds all that its answer depends on. So any process of a command
//! can answer it, and another one can where the first died. A process may also announce that it has many answers open
//! at once, and is then told what is new alone. `docs/hooks.md` shows them all.

mod clients;
mod command;
mod filters;
mod generate;
mod group;
mod many;
mod sample;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use derive_setters::Setters;
use driftless_agent::session::Thoughts;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{Error, Result, short};
use crate::failure::Failure;
use crate::service::{LOOK, Service, Silent};

use clients::Patience;
use command::ATTEMPTS;
pub use filters::{Filter, Filters};
pub use group::Rm;

/// Generations of one answer.
const GENERATIONS_MAX: usize = 256;
/// Longest answer.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// How a hook is reached.
#[derive(Debug, Clone, Setters)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct HookOptions {
    /// `http://…` or `https://…` for a service, else a line for the shell.
    #[setters(into)]
    pub at: String,
    /// Processes of a command that work side by side; at least 1.
    pub processes: usize,
    /// How long one answer may take, without the time in which engines generate for it.
    pub deadline: Duration,
    /// Checkpoint whose template and tokenizer conversations are written with. Given it, an answer has an address at which
    /// clients of OpenAI and Anthropic get tokens of the policy.
    #[setters(strip_option)]
    pub clients: Option<PathBuf>,
    /// Further variables of that template, as a JSON object.
    pub variables: Option<String>,
    /// What becomes of thoughts in later prompts of a client's conversation.
    pub thoughts: Thoughts,
}

impl HookOptions {
    /// One process, which has a minute for each answer.
    #[must_use]
    pub fn new(at: impl Into<String>) -> Self {
        let (clients, variables, thoughts) = (None, None, Thoughts::Kept);
        let (at, deadline) = (at.into(), Duration::from_secs(60));
        HookOptions { at, processes: 1, deadline, clients, variables, thoughts }
    }
}

/// A command or a service that answers questions of one kind.
#[derive(Debug)]
pub struct Hook {
    flag: &'static str,
    peer: Peer,
    asked: AtomicU64,
    deadline: Duration,
    clients: Option<clients::Clients>,
}

#[derive(Debug)]
enum Peer {
    Command(Arc<command::Pool>),
    Service(Service),
}

/// A question as it is sent.
#[derive(Serialize)]
struct Line<'a, Q> {
    id: u64,
    hook: &'static str,
    #[serde(flatten)]
    question: &'a Q,
}

/// The same with its id, as bytes.
struct Question {
    id: u64,
    line: Vec<u8>,
}

/// What every answer has.
#[derive(Deserialize)]
struct Head {
    /// A service may leave it out.
    id: Option<u64>,
    error: Option<String>,
    /// Which [`Failure`] the error is.
    outcome: Option<Value>,
    /// Of the first line of a process with many answers open.
    announced: Option<many::Announced>,
}

/// Why there is no answer.
#[derive(Debug)]
pub(crate) struct Fault {
    pub(crate) expected: String,
    pub(crate) found: String,
    pub(crate) todo: &'static str,
    /// Whether nothing came that could be an answer.
    pub(crate) is_away: bool,
    /// What kind of failure it is; none where the hook does not say it of its error.
    pub(crate) failure: Option<Failure>,
}

impl Hook {
    /// Makes ready to ask what `flag` names. A command is started with the first question, on the tokio
    /// runtime that asks, which has to drive time and I/O.
    ///
    /// # Errors
    /// [`Error::Input`] for what is no URL, although it begins like one, and for an empty command; [`Error::Agent`] for a
    /// checkpoint whose conversations cannot be written.
    ///
    /// # Panics
    /// With [`HookOptions::clients`] in an async context: a server has a runtime of its own.
    pub fn open(flag: &'static str, options: &HookOptions) -> Result<Self> {
        let is_url = ["http://", "https://"].iter().any(|scheme| options.at.starts_with(scheme));
        let peer = match (is_url, options.at.trim().is_empty()) {
            (true, _) => Peer::Service(Service::new(flag, &options.at, options.deadline, ANSWER_BYTES_MAX)?),
            (false, false) => Peer::Command(Arc::new(command::Pool::new(flag, options))),
            (false, true) => {
                return Err(crate::error::input(flag, "a command, or http://host:port/path", "nothing"));
            }
        };
        // A service is asked for a whole answer, and its time with it.
        let clients = options.clients.as_deref().filter(|_| !is_url);
        let clients = clients.map(|checkpoint| clients::Clients::start(checkpoint, options)).transpose()?;
        Ok(Hook { flag, peer, asked: AtomicU64::new(0), deadline: options.deadline, clients })
    }

    /// Asks, and takes the answer apart. `expected` says what it has to be.
    pub(crate) async fn ask<A: DeserializeOwned>(
        &self,
        hook: &'static str,
        question: &(impl Serialize + Sync),
        expected: &'static str,
    ) -> Result<A, Fault> {
        let asked = self.asked(hook, question, expected)?;
        Ok(self.begin(asked, expected, self.deadline.into(), ATTEMPTS).await?.0)
    }

    /// A question with an id of its own.
    fn asked(
        &self,
        hook: &'static str,
        question: &(impl Serialize + Sync),
        expected: &'static str,
    ) -> Result<Question, Fault> {
        let id = self.asked.fetch_add(1, Ordering::Relaxed) + 1;
        Ok(Question { id, line: line(&Line { id, hook, question }, expected)? })
    }

    /// As [`Hook::ask`] of so many processes, one where the one before ended; with the answer itself where the process has
    /// it open and can be told more.
    async fn begin<A: DeserializeOwned>(
        &self,
        Question { id, line }: Question,
        expected: &'static str,
        patience: Patience,
        attempts: u32,
    ) -> Result<(A, Option<many::Talk>), Fault> {
        let (answer, talk) = match &self.peer {
            Peer::Command(pool) => pool.ask(id, line, patience, attempts).await,
            Peer::Service(service) => service.ask(line).await.map(|answer| (answer, None)),
        }
        .map_err(|silent| Fault::away(expected, silent))?;
        Ok((parsed(&answer, expected)?, talk))
    }

    /// A fault of an answer as this crate's error; `about` says what was asked about.
    pub(crate) fn refused(&self, about: impl fmt::Display, fault: Fault) -> Error {
        let Fault { expected, found, todo, is_away, failure } = fault;
        let failure = failure.unwrap_or(Failure::Hook);
        Error::Hook { hook: self.flag, about: about.to_string(), expected, found, todo, is_away, failure }
    }
}

impl Fault {
    /// An answer that says something else than it may.
    pub(crate) fn of(expected: impl fmt::Display, found: impl fmt::Display) -> Self {
        let (expected, found) = (expected.to_string(), found.to_string());
        Fault { expected, found, todo: LOOK, is_away: false, failure: Some(Failure::Hook) }
    }

    /// Nothing that could be an answer.
    fn away(expected: &str, Silent { found, todo, failure }: Silent) -> Self {
        Fault { todo, is_away: true, failure: Some(failure), ..Fault::of(expected, found) }
    }

    /// Whether a process ended in the middle of an answer, or could not be started.
    fn has_ended(&self) -> bool {
        self.is_away && self.failure == Some(Failure::Environment)
    }

    /// An error that the hook tells of. An outcome that is none counts as a bug of it.
    fn told(expected: &str, error: &str, outcome: Option<&Value>) -> Self {
        let known = outcome.and_then(Value::as_str).and_then(Failure::named);
        let (error, failure) = (short(error), known.or(outcome.map(|_| Failure::Hook)));
        let found = match outcome.filter(|_| known.is_none()) {
            Some(unknown) => {
                let unknown = short(&unknown.to_string());
                format!("its error: {error}; with outcome {unknown}, which docs/hooks.md does not name")
            }
            None => format!("its error: {error}"),
        };
        Fault { failure, ..Fault::of(expected, found) }
    }
}

/// What is sent, as JSON.
fn line(sent: &impl Serialize, expected: &'static str) -> Result<Vec<u8>, Fault> {
    let line = serde_json::to_vec(sent);
    line.map_err(|error| Fault::of(expected, format_args!("a question that is no JSON: {error}")))
}

/// What an answer says.
fn parsed<A: DeserializeOwned>(answer: &[u8], expected: &'static str) -> Result<A, Fault> {
    if let Ok(Head { error: Some(error), outcome, .. }) = serde_json::from_slice(answer) {
        return Err(Fault::told(expected, &error, outcome.as_ref()));
    }
    serde_json::from_slice(answer).map_err(|_| Fault::of(expected, shown(answer)))
}

/// The start of an answer, and why it is no JSON if it is none.
fn shown(answer: &[u8]) -> String {
    let text = String::from_utf8_lossy(answer);
    let start = short(text.trim());
    match serde_json::from_slice::<serde::de::IgnoredAny>(answer) {
        Ok(_) => format!("`{start}`"),
        Err(_) if ["NaN", "Infinity"].iter().any(|word| text.contains(word)) => {
            format!("`{start}`; NaN and Infinity are no JSON, answer finite numbers")
        }
        Err(error) => format!("`{start}`, which is no JSON: {error}"),
    }
}
