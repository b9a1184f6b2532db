//! HTTP servers: a follower's interface ([`serve`]), and what every server of the workspace is made of.
//!
//! | File | Does |
//! |---|---|
//! | `follower` | serves a follower to coordinators and operators |
//! | [`listen`] | accepts connections, within limits |
//! | this one | the server's thread, and its token |

mod follower;
pub mod listen;

use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

use axum::extract::Request;
use axum::http::{StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Json, Response};
use serde::Serialize;
use tokio::runtime;
use tokio::sync::oneshot;

use crate::error::{Error, Result};
use listen::admit;

pub use follower::{ServeOptions, serve};

/// How long requests under way may hold up the end of the server.
const SHUTDOWN_DEADLINE: Duration = Duration::from_secs(5);

/// A running HTTP server. Dropping it ends the server.
#[derive(Debug)]
pub struct Server {
    addr: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Server {
    /// The address it listens on, with the port that the system picked if port 0 was asked for.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Runs `serving` on a thread of its own until the server is dropped.
    ///
    /// # Errors
    ///
    /// [`Error::Listen`] if the thread cannot be started.
    pub fn run(
        runtime: runtime::Runtime,
        addr: SocketAddr,
        name: &str,
        serving: impl Future<Output = ()> + Send + 'static,
    ) -> Result<Self> {
        let (stop, stopped) = oneshot::channel::<()>();
        let thread = thread::Builder::new().name(name.into()).spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    () = serving => {}
                    _ = stopped => {}
                }
            });
            runtime.shutdown_timeout(SHUTDOWN_DEADLINE);
        });
        let thread = thread.map_err(|source| Error::Listen { addr, source })?;
        Ok(Self { addr, stop: Some(stop), thread: Some(thread) })
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

    /// Answers 401 to a request without the token.
    pub async fn check(self, request: Request, next: Next) -> Response {
        let given = request.headers().get(header::AUTHORIZATION).map(|value| blake3::hash(value.as_bytes()));
        // Hashes of equal length compare in constant time.
        if self.0.is_some() && given != self.0 {
            let error = Body { kind: "unauthorized", message: "missing or wrong bearer token".into() };
            return (StatusCode::UNAUTHORIZED, Json(Failure { error })).into_response();
        }
        admit(request, next).await
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // A closed channel says the same.
        drop(self.stop.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the HTTP server's thread panicked");
        }
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

#[derive(Serialize)]
pub(crate) struct Failure {
    pub(crate) error: Body,
}

#[derive(Serialize)]
pub(crate) struct Body {
    pub(crate) kind: &'static str,
    pub(crate) message: String,
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
