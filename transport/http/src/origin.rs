//! Whether a request was meant for the server that it reached.

use std::net::IpAddr;

use axum::http::uri::Authority;
use axum::http::{HeaderMap, header};

/// Whether a request names this server as what it is. A page from elsewhere may have a browser ask under another
/// name, or with an origin of its own. Without a token only loopback has a name here; behind one, a proxy's name will do.
/// A request without a name is no browser's: probes of HTTP/1.0 send none.
#[must_use]
pub fn is_ours(headers: &HeaderMap, is_open: bool) -> bool {
    if !headers.contains_key(header::HOST) {
        return !headers.contains_key(header::ORIGIN);
    }
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let Some(host) = text(header::HOST).and_then(|host| host.parse::<Authority>().ok()) else { return false };
    let name = host.host().trim_start_matches('[').trim_end_matches(']').trim_end_matches('.');
    let name = name.to_ascii_lowercase();
    // A name of this kind is always loopback (RFC 6761), and an address is no name that a name server could turn over.
    let is_loopback = name == "localhost"
        || name.ends_with(".localhost")
        || name.parse().is_ok_and(|ip: IpAddr| ip.to_canonical().is_loopback() || ip.is_unspecified());
    let is_own = |origin: &str| origin.split_once("://").is_some_and(|(_, place)| place == host.as_str());
    let is_same = !headers.contains_key(header::ORIGIN) || text(header::ORIGIN).is_some_and(is_own);
    (is_loopback || !is_open) && is_same
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn only_names_of_loopback_are_ours_without_a_token() {
        let ask = |host: Option<&str>, origin: Option<&str>, is_open| {
            let mut headers = HeaderMap::new();
            let pairs = [(header::HOST, host), (header::ORIGIN, origin)];
            for (name, value) in pairs.into_iter().filter_map(|(name, value)| Some((name, value?))) {
                headers.insert(name, HeaderValue::from_str(value).unwrap());
            }
            is_ours(&headers, is_open)
        };
        for host in [
            "localhost:7430",
            "127.0.0.1",
            "[::1]:8080",
            "LOCALHOST",
            "localhost.",
            "a.localhost:1",
            "0.0.0.0:7431",
            "[::ffff:127.0.0.1]:1",
        ] {
            assert!(ask(Some(host), None, true), "{host}");
        }
        for host in ["evil.example", "127.0.0.1.evil.example", "10.0.0.1:7430", "evillocalhost", "a b"] {
            assert!(!ask(Some(host), None, true), "{host}");
        }
        assert!(ask(None, None, true) && !ask(None, Some("http://localhost:1"), true));
        assert!(ask(Some("runs.internal"), None, false));
        for is_open in [true, false] {
            assert!(ask(Some("localhost:1"), Some("http://localhost:1"), is_open));
            assert!(!ask(Some("localhost:1"), Some("http://localhost:2"), is_open));
            assert!(!ask(Some("localhost:1"), Some("null"), is_open));
        }
    }
}
