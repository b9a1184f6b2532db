//! HTTP clients: the one builder of them, and a small one that blocks.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use reqwest::{ClientBuilder, Method, RequestBuilder, StatusCode, Url, redirect};
use tokio::runtime::Handle;

use crate::error::{Error, Result};
use crate::runtime;

/// How long a connection may take to be made, whatever the whole request may take.
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);
/// Bytes of an answer that is not what was asked for that are read and shown.
pub(crate) const WORDS_MAX: usize = 200;

/// What every client of the workspace is built from. It gives up on a connection after `connect`. It takes no proxy
/// from the environment, which libraries do not read. It follows no redirect: one would carry a key or a token to
/// whatever host an answer names, and may turn a POST into a GET.
pub fn client_builder(connect: Duration) -> ClientBuilder {
    // Where another crate of the build has switched on TLS without a provider, reqwest would panic for want of one even
    // for plain HTTP. The only error is that there is a provider already, and any will do.
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::builder().connect_timeout(connect).redirect(redirect::Policy::none()).no_proxy()
}

/// A client; its calls may be made from any thread but those of the [`runtime`] that drives them.
pub struct Client {
    client: reqwest::Client,
    headers: HeaderMap,
    pub(crate) runtime: Handle,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").finish_non_exhaustive()
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
    /// The answer as the reason why nothing was done, cut short.
    #[must_use]
    pub fn refusal(&self) -> Error {
        let text = String::from_utf8_lossy(&self.body[..self.body.len().min(WORDS_MAX)]);
        Error::Refused { words: format!("status {}: {}", self.status.as_u16(), text.escape_debug()) }
    }
}

impl Client {
    /// A client that brings `token`, if there is one, with every request.
    ///
    /// # Errors
    /// [`Error::Start`] if the threads of this process's connections cannot be started.
    pub fn new(token: Option<&str>) -> Result<Self> {
        let bearer = token.map(|token| ("authorization".to_owned(), format!("Bearer {token}")));
        Self::with_headers(bearer)
    }

    /// A client that brings these headers, by name and value, with every request.
    ///
    /// # Errors
    /// [`Error::BadSetting`] for what no header may be, without its value, which may be a secret. [`Error::Start`] as above.
    pub fn with_headers(headers: impl IntoIterator<Item = (String, String)>) -> Result<Self> {
        let header = |(name, value): (String, String)| {
            let pair = HeaderName::try_from(&name).ok().zip(HeaderValue::try_from(value).ok());
            let (expected, found) = ("the name and the value of an HTTP header".to_owned(), name);
            pair.ok_or(Error::BadSetting { name: "headers", expected, found })
        };
        let headers = headers.into_iter().map(header).collect::<Result<HeaderMap>>()?;
        let start = |source| Error::Start { source };
        let client = client_builder(CONNECT_DEADLINE).build();
        let client = client.map_err(|error| start(io::Error::other(error)))?;
        let runtime = runtime::handle().map_err(start)?;
        Ok(Self { client, headers, runtime })
    }

    pub(crate) fn request(&self, method: Method, url: Url) -> RequestBuilder {
        self.client.request(method, url).headers(self.headers.clone())
    }

    /// Reads `url`, at most `bytes_max` bytes, and has `arrived` hear how many came; `range` is the header's value.
    ///
    /// # Errors
    /// [`Error::NoAnswer`] within `deadline`, [`Error::Lost`], [`Error::TooLong`].
    pub fn get(
        &self,
        url: Url,
        range: &str,
        bytes_max: u64,
        arrived: &Arc<dyn Fn(u64) + Send + Sync>,
        deadline: Duration,
    ) -> Result<Answer> {
        let (request, arrived) = (self.request(Method::GET, url).header("range", range), arrived.clone());
        let call = exchange(request, bytes_max, move |bytes| arrived(bytes), deadline);
        runtime::run(&self.runtime, call).unwrap_or(Err(Error::Ended))
    }

    /// Sends `body`, which is JSON, to `url`, and reads at most `bytes_max` bytes of the answer.
    ///
    /// # Errors
    /// Those of [`Client::get`].
    pub fn post(&self, url: Url, body: Vec<u8>, bytes_max: u64, deadline: Duration) -> Result<Answer> {
        let request = self.request(Method::POST, url).header("content-type", "application/json").body(body);
        let call = exchange(request, bytes_max, |_| {}, deadline);
        runtime::run(&self.runtime, call).unwrap_or(Err(Error::Ended))
    }
}

/// Sends a request and reads its answer.
pub(crate) async fn exchange(
    request: RequestBuilder,
    bytes_max: u64,
    arrived: impl Fn(u64),
    deadline: Duration,
) -> Result<Answer> {
    let read = async {
        let mut response = request.send().await?;
        let (status, mut body) = (response.status(), Vec::new());
        while let Some(bytes) = response.chunk().await? {
            if body.len() as u64 + bytes.len() as u64 > bytes_max.max(WORDS_MAX as u64) {
                return Err(Error::TooLong { max: bytes_max });
            }
            arrived(bytes.len() as u64);
            body.extend_from_slice(&bytes);
        }
        Ok(Answer { status, body })
    };
    tokio::time::timeout(deadline, read).await.unwrap_or(Err(Error::NoAnswer { after: deadline }))
}

/// Checks the URL of a server; `what` says which.
///
/// # Errors
/// [`Error::BadUrl`] for something that is no URL, or has a user, a password or a query.
pub fn parse_url(what: &'static str, text: &str) -> Result<Url> {
    let parsed = Url::parse(text).ok();
    let host = parsed.as_ref().and_then(Url::host_str).unwrap_or("something else").to_owned();
    let is_plain = |url: &Url| {
        let no_secret = url.username().is_empty() && url.password().is_none() && url.query().is_none();
        matches!(url.scheme(), "http" | "https") && url.has_host() && no_secret
    };
    parsed.filter(is_plain).ok_or(Error::BadUrl { what, text: host })
}
