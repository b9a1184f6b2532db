//! One request, retried until it is answered or its deadline has passed.

use std::error::Error as _;
use std::time::{Duration, Instant};

use object_store::client::HttpError;
use tokio::time::{sleep, timeout};

use super::Remote;
use super::service::{Refusal, element};
use crate::error::{Error, Result};
use crate::key::Key;

/// What a request does, and with which key.
pub(super) struct Action<'a>(pub(super) &'static str, pub(super) &'a Key);

/// How a request ended.
pub(super) struct Asked<T> {
    pub(super) result: Result<T>,
    /// Tries it took. After the first any of them may have taken effect.
    pub(super) attempts: u32,
}

/// A part of an answer that did not come in time.
#[derive(Debug, thiserror::Error)]
#[error("no answer within {0:.0?}")]
pub(super) struct Silent(Duration);

impl Silent {
    pub(super) fn error(patience: Duration) -> object_store::Error {
        object_store::Error::Generic { store: "answer", source: Box::new(Silent(patience)) }
    }
}

/// Why a try failed, fit to be shown, and whether another may succeed.
pub(super) struct Cause {
    pub(super) text: String,
    transient: bool,
}

impl Remote {
    /// Makes a request that moves `bytes` until it is answered, until the answer is that asking again is of
    /// no use, or until the deadline has passed.
    pub(super) async fn ask<T, F>(
        &self,
        action: Action<'_>,
        bytes: usize,
        request: impl Fn() -> F,
    ) -> Asked<T>
    where
        F: Future<Output = object_store::Result<T>>,
    {
        let limits = &self.limits;
        let patience = limits.attempt + Duration::from_secs(bytes as u64 / limits.bytes_per_second_min);
        self.ask_within(action, patience, request).await
    }

    /// As [`Remote::ask`], with so long for each try.
    pub(super) async fn ask_within<T, F>(
        &self,
        action: Action<'_>,
        patience: Duration,
        request: impl Fn() -> F,
    ) -> Asked<T>
    where
        F: Future<Output = object_store::Result<T>>,
    {
        let limits = &self.limits;
        let begin = Instant::now();
        let mut pause = limits.pause[0];
        let mut attempts = 0;
        loop {
            attempts += 1;
            let tried = {
                // Closed it is never; if it were, the bound would be gone and nothing else.
                let _slot = self.slots.acquire().await;
                timeout(patience, request()).await
            };
            let cause = match tried {
                Ok(Ok(value)) => return Asked { result: Ok(value), attempts },
                Ok(Err(error)) => match cause(&error) {
                    Cause { transient: false, text } => {
                        return Asked { result: Err(self.refused(&action, error, text)), attempts };
                    }
                    Cause { text, .. } => text,
                },
                Err(_) => format!("no answer within {patience:.0?}"),
            };
            let waited = begin.elapsed();
            if waited + pause >= limits.deadline {
                let (Action(action, key), source) = (action, cause.into());
                let (key, store) = (key.clone(), self.name.clone());
                let error = Error::Unreachable { store, action, key, waited, attempts, source };
                return Asked { result: Err(error), attempts };
            }
            tracing::warn!(store = self.name, key = %action.1, attempts, "{}: {cause}; trying again", action.0);
            sleep(pause.mul_f64(rand::random_range(0.5..1.0))).await;
            pause = (pause * 2).min(limits.pause[1]);
        }
    }

    /// The crate's error for an answer that is final.
    fn refused(&self, action: &Action<'_>, error: object_store::Error, text: String) -> Error {
        let (key, store) = (action.1.clone(), self.name.clone());
        match error {
            object_store::Error::NotFound { .. } => Error::NotFound { key, store },
            object_store::Error::AlreadyExists { .. } => Error::AlreadyExists { key, store },
            _ => Error::Refused { store, action: action.0, key, source: text.into() },
        }
    }
}

/// Reads an error of `object_store`: its variant where it has one, else the HTTP error inside.
pub(super) fn cause(error: &object_store::Error) -> Cause {
    use object_store::Error as E;
    match error {
        E::PermissionDenied { .. } => Cause { text: denied("permission denied", error), transient: false },
        E::Unauthenticated { .. } => Cause { text: denied("not authenticated", error), transient: false },
        E::Generic { .. } => generic(error),
        error => Cause { text: error.to_string(), transient: false },
    }
}

fn generic(error: &object_store::Error) -> Cause {
    let mut source = error.source();
    while let Some(inner) = source {
        if let Some(silent) = inner.downcast_ref::<Silent>() {
            return Cause { text: silent.to_string(), transient: true };
        }
        if let Some(http) = inner.downcast_ref::<HttpError>() {
            if let Some(refusal) = http.source().and_then(|source| source.downcast_ref::<Refusal>()) {
                return Cause { text: refusal.to_string(), transient: refusal.is_transient() };
            }
            let text = http.source().map_or_else(|| http.to_string(), crate::error::chain_text);
            return Cause { text, transient: true };
        }
        source = inner.source();
    }
    let text = error.to_string();
    // Amazon may begin to answer with success and end with an error, which only its text shows.
    let transient = ["<Code>InternalError", "<Code>SlowDown"].iter().any(|code| text.contains(code));
    // Other documents reach this point only where `object_store` has no variant for 401 and 403.
    let text = if text.contains("<Code>") && !transient { denied("permission denied", error) } else { text };
    Cause { text, transient }
}

fn denied(what: &str, error: &object_store::Error) -> String {
    let code = element(&error.to_string(), "Code").map_or_else(String::new, |code| format!(" ({code})"));
    format!("{what}{code}; check the credentials and what they allow")
}
