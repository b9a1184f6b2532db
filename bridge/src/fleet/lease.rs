//! One request's place on one engine, and the handling of its reply.

use std::sync::Arc;
use std::time::Duration;

use super::member::{LOOK_EVERY, Member};
use crate::engine::{Finish, GenerateRequest, Generation, Label, Rid};
use crate::error::{Error, Result};

/// How an engine says that it still works on a request of this id; a trainer that was restarted meets its
/// own.
const DUPLICATE: &str = "Duplicate request ID";

/// A place on an engine, given back when dropped; a request that was sent and not answered by then is
/// aborted.
#[derive(Debug)]
pub(super) struct Lease {
    member: Arc<Member>,
    rid: Rid,
    /// What is left of the sample's time.
    pub(super) left: Duration,
    unanswered: bool,
}

/// How an attempt ended.
pub(super) enum Attempt {
    /// With a sample.
    Done(Generation),
    /// With nothing that another engine, or another time, would change, or with no time left.
    Over(Error),
    /// With nothing, for this reason.
    Again(String),
}

impl Lease {
    /// Takes a place that is free.
    pub(super) fn new(member: Arc<Member>, rid: Rid, left: Duration) -> Self {
        member.state().in_flight += 1;
        Self { member, rid, left, unanswered: false }
    }

    pub(super) async fn attempt(mut self, request: &GenerateRequest, minimum: Option<&Label>) -> Attempt {
        self.unanswered = true;
        let outcome = tokio::select! {
            biased;
            () = self.member.gone() => return self.again("it was removed from the fleet".into()),
            outcome = tokio::time::timeout(self.left, self.generate(request)) => outcome,
        };
        let Ok(outcome) = outcome else { return self.late(self.left).await };
        self.unanswered = matches!(outcome, Err(Error::Deadline { .. }));
        match outcome {
            Ok((generation, before)) => {
                self.member.state().replied();
                match unusable(&generation, before.as_deref(), minimum) {
                    None => Attempt::Done(self.note(generation)),
                    Some(reason) => {
                        self.note(generation);
                        // Whatever made it unusable, asking again at once would make it so again.
                        tokio::time::sleep(LOOK_EVERY).await;
                        self.again(reason)
                    }
                }
            }
            Err(error) if error.is_transient() => {
                self.member.failed(&error);
                Attempt::Again(error.to_string())
            }
            Err(Error::Status { body, .. }) if body.contains(DUPLICATE) => self.again(body),
            Err(error) => Attempt::Over(error),
        }
    }

    /// Says whose failure a late reply is: the engine's, if it does not answer anything else either.
    async fn late(&self, after: Duration) -> Attempt {
        let (engine, call) = (self.member.engine.url().to_owned(), "a generation".to_owned());
        let error = Error::Deadline { engine, call, after };
        self.member.look().await;
        let is_up = self.member.state().up;
        if is_up { Attempt::Over(error) } else { Attempt::Again(error.to_string()) }
    }

    /// The reply, and the engine's label before it where the reply will not say which tokens are whose.
    async fn generate(&self, request: &GenerateRequest) -> Result<(Generation, Option<String>)> {
        let engine = &self.member.engine;
        let spans = self.member.state().identity.as_ref().is_some_and(|identity| identity.spans);
        let before = if spans { None } else { engine.label().await? };
        let generation = engine.generate(request).await?;
        generation.validate(self.member.expected.config.vocabulary)?;
        for span in &generation.spans {
            self.member.check_version("a generation", &span.label).await?;
        }
        Ok((generation, before))
    }

    /// Learns from a reply what its engine serves.
    fn note(&self, generation: Generation) -> Generation {
        if let Some(newest) = generation.spans.last() {
            self.member.serves(newest.label.clone());
        }
        generation
    }

    fn again(&self, reason: String) -> Attempt {
        self.member.state().failure = Some(reason.clone());
        Attempt::Again(reason)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.member.freed();
        if let (true, Ok(runtime)) = (self.unanswered, tokio::runtime::Handle::try_current()) {
            let (member, rid) = (self.member.clone(), self.rid);
            runtime.spawn(async move {
                if let Err(error) = member.engine.abort(&rid).await {
                    tracing::warn!(%rid, %error, "abort of an abandoned request");
                }
            });
        }
    }
}

/// Why a complete reply must not be used: aborted, older than asked, or crossed by a change of weights that
/// it cannot locate.
fn unusable(generation: &Generation, before: Option<&str>, minimum: Option<&Label>) -> Option<String> {
    if let Finish::Abort { message } = &generation.finish {
        return Some(format!("aborted by somebody else: {message}"));
    }
    if !generation.spans_reported {
        let crossed = generation.spans.iter().find(|span| Some(span.label.as_str()) != before);
        if let Some(span) = crossed {
            return Some(format!(
                "weights changed in mid-reply, to {}, on an engine that reports no spans",
                span.label
            ));
        }
    }
    let minimum = minimum?;
    let old = generation
        .spans
        .iter()
        .find(|span| !span.label.parse::<Label>().is_ok_and(|label| label.at_least(minimum)))?;
    Some(format!("tokens of {} where {minimum} or later was asked for", old.label))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::VersionSpan;

    fn generation(labels: &[&str], spans_reported: bool) -> Generation {
        let span = |(at, label): (usize, &&str)| VersionSpan {
            label: (*label).to_owned(),
            start: at as u32,
            end: at as u32 + 1,
        };
        Generation {
            rid: Rid::new(0, 0),
            engine: "e".into(),
            output_ids: vec![0; labels.len()],
            log_probs: vec![0.0; labels.len()],
            spans: labels.iter().enumerate().map(span).collect(),
            spans_reported,
            finish: Finish::Length,
            retractions: 0,
        }
    }

    #[test]
    fn every_token_must_be_new_enough() {
        let minimum: Label = "3f0c9a12b7de:5".parse().unwrap();
        let why = |labels: &[&str]| unusable(&generation(labels, true), None, Some(&minimum));
        assert_eq!(why(&["3f0c9a12b7de:5", "3f0c9a12b7de:6"]), None);
        assert!(why(&["3f0c9a12b7de:4", "3f0c9a12b7de:5"]).unwrap().contains("3f0c9a12b7de:4"));
        assert!(why(&["aaaaaaaaaaaa:9"]).is_some() && why(&["default"]).is_some());
        assert_eq!(unusable(&generation(&["default"], true), None, None), None);
    }

    #[test]
    fn without_spans_a_change_of_label_spoils_the_reply() {
        assert_eq!(unusable(&generation(&["a"], false), Some("a"), None), None);
        assert!(unusable(&generation(&["b"], false), Some("a"), None).is_some());
    }

    #[test]
    fn aborted_replies_are_not_samples() {
        let aborted =
            Generation { finish: Finish::Abort { message: "x".into() }, ..generation(&["a"], true) };
        assert!(unusable(&aborted, None, None).is_some());
    }
}
