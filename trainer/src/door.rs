//! `fleet.sock`: the engines of a run that goes on are listed and changed over a socket in its directory.
//!
//! Only the user of the run may open it. A line of JSON asks, and a line of JSON answers: [`Request`] and [`Answer`]. Over
//! HTTP these are the bodies of `POST /fleet`; `GET /fleet` lists.

use std::io::{BufRead as _, BufReader, ErrorKind, Read as _, Write as _};
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use driftless_bridge::fleet::{EngineStatus, Phase};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Name of the socket in the run's directory.
pub const SOCKET: &str = "fleet.sock";

/// Path of both over HTTP.
pub(crate) const PATH: &str = "/fleet";

/// Longest answer: thousands of engines.
const ANSWER_BYTES_MAX: u64 = 16 << 20;

/// What is asked of a run. Addresses are those of [`driftless_bridge::connect`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// To tell of its engines.
    List,
    /// To take an engine in.
    Add {
        /// Where it is.
        address: String,
        /// Whether it gets the run's keys.
        #[serde(default)]
        keys: bool,
    },
    /// To give an engine no more requests, and let it go once it has none.
    Drain {
        /// Where it is.
        address: String,
        /// How long it may take.
        seconds: u64,
    },
    /// To let an engine go at once.
    Remove {
        /// Where it is.
        address: String,
    },
}

/// What a run answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// It is done, and these are its engines now.
    Engines(Vec<EngineRow>),
    /// It is not done.
    Refused {
        /// Why not.
        why: String,
    },
}

/// An engine of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineRow {
    /// Its URL.
    pub address: String,
    /// Where it is on its way: `joining`, `syncing`, `serving`, `draining` or `lost`.
    pub phase: String,
    /// The label of the version that it serves, as far as known.
    pub serving: Option<String>,
    /// Requests of the run under way on it.
    pub in_flight: usize,
    /// Why it gets no requests, where there is more to say than its phase.
    pub why: Option<String>,
}

impl From<EngineStatus> for EngineRow {
    fn from(status: EngineStatus) -> Self {
        let phase = status.phase.name().to_owned();
        let why = match status.phase {
            Phase::Lost { why } => Some(why),
            Phase::Joining => status.failure,
            _ => None,
        };
        let EngineStatus { url: address, serving, in_flight, .. } = status;
        Self { address, phase, serving, in_flight, why }
    }
}

/// Asks the run whose directory this is, and returns its engines as they are then.
///
/// # Errors
/// [`Error::NoRun`] where nobody answers within `deadline`; [`Error::FleetRefused`].
pub fn ask(save: &Path, request: &Request, deadline: Duration) -> Result<Vec<EngineRow>> {
    let path = save.join(SOCKET);
    let silent = |source| Error::NoRun { path: path.clone(), after: deadline, source };
    let json = |source| Error::Json { path: path.clone(), source };
    let mut line = serde_json::to_vec(request).map_err(json)?;
    line.push(b'\n');
    let mut stream = UnixStream::connect(&path).map_err(silent)?;
    stream.set_write_timeout(Some(deadline)).map_err(silent)?;
    stream.set_read_timeout(Some(deadline)).map_err(silent)?;
    stream.write_all(&line).map_err(silent)?;
    let mut answer = Vec::new();
    BufReader::new(stream.take(ANSWER_BYTES_MAX)).read_until(b'\n', &mut answer).map_err(silent)?;
    if answer.last() != Some(&b'\n') {
        return Err(silent(ErrorKind::UnexpectedEof.into()));
    }
    serde_json::from_slice::<Answer>(&answer).map_err(json)?.engines(&save.display().to_string())
}

/// Where a run listens for what is asked of it over HTTP.
#[derive(Debug, Clone)]
pub struct Listen {
    /// The address.
    pub addr: SocketAddr,
    /// What callers have to bring; needed beyond loopback.
    pub token: Option<String>,
}

impl Listen {
    /// # Errors
    /// [`Error::FleetListen`] for an address beyond loopback without a token.
    pub(crate) fn check(&self) -> Result<()> {
        let refused = |source| Error::FleetListen { source };
        driftless_http::check_exposure("fleet_listen", self.addr, self.token.as_deref()).map_err(refused)
    }
}

/// Asks the run that listens at `url`, as [`ask`] does; `token` is what it wants, if it wants one.
///
/// # Errors
/// [`Error::NoRunAt`] where it does not answer within `deadline`, or not as a run; [`Error::FleetRefused`].
pub fn ask_at(
    url: &str,
    token: Option<&str>,
    request: &Request,
    deadline: Duration,
) -> Result<Vec<EngineRow>> {
    let silent = |source| Error::NoRunAt { url: url.to_owned(), source };
    let mut at = driftless_http::parse_url("run", url).map_err(silent)?;
    at.set_path(PATH);
    let body = serde_json::to_vec(request).map_err(|source| Error::Json { path: PATH.into(), source })?;
    let client = driftless_http::Client::new(token).map_err(silent)?;
    let answer = client.post(at, body, ANSWER_BYTES_MAX, deadline).map_err(silent)?;
    match serde_json::from_slice::<Answer>(&answer.body) {
        Ok(said) => said.engines(url),
        // A proxy's, or a refusal of the token.
        Err(_) => Err(silent(answer.refusal())),
    }
}

impl Answer {
    fn engines(self, run: &str) -> Result<Vec<EngineRow>> {
        match self {
            Answer::Engines(engines) => Ok(engines),
            Answer::Refused { why } => Err(Error::FleetRefused { run: run.to_owned(), why }),
        }
    }
}
