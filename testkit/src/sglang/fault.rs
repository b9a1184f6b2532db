//! Faults on command: a layer in front of the server, which lies, refuses, hangs and dies.

use std::collections::VecDeque;
use std::future::pending;
use std::path::PathBuf;
use std::time::Duration;

use axum::Json;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::{Method, StatusCode, request};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use driftless_bridge::live::{Cache, PatchDone, PluginReply};
use serde_json::{Value, json};

use super::Shared;
use super::engine::{Engine, WRONG};

/// What a call does instead of what it should.
#[derive(Debug, Clone)]
pub enum Fault {
    /// No answer, ever.
    Hang,
    /// The same, and word that the call has come.
    HangTold(std::sync::mpsc::Sender<()>),
    /// The right answer, after so long.
    Slow(Duration),
    /// This status and body.
    Answer(u16, String),
    /// The engine ends, and with it the connection.
    Die,
    /// The label in a reply of `/generate` is changed.
    Label(&'static str),
    /// A reply of `/generate` has the plugin's word on each token, and the last label of it as the engine's.
    Labels(&'static [&'static str]),
    /// One checksum is wrong.
    WrongSum,
    /// The new label is not taken, and the answer is that it was.
    KeepLabel,
    /// The update loads and says that it could not flush.
    Unflushed,
    /// The update is answered by a plugin that has the version's weights prepared.
    Patched,
    /// Likewise, and the plugin could not ask for the cache to be dropped.
    PatchedOnly,
    /// The update fails, and what the engine calls a rollback loads the new path once more, as SGLang's does.
    Rollback,
    /// The update fails with half of the weights loaded: this status, or else the connection ends.
    Half(Option<u16>),
}

/// Notes a call, and carries it out, or does what its fault says.
pub(super) async fn layer(State(engine): State<Shared>, request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    let bytes = to_bytes(body, usize::MAX).await.unwrap();
    let body = serde_json::from_slice(&bytes).unwrap_or_default();
    let fault = engine.lock().unwrap().note(&parts, &body);
    let (generates, shared) = (parts.uri.path() == "/generate", engine.clone());
    let request = Request::from_parts(parts, Body::from(bytes));
    let run = async move {
        let _generating = generates.then(|| Generating::begin(shared));
        next.run(request).await
    };
    let response = match fault {
        Some(fault) => fails(fault, &engine, &body, run).await,
        None => run.await,
    };
    engine.lock().unwrap().audit();
    response
}

impl Engine {
    /// Notes a call; the fault that it is to meet.
    fn note(&mut self, parts: &request::Parts, body: &Value) -> Option<Fault> {
        let (method, path) = (&parts.method, parts.uri.path());
        let key = parts.headers.get("authorization").map(|key| key.to_str().unwrap().to_owned());
        self.keys.push((path.to_owned(), key));
        if method == Method::POST && path != "/generate" && path != "/weights_checker" {
            self.calls.push((path.to_owned(), body.clone()));
        }
        self.faults.get_mut(format!("{method} {path}").as_str()).and_then(VecDeque::pop_front)
    }
}

/// One of the generations under way, as long as it lives.
struct Generating(Shared);

impl Generating {
    fn begin(shared: Shared) -> Self {
        let mut engine = shared.lock().unwrap();
        engine.generating += 1;
        engine.most_generating = engine.most_generating.max(engine.generating);
        drop(engine);
        Self(shared)
    }
}

impl Drop for Generating {
    fn drop(&mut self) {
        self.0.lock().unwrap().generating -= 1;
    }
}

/// A call that meets a fault; `run` is what carries it out.
async fn fails(fault: Fault, engine: &Shared, body: &Value, run: impl Future<Output = Response>) -> Response {
    let label = body["weight_version"].as_str().unwrap_or_default();
    match fault {
        Fault::Hang => pending().await,
        Fault::HangTold(told) => {
            told.send(()).unwrap();
            pending().await
        }
        Fault::Slow(time) => {
            tokio::time::sleep(time).await;
            run.await
        }
        Fault::Answer(status, text) => (StatusCode::from_u16(status).unwrap(), text).into_response(),
        Fault::Die => end_connection(),
        Fault::Label(label) => edited(run.await, |reply| relabel(reply, label)).await,
        Fault::Labels(labels) => edited(run.await, |reply| tell(reply, labels)).await,
        Fault::WrongSum => {
            let wrong = |reply: &mut Value| reply["ranks"][0]["checksums"][WRONG.0] = WRONG.1.into();
            edited(run.await, wrong).await
        }
        Fault::KeepLabel => Json(json!({"success": true, "message": ""})).into_response(),
        Fault::Patched => edited(run.await, said(label, Some(Cache::Dropped))).await,
        Fault::PatchedOnly => edited(run.await, said(label, None)).await,
        Fault::Unflushed | Fault::Rollback | Fault::Half(_) => {
            let response = engine.lock().unwrap().loads(&fault, body);
            if matches!(fault, Fault::Half(None)) { end_connection() } else { response }
        }
    }
}

impl Engine {
    /// An update that goes wrong.
    fn loads(&mut self, fault: &Fault, body: &Value) -> Response {
        let path = body["model_path"].as_str().unwrap();
        self.weights = Some(PathBuf::from(path));
        match fault {
            Fault::Unflushed => {
                self.facts().serving.model_path = path.to_owned();
                let held = "requests are still running or queued.";
                refusal(400, &format!("Weights were updated, but the cache was not flushed because {held}"))
            }
            Fault::Rollback => {
                refusal(400, "Failed to update weights: no memory.\nRolling back to original weights.")
            }
            _ => {
                self.weights = None;
                self.audit();
                let status = if let Fault::Half(Some(status)) = fault { *status } else { 500 };
                refusal(status, "Failed to update weights: no memory.")
            }
        }
    }
}

/// What a plugin says of an update to `label`.
fn said(label: &str, cache: Option<Cache>) -> impl FnOnce(&mut Value) {
    let (elements, prepared_us, wrote_us, stood_still_us) = (1, 900, 250, 16_250);
    let done = PatchDone { label: label.to_owned(), elements, prepared_us, wrote_us, stood_still_us, cache };
    let message = format!("{}. Weight version updated to {label}.", PluginReply::Done(done));
    move |reply| reply["message"] = message.into()
}

fn relabel(reply: &mut Value, label: &str) {
    let meta = &mut reply["meta_info"];
    meta["weight_version"] = label.into();
    if let Some(span) = meta.get_mut("weight_versions") {
        span[0]["version"] = label.into();
    }
}

fn tell(reply: &mut Value, labels: &[&str]) {
    relabel(reply, labels.iter().rfind(|label| !label.is_empty()).unwrap());
    reply["meta_info"]["driftless_labels"] = labels.into();
}

/// The answer with its JSON changed.
async fn edited(response: Response, edit: impl FnOnce(&mut Value)) -> Response {
    let (parts, body) = response.into_parts();
    let mut reply = serde_json::from_slice(&to_bytes(body, usize::MAX).await.unwrap()).unwrap();
    edit(&mut reply);
    (parts.status, Json(reply)).into_response()
}

/// Not a panic that is reported: its backtrace takes longer than the deadlines that tests are about.
pub(crate) fn end_connection() -> ! {
    std::panic::resume_unwind(Box::new("the connection ends here, as the test wants"))
}

/// What SGLang answers to a call that it refuses.
pub(super) fn refusal(status: u16, message: &str) -> Response {
    let body = json!({"success": false, "message": message});
    (StatusCode::from_u16(status).unwrap(), Json(body)).into_response()
}
