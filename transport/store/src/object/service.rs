//! The HTTP client under `object_store`, with typed refusals.
//!
//! The crate distinguishes what it acts on (not found, precondition failed) and turns everything else into
//! text. Whether a retry can help is decided here, where status and code are still values.

use std::fmt;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::StreamExt as _;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody,
    HttpService, ReqwestConnector,
};
use object_store::{ClientOptions, HeaderMap};

/// Error documents are a few hundred bytes; more of one is not read.
const DOCUMENT_BYTES_MAX: usize = 16 << 10;
/// A server's own words, cut to this many characters.
const MESSAGE_CHARS_MAX: usize = 200;

/// Makes clients whose refusals are [`Refusal`]s.
#[derive(Debug)]
pub(super) struct Connector;

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        // The only error is that there is a provider already, and any will do.
        let _ = rustls::crypto::ring::default_provider().install_default();
        Ok(HttpClient::new(Service(ReqwestConnector::default().connect(options)?)))
    }
}

#[derive(Debug)]
struct Service(HttpClient);

#[async_trait]
impl HttpService for Service {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let response = self.0.execute(request).await?;
        let status = response.status().as_u16();
        if status < 400 {
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

/// A status of 400 or above, and what the server says to it.
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
        Self { status, code, message: element(&document, "Message").unwrap_or_default() }
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
