//! The HTTP client under `object_store`, with typed refusals.
//!
//! The crate distinguishes what it acts on (not found, precondition failed) and turns everything else into
//! text. Whether a retry can help is decided here, where status and code are still values.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use driftless_http::client_builder;
use futures_util::StreamExt as _;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody,
    HttpService,
};
use object_store::{ClientConfigKey, ClientOptions, HeaderMap};
use rand::seq::SliceRandom as _;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::{Certificate, NoProxy, Proxy};

use crate::store::redact;

/// How long a connection may take to be made, where the options do not say.
const CONNECT_DEADLINE: Duration = Duration::from_secs(10);
/// Error documents are a few hundred bytes; more of one is not read.
const DOCUMENT_BYTES_MAX: usize = 16 << 10;
/// A server's own words, cut to this many characters.
const MESSAGE_CHARS_MAX: usize = 200;

/// Makes clients whose refusals are [`Refusal`]s.
#[derive(Debug)]
pub(super) struct Connector;

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = client(options).map_err(|error| object_store::Error::Generic {
            store: "HTTP client",
            source: error.without_url().into(),
        })?;
        Ok(HttpClient::new(Service(HttpClient::new(client))))
    }
}

/// The client that options describe. `object_store`'s own client follows redirects, and has no option not to.
fn client(options: &ClientOptions) -> reqwest::Result<reqwest::Client> {
    let option = |key| options.get_config_value(&key);
    let is_on =
        |key| option(key).is_some_and(|value| ["1", "true", "on", "yes", "y"].contains(&value.as_str()));
    // "10 seconds", or "1s" where `object_store` asks for an instance's credentials.
    let connect = option(ClientConfigKey::ConnectTimeout).unwrap_or_default();
    let digits = connect.split(|letter: char| !letter.is_ascii_digit()).next().unwrap_or_default();
    let connect = digits.parse().map_or(CONNECT_DEADLINE, Duration::from_secs);
    let mut builder = client_builder(connect)
        .user_agent(concat!("driftless/", env!("CARGO_PKG_VERSION")))
        .https_only(!is_on(ClientConfigKey::AllowHttp))
        .tls_danger_accept_invalid_certs(is_on(ClientConfigKey::AllowInvalidCertificates))
        .http1_only()
        .dns_resolver(Shuffled)
        // The length of an answer is that of the object.
        .no_gzip()
        .no_brotli()
        .no_zstd()
        .no_deflate();
    if let Some(url) = option(ClientConfigKey::ProxyUrl) {
        let excludes = option(ClientConfigKey::ProxyExcludes).and_then(|hosts| NoProxy::from_string(&hosts));
        builder = builder.proxy(Proxy::all(url)?.no_proxy(excludes));
    }
    if let Some(certificate) = option(ClientConfigKey::ProxyCaCertificate) {
        builder = builder.tls_certs_merge([Certificate::from_pem(certificate.as_bytes())?]);
    }
    builder.build()
}

/// The addresses of a host in random order. The system's order would have all connections go to one of them.
#[derive(Debug)]
struct Shuffled;

impl Resolve for Shuffled {
    fn resolve(&self, name: Name) -> Resolving {
        Box::pin(async move {
            let mut found: Vec<SocketAddr> = tokio::net::lookup_host((name.as_str(), 0)).await?.collect();
            found.shuffle(&mut rand::rng());
            Ok(Box::new(found.into_iter()) as Addrs)
        })
    }
}

#[derive(Debug)]
struct Service(HttpClient);

#[async_trait]
impl HttpService for Service {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let response = self.0.execute(request).await?;
        let status = response.status().as_u16();
        if status < 300 {
            return Ok(response);
        }
        let (parts, body) = response.into_parts();
        let document = read_document(body).await?;
        let refusal = Refusal::new(status, &parts.headers, &document);
        if refusal.is_an_answer() {
            return Ok(HttpResponse::from_parts(parts, document.into()));
        }
        Err(HttpError::new(HttpErrorKind::Unknown, refusal))
    }
}

async fn read_document(body: HttpResponseBody) -> Result<Bytes, HttpError> {
    let mut document = Vec::new();
    let mut stream = body.bytes_stream();
    while let Some(bytes) = stream.next().await {
        document.extend_from_slice(&bytes?);
        if document.len() > DOCUMENT_BYTES_MAX {
            document.truncate(DOCUMENT_BYTES_MAX);
            break;
        }
    }
    Ok(document.into())
}

/// A status of 300 or above, and what the server says to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Refusal {
    status: u16,
    code: String,
    message: String,
}

impl Refusal {
    fn new(status: u16, headers: &HeaderMap, document: &[u8]) -> Self {
        let document = String::from_utf8_lossy(document);
        let header = headers.get("x-ms-error-code").and_then(|code| code.to_str().ok());
        let code = header.map(str::to_owned).or_else(|| element(&document, "Code")).unwrap_or_default();
        let message = match status {
            300..400 => {
                let place = headers.get("location").and_then(|place| place.to_str().ok());
                let place = place.map_or_else(|| "another endpoint".to_owned(), redact);
                format!("a redirect to {place}, which is not followed; set the store's endpoint and region")
            }
            _ => element(&document, "Message").unwrap_or_default(),
        };
        Self { status, code, message }
    }

    /// Whether `object_store` knows what this means.
    fn is_an_answer(&self) -> bool {
        match self.status {
            401 | 403 | 412 => true,
            // Without its bucket no object is anywhere, which is not what "no such object" means to a caller.
            404 => !matches!(self.code.as_str(), "NoSuchBucket" | "ContainerNotFound"),
            // Amazon answers so when two conditional puts meet, and nothing says that either has succeeded.
            409 => self.code == "BlobAlreadyExists",
            _ => false,
        }
    }

    /// Whether the same request may be answered otherwise a moment later.
    pub(super) fn is_transient(&self) -> bool {
        let busy = ["ConditionalRequestConflict", "OperationAborted", "RequestTimeout", "SlowDown"];
        matches!(self.status, 408 | 429 | 500 | 502..=599) || busy.contains(&self.code.as_str())
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HTTP status {}", self.status)?;
        for text in [&self.code, &self.message].into_iter().filter(|text| !text.is_empty()) {
            write!(f, ", {text}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Refusal {}

/// The text of the first `<name>` in an error document. Nothing else of a document is shown: some repeat what
/// was signed.
pub(super) fn element(document: &str, name: &str) -> Option<String> {
    let (_, rest) = document.split_once(&format!("<{name}>"))?;
    let (text, _) = rest.split_once("</")?;
    let line = text.split(['\r', '\n']).next().unwrap_or_default();
    Some(line.chars().take(MESSAGE_CHARS_MAX).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(status: u16, document: &str) -> Refusal {
        Refusal::new(status, &HeaderMap::new(), document.as_bytes())
    }

    #[test]
    fn code_and_message_are_read_and_nothing_else() {
        let said = "<Error><Code>SignatureDoesNotMatch</Code><Message>No match</Message><StringToSign>SECRET</StringToSign></Error>";
        assert_eq!(refusal(400, said).to_string(), "HTTP status 400, SignatureDoesNotMatch, No match");
        assert_eq!(refusal(400, "<Code>torn").to_string(), "HTTP status 400");
        assert_eq!(refusal(502, "\u{feff}not XML").to_string(), "HTTP status 502");
        let azure = "<Error><Message>Busy.\nRequestId:7</Message></Error>";
        assert_eq!(refusal(503, azure).to_string(), "HTTP status 503, Busy.");
    }

    #[test]
    fn only_what_may_change_is_asked_again() {
        for (status, code, transient, answer) in [
            (400, "BadDigest", false, false),
            (400, "RequestTimeout", true, false),
            (403, "AccessDenied", false, true),
            (404, "NoSuchKey", false, true),
            (404, "NoSuchBucket", false, false),
            (409, "ConditionalRequestConflict", true, false),
            (409, "BlobAlreadyExists", false, true),
            (409, "ContainerBeingDeleted", false, false),
            (412, "PreconditionFailed", false, true),
            (416, "InvalidRange", false, false),
            (429, "", true, false),
            (500, "InternalError", true, false),
            (501, "NotImplemented", false, false),
            (503, "SlowDown", true, false),
        ] {
            let refusal = refusal(status, &format!("<Code>{code}</Code>"));
            assert_eq!((refusal.is_transient(), refusal.is_an_answer()), (transient, answer), "{refusal}");
        }
    }
}
