//! A client of one vLLM server: the calls that the bridge uses, each with its deadline.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};

use super::generate::{self, RawCompletion, Streamed};
use crate::engine::{
    ClientOptions, Comparison, Deadlines, Engine as _, GenerateRequest, Generation, Mismatch, Piece, Tell,
    context,
};
use crate::error::{Error, Result};
use crate::http::{Call, Connection, Level, excerpt};
use crate::live::{PatchRefused, PluginReply};

/// What a server without the calls that updates need is told.
const WANTED: &str =
    "a call of the server; start it with VLLM_SERVER_DEV_MODE=1, of a release that has weight versions";

/// A client of one vLLM server. Cheap to clone; clones share connections.
///
/// It is an [`Engine`](crate::engine::Engine), and has no other calls.
#[derive(Debug, Clone)]
pub struct Client {
    pub(super) connection: Connection,
    pub(super) deadlines: Deadlines,
    /// Whether the server has refused to be told what it serves: it was started without our plugin.
    pub(super) without_plugin: Arc<AtomicBool>,
}

#[derive(Debug, Deserialize)]
struct Version {
    version: String,
}

#[derive(Debug, Deserialize)]
struct Models {
    data: Vec<Model>,
}

/// A name that the server answers to.
#[derive(Debug, Deserialize)]
struct Model {
    /// What the server was started with: a directory, or a name on a hub.
    root: Option<String>,
    /// The model that an adapter belongs to.
    parent: Option<String>,
}

#[derive(Debug, Deserialize)]
struct WeightInfo {
    weight_version: Option<String>,
}

#[derive(Debug, Deserialize)]
struct IsPaused {
    is_paused: bool,
}

#[derive(Debug, Deserialize)]
struct Success {
    success: bool,
}

#[derive(Debug, Deserialize)]
struct Message {
    message: String,
}

/// What a server answers where a worker has raised.
#[derive(Debug, Deserialize)]
struct Raised {
    error: Message,
}

#[derive(Debug, Deserialize)]
struct Results {
    results: Vec<Value>,
}

impl Client {
    /// A client of the server at `host:port` or `http://host:port`. Nothing is sent yet.
    ///
    /// # Errors
    /// [`Error::Address`](crate::Error::Address) for any other form of address.
    pub fn new(address: &str, options: ClientOptions) -> Result<Self> {
        let connection = Connection::new(address, options.link())?;
        Ok(Self { connection, deadlines: options.deadlines, without_plugin: Arc::default() })
    }

    /// `GET /version`.
    pub(super) async fn version(&self) -> Result<String> {
        let version: Version = self.connection.json(self.get("/version", Level::Normal)).await?;
        Ok(version.version)
    }

    /// `GET /v1/models`: the model that the server was started with, under whatever names.
    pub(super) async fn root(&self) -> Result<String> {
        let call = self.get("/v1/models", Level::Normal);
        let models: Models = self.connection.json(call).await?;
        let mut roots: Vec<String> =
            models.data.into_iter().filter(|model| model.parent.is_none()).filter_map(|m| m.root).collect();
        roots.dedup();
        match <[String; 1]>::try_from(roots) {
            Ok([root]) => Ok(root),
            Err(roots) => {
                Err(self.connection.malformed(call, "one model with a root", &format!("{roots:?}")))
            }
        }
    }

    /// `GET /weight_info`: the label.
    pub(super) async fn weight_info(&self) -> Result<Option<String>> {
        let call = self.get("/weight_info", Level::Control);
        match self.connection.json::<WeightInfo>(call).await {
            Ok(info) => Ok(info.weight_version),
            Err(Error::Status { status: 404, .. }) => Err(self.lacks(call.path)),
            Err(error) => Err(error),
        }
    }

    /// The server lacks a call, and here is why.
    pub(super) fn lacks(&self, path: &str) -> Error {
        Error::refused(self.url(), path, WANTED, "no such call")
    }

    /// `POST /update_weight_version`.
    pub(super) async fn update_weight_version(&self, label: &str) -> Result<()> {
        let body = json!({ "new_version": label });
        let call = self.post("/update_weight_version", Some(&body), self.deadlines.control);
        let reply: Success = self.connection.json(call).await?;
        if reply.success { Ok(()) } else { Err(self.connection.malformed(call, "success true", "false")) }
    }

    /// `POST /v1/completions`: one sample, and then the label, which such a reply does not say.
    pub(super) async fn completion(&self, request: &GenerateRequest) -> Result<Generation> {
        generate::check_request(request)?;
        let body = generate::body(request, false);
        let call = Call::post("/v1/completions", Level::Normal, Some(&body), self.deadlines.generate);
        let raw: RawCompletion = self.connection.json(call).await?;
        let label = self.weight_info().await?;
        raw.check(request, self.url(), label)
            .map_err(|(expected, found)| self.connection.malformed(call, &expected, &found))
    }

    /// As [`Client::completion`], and tells of tokens as they come, so many at a time, with the label that the server had
    /// before the request.
    pub(super) async fn stream(
        &self,
        request: &GenerateRequest,
        interval: u32,
        seen: Tell<'_>,
    ) -> Result<Generation> {
        generate::check_request(request)?;
        let began = self.weight_info().await?.unwrap_or_default();
        let body = generate::body(request, true);
        let call = Call::post("/v1/completions", Level::Normal, Some(&body), self.deadlines.generate);
        let malformed = |(expected, found): Mismatch| self.connection.malformed(call, &expected, &found);
        let (mut streamed, mut told, mut finish) = (Streamed::default(), 0, None);
        let mut behind = context(0, &request.input_ids);
        let take = |data: &[u8]| {
            let raw: RawCompletion = self.connection.decode(call, data)?;
            if let Some(failure) = &raw.error {
                return Err(self.connection.failed(call, failure, data));
            }
            finish = streamed.take(raw, request).map_err(malformed)?;
            if finish.is_some() {
                return Ok(ControlFlow::Break(()));
            }
            let (output_ids, log_probs) = (&streamed.output_ids[told..], &streamed.log_probs[told..]);
            if told == 0 || output_ids.len() >= interval as usize {
                told = streamed.output_ids.len();
                let piece = Piece { output_ids, log_probs, label: &began, located: false, digest: None };
                seen(piece.digested(request.rid, behind));
                behind = context(behind, output_ids);
            }
            Ok(ControlFlow::Continue(()))
        };
        self.connection.events(call, take).await?;
        let finish = finish.ok_or_else(|| malformed(generate::unfinished()))?;
        let label = self.weight_info().await?;
        streamed.whole(request, self.url(), finish, label).map_err(malformed)
    }

    /// A control call without a body, which answers with a word.
    pub(super) async fn says(&self, path: &str, word: &str) -> Result<()> {
        self.connection.status_is(self.post(path, None, self.deadlines.control), word).await
    }

    /// `GET /is_paused`.
    pub(super) async fn is_paused(&self) -> Result<bool> {
        let reply: IsPaused = self.connection.json(self.get("/is_paused", Level::Control)).await?;
        Ok(reply.is_paused)
    }

    /// `POST /reset_prefix_cache`: drops the KV cache, or says false because requests hold it. Running
    /// requests are sent back to the queue first, without their cache, if `preempt` says so.
    pub(super) async fn reset_prefix_cache(&self, preempt: bool) -> Result<bool> {
        let path =
            if preempt { "/reset_prefix_cache?reset_running_requests=true" } else { "/reset_prefix_cache" };
        let call = self.post(path, None, self.deadlines.control);
        let reply = self.connection.send(call).await?;
        match reply.status {
            // Some releases answer nothing, some whether they did it.
            200 if reply.body.is_empty() => Ok(true),
            200 => Ok(self.connection.decode::<Success>(call, &reply.body)?.success),
            409 => Ok(false),
            _ => Err(self.connection.status_error(call, &reply)),
        }
    }

    /// `POST /collective_rpc` of `reload_weights`: every worker reads what the server was started with once
    /// more.
    pub(super) async fn reload_weights(&self) -> Result<()> {
        let body = json!({ "method": "reload_weights" });
        let call = self.post("/collective_rpc", Some(&body), self.deadlines.load);
        let reply = self.connection.send(call).await?;
        if reply.status != 200 {
            return Err(self.connection.status_error(call, &reply));
        }
        if reply.body.is_empty() {
            return Ok(());
        }
        let workers: Results = self.connection.decode(call, &reply.body)?;
        if workers.results.iter().all(Value::is_null) {
            return Ok(());
        }
        Err(self.connection.malformed(call, "null from every worker", &excerpt(&reply.body)))
    }

    /// `POST /collective_rpc` of the call that our plugin gives each worker: what the first one found.
    pub(super) async fn compare(
        &self,
        label: &str,
        directory: &Path,
        sample: Option<u64>,
    ) -> Result<Comparison> {
        let kwargs = json!({ "label": label, "directory": directory, "sample": sample });
        let body = json!({ "method": "driftless_compare", "kwargs": kwargs });
        let call = self.post("/collective_rpc", Some(&body), self.deadlines.load);
        let reply = self.connection.send(call).await?;
        if reply.status != 200 {
            return Err(self.connection.status_error(call, &reply));
        }
        let workers: Results = self.connection.decode(call, &reply.body)?;
        let said = workers.results.first().and_then(Value::as_str).and_then(PluginReply::find);
        match said {
            Some((PluginReply::Compared(compared), _)) if compared.label == label => {
                Ok(Comparison::Compared(compared))
            }
            Some((PluginReply::Refused(refused), _)) => Ok(refused.into()),
            _ => {
                let expected = format!("the plugin's reply about {label}");
                Err(self.connection.malformed(call, &expected, &excerpt(&reply.body)))
            }
        }
    }

    /// `POST /init_weight_transfer_engine`: tells the server's plugin which version was loaded, where it has
    /// one. A server that refuses is asked once: it logs each refusal with a trace.
    pub(super) async fn tell_plugin(&self, label: &str) -> Result<()> {
        if self.without_plugin.load(Ordering::Relaxed) {
            return Ok(());
        }
        let body = json!({ "init_info": { "port": self.connection.port(), "label": label } });
        match self.change("/init_weight_transfer_engine", Some(&body), self.deadlines.load).await {
            Err(Error::Status { status, body, .. }) => {
                tracing::info!(engine = self.url(), status, body, "has no plugin: it loads every version");
                self.without_plugin.store(true, Ordering::Relaxed);
                Ok(())
            }
            told => told,
        }
    }

    /// `POST /start_weight_update`. One that a follower left open is ended first.
    pub(super) async fn start_weight_update(&self) -> Result<()> {
        const PATH: &str = "/start_weight_update";
        match self.change(PATH, None, self.deadlines.control).await {
            Err(Error::Status { .. }) => {
                self.finish_weight_update(None).await?;
                self.change(PATH, None, self.deadlines.control).await
            }
            started => started,
        }
    }

    /// `POST /update_weights`: has our plugin make the weights those of a label. What it says where it wrote nothing
    /// stands somewhere in vLLM's error.
    pub(super) async fn update_weights(&self, label: &str) -> Result<Option<PatchRefused>> {
        let body = json!({ "update_info": { "label": label } });
        let call = self.post("/update_weights", Some(&body), self.deadlines.load);
        let reply = self.connection.send(call).await?;
        if reply.status == 200 {
            return self.connection.decode::<Message>(call, &reply.body).map(|_| None);
        }
        let raised = serde_json::from_slice::<Raised>(&reply.body).ok();
        let said = raised.and_then(|raised| Some(PluginReply::find(&raised.error.message)?.0));
        match said {
            Some(PluginReply::Refused(refused)) => Ok(Some(refused)),
            _ => Err(self.connection.status_error(call, &reply)),
        }
    }

    /// `POST /finish_weight_update`: the server takes the label, if there is one.
    pub(super) async fn finish_weight_update(&self, label: Option<&str>) -> Result<()> {
        let body = json!({ "weight_version": label });
        self.change("/finish_weight_update", Some(&body), self.deadlines.control).await
    }

    /// A call about a weight transfer, which answers with a message for people.
    async fn change(&self, path: &str, body: Option<&Value>, deadline: Duration) -> Result<()> {
        let call = self.post(path, body, deadline);
        let Message { message } = self.connection.json(call).await?;
        tracing::debug!(engine = self.url(), path, message, "answered");
        Ok(())
    }

    /// Whether a path is one of the server's calls, of which a GET answers `status` and does nothing.
    pub(super) async fn has(&self, path: &str, status: u16) -> Result<bool> {
        self.connection.status(self.get(path, Level::Control), &[(status, true), (404, false)]).await
    }

    fn get<'a>(&self, path: &'a str, level: Level) -> Call<'a> {
        Call::get(path, level, self.deadlines.info)
    }

    fn post<'a>(&self, path: &'a str, body: Option<&'a Value>, deadline: Duration) -> Call<'a> {
        Call::post(path, Level::Control, body, deadline).closing()
    }
}
