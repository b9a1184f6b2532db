//! One request's place on one engine, and the handling of its reply.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use super::member::{LOOK_EVERY, Member};
use super::settled::Versions;
use super::usage::{Cause, Marks};
use crate::engine::{Drawn, Finish, GenerateRequest, Generation, Label, Meter, Piece, Rid, Tell, outside};
use crate::error::{Error, Result};

/// How an engine says that it still works on a request of this id; a trainer that was restarted meets its
/// own.
const DUPLICATE: &str = "Duplicate request ID";

/// Tokens of a piece of a stream, and most pieces of a stream that repeats all tokens in each.
const PIECE: u32 = 64;
const REPEATED_MAX: u32 = 8;

/// How long nothing may be heard of a request before its engine is looked at.
const SILENCE: Duration = Duration::from_secs(60);

/// An answer, over all attempts.
pub(super) struct Answer<'a> {
    /// Its tokens that stay, whatever becomes of an attempt.
    pub(super) drawn: Drawn,
    /// Is told of each of them.
    pub(super) told: Tell<'a>,
}

impl Answer<'_> {
    fn keep(&mut self, piece: Piece<'_>) {
        self.drawn.push(piece);
        (self.told)(piece);
    }

    /// Keeps what a reply has, of which the tokens behind the first `behind` are kept already.
    fn keep_rest(&mut self, behind: usize, reply: &Generation) {
        let mut whole = Drawn::default();
        whole.append(reply);
        whole.pieces(self.drawn.len() - behind).for_each(|piece| self.keep(piece));
    }
}

/// A place on an engine, given back when dropped; a request that was sent and not answered by then is
/// aborted.
#[derive(Debug)]
pub(super) struct Lease {
    member: Arc<Member>,
    rid: Rid,
    /// What is left of the sample's time.
    pub(super) left: Duration,
    unanswered: bool,
    marks: Mutex<Marks>,
    /// Why it ends, unless with a sample.
    cause: Option<Cause>,
    /// Why its request is made again.
    again: Option<Cause>,
    meter: Meter,
}

/// How an attempt ended.
pub(super) enum Attempt {
    /// With a sample.
    Done(Generation),
    /// With nothing that another engine, or another time, would change, or with no time left.
    Over(Error),
    /// With nothing, for this reason.
    Again(Cause, String),
}

impl Lease {
    /// Takes a place that is free.
    pub(super) fn new(member: Arc<Member>, rid: Rid, left: Duration) -> Self {
        let marks = Marks::new(member.taken()).into();
        let (cause, meter) = (Some(Cause::GivenUp), Meter::default());
        Self { member, rid, left, unanswered: false, marks, cause, again: None, meter }
    }

    /// The same for a request with this meter, which is made again for this reason.
    pub(super) fn counted(mut self, meter: Meter, again: Option<Cause>) -> Self {
        (self.meter, self.again) = (meter, again);
        self
    }

    fn marks(&self) -> MutexGuard<'_, Marks> {
        self.marks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the engine go on behind what is drawn of an answer.
    pub(super) async fn attempt(
        mut self,
        request: GenerateRequest,
        minimum: Option<&Label>,
        answer: &mut Answer<'_>,
    ) -> Attempt {
        self.unanswered = true;
        self.marks().tokens = request.input_ids.len() as u64;
        let behind = answer.drawn.len();
        let outcome = tokio::select! {
            biased;
            () = self.member.gone() => {
                return self.again(Cause::Removed, "it was removed from the fleet".into());
            }
            outcome = tokio::time::timeout(self.left, self.generate(request, minimum, answer)) => outcome,
        };
        let Ok(outcome) = outcome else { return self.late(self.left).await };
        self.unanswered = matches!(outcome, Err(Error::Deadline { .. }) | Ok(None));
        match outcome {
            Ok(Some((generation, before))) => {
                self.member.state().replied();
                self.marks().tokens_drawn = generation.output_ids.len() as u64;
                let (cause, reason) =
                    match (unusable(&generation, before.as_deref(), minimum), &generation.finish) {
                        (None, Finish::Abort { message }) => {
                            answer.keep_rest(behind, &generation);
                            if !generation.output_ids.is_empty() {
                                let mut marks = self.marks();
                                (marks.kept, marks.tokens_kept) = (Some(Instant::now()), marks.tokens_drawn);
                            }
                            (Cause::Aborted, format!("aborted by somebody else: {message}"))
                        }
                        (None, _) => {
                            self.cause = None;
                            return Attempt::Done(self.note(generation));
                        }
                        (Some(found), _) => found,
                    };
                self.note(generation);
                // Whatever made it unusable, asking again at once would make it so again.
                tokio::time::sleep(LOOK_EVERY).await;
                self.again(cause, reason)
            }
            Ok(None) => {
                let reason = "weights changed in mid-reply, on an engine that reports no spans";
                self.again(Cause::Crossed, reason.into())
            }
            Err(error) if error.is_transient() => {
                self.member.failed(&error);
                self.cause = Some(Cause::Failed);
                Attempt::Again(Cause::Failed, error.to_string())
            }
            Err(Error::Status { body, .. }) if body.contains(DUPLICATE) => self.again(Cause::Failed, body),
            Err(error) => self.over(error),
        }
    }

    /// With nothing that another engine, or another time, would change.
    fn over(&mut self, error: Error) -> Attempt {
        self.cause = Some(Cause::Failed);
        Attempt::Over(error)
    }

    /// Says whose failure a late reply is: the engine's, if it does not answer anything else either.
    async fn late(&mut self, after: Duration) -> Attempt {
        let error = self.too_late(after);
        self.member.look().await;
        let is_up = self.member.state().up;
        self.cause = Some(Cause::Failed);
        if is_up { Attempt::Over(error) } else { Attempt::Again(Cause::Failed, error.to_string()) }
    }

    /// The reply, and the engine's label before it where the reply will not say which tokens are whose. `None` where the
    /// weights change under such a reply.
    async fn generate(
        &self,
        mut request: GenerateRequest,
        minimum: Option<&Label>,
        answer: &mut Answer<'_>,
    ) -> Result<Option<(Generation, Option<String>)>> {
        let engine = &self.member.engine;
        let (identity, serving) = {
            let state = self.member.state();
            (state.identity.clone(), state.serving.clone())
        };
        let spans = identity.as_ref().is_some_and(|identity| identity.spans);
        let began = if spans { serving } else { engine.label().await? };
        // An update that drops no cache leaves prefixes of older weights there.
        request.salt = request.salt.or_else(|| began.clone());
        let salt = request.salt.as_deref();
        let request = &request;
        let vocabulary = self.member.expected.config.vocabulary;
        let mut versions =
            Versions { settled: &self.member.shared.settled, began: began.as_deref(), known: true };
        let (heard, crossed) = (AtomicU64::new(0), Notify::new());
        let mut seen = |piece: Piece<'_>| {
            heard.fetch_add(1, Relaxed);
            let now = Instant::now();
            let mut marks = self.marks();
            marks.first.get_or_insert(now);
            marks.tokens_drawn += piece.output_ids.len() as u64;
            if !spans && !piece.located && Some(piece.label) != began.as_deref() {
                crossed.notify_one();
            }
            // Behind one that is not kept, none is.
            versions.known &=
                is_new_enough(piece.label, minimum) && outside(piece.output_ids, vocabulary).is_none();
            let is_known = if piece.located { versions.known } else { versions.know(piece.label) };
            if is_known {
                answer.keep(piece);
                (marks.kept, marks.tokens_kept) = (Some(now), marks.tokens_drawn);
            }
        };
        let interval = interval(request, identity.is_some_and(|identity| identity.incremental));
        let reply = match interval {
            Some(interval) => engine.stream(request, interval, &mut seen),
            None => engine.generate(request),
        };
        let generation = tokio::select! {
            biased;
            reply = reply => reply?,
            () = crossed.notified() => return Ok(None),
            () = self.silence(&heard) => return Err(self.too_late(SILENCE)),
        };
        generation.validate(vocabulary)?;
        self.count_cached(&generation, salt);
        for span in &generation.spans {
            self.member.check_version("a generation", &span.label).await?;
        }
        Ok(Some((generation, began.filter(|_| !spans))))
    }

    /// Counts what the engine had of the prompt in its cache. What is there under the salt of one version may be from
    /// before a later one that drew.
    fn count_cached(&self, generation: &Generation, salt: Option<&str>) {
        let cached = generation.cached_tokens.unwrap_or_default().into();
        let drew = generation.spans.first().map(|span| span.label.as_str());
        let mut marks = self.marks();
        marks.tokens_cached = cached;
        marks.tokens_stale = if drew.is_some() && drew != salt { cached } else { 0 };
    }

    fn too_late(&self, after: Duration) -> Error {
        Error::Deadline {
            engine: self.member.engine.url().to_owned(),
            call: "a generation".to_owned(),
            after,
        }
    }

    /// Returns once nothing is heard of a request for a while, and its engine does not answer anything else either.
    async fn silence(&self, heard: &AtomicU64) {
        loop {
            let before = heard.load(Relaxed);
            tokio::time::sleep(SILENCE).await;
            if heard.load(Relaxed) == before {
                self.member.look().await;
                if !self.member.state().up {
                    return;
                }
            }
        }
    }

    /// Learns from a reply what its engine serves.
    fn note(&self, generation: Generation) -> Generation {
        if let Some(newest) = generation.spans.last() {
            self.member.serves(newest.label.clone());
        }
        generation
    }

    fn again(&mut self, cause: Cause, reason: String) -> Attempt {
        self.cause = Some(cause);
        self.member.state().failure = Some(reason.clone());
        Attempt::Again(cause, reason)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let marks = *self.marks();
        self.meter.add(self.member.freed(marks, self.cause, self.again));
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

/// How many tokens of a request come at a time; `None` where they come at once. Pieces that have all tokens so far are few.
fn interval(request: &GenerateRequest, incremental: bool) -> Option<u32> {
    let most = request.sampling.max_new_tokens;
    let interval = if incremental { PIECE } else { PIECE.max(most / REPEATED_MAX) };
    (most > interval).then_some(interval)
}

/// Why the tokens of a reply must not be used: older than asked, or crossed by a change of weights that it cannot locate.
fn unusable(
    generation: &Generation,
    before: Option<&str>,
    minimum: Option<&Label>,
) -> Option<(Cause, String)> {
    if !generation.spans_reported {
        let crossed = generation.spans.iter().find(|span| Some(span.label.as_str()) != before);
        if let Some(span) = crossed {
            let reason = format!(
                "weights changed in mid-reply, to {}, on an engine that reports no spans",
                span.label
            );
            return Some((Cause::Crossed, reason));
        }
    }
    let old = generation.spans.iter().find(|span| !is_new_enough(&span.label, minimum))?;
    let minimum = minimum?;
    Some((Cause::TooOld, format!("tokens of {} where {minimum} or later was asked for", old.label)))
}

fn is_new_enough(label: &str, minimum: Option<&Label>) -> bool {
    minimum.is_none_or(|minimum| label.parse::<Label>().is_ok_and(|label| label.at_least(minimum)))
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
            cached_tokens: None,
            replies: Vec::new(),
        }
    }

    #[test]
    fn every_token_must_be_new_enough() {
        let minimum: Label = "3f0c9a12b7de:5".parse().unwrap();
        let why = |labels: &[&str]| {
            let found = unusable(&generation(labels, true), None, Some(&minimum));
            found.inspect(|(cause, _)| assert_eq!(*cause, Cause::TooOld)).map(|(_, why)| why)
        };
        assert_eq!(why(&["3f0c9a12b7de:5", "3f0c9a12b7de:6"]), None);
        assert!(why(&["3f0c9a12b7de:4", "3f0c9a12b7de:5"]).unwrap().contains("3f0c9a12b7de:4"));
        assert!(why(&["aaaaaaaaaaaa:9"]).is_some() && why(&["default"]).is_some());
        assert_eq!(unusable(&generation(&["default"], true), None, None), None);
    }

    #[test]
    fn without_spans_a_change_of_label_spoils_the_reply() {
        assert_eq!(unusable(&generation(&["a"], false), Some("a"), None), None);
        let found = unusable(&generation(&["b"], false), Some("a"), None);
        assert!(found.is_some_and(|(cause, _)| cause == Cause::Crossed));
    }

    #[test]
    fn interval_leaves_short_answers_whole_and_repeats_little() {
        let of = |most, incremental| {
            let sampling = crate::SamplingParams { max_new_tokens: most, ..Default::default() };
            interval(&GenerateRequest::new(Rid::new(0, 0), vec![1], sampling), incremental)
        };
        assert_eq!((of(64, true), of(65, true), of(4096, true)), (None, Some(64), Some(64)));
        assert_eq!((of(64, false), of(512, false), of(4096, false)), (None, Some(64), Some(512)));
    }

    #[test]
    fn answer_keeps_what_a_reply_has_beyond_its_stream() {
        let mut told = Vec::new();
        let mut tell = |piece: Piece<'_>| told.push((piece.label.to_owned(), piece.output_ids.len()));
        let mut answer = Answer { drawn: Drawn::default(), told: &mut tell };
        answer.keep(Piece {
            output_ids: &[0, 0],
            log_probs: &[0.0, 0.0],
            label: "a",
            located: false,
            digest: None,
        });
        answer.keep_rest(1, &generation(&["a", "b", "b"], true));
        assert_eq!((answer.drawn.len(), answer.drawn.spans.len()), (4, 2));
        assert_eq!(told, [("a".to_owned(), 2), ("b".to_owned(), 2)]);
    }
}
