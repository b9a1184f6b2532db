//! One engine's HTTP connection: a deadline on every call and a bound on every reply. Keys are never shown.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use driftless_http::client_builder;
use driftless_store::redact;
use driftless_transport::activate::Limit;
use reqwest::header::{AUTHORIZATION, CONNECTION};
use reqwest::{Method, Url};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::error::{Error, Result};
use crate::keys::Keys;
use crate::tls::Ca;

/// How long an unused connection is kept. The engine's HTTP server closes it after 5 s, and a call sent on it
/// just then would be lost.
const IDLE: Duration = Duration::from_secs(2);

/// How often a limit is looked at during a call: it may become shorter.
const TICK: Duration = Duration::from_millis(50);

/// Longest part of a foreign body that goes into an error.
const EXCERPT_CHARS: usize = 600;

/// Who may make a call.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Level {
    /// Generation and information.
    Normal,
    /// Weights and lifecycle.
    Control,
}

/// A request to be sent: where, by whom, with what, for how long at most.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call<'a> {
    pub(crate) method: &'a str,
    pub(crate) path: &'a str,
    pub(crate) level: Level,
    pub(crate) body: Option<&'a Value>,
    pub(crate) deadline: Duration,
    /// Whether its connection ends behind the reply.
    closes: bool,
}

impl<'a> Call<'a> {
    pub(crate) fn get(path: &'a str, level: Level, deadline: Duration) -> Self {
        Self { method: "GET", path, level, body: None, deadline, closes: false }
    }

    pub(crate) fn post(path: &'a str, level: Level, body: Option<&'a Value>, deadline: Duration) -> Self {
        Self { method: "POST", path, level, body, deadline, closes: false }
    }

    /// The call on a connection of its own. Behind a reply that an exception makes, uvicorn closes the connection without
    /// saying so; the next call on it would be lost.
    pub(crate) fn closing(self) -> Self {
        Self { closes: true, ..self }
    }
}

#[derive(Deserialize)]
struct Status {
    status: String,
}

/// A whole reply.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) body: Vec<u8>,
}

/// What a connection is made with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Link<'a> {
    pub(crate) keys: &'a Keys,
    /// Who vouches for the engine; those that the system trusts, if `None`.
    pub(crate) ca: Option<&'a Ca>,
    /// How long it may take to be made.
    pub(crate) connect: Duration,
    /// Bound on one reply.
    pub(crate) reply_bytes_max: usize,
}

/// A connection to one engine.
#[derive(Debug, Clone)]
pub(crate) struct Connection {
    http: reqwest::Client,
    base: Url,
    /// The base without its trailing slash: how the engine is named.
    pub(crate) engine: String,
    keys: Keys,
    pub(crate) reply_bytes_max: usize,
    /// Ends every call, whatever its own deadline.
    limit: Option<Limit>,
}

impl Connection {
    pub(crate) fn new(address: &str, link: Link<'_>) -> Result<Self> {
        let (base, keys, reply_bytes_max) = (parse(address)?, link.keys.clone(), link.reply_bytes_max);
        let mut client = client_builder(link.connect).pool_idle_timeout(IDLE);
        if let Some(ca) = link.ca {
            client = client.tls_certs_only(ca.certificates());
        }
        let http = client.build().map_err(Error::set_up("the HTTP client"))?;
        let engine = base.as_str().trim_end_matches('/').to_owned();
        Ok(Self { http, base, engine, keys, reply_bytes_max, limit: None })
    }

    /// The same connection, whose calls all end when nothing is left of `limit`.
    pub(crate) fn limited(&self, limit: &Limit) -> Self {
        Self { limit: Some(limit.clone()), ..self.clone() }
    }

    /// The port that calls go to.
    pub(crate) fn port(&self) -> Option<u16> {
        self.base.port_or_known_default()
    }

    /// Sends a call and reads the whole reply, whatever its status.
    pub(crate) async fn send(&self, call: Call<'_>) -> Result<Reply> {
        let began = Instant::now();
        let sent = self.in_time(call, self.exchange(call)).await;
        let (status, ms) =
            (sent.as_ref().ok().map(|reply| reply.status), began.elapsed().as_secs_f64() * 1e3);
        tracing::debug!(engine = self.engine, call = call.path, status, ms, "call");
        sent
    }

    /// What an exchange comes to within the call's deadline, and what is left of the limit.
    pub(crate) async fn in_time<T>(
        &self,
        call: Call<'_>,
        exchange: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let (engine, name) = self.names(call);
        let exchange = tokio::time::timeout(call.deadline, exchange);
        let exchanged = match &self.limit {
            None => exchange.await,
            Some(limit) => tokio::select! {
                biased;
                () = reached(limit) => return Err(Error::GivenUp { engine, call: name }),
                exchanged = exchange => exchanged,
            },
        };
        exchanged.map_err(|_| Error::Deadline { engine, call: name, after: call.deadline })?
    }

    /// Sends a call that succeeds with 200 and a JSON body.
    pub(crate) async fn json<T: DeserializeOwned>(&self, call: Call<'_>) -> Result<T> {
        let reply = self.send(call).await?;
        if reply.status != 200 {
            return Err(self.status_error(call, &reply));
        }
        self.decode(call, &reply.body)
    }

    /// Sends a call whose status says all: what it means, by `meanings`.
    pub(crate) async fn status<T: Copy>(&self, call: Call<'_>, meanings: &[(u16, T)]) -> Result<T> {
        let reply = self.send(call).await?;
        let meaning = meanings.iter().find(|(status, _)| *status == reply.status);
        meaning.map(|(_, meaning)| *meaning).ok_or_else(|| self.status_error(call, &reply))
    }

    /// Sends a call that succeeds with 200, whatever the body.
    pub(crate) async fn ok(&self, call: Call<'_>) -> Result<()> {
        self.status(call, &[(200, ())]).await
    }

    /// Sends a call that answers `{"status": …}`. Another word is a proxy's, or an engine's that did nothing.
    pub(crate) async fn status_is(&self, call: Call<'_>, word: &str) -> Result<()> {
        let Status { status } = self.json(call).await?;
        if status == word {
            return Ok(());
        }
        Err(self.malformed(call, &format!("status {word}"), &excerpt(status.as_bytes())))
    }

    /// Reads a body as the call's reply.
    pub(crate) fn decode<T: DeserializeOwned>(&self, call: Call<'_>, body: &[u8]) -> Result<T> {
        serde_json::from_slice(body).map_err(|error| self.malformed(call, &error.to_string(), &excerpt(body)))
    }

    pub(crate) fn malformed(&self, call: Call<'_>, expected: &str, found: &str) -> Error {
        let (engine, call) = self.names(call);
        Error::Reply { engine, call, expected: expected.to_owned(), found: found.to_owned() }
    }

    pub(crate) fn status_error(&self, call: Call<'_>, reply: &Reply) -> Error {
        let (engine, call) = self.names(call);
        Error::Status { engine, call, status: reply.status, body: excerpt(&reply.body) }
    }

    /// Engine and call, as errors name them.
    fn names(&self, call: Call<'_>) -> (String, String) {
        (self.engine.clone(), format!("{} {}", call.method, call.path))
    }

    async fn exchange(&self, call: Call<'_>) -> Result<Reply> {
        let reply = self.begin(call).await?;
        self.rest(call, reply).await
    }

    /// Sends a call, and returns its reply once that begins.
    pub(crate) async fn begin(&self, call: Call<'_>) -> Result<reqwest::Response> {
        let mut sent = self.request(call)?.send().await;
        // The connection may be one kept from an engine that has been started again since. What only asks may
        // be asked twice.
        if call.method == "GET" && sent.as_ref().is_err_and(|error| !error.is_connect()) {
            sent = self.request(call)?.send().await;
        }
        sent.map_err(|error| self.lost(call, error))
    }

    /// Reads the rest of a reply.
    pub(crate) async fn rest(&self, call: Call<'_>, mut reply: reqwest::Response) -> Result<Reply> {
        let status = reply.status().as_u16();
        let limit = self.reply_bytes_max;
        if reply.content_length().is_some_and(|length| length > limit as u64) {
            return Err(self.too_large(call));
        }
        let mut body = Vec::new();
        while let Some(chunk) = reply.chunk().await.map_err(|error| self.lost(call, error))? {
            if body.len() + chunk.len() > limit {
                return Err(self.too_large(call));
            }
            body.extend_from_slice(&chunk);
        }
        Ok(Reply { status, body })
    }

    pub(crate) fn lost(&self, call: Call<'_>, error: reqwest::Error) -> Error {
        let (engine, call) = self.names(call);
        Error::Unreachable { engine, call, source: error.into() }
    }

    pub(crate) fn too_large(&self, call: Call<'_>) -> Error {
        let (engine, call) = self.names(call);
        Error::ReplyTooLarge { engine, call, limit: self.reply_bytes_max }
    }

    fn request(&self, call: Call<'_>) -> Result<reqwest::RequestBuilder> {
        let url = self.base.join(call.path.trim_start_matches('/'));
        let url = url.map_err(|error| Error::Address { url: call.path.into(), reason: error.to_string() })?;
        let method = if call.method == "POST" { Method::POST } else { Method::GET };
        let key = match call.level {
            Level::Normal => self.keys.normal(),
            Level::Control => self.keys.control(),
        };
        let mut request = self.http.request(method, url);
        if let Some(key) = key {
            request = request.header(AUTHORIZATION, key.clone());
        }
        if call.closes {
            request = request.header(CONNECTION, "close");
        }
        if let Some(body) = call.body {
            request = request.json(body);
        }
        Ok(request)
    }
}

/// Waits until nothing is left of a limit.
async fn reached(limit: &Limit) {
    loop {
        let left = limit.left();
        if left.is_zero() {
            return;
        }
        tokio::time::sleep(left.min(TICK)).await;
    }
}

/// Whether what is sent to the address can be read on its way to another host.
pub(crate) fn is_in_clear(address: &str) -> Result<bool> {
    let url = parse(address)?;
    let host = url.host_str().unwrap_or_default().trim_matches(['[', ']']);
    let is_loopback = host.parse::<IpAddr>().map_or(host == "localhost", |ip| ip.is_loopback());
    Ok(url.scheme() == "http" && !is_loopback)
}

/// `host:port`, `http://host:port` or `https://host`, with a path or without; it ends with a slash, for calls to be joined.
fn parse(address: &str) -> Result<Url> {
    let fail = |reason: &str| Error::Address { url: redact(address), reason: reason.into() };
    let text = if address.contains("://") { address.to_owned() } else { format!("http://{address}") };
    let mut url = Url::parse(&text).map_err(|error| fail(&error.to_string()))?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(fail("it is neither http nor https"));
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(fail("keys do not belong into an address"));
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err(fail("it has a query or a fragment"));
    }
    // Port 80 is what an address without a port means; no engine listens there by default, so it is a
    // forgotten port.
    let authority = text.split('/').nth(2).unwrap_or_default();
    if url.scheme() == "http" && url.port().is_none() && !authority.ends_with(":80") {
        return Err(fail("it has no port"));
    }
    let path = format!("{}/", url.path().trim_end_matches('/'));
    url.set_path(&path);
    Ok(url)
}

/// The readable beginning of a foreign body, in one line and without what a terminal would obey.
pub(crate) fn excerpt(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(body).replace(char::is_control, " ");
    let text = text.trim();
    match text.char_indices().nth(EXCERPT_CHARS) {
        Some((end, _)) => format!("{}… ({} bytes)", &text[..end], body.len()),
        None if text.is_empty() => "an empty body".to_owned(),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::net::TcpListener;

    use super::*;

    fn connection(address: &str) -> Result<Connection> {
        let (keys, connect) = (Keys::default(), Duration::from_secs(60));
        Connection::new(address, Link { keys: &keys, ca: None, connect, reply_bytes_max: 9 })
    }

    #[test]
    fn addresses() {
        let engine = |address: &str| connection(address).map(|connection| connection.engine);
        assert_eq!(engine("127.0.0.1:30000").unwrap(), "http://127.0.0.1:30000");
        assert_eq!(engine("http://[::1]:30000/").unwrap(), "http://[::1]:30000");
        assert_eq!(engine("http://a:80/v1").unwrap(), "http://a/v1");
        assert_eq!(engine("https://a/base/v1//").unwrap(), "https://a/base/v1");
        assert_eq!(engine("https://a:1").unwrap(), "https://a:1");
        for bad in [
            "",
            "localhost",
            "http://a/b:80",
            "ftp://a:1",
            "http://u:p@a:1",
            "https://u@a",
            "a:99999",
            "http://a:1?x=1",
            "https://a#x",
        ] {
            assert!(matches!(engine(bad), Err(Error::Address { .. })), "{bad:?}");
        }
        for secret in ["http://u:hidden@a:1", "u:hidden@a:1", "http://u:hid?den@a:1", "http://a:1?key=hidden"]
        {
            let error = engine(secret).unwrap_err().to_string();
            assert!(!error.contains("hid") && !error.contains("den"), "{error}");
        }
    }

    /// Answers the first request of each connection with 500, and closes at the next one, as a server does that has closed
    /// meanwhile.
    fn one_request_a_connection(listener: &TcpListener) -> std::io::Result<()> {
        for connection in listener.incoming() {
            let mut connection = connection?;
            let mut lines = BufReader::new(connection.try_clone()?).lines();
            while !lines.next().transpose()?.unwrap_or_default().is_empty() {}
            connection.write_all(b"HTTP/1.1 500 X\r\ncontent-length: 0\r\n\r\n")?;
            std::thread::spawn(move || drop((lines.next(), connection)));
        }
        Ok(())
    }

    #[test]
    fn call_on_its_own_connection_leaves_none_for_the_next() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        std::thread::spawn(move || one_request_a_connection(&listener));
        let minute = Duration::from_secs(60);
        let engine = connection(&address).unwrap();
        let call = Call::post("/x", Level::Normal, None, minute);
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let send = |call: Call<'_>| runtime.block_on(engine.send(call)).map(|reply| reply.status);
        for _ in 0..3 {
            assert_eq!(send(call.closing()).unwrap(), 500);
        }
        // Whether a connection is back in the pool when the next call starts is the runtime's affair, so this tries on.
        let met = (0..1000).find_map(|_| send(call).err());
        assert!(matches!(met, Some(Error::Unreachable { .. })), "the server does close: {met:?}");
    }

    #[test]
    fn is_in_clear_over_plain_http_beyond_this_host() {
        for (address, expected) in [
            ("a:1", true),
            ("http://10.0.0.1:30000/base", true),
            ("https://10.0.0.1", false),
            ("localhost:1", false),
            ("http://[::1]:1", false),
            ("127.8.0.1:1", false),
            ("localhost.example:1", true),
        ] {
            assert_eq!(is_in_clear(address).unwrap(), expected, "{address}");
        }
    }

    #[test]
    fn excerpts_are_cut_between_characters() {
        let long = "ä".repeat(2000);
        let cut = excerpt(long.as_bytes());
        assert!(cut.starts_with("ää") && cut.ends_with("(4000 bytes)"));
        assert_eq!(excerpt(b" \n"), "an empty body");
        assert_eq!(excerpt(&[0xff, b'x']), "\u{fffd}x");
        assert_eq!(excerpt(b"no\x1b[31m\nERROR of ours\x07"), "no [31m ERROR of ours");
    }
}
