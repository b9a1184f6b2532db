//! An answer as a stream of events. It is told when it is whole; until then pings keep the connection.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures_util::stream::unfold;
use tokio::time::{Instant, timeout_at};

use super::routes::{Awaited, arrived};
use crate::message::{Answer, Refusal};
use crate::wire::{Form, Frame, Protocol};

/// How it is told.
pub(super) struct Told {
    pub(super) protocol: Protocol,
    pub(super) form: Form,
    pub(super) frame: Frame,
    pub(super) ping: Duration,
    /// When its client has waited enough, and what it hears then.
    pub(super) until: Instant,
    pub(super) late: Refusal,
}

impl Told {
    fn whole(&self, answer: Result<Answer, Refusal>) -> String {
        match answer {
            Ok(answer) => {
                let events = self.protocol.events(&self.form, &answer, &self.frame);
                events.iter().map(|event| event.to_text()).collect()
            }
            Err(refusal) => self.protocol.refused_late(&refusal).to_text(),
        }
    }

    /// The next piece, and whether others follow.
    async fn next(&self, awaited: &mut Awaited) -> (String, bool) {
        let pause = (Instant::now() + self.ping).min(self.until);
        match timeout_at(pause, awaited).await {
            Ok(answer) => (self.whole(arrived(answer)), false),
            Err(_) if pause == self.until => (self.whole(Err(self.late.clone())), false),
            Err(_) => (self.protocol.ping().to_owned(), true),
        }
    }
}

/// The response to a client that wants a stream; `early` is an answer that is there already.
pub(super) fn respond(told: Told, early: Option<Answer>, awaited: Awaited) -> Response {
    let body = match early {
        Some(answer) => Body::from(told.whole(Ok(answer))),
        None => Body::from_stream(unfold(Some((told, awaited, true)), async |state| {
            let (told, mut awaited, is_first) = state?;
            // The first ping has been due for as long as the answer was waited for.
            let (piece, goes_on) = if is_first {
                (told.protocol.ping().to_owned(), true)
            } else {
                told.next(&mut awaited).await
            };
            Some((Ok::<_, Infallible>(Bytes::from(piece)), goes_on.then_some((told, awaited, false))))
        })),
    };
    let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-cache")];
    (headers, body).into_response()
}
