//! A small S3 server in this process that errs on command: bucket `bucket`, everything in memory, nothing
//! authenticated.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use tokio::runtime::Runtime;

/// Keys in one page of a listing.
const PAGE: usize = 2;

/// What goes wrong with one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Nothing.
    None,
    /// It has no effect and gets this status.
    Before(u16),
    /// It takes effect and gets this status.
    After(u16),
    /// It takes effect and gets no answer.
    Silence,
    /// It has no effect, and this status sends the client to the same path at [`Bucket::elsewhere`].
    Redirect(u16),
    /// It takes effect, and its answer takes so long.
    Late(Duration),
    /// The answer ends in the middle.
    Cut,
    /// The answer is longer than the range that it names.
    Longer,
    /// The object is another one from here on.
    Replaced,
}

/// What the server has and does.
#[derive(Debug, Default)]
pub struct Bucket {
    /// By key, each with its tag.
    pub objects: BTreeMap<String, (Bytes, u64)>,
    /// Uploads that were begun and neither completed nor aborted, by id; their parts by number.
    pub uploads: BTreeMap<String, BTreeMap<usize, Bytes>>,
    /// Requests so far, as `METHOD`, or `METHOD part` for one part of an upload.
    pub requests: Vec<String>,
    /// The next request of this kind meets this fault.
    pub faults: VecDeque<(&'static str, Fault)>,
    /// Takes conditions and ignores them.
    pub careless: bool,
    /// The host and port that redirects name.
    pub elsewhere: String,
    next: u64,
}

/// The server; it ends with this value.
#[derive(Debug)]
pub struct Server {
    /// Where it listens.
    pub addr: SocketAddr,
    /// What it has.
    pub bucket: Arc<Mutex<Bucket>>,
    _runtime: Runtime,
}

impl Server {
    /// Starts an empty one on a loopback port of the system's choice.
    #[must_use]
    pub fn start() -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let bucket = Arc::new(Mutex::new(Bucket::default()));
        let router = Router::new().fallback(answer).with_state(bucket.clone());
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let addr = listener.local_addr().unwrap();
        runtime.spawn(async move { axum::serve(listener, router).await });
        Self { addr, bucket, _runtime: runtime }
    }

    /// Looks at, or changes, what it has.
    pub fn with<T>(&self, f: impl FnOnce(&mut Bucket) -> T) -> T {
        f(&mut self.bucket.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

async fn answer(State(bucket): State<Arc<Mutex<Bucket>>>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let Ok(body) = axum::body::to_bytes(body, 1 << 30).await else { return refuse(400, "IncompleteBody") };
    let query: BTreeMap<String, String> =
        url::form_urlencoded::parse(parts.uri.query().unwrap_or_default().as_bytes()).into_owned().collect();
    let path = percent_encoding::percent_decode_str(parts.uri.path()).decode_utf8_lossy();
    let key = path.strip_prefix("/bucket").unwrap_or_default().trim_start_matches('/').to_owned();
    let kind = if query.contains_key("partNumber") { "PUT part" } else { parts.method.as_str() };
    let (fault, response) = {
        let mut bucket = bucket.lock().unwrap_or_else(PoisonError::into_inner);
        bucket.requests.push(kind.to_owned());
        let fault = bucket.faults.iter().position(|(of, _)| *of == kind);
        let fault = fault.and_then(|index| bucket.faults.remove(index)).map(|(_, fault)| fault);
        if let Some(Fault::Before(status)) = fault {
            return refuse(status, "Injected");
        }
        if let Some(Fault::Redirect(status)) = fault {
            let place = format!("http://{}{}", bucket.elsewhere, parts.uri);
            return (StatusCode::from_u16(status).unwrap(), [(header::LOCATION, place)]).into_response();
        }
        if let Some((bytes, tag)) =
            bucket.objects.get(&key).cloned().filter(|_| fault == Some(Fault::Replaced))
        {
            let other = bytes.iter().map(|byte| byte ^ 0xff).collect::<Vec<_>>();
            bucket.objects.insert(key.clone(), (other.into(), tag + 1000));
        }
        (fault, bucket.carry_out(&parts.method, &key, &query, &parts.headers, body))
    };
    match fault {
        Some(Fault::After(status)) => refuse(status, "Injected"),
        Some(Fault::Silence) => std::future::pending().await,
        Some(Fault::Late(time)) => {
            tokio::time::sleep(time).await;
            response
        }
        Some(Fault::Cut) => {
            let (parts, body) = response.into_parts();
            let bytes = axum::body::to_bytes(body, 1 << 30).await.unwrap();
            let half = bytes.slice(..bytes.len() / 2);
            let torn = futures_util::stream::iter([Ok(half), Err(std::io::Error::other("cut"))]);
            Response::from_parts(parts, Body::from_stream(torn))
        }
        Some(Fault::Longer) => {
            let (mut parts, body) = response.into_parts();
            parts.headers.remove(header::CONTENT_LENGTH);
            let bytes = axum::body::to_bytes(body, 1 << 30).await.unwrap();
            Response::from_parts(parts, Body::from(bytes.repeat(2)))
        }
        _ => response,
    }
}

impl Bucket {
    fn carry_out(
        &mut self,
        method: &Method,
        key: &str,
        query: &BTreeMap<String, String>,
        headers: &HeaderMap,
        body: Bytes,
    ) -> Response {
        let id = query.get("uploadId");
        match (method.as_str(), id) {
            ("GET", _) if key.is_empty() => self.list(query),
            ("PUT", Some(id)) => {
                let number = query.get("partNumber").and_then(|number| number.parse().ok());
                let Some(number) = number else { return refuse(400, "InvalidArgument") };
                let Some(parts) = self.uploads.get_mut(id) else { return refuse(404, "NoSuchUpload") };
                parts.insert(number, body);
                ([(header::ETAG, format!("\"{number}\""))], "").into_response()
            }
            ("PUT", None) => {
                let taken = headers.contains_key(header::IF_NONE_MATCH) && self.objects.contains_key(key);
                if taken && !self.careless {
                    return refuse(412, "PreconditionFailed");
                }
                self.store(key, body)
            }
            ("POST", None) => {
                self.next += 1;
                let id = format!("upload{}", self.next);
                self.uploads.insert(id.clone(), BTreeMap::new());
                format!(
                    "<InitiateMultipartUploadResult><UploadId>{id}</UploadId></InitiateMultipartUploadResult>"
                )
                .into_response()
            }
            ("POST", Some(id)) => {
                let Some(parts) = self.uploads.remove(id) else { return refuse(404, "NoSuchUpload") };
                let whole = parts.into_values().collect::<Vec<_>>().concat();
                self.store(key, whole.into());
                let tag = self.next;
                format!("<CompleteMultipartUploadResult><ETag>{tag}</ETag></CompleteMultipartUploadResult>")
                    .into_response()
            }
            ("DELETE", Some(id)) => {
                self.uploads.remove(id);
                StatusCode::NO_CONTENT.into_response()
            }
            ("DELETE", None) => {
                self.objects.remove(key);
                StatusCode::NO_CONTENT.into_response()
            }
            _ => self.get(key, headers),
        }
    }

    fn store(&mut self, key: &str, body: Bytes) -> Response {
        self.next += 1;
        self.objects.insert(key.to_owned(), (body, self.next));
        ([(header::ETAG, format!("\"{}\"", self.next))], "").into_response()
    }

    fn get(&self, key: &str, headers: &HeaderMap) -> Response {
        let Some((bytes, tag)) = self.objects.get(key) else { return refuse(404, "NoSuchKey") };
        let common = [
            (header::ETAG, format!("\"{tag}\"")),
            (header::LAST_MODIFIED, "Sat, 21 Nov 2026 13:00:00 GMT".to_owned()),
        ];
        let Some(range) = headers.get(header::RANGE) else { return (common, bytes.clone()).into_response() };
        let Some((start, end)) = range.to_str().ok().and_then(first_and_last) else {
            return refuse(400, "InvalidArgument");
        };
        if start >= bytes.len() || start > end {
            return refuse(416, "InvalidRange");
        }
        let end = bytes.len().min(end.saturating_add(1));
        let place = [(header::CONTENT_RANGE, format!("bytes {start}-{}/{}", end - 1, bytes.len()))];
        (StatusCode::PARTIAL_CONTENT, common, place, bytes.slice(start..end)).into_response()
    }

    fn list(&self, query: &BTreeMap<String, String>) -> Response {
        let after = query.get("continuation-token").cloned().unwrap_or_default();
        let prefix = query.get("prefix").cloned().unwrap_or_default();
        let mut found = self.objects.iter().filter(|(key, _)| **key > after && key.starts_with(&prefix));
        let mut xml = "<ListBucketResult>".to_owned();
        let mut last = String::new();
        for (key, (bytes, tag)) in found.by_ref().take(PAGE) {
            let size = bytes.len();
            xml += &format!(
                "<Contents><Key>{key}</Key><Size>{size}</Size><ETag>{tag}</ETag><LastModified>2026-11-21T13:00:00Z</LastModified></Contents>"
            );
            last = key.clone();
        }
        if found.next().is_some() {
            xml += &format!("<NextContinuationToken>{last}</NextContinuationToken>");
        }
        (xml + "</ListBucketResult>").into_response()
    }
}

fn refuse(status: u16, code: &str) -> Response {
    let said = format!("<Error><Code>{code}</Code><Message>said the fake</Message></Error>");
    (StatusCode::from_u16(status).unwrap(), said).into_response()
}

/// The first and the last byte that `bytes=0-99` asks for; the fake knows no other form.
fn first_and_last(range: &str) -> Option<(usize, usize)> {
    let (first, last) = range.strip_prefix("bytes=")?.split_once('-')?;
    Some((first.parse().ok()?, last.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::TcpStream;

    use super::*;

    #[test]
    fn odd_requests_are_answered() {
        let server = Server::start();
        server.with(|bucket| {
            bucket.objects.insert("k%zz".into(), (Bytes::from_static(b"0123456789"), 1));
            bucket.faults.push_back(("GET", Fault::Replaced));
        });
        let status = |method: &str, path: &str, header: &str| -> String {
            let mut peer = TcpStream::connect(server.addr).unwrap();
            let head = format!("{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{header}\r\n");
            peer.write_all(head.as_bytes()).unwrap();
            let mut answer = String::new();
            peer.read_to_string(&mut answer).unwrap();
            answer.split(' ').nth(1).unwrap_or_default().to_owned()
        };
        assert_eq!(status("GET", "/bucket/nothing", ""), "404", "to be replaced, and not there");
        assert_eq!(status("GET", "/bucket/k%25zz", "range: bytes=2-5\r\n"), "206");
        assert_eq!(status("GET", "/bucket/k%zz", "range: bytes=2-99\r\n"), "206", "no escape");
        for (range, expected) in [("2-", "400"), ("x-5", "400"), ("5-2", "416"), ("10-12", "416")] {
            let header = format!("range: bytes={range}\r\n");
            assert_eq!(status("GET", "/bucket/k%25zz", &header), expected, "{range}");
        }
        for query in ["uploadId=u", "uploadId=u&partNumber=x", "uploadId=u&partNumber=1"] {
            let path = format!("/bucket/k?{query}");
            let expected = if query.ends_with('1') { "404" } else { "400" };
            assert_eq!(status("PUT", &path, "content-length: 0\r\n"), expected, "{query}");
        }
        assert_eq!(status("GET", "/bucket/%", ""), "404");
    }
}
