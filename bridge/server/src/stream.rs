//! Replies that come in pieces.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Instant;

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures_util::stream::unfold;
use serde_json::Value;
use tokio::sync::{OwnedRwLockReadGuard, mpsc, oneshot};

use crate::job::Tokens;
use crate::reply::{self, Refusal};
use crate::routes::Shared;
use crate::state::Lease;
use crate::{Completion, Job, Progress, Request};

/// Pieces that wait for a client.
const PIECES_MAX: usize = 64;

/// A stream that its client reads. Dropping it aborts the request.
pub(super) struct Stream {
    shared: Arc<Shared>,
    rid: String,
    log_probs: bool,
    received: Instant,
    pieces: mpsc::Receiver<Tokens>,
    answer: oneshot::Receiver<Completion>,
    /// Tokens that the client was told of; what they are is kept where each piece has all of them.
    told: usize,
    all: Tokens,
    _reader: OwnedRwLockReadGuard<()>,
    _lease: Lease,
}

impl Stream {
    /// Waits until the server is not paused, then has the request generated.
    pub(super) async fn begin(
        shared: Arc<Shared>,
        request: Request,
        interval: usize,
        log_probs: bool,
        lease: Lease,
    ) -> Result<Self, Refusal> {
        let received = Instant::now();
        let reader = shared.state.enter().await;
        let (reply, answer) = oneshot::channel();
        let (told, pieces) = mpsc::channel(PIECES_MAX);
        let (rid, progress) = (request.rid.clone(), Some(Progress::new(interval, told)));
        shared.worker.tell(move |generator| generator.submit(Job { request, reply, progress }))?;
        let all = Tokens { output_ids: Vec::new(), log_probs: Vec::new() };
        let (_reader, _lease) = (reader, lease);
        Ok(Self { shared, rid, log_probs, received, pieces, answer, told: 0, all, _reader, _lease })
    }

    async fn next(&mut self) -> Value {
        // Pieces are there before the completion that has their tokens too.
        if let Some(tokens) = self.pieces.recv().await {
            return self.piece(tokens);
        }
        let facts = self.shared.facts();
        let from = if facts.incremental_streaming_output { self.told } else { 0 };
        let whole = match (&mut self.answer).await {
            Ok(completion) => reply::generated(&completion, from, self.log_probs, &facts, self.received),
            Err(_) => Err(Refusal::unavailable()),
        };
        whole.unwrap_or_else(|refusal| refusal.event())
    }

    fn piece(&mut self, tokens: Tokens) -> Value {
        let facts = self.shared.facts();
        self.told += tokens.output_ids.len();
        if facts.incremental_streaming_output {
            return reply::piece(&self.rid, &tokens, self.told, self.log_probs, &facts);
        }
        self.all.output_ids.extend(tokens.output_ids);
        self.all.log_probs.extend(tokens.log_probs);
        reply::piece(&self.rid, &self.all, self.told, self.log_probs, &facts)
    }
}

impl IntoResponse for Stream {
    fn into_response(self) -> Response {
        let events = unfold(Some(self), async |stream| {
            let mut stream = stream?;
            let event = stream.next().await;
            let goes_on = event["meta_info"]["finish_reason"].is_null() && event.get("error").is_none();
            let end = if goes_on { "" } else { "data: [DONE]\n\n" };
            let bytes = Bytes::from(format!("data: {event}\n\n{end}"));
            Some((Ok::<_, Infallible>(bytes), goes_on.then_some(stream)))
        });
        ([(header::CONTENT_TYPE, "text/event-stream")], Body::from_stream(events)).into_response()
    }
}
