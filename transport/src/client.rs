//! A small blocking HTTP client: publishers notify followers with it, and followers ask relays.

use std::fmt;
use std::future::Future;
use std::sync::mpsc;
use std::time::Duration;

use driftless_store::{OnBytes, chain_text, no_progress, runtime};
use reqwest::{Client, Method, RequestBuilder, StatusCode, Url};
use tokio::runtime::Handle;

use crate::error::{Error, Result};

/// How long a connection may take to be made, whatever the whole request may take.
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);
/// Bytes of an answer that is not what was asked for that are read and shown.
const WORDS_MAX: usize = 200;

/// A client; its calls may be made from any thread but those of the runtime that drives them
/// ([`runtime`]).
pub struct Http {
    client: Client,
    token: Option<String>,
    runtime: Handle,
}

impl fmt::Debug for Http {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Http").finish_non_exhaustive()
    }
}

/// An answer.
#[derive(Debug)]
pub struct Answer {
    /// Its status.
    pub status: StatusCode,
    /// Its body.
    pub body: Vec<u8>,
}

impl Answer {
    /// What the answer says, cut short, for an error.
    #[must_use]
    pub fn words(&self) -> String {
        let text = String::from_utf8_lossy(&self.body[..self.body.len().min(WORDS_MAX)]).into_owned();
        format!("status {}: {}", self.status.as_u16(), text.escape_debug())
    }
}

impl Http {
    /// A client that brings `token`, if there is one, with every request.
    ///
    /// # Errors
    /// [`Io`](driftless_store::Error::Io) if the threads of this process's connections cannot be started.
    pub fn new(token: Option<&str>) -> Result<Self> {
        // The only error is that there is a provider already, and any will do.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let start = |source| Error::io("start the threads of", "the HTTP client", source);
        let client = Client::builder()
            .connect_timeout(CONNECT_DEADLINE)
            .redirect(reqwest::redirect::Policy::none())
            .no_proxy()
            .build()
            .map_err(|error| start(std::io::Error::other(error)))?;
        let runtime = runtime::handle().map_err(start)?;
        Ok(Self { client, token: token.map(str::to_owned), runtime })
    }

    fn request(&self, method: Method, url: Url) -> RequestBuilder {
        let request = self.client.request(method, url);
        match &self.token {
            Some(token) => request.bearer_auth(token),
            None => request,
        }
    }

    /// Reads `url`, of which at most `bytes_max` bytes are taken, and `arrived` told; `range` is the header's
    /// value.
    ///
    /// # Errors
    /// A text for people: no answer within `deadline`, a broken connection, or more bytes than that.
    pub fn get(
        &self,
        url: Url,
        range: &str,
        bytes_max: u64,
        arrived: &OnBytes,
        deadline: Duration,
    ) -> std::result::Result<Answer, String> {
        let request = self.request(Method::GET, url).header("range", range);
        self.wait(exchange(request, bytes_max, arrived.clone(), deadline))
    }

    /// Runs a call on the runtime and waits for it; it has a deadline.
    fn wait<T: Send + 'static>(
        &self,
        call: impl Future<Output = std::result::Result<T, String>> + Send + 'static,
    ) -> std::result::Result<T, String> {
        const ENDED: &str = "the HTTP client has ended";
        let (sender, receiver) = mpsc::sync_channel(1);
        self.runtime.spawn(async move {
            // The receiver waits below.
            let _ = sender.send(call.await);
        });
        receiver.recv().unwrap_or(Err(ENDED.to_owned()))
    }
}

/// Sends a request and reads its answer.
async fn exchange(
    request: RequestBuilder,
    bytes_max: u64,
    arrived: OnBytes,
    deadline: Duration,
) -> std::result::Result<Answer, String> {
    let read = async {
        let mut response = request.send().await.map_err(|error| chain_text(&error))?;
        let (status, mut body) = (response.status(), Vec::new());
        while let Some(bytes) = response.chunk().await.map_err(|error| chain_text(&error))? {
            if body.len() as u64 + bytes.len() as u64 > bytes_max.max(WORDS_MAX as u64) {
                return Err(format!("more than the {bytes_max} bytes that were asked for"));
            }
            arrived(bytes.len() as u64);
            body.extend_from_slice(&bytes);
        }
        Ok(Answer { status, body })
    };
    tokio::time::timeout(deadline, read)
        .await
        .unwrap_or_else(|_| Err(format!("no answer within {deadline:.1?}")))
}

/// Checks the URL of a server; `what` says which.
///
/// # Errors
/// [`Error::BadText`] for something that is no URL, or has a user, a password or a query.
pub fn parse_url(what: &'static str, text: &str) -> Result<Url> {
    let parsed = Url::parse(text).ok();
    // A user, a password or a query may be a secret, and is not repeated.
    let host = parsed.as_ref().and_then(Url::host_str).unwrap_or("something else").to_owned();
    let is_plain = |url: &Url| {
        let no_secret = url.username().is_empty() && url.password().is_none() && url.query().is_none();
        matches!(url.scheme(), "http" | "https") && url.has_host() && no_secret
    };
    parsed.filter(is_plain).ok_or(Error::BadText {
        what,
        text: host,
        expected: "http://host:port or https://host:port, without user, password and query",
    })
}

/// Refuses addresses of followers that [`notify`] would refuse.
///
/// # Errors
/// [`Error::BadText`] for something that is no URL.
pub fn check_followers(urls: &[String]) -> Result<()> {
    urls.iter().try_for_each(|url| parse_url("follower", url).map(drop))
}

/// Tells followers, all at once, that there is a version: `POST <url>/notify`. Returns what kept those from
/// hearing it that did not; they find it with their next look.
///
/// # Errors
/// [`Error::BadText`] for something that is no URL, before any follower is told.
pub fn notify(urls: &[String], token: Option<&str>, deadline: Duration) -> Result<Vec<(String, String)>> {
    let parsed = urls.iter().map(|url| parse_url("follower", url)).collect::<Result<Vec<_>>>()?;
    if parsed.is_empty() {
        return Ok(Vec::new());
    }
    let http = Http::new(token)?;
    let requests: Vec<_> = parsed
        .into_iter()
        .map(|mut url| {
            if let Ok(mut path) = url.path_segments_mut() {
                path.pop_if_empty().push("notify");
            }
            http.request(Method::POST, url)
        })
        .collect();
    let told = http.wait(async move {
        let told: Vec<_> = requests
            .into_iter()
            .map(|request| tokio::spawn(exchange(request, WORDS_MAX as u64, no_progress(), deadline)))
            .collect();
        let mut answers = Vec::new();
        for one in told {
            answers.push(one.await.unwrap_or_else(|error| Err(error.to_string())));
        }
        Ok(answers)
    });
    let failed = |(url, answer): (&String, std::result::Result<Answer, String>)| match answer {
        Ok(answer) if answer.status.is_success() => None,
        Ok(answer) => Some((url.clone(), answer.words())),
        Err(error) => Some((url.clone(), error)),
    };
    match told {
        Ok(answers) => Ok(urls.iter().zip(answers).filter_map(failed).collect()),
        Err(error) => Ok(urls.iter().map(|url| (url.clone(), error.clone())).collect()),
    }
}
