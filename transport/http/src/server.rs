//! A server's threads, and its token.

use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

use axum::extract::Request;
use axum::http::{StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Json, Response};
use tokio::net::TcpListener;
use tokio::runtime::{self, Handle, Runtime};

use crate::error::{Error, Result};
use crate::listen::admit;
use crate::origin::is_ours;

/// How long requests under way may hold up the end of the server.
const SHUTDOWN_DEADLINE: Duration = Duration::from_secs(5);

/// A running server, which has threads of its own. Dropping it ends the server and all that it does.
#[derive(Debug)]
pub struct Server {
    addr: SocketAddr,
    /// There until this is dropped.
    runtime: Option<Runtime>,
}

/// How many threads a server has.
#[derive(Clone, Copy, Debug)]
pub struct Threads {
    /// Those that send and receive.
    pub io: usize,
    /// Most that may wait for a disk, or for anything else that blocks.
    pub blocking: usize,
}

impl Server {
    /// Listens at `addr`, where port 0 takes a free one, and runs what `serving` makes of the listener until
    /// the server is dropped. `name` is that of its threads.
    ///
    /// # Errors
    ///
    /// [`Error::Listen`] if the address or the threads cannot be had; those of `serving`.
    pub fn start<F, E>(
        name: &str,
        addr: SocketAddr,
        threads: Threads,
        serving: impl FnOnce(TcpListener, &Handle) -> Result<F, E>,
    ) -> Result<Self, E>
    where
        F: Future<Output = ()> + Send + 'static,
        E: From<Error>,
    {
        let listen = |source| Error::Listen { addr, source };
        let mut builder = runtime::Builder::new_multi_thread();
        builder.worker_threads(threads.io).max_blocking_threads(threads.blocking).thread_name(name);
        let runtime = builder.enable_io().enable_time().build().map_err(listen)?;
        let listener = runtime.block_on(TcpListener::bind(addr)).map_err(listen)?;
        let addr = listener.local_addr().map_err(listen)?;
        runtime.spawn(serving(listener, runtime.handle())?);
        Ok(Self { addr, runtime: Some(runtime) })
    }

    /// The address it listens on, with the port that the system picked if port 0 was asked for.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let Some(runtime) = self.runtime.take() else { return };
        // On a thread of its own: the caller's may be one of a runtime, which may not wait.
        let end = move || runtime.shutdown_timeout(SHUTDOWN_DEADLINE);
        if let Ok(ended) = thread::Builder::new().name("server-end".into()).spawn(end) {
            // A panic there has been printed.
            let _ = ended.join();
        }
    }
}

/// What a caller has to bring; nothing, if there is no token.
#[derive(Clone)]
pub struct Token(Option<blake3::Hash>);

impl Token {
    /// What a caller brings as `Authorization: Bearer <token>`.
    #[must_use]
    pub fn new(token: Option<String>) -> Self {
        Self(token.map(|token| blake3::hash(format!("Bearer {token}").as_bytes())))
    }

    /// Answers 401 to a request without the token. Where none is asked for, a page from elsewhere may still have a browser
    /// ask: it names another host, or says where it is from, and is answered with 403.
    pub async fn check(self, request: Request, next: Next) -> Response {
        if self.0.is_none() && !is_ours(request.headers(), true) {
            let why = "the Host or the Origin is not this server's: ask for 127.0.0.1 or localhost, or give it a token";
            return refuse(StatusCode::FORBIDDEN, "forbidden", why);
        }
        let given = request.headers().get(header::AUTHORIZATION).map(|value| blake3::hash(value.as_bytes()));
        // Hashes of equal length compare in constant time.
        if self.0.is_some() && given != self.0 {
            return refuse(StatusCode::UNAUTHORIZED, "unauthorized", "missing or wrong bearer token");
        }
        admit(request, next).await
    }
}

/// Refuses to listen beyond loopback addresses without a token; `name` names the server.
///
/// # Errors
///
/// [`Error::BadSetting`] for an address other than loopback without a token, or an empty token.
pub fn check_exposure(name: &'static str, addr: SocketAddr, token: Option<&str>) -> Result<()> {
    let refuse =
        |expected: &str, found: String| Err(Error::BadSetting { name, expected: expected.into(), found });
    match token {
        None if !addr.ip().is_loopback() => {
            refuse("a loopback address, or a token for all others", addr.to_string())
        }
        Some("") => refuse("a token that is not empty", "an empty one".into()),
        _ => Ok(()),
    }
}

/// An answer that says no: `{"error": {"kind": …, "message": …}}`. `kind` is a stable name, `message` is for people.
pub fn refuse(status: StatusCode, kind: &str, message: impl AsRef<str>) -> Response {
    let error = serde_json::json!({ "kind": kind, "message": message.as_ref() });
    (status, Json(serde_json::json!({ "error": error }))).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_is_served_without_a_token() {
        let check = |addr: &str, token| check_exposure("address", addr.parse().unwrap(), token);
        check("127.0.0.1:0", None).unwrap();
        check("[::1]:0", None).unwrap();
        check("0.0.0.0:0", Some("secret")).unwrap();
        for (addr, token) in [("0.0.0.0:0", None), ("10.0.0.1:80", None), ("127.0.0.1:0", Some(""))] {
            assert!(matches!(check(addr, token), Err(Error::BadSetting { .. })), "{addr}");
        }
    }
}
