//! A typed client of one engine: every call the bridge uses, each with its deadline.

use std::ops::ControlFlow;
use std::sync::LazyLock;
use std::time::Duration;

use driftless_transport::activate::Limit;
use serde_json::{Value, json};

use super::generate::{self, RawGeneration, Streamed};
use super::wire::{ChecksumReply, DistributedUpdate, GroupInit, Loads, Outcome, PluginUpdated, TensorUpdate};
use crate::engine::{ClientOptions, Deadlines, GenerateRequest, Generation, Mismatch, PauseMode, Tell};
use crate::error::{Error, Result};
use crate::http::{Call, Connection, Level, Reply, excerpt};
use crate::live::PluginReply;
use crate::sglang::{
    DiskUpdate, DiskUpdated, Load, MemoryTag, ModelInfo, OnlyPlugin, RankChecksums, ServerInfo,
};

/// How an engine says that an update changed the weights but could not flush the cache (0.5.22 and later;
/// earlier ones die instead).
const UNFLUSHED: &str = "Weights were updated, but the cache was not flushed";

/// How an engine says that there was no group to destroy.
const NO_GROUP: &str = "does not exist";
/// How an engine says that a session was left open.
const OPEN_SESSION: &str = "already open";

static EMPTY: LazyLock<Value> = LazyLock::new(|| json!({}));

/// A client of one engine. Cheap to clone; clones share connections.
#[derive(Debug, Clone)]
pub struct Client {
    connection: Connection,
    deadlines: Deadlines,
}

impl Client {
    /// A client of the engine at `host:port` or `http://host:port`. Nothing is sent yet.
    ///
    /// # Errors
    /// [`Error::Address`] for any other form of address.
    pub fn new(address: &str, options: ClientOptions) -> Result<Self> {
        Ok(Self { connection: Connection::new(address, options.link())?, deadlines: options.deadlines })
    }

    /// The engine's URL, as errors name it.
    pub fn url(&self) -> &str {
        &self.connection.engine
    }

    /// The same client, whose calls all end when nothing is left of `limit`.
    pub(crate) fn limited(&self, limit: &Limit) -> Self {
        Self { connection: self.connection.limited(limit), deadlines: self.deadlines }
    }

    /// `GET /model_info`, or its older name where there is none.
    ///
    /// # Errors
    /// As every call: [`Error::Unreachable`], [`Error::Deadline`], [`Error::Status`],
    /// [`Error::ReplyTooLarge`], [`Error::Reply`].
    pub async fn model_info(&self) -> Result<ModelInfo> {
        self.renamed("/model_info", "/get_model_info").await
    }

    /// `GET /server_info`, or its older name where there is none.
    ///
    /// # Errors
    /// As [`Client::model_info`].
    pub async fn server_info(&self) -> Result<ServerInfo> {
        self.renamed("/server_info", "/get_server_info").await
    }

    /// `GET /health`. Runs a one-token request on the engine, so it waits, 20 s at most, while the engine is
    /// paused or loads.
    ///
    /// # Errors
    /// [`Error::Status`] 503 when it is not healthy; as [`Client::model_info`].
    pub async fn health(&self) -> Result<()> {
        self.connection.ok(self.get("/health", self.deadlines.control)).await
    }

    /// `GET /ready`: whether the engine is healthy and not paused; `None` where the engine has no such call
    /// (before 0.5.20).
    ///
    /// # Errors
    /// As [`Client::model_info`].
    pub async fn ready(&self) -> Result<Option<bool>> {
        let call = self.get("/ready", self.deadlines.info);
        self.connection.status(call, &[(200, Some(true)), (503, Some(false)), (404, None)]).await
    }

    /// `GET /v1/loads?include=core`: the load of every data-parallel rank.
    ///
    /// # Errors
    /// As [`Client::model_info`].
    pub async fn loads(&self) -> Result<Vec<Load>> {
        let loads: Loads =
            self.connection.json(self.get("/v1/loads?include=core", self.deadlines.info)).await?;
        Ok(loads.loads)
    }

    /// `POST /generate`: one sample. The reply is checked: one log-probability per token, of that token;
    /// spans without gaps; the request's id.
    ///
    /// # Errors
    /// [`Error::Reply`] when it is not so; as [`Client::model_info`].
    pub async fn generate(&self, request: &GenerateRequest) -> Result<Generation> {
        let body = generate::body(request, None);
        let call = Call::post("/generate", Level::Normal, Some(&body), self.deadlines.generate);
        let raw: RawGeneration = self.connection.json(call).await?;
        raw.check(request, self.url())
            .map_err(|(expected, found)| self.connection.malformed(call, &expected, &found))
    }

    /// As [`Client::generate`], and tells of tokens as they come, `interval` at a time, each piece with the label that the
    /// engine had when it sent it. Dropping the future aborts the request.
    ///
    /// # Errors
    /// As [`Client::generate`]. [`Error::Reply`] also for a stream that ends before its request does.
    pub async fn stream(
        &self,
        request: &GenerateRequest,
        interval: u32,
        seen: Tell<'_>,
    ) -> Result<Generation> {
        let body = generate::body(request, Some(interval));
        let call = Call::post("/generate", Level::Normal, Some(&body), self.deadlines.generate);
        let malformed = |(expected, found): Mismatch| self.connection.malformed(call, &expected, &found);
        let (mut streamed, mut whole) = (Streamed::default(), None);
        let take = |data: &[u8]| {
            let raw: RawGeneration = self.connection.decode(call, data)?;
            if let Some(failure) = &raw.error {
                return Err(self.connection.failed(call, failure, data));
            }
            whole = streamed.take(raw, request, self.url(), seen).map_err(malformed)?;
            Ok(if whole.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        };
        self.connection.events(call, take).await?;
        whole.ok_or_else(|| malformed(generate::unfinished()))
    }

    /// `POST /pause_generation`.
    ///
    /// # Errors
    /// As [`Client::model_info`].
    pub async fn pause(&self, mode: PauseMode) -> Result<()> {
        let body = json!({ "mode": mode });
        self.is_ok("/pause_generation", &body).await
    }

    /// `POST /continue_generation`. Harmless when the engine is not paused.
    ///
    /// # Errors
    /// As [`Client::model_info`].
    pub async fn resume(&self) -> Result<()> {
        let body = json!({ "torch_empty_cache": false });
        self.is_ok("/continue_generation", &body).await
    }

    /// `POST /flush_cache`: drops the KV cache, or says false because requests still hold it. An engine that
    /// is paused with every request retracted can be flushed from 0.5.21 on, but only when asked without its
    /// `timeout` parameter, which waits for an empty queue.
    ///
    /// # Errors
    /// As [`Client::model_info`].
    pub async fn flush_cache(&self) -> Result<bool> {
        let call = self.post("/flush_cache", &EMPTY, self.deadlines.control);
        self.connection.status(call, &[(200, true), (400, false)]).await
    }

    /// `POST /update_weights_from_disk`.
    ///
    /// # Errors
    /// [`Error::Status`] 400 with the engine's message when the weights did not change; as
    /// [`Client::model_info`].
    pub async fn update_weights_from_disk(&self, update: &DiskUpdate) -> Result<DiskUpdated> {
        let body = update_body(update);
        let call = self.post("/update_weights_from_disk", &body, self.deadlines.load);
        let reply = self.connection.send(call).await?;
        self.updated(call, &reply)
    }

    /// [`Client::update_weights_from_disk`] of an engine whose plugin may carry it out, or refuse it, instead.
    pub(crate) async fn update_by_plugin(&self, update: &DiskUpdate) -> Result<PluginUpdated> {
        let body = update_body(update);
        let call = self.post("/update_weights_from_disk", &body, self.deadlines.load);
        let reply = self.connection.send(call).await?;
        let message = serde_json::from_slice(&reply.body)
            .map_or_else(|_| String::new(), |Outcome { message, .. }| message);
        match (reply.status, PluginReply::find(&message)) {
            (200, Some((PluginReply::Done(done), behind))) => {
                Ok(PluginUpdated::Done { done, behind: behind.to_owned() })
            }
            // SGLang changes nothing behind a call that its ranks say no to.
            (400, Some((PluginReply::Compared(compared), _))) => Ok(PluginUpdated::Compared(compared)),
            (400, Some((PluginReply::Refused(refused), _))) => Ok(PluginUpdated::Refused(refused)),
            _ => self.updated(call, &reply).map(PluginUpdated::Engine),
        }
    }

    fn updated(&self, call: Call<'_>, reply: &Reply) -> Result<DiskUpdated> {
        match self.outcome(call, reply) {
            Ok(()) => Ok(DiskUpdated::Done),
            Err(Error::Status { status: 400, body, .. }) if body.contains(UNFLUSHED) => {
                Ok(DiskUpdated::Unflushed)
            }
            Err(error) => Err(error),
        }
    }

    /// `POST /init_weights_update_group`: the engine's ranks connect to the group's store. With NCCL nothing
    /// else happens before the first update.
    ///
    /// # Errors
    /// [`Error::Status`] 400 with the engine's message; as [`Client::model_info`].
    pub(crate) async fn init_weights_update_group(&self, init: &GroupInit) -> Result<()> {
        self.succeeds("/init_weights_update_group", &json!(init), self.deadlines.control).await
    }

    /// `POST /destroy_weights_update_group`. A group that the engine does not have is no error.
    ///
    /// # Errors
    /// As [`Client::model_info`].
    pub(crate) async fn destroy_weights_update_group(&self, group: &str) -> Result<()> {
        let body = json!({ "group_name": group });
        match self.succeeds("/destroy_weights_update_group", &body, self.deadlines.control).await {
            Err(Error::Status { status: 400, body, .. }) if body.contains(NO_GROUP) => Ok(()),
            outcome => outcome,
        }
    }

    /// `POST /update_weights_from_distributed`: the engine takes part in the broadcasts that the body
    /// announces and loads what it received.
    ///
    /// # Errors
    /// [`Error::Status`] 400 with the engine's message: some of its weights may have changed; as
    /// [`Client::model_info`].
    pub(crate) async fn update_weights_from_distributed(&self, update: &DistributedUpdate) -> Result<()> {
        self.succeeds("/update_weights_from_distributed", &json!(update), self.deadlines.load).await
    }

    /// `POST /update_weights_from_tensor`: the engine's ranks open the memory that the body names and load
    /// what is there.
    ///
    /// # Errors
    /// [`Error::Status`] 400 with the engine's message: some of its weights may have changed; as
    /// [`Client::model_info`].
    pub(crate) async fn update_weights_from_tensor(&self, update: &TensorUpdate) -> Result<()> {
        self.succeeds("/update_weights_from_tensor", &json!(update), self.deadlines.load).await
    }

    /// `POST /release_memory_occupation`. The engine must have no request, and must have what it releases: it
    /// ends otherwise.
    ///
    /// # Errors
    /// As [`Client::model_info`].
    pub(crate) async fn release_memory(&self, tags: &[MemoryTag]) -> Result<()> {
        self.occupation("/release_memory_occupation", tags).await
    }

    /// `POST /resume_memory_occupation`. The engine must have released what it resumes: it ends otherwise.
    /// The contents of the memory are undefined; the KV cache is empty.
    ///
    /// # Errors
    /// As [`Client::model_info`].
    pub(crate) async fn resume_memory(&self, tags: &[MemoryTag]) -> Result<()> {
        self.occupation("/resume_memory_occupation", tags).await
    }

    async fn occupation(&self, path: &str, tags: &[MemoryTag]) -> Result<()> {
        let words: Vec<_> = tags.iter().map(|tag| tag.as_str()).collect();
        let body = json!({ "tags": words });
        self.connection.ok(self.post(path, &body, self.deadlines.load)).await
    }

    /// `POST /begin_weight_update`, for engines whose [`Capabilities::sessions`](crate::sglang::Capabilities) says
    /// so. A session that somebody left open is ended first.
    ///
    /// # Errors
    /// As [`Client::model_info`].
    pub(crate) async fn begin_weight_update(&self) -> Result<()> {
        let begin = || self.succeeds("/begin_weight_update", &EMPTY, self.deadlines.control);
        match begin().await {
            Err(Error::Status { body, .. }) if body.contains(OPEN_SESSION) => {
                self.end_weight_update().await?;
                begin().await
            }
            outcome => outcome,
        }
    }

    /// `POST /end_weight_update`.
    ///
    /// # Errors
    /// As [`Client::model_info`].
    pub(crate) async fn end_weight_update(&self) -> Result<()> {
        self.succeeds("/end_weight_update", &EMPTY, self.deadlines.load).await
    }

    /// `POST /update_weight_version`: changes the label only, and aborts nothing.
    ///
    /// # Errors
    /// As [`Client::model_info`].
    pub async fn set_weight_version(&self, label: &str) -> Result<()> {
        let body = json!({ "new_version": label, "abort_all_requests": false });
        self.succeeds("/update_weight_version", &body, self.deadlines.control).await
    }

    /// `POST /weights_checker` with action `checksum`: the checksums of every rank's tensors.
    ///
    /// # Errors
    /// [`Error::Reply`] when there are none; as [`Client::model_info`].
    pub async fn checksums(&self) -> Result<Vec<RankChecksums>> {
        let body = json!({ "action": "checksum" });
        let call = self.post("/weights_checker", &body, self.deadlines.load);
        let reply: ChecksumReply = self.connection.json(call).await?;
        if !reply.success || reply.ranks.is_empty() {
            return Err(self.connection.malformed(call, "checksums of at least one rank", &reply.message));
        }
        Ok(reply.ranks)
    }

    /// `POST /abort_request` of one request; never of all. An id the engine does not know is no error.
    ///
    /// # Errors
    /// As [`Client::model_info`].
    pub async fn abort(&self, request: &crate::engine::Rid) -> Result<()> {
        let body = json!({ "rid": request.to_string(), "abort_all": false });
        self.connection.ok(self.post("/abort_request", &body, self.deadlines.control)).await
    }

    /// Whether the engine knows a POST-only path: a GET of one is 405, and nothing is done; of an unknown
    /// path it is 404.
    pub(crate) async fn has_post(&self, path: &str) -> Result<bool> {
        self.connection.status(self.get(path, self.deadlines.info), &[(405, true), (404, false)]).await
    }

    /// A call that is none of the above, for the conformance suite's malformed ones: the status and the body.
    #[cfg(feature = "conformance")]
    pub(crate) async fn raw(&self, method: &str, path: &str, body: &Value) -> Result<(u16, Value)> {
        let (level, deadline) = (Level::Control, self.deadlines.control);
        let call = match method {
            "POST" => Call::post(path, level, Some(body), deadline),
            _ => Call::get(path, level, deadline),
        };
        let reply = self.connection.send(call).await?;
        let value =
            serde_json::from_slice(&reply.body).unwrap_or_else(|_| Value::String(excerpt(&reply.body)));
        Ok((reply.status, value))
    }

    async fn renamed<T: serde::de::DeserializeOwned>(&self, path: &str, older: &str) -> Result<T> {
        match self.connection.json(self.get(path, self.deadlines.info)).await {
            Err(Error::Status { status: 404, .. }) => {
                self.connection.json(self.get(older, self.deadlines.info)).await
            }
            result => result,
        }
    }

    /// A control call that answers `{"status": "ok"}`. Another body is a proxy's, or an engine's that did
    /// nothing.
    async fn is_ok(&self, path: &str, body: &Value) -> Result<()> {
        self.connection.status_is(self.post(path, body, self.deadlines.control), "ok").await
    }

    /// A control call that answers `{success, message}`.
    async fn succeeds(&self, path: &str, body: &Value, deadline: Duration) -> Result<()> {
        let call = self.post(path, body, deadline);
        let reply = self.connection.send(call).await?;
        self.outcome(call, &reply)
    }

    /// Reads a `{success, message}` reply; SGLang sends it with 200 and with 400.
    fn outcome(&self, call: Call<'_>, reply: &Reply) -> Result<()> {
        if reply.status != 200 {
            return Err(self.connection.status_error(call, reply));
        }
        let outcome: Outcome = self.connection.decode(call, &reply.body)?;
        if outcome.success {
            return Ok(());
        }
        let found = excerpt(outcome.message.as_bytes());
        Err(self.connection.malformed(call, "success true with status 200", &found))
    }

    fn get<'a>(&self, path: &'a str, deadline: Duration) -> Call<'a> {
        Call::get(path, Level::Normal, deadline)
    }

    fn post<'a>(&self, path: &'a str, body: &'a Value, deadline: Duration) -> Call<'a> {
        Call::post(path, Level::Control, Some(body), deadline)
    }
}

fn update_body(update: &DiskUpdate) -> Value {
    let mut body = json!(update);
    body["abort_all_requests"] = false.into();
    match update.only {
        Some(OnlyPlugin::Patch) => body["manifest"] = json!({ "driftless": "patch" }),
        Some(OnlyPlugin::Compare { sample }) => {
            body["manifest"] = json!({ "driftless": "compare", "sample": sample });
        }
        None => {}
    }
    body
}
