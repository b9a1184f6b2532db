//! The crate's one error type.

use std::path::PathBuf;
use std::time::Duration;

use driftless_store::BoxError;

/// What can go wrong between us and an inference engine. Every variant that concerns an engine names its URL.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An engine's address is not one that this crate can call.
    #[error(
        "engine address {url:?} is not usable: {reason}; give host:port, http://host:port or https://host"
    )]
    Address {
        /// The address, without what may be a secret in it.
        url: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A key cannot be sent in an HTTP header, or its file cannot be read.
    #[error("{which} key is not usable: {reason}")]
    Key {
        /// `api` or `admin`.
        which: &'static str,
        /// What is wrong; never the key itself.
        reason: String,
    },
    /// The authorities that vouch for engines cannot be read.
    #[error("the CA of engines is not usable: {reason}; give certificates in PEM")]
    Ca {
        /// What is wrong.
        reason: String,
    },
    /// The connection failed, or broke before the whole reply was read.
    #[error("engine {engine}: {call} failed: the connection was refused or lost")]
    Unreachable {
        /// URL of the engine.
        engine: String,
        /// The call, as method and path.
        call: String,
        /// The first cause.
        source: driftless_http::Lost,
    },
    /// No whole reply within the call's deadline.
    #[error("engine {engine}: {call} gave no whole reply within {after:?}")]
    Deadline {
        /// URL of the engine.
        engine: String,
        /// The call, as method and path.
        call: String,
        /// The deadline.
        after: Duration,
    },
    /// The activation ran out of time, or the follower was told to stop.
    #[error("engine {engine}: {call} was given up: the activation's time is over")]
    GivenUp {
        /// URL of the engine.
        engine: String,
        /// The call, as method and path.
        call: String,
    },
    /// The engine answered with another HTTP status than the call expects.
    #[error("engine {engine}: {call} answered {status}: {body}")]
    Status {
        /// URL of the engine.
        engine: String,
        /// The call, as method and path.
        call: String,
        /// The HTTP status.
        status: u16,
        /// The reply's body, cut to a readable length.
        body: String,
    },
    /// A reply is larger than this crate accepts.
    #[error("engine {engine}: the reply to {call} exceeds {limit} bytes")]
    ReplyTooLarge {
        /// URL of the engine.
        engine: String,
        /// The call, as method and path.
        call: String,
        /// The bound, in bytes.
        limit: usize,
    },
    /// A reply is not what the call's protocol says.
    #[error("engine {engine}: the reply to {call} is malformed: expected {expected}, found {found}")]
    Reply {
        /// URL of the engine.
        engine: String,
        /// The call, as method and path.
        call: String,
        /// What the protocol says.
        expected: String,
        /// What came, cut to a readable length.
        found: String,
    },
    /// The engine's set-up cannot be used, or it is not the engine that was meant.
    #[error("engine {engine} is refused: {what} should be {expected}, found {found}")]
    Refused {
        /// URL of the engine.
        engine: String,
        /// The property, by the engine's own name for it.
        what: String,
        /// The value that would do.
        expected: String,
        /// The engine's value.
        found: String,
    },
    /// The weights that the engine holds are not those of the checkpoint.
    #[error(
        "engine {engine}: {count} of its tensors differ from the checkpoint, first {tensor}: expected checksum {expected}, found {found}"
    )]
    LiveWeights {
        /// URL of the engine.
        engine: String,
        /// How many tensors differ, are missing or are unexpected.
        count: usize,
        /// The first of them in name order, under the engine's fused name.
        tensor: String,
        /// The checkpoint's checksum, or `none`.
        expected: String,
        /// The engine's checksum, or `none`.
        found: String,
    },
    /// The weights that the engine holds are not those of the checkpoint, as its plugin compared them.
    #[error(
        "engine {engine}: {count} tensors of the checkpoint are not what it holds: {tensors}; its plugin compared them"
    )]
    Differing {
        /// URL of the engine.
        engine: String,
        /// How many tensors differ, at any rank.
        count: u64,
        /// The first of them, by name.
        tensors: String,
    },
    /// The engine's live weights cannot be compared with a version's, which was asked for.
    #[error(
        "the live weights of engine {engine} cannot be compared, which is required here: {why}. Install driftless-rl into its \
         environment and start it again as the user of this process"
    )]
    NotComparable {
        /// URL of the engine.
        engine: String,
        /// Why not.
        why: String,
    },
    /// The engine reports another version label than the one it was given.
    #[error("engine {engine} reports weight version {found} where {expected} was activated")]
    LabelMismatch {
        /// URL of the engine.
        engine: String,
        /// The label it was given.
        expected: String,
        /// The label it reports.
        found: String,
    },
    /// A checkpoint must not be posted: the engine would reject it or die of it.
    #[error("{path}: tensor {tensor} should be {expected}, found {found}; nothing was posted to the engine")]
    Checkpoint {
        /// The checkpoint directory.
        path: PathBuf,
        /// The tensor's name in the checkpoint.
        tensor: String,
        /// Its dtype and shape as the engine loaded it, or `absent`.
        expected: String,
        /// Its dtype and shape in the checkpoint, or `absent`.
        found: String,
    },
    /// A checkpoint's `config.json` is missing or says something that this crate does not know.
    #[error("{path}: {what} should be {expected}, found {found}")]
    Config {
        /// The file.
        path: PathBuf,
        /// The field, or `the file`.
        what: String,
        /// What would do.
        expected: String,
        /// What it holds.
        found: String,
    },
    /// A version label is not of the form `<12 hex>:<number>`.
    #[error("version label {found:?} is not of the form <12 hex digits>:<number>")]
    Label {
        /// The text.
        found: String,
    },
    /// A request was not sent because the engine would misbehave on it.
    #[error("request {rid} is refused: {what} should be {expected}, found {found}")]
    Request {
        /// The request.
        rid: String,
        /// The field.
        what: &'static str,
        /// What would do.
        expected: String,
        /// What it holds.
        found: String,
    },
    /// The engine could not be told to generate again after an activation.
    #[error("engine {engine} may still be paused: continue_generation failed{}", during(.first))]
    LeftPaused {
        /// URL of the engine.
        engine: String,
        /// The activation's own failure, where there was one.
        first: Option<String>,
        /// Why continuing failed.
        source: Box<Error>,
    },
    /// What the engine generates with a version's weights is no sample. It was paused and fenced again.
    #[error(
        "engine {engine} generates nothing sound with the weights of {label}, and stays paused until it has others"
    )]
    Unsound {
        /// URL of the engine.
        engine: String,
        /// The version's label.
        label: String,
        /// What is wrong with its reply.
        source: Box<Error>,
    },
    /// The engine does not have our plugin, which was asked for.
    #[error(
        "engine {engine} cannot be patched, which is required here: {why}. Install driftless-rl into its environment and start \
         it again as the user of this process"
    )]
    NoPlugin {
        /// URL of the engine.
        engine: String,
        /// What was looked for, and what was found.
        why: String,
    },
    /// The weights of a live model cannot be patched, or not by this delta.
    #[error("{what} should be {expected}, found {found}")]
    Live {
        /// What of the model, of a delta or of the device.
        what: String,
        /// What would do.
        expected: String,
        /// What there is.
        found: String,
    },
    /// A prepared delta, or the directory that it lies in, cannot be used.
    #[error("no prepared delta can be used")]
    Offer {
        /// The reason.
        source: Box<driftless_transport::Error>,
    },
    /// A file for followers cannot be written.
    #[error("cannot write {path}")]
    Write {
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// The engines did not reach a version in time.
    #[error("after {after:?} not every engine serves {label}: {}", list(.laggards))]
    Behind {
        /// The label waited for.
        label: String,
        /// The deadline.
        after: Duration,
        /// The engines that are not there, each as `URL (serves …)` or `URL (its failure)`.
        laggards: Vec<String>,
    },
    /// Too few hosts had a version on disk in time; no engine was paused for it.
    #[error("fewer than {wanted} hosts prepared version {version}, so no engine was paused: {}", list(.hosts))]
    Unprepared {
        /// The version.
        version: u64,
        /// How many hosts were asked for.
        wanted: usize,
        /// The hosts that failed, each as `URL (its failure)`.
        hosts: Vec<String>,
    },
    /// Too few hosts activated a version in time.
    #[error("fewer than {wanted} hosts activated {label}: {}", list(.hosts))]
    Unactivated {
        /// The version's label.
        label: String,
        /// How many hosts were asked for.
        wanted: usize,
        /// The hosts that failed, each as `URL (its failure)`.
        hosts: Vec<String>,
    },
    /// Too few engines answered to begin with.
    #[error(
        "{attached} of {} engines answered, where at least {wanted} have to: start the others; {}",
        .attached + .away.len(), list(.away)
    )]
    Unattached {
        /// How many engines were asked for.
        wanted: usize,
        /// How many answered.
        attached: usize,
        /// The others, each as `URL (its failure)`.
        away: Vec<String>,
    },
    /// No engine gave an acceptable generation in time.
    #[error("request {rid}: no engine gave an acceptable generation within {after:?}: {}", list(.attempts))]
    Exhausted {
        /// The request.
        rid: String,
        /// The deadline.
        after: Duration,
        /// The last failure of each engine, as `URL: reason`.
        attempts: Vec<String>,
    },
    /// A fleet needs at least one engine, each of them once.
    #[error("a fleet needs at least one engine and each of them once, found {found:?}")]
    Fleet {
        /// The addresses as given.
        found: Vec<String>,
    },
    /// An engine that was to be added is in the fleet.
    #[error("engine {engine} is in the fleet already")]
    InFleet {
        /// URL of the engine.
        engine: String,
    },
    /// An engine that was to be taken away is not in the fleet.
    #[error("engine {engine} is not in the fleet, which has {}", engines_of(.engines))]
    NotInFleet {
        /// URL of the engine.
        engine: String,
        /// Those that are.
        engines: Vec<String>,
    },
    /// A file of a checkpoint cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// A checkpoint directory is not readable as one.
    #[error("checkpoint {path} cannot be used")]
    Open {
        /// The directory.
        path: PathBuf,
        /// The reason.
        source: Box<driftless_transport::Error>,
    },
    /// The rendezvous of a weight-update group cannot listen.
    #[error(
        "cannot listen at {address} for the ranks of a weight-update group; give another address or port"
    )]
    Listen {
        /// The address.
        address: std::net::SocketAddr,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// The rendezvous of a weight-update group cannot hold a key.
    #[error("the rendezvous cannot hold key {key:?}: {why}")]
    Rendezvous {
        /// The key.
        key: String,
        /// The bound it meets.
        why: String,
    },
    /// A tensor that is larger than anything that can be pushed.
    #[error("tensor {tensor}: its shape {shape:?} has more bytes than fit in 64 bits; nothing was posted")]
    TooLarge {
        /// The tensor's name.
        tensor: String,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// A weight-update group got no further in time. It was given up, and is formed anew by the next push.
    #[error("group {group}: {what} did not end within {after:?}, with {}{}", list(.engines), awaited(.waiting))]
    Group {
        /// The group's name.
        group: String,
        /// What was waited for.
        what: &'static str,
        /// The deadline.
        after: Duration,
        /// The group's engines.
        engines: Vec<String>,
        /// Keys of the rendezvous that ranks waited for.
        waiting: Vec<String>,
    },
    /// The pushing side could not do its part.
    #[error("weights cannot be pushed from here: {what}")]
    Root {
        /// What failed.
        what: String,
        /// The reason.
        source: BoxError,
    },
    /// NCCL is missing, is another version than asked for, or failed.
    #[error("NCCL: {what}")]
    Nccl {
        /// What failed.
        what: String,
        /// The reason.
        source: BoxError,
    },
    /// Engines answered that they had loaded a bucket, and still have its memory open.
    #[error(
        "{after:?} after the reply a bucket's memory is still open, with {}; the engines must run as the user of this process and share its /dev/shm (containers: the host's IPC namespace)",
        list(.engines)
    )]
    Unreleased {
        /// The deadline.
        after: Duration,
        /// The engines.
        engines: Vec<String>,
    },
    /// The runtime that attached a fleet was shut down, and its requests with it.
    #[error("the fleet was closed: the runtime that attached it is shut down")]
    Closed,
    /// The HTTP client, or the threads of its connections, could not be set up.
    #[error("cannot set up {what}")]
    SetUp {
        /// The part.
        what: &'static str,
        /// The reason.
        source: BoxError,
    },
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Whether another engine, or the same one later, may do what this one did not: true for lost
    /// connections, deadlines and the server's own failures (5xx), false for refusals and malformed requests.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable { .. }
            | Self::Deadline { .. }
            | Self::GivenUp { .. }
            | Self::Unattached { .. }
            | Self::Reply { .. }
            | Self::ReplyTooLarge { .. } => true,
            Self::Status { status, .. } => *status >= 500 || *status == 408 || *status == 429,
            _ => false,
        }
    }

    /// Whether an engine may still carry out the call that failed: no answer says that it will not.
    pub(crate) fn is_unanswered(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::Deadline { .. } | Self::GivenUp { .. })
    }

    /// Whether a request failed for want of an engine, not by itself: every engine was down, too old or failing until the
    /// fleet's deadline. The same request may succeed when engines are back.
    pub fn is_no_engine(&self) -> bool {
        matches!(self, Self::Exhausted { .. })
    }

    /// [`Error::Refused`] for a property of an engine.
    pub(crate) fn refused(
        engine: impl Into<String>,
        what: impl Into<String>,
        expected: impl Into<String>,
        found: impl Into<String>,
    ) -> Self {
        let (engine, what) = (engine.into(), what.into());
        Self::Refused { engine, what, expected: expected.into(), found: found.into() }
    }

    /// [`Error::Live`] for something of a model, of a delta or of the device.
    pub(crate) fn live(
        what: impl Into<String>,
        expected: impl Into<String>,
        found: impl Into<String>,
    ) -> Self {
        Self::Live { what: what.into(), expected: expected.into(), found: found.into() }
    }

    /// [`Error::SetUp`] for a part, of the reason.
    pub(crate) fn set_up<E: Into<BoxError>>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |error| Self::SetUp { what, source: error.into() }
    }

    /// The threads that drive connections cannot be started.
    pub(crate) fn threads(error: std::io::Error) -> Self {
        Self::set_up("the threads of connections to engines")(error)
    }
}

fn during(first: &Option<String>) -> String {
    first.as_ref().map_or_else(String::new, |first| format!(", after: {first}"))
}

fn awaited(keys: &[String]) -> String {
    if keys.is_empty() { String::new() } else { format!("; its ranks wait for {}", keys.join(", ")) }
}

fn engines_of(engines: &[String]) -> String {
    if engines.is_empty() { "none".to_owned() } else { engines.join(", ") }
}

fn list(items: &[String]) -> String {
    items.join("; ")
}
