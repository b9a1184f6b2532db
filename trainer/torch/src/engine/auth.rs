//! Who may call what, as SGLang's `utils/auth.py` decides it.

use axum::http::Method;

/// The two bearer keys of a server; an absent one leaves its routes open.
#[derive(Clone, Default)]
pub(super) struct Access {
    pub(super) api_key: Option<String>,
    pub(super) admin_key: Option<String>,
}

/// Routes that change weights or generation: the admin key guards them, where there is one.
const ADMIN: [&str; 9] = [
    "/abort_request",
    "/begin_weight_update",
    "/continue_generation",
    "/end_weight_update",
    "/flush_cache",
    "/pause_generation",
    "/update_weight_version",
    "/update_weights_from_disk",
    "/weights_checker",
];

/// What a request may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pass {
    /// Nothing: a key is missing or wrong.
    Refused,
    /// It is answered, and says nothing about the client.
    Probe,
    /// What it asks for: it has the key, or none is needed.
    Granted,
}

impl Access {
    /// What a request may do. Probes are always open, so that an orchestrator needs no key for them.
    pub(super) fn pass(&self, method: &Method, path: &str, authorization: Option<&str>) -> Pass {
        let probe = ["/health", "/ready", "/metrics"].iter().any(|prefix| path.starts_with(prefix));
        if probe || method == Method::OPTIONS {
            return Pass::Probe;
        }
        let needed = match ADMIN.contains(&path) {
            true => self.admin_key.as_ref().or(self.api_key.as_ref()),
            false => self.api_key.as_ref(),
        };
        match needed.is_none_or(|key| bearer(authorization).is_some_and(|found| same(found, key))) {
            true => Pass::Granted,
            false => Pass::Refused,
        }
    }
}

/// The token of an `Authorization: Bearer` header.
fn bearer(authorization: Option<&str>) -> Option<&str> {
    let (scheme, token) = authorization?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then_some(token)
}

/// Equality in a time that depends on the lengths only, so that a key cannot be guessed byte by byte.
fn same(a: &str, b: &str) -> bool {
    let differing = a.bytes().zip(b.bytes()).fold(0, |bits, (a, b)| bits | (a ^ b));
    a.len() == b.len() && differing == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(api: Option<&str>, admin: Option<&str>) -> Access {
        Access { api_key: api.map(str::to_owned), admin_key: admin.map(str::to_owned) }
    }

    #[test]
    fn levels_follow_sglang() {
        let (get, post) = (Method::GET, Method::POST);
        let open = access(None, None);
        assert_eq!(open.pass(&post, "/update_weights_from_disk", None), Pass::Granted);

        let api = access(Some("k"), None);
        assert_eq!(api.pass(&post, "/generate", None), Pass::Refused);
        assert_eq!(api.pass(&post, "/generate", Some("Bearer x")), Pass::Refused);
        assert_eq!(api.pass(&post, "/generate", Some("bearer k")), Pass::Granted);
        assert_eq!(api.pass(&post, "/pause_generation", Some("Bearer k")), Pass::Granted);
        assert_eq!(["/health", "/ready"].map(|path| api.pass(&get, path, None)), [Pass::Probe; 2]);

        let both = access(Some("k"), Some("a"));
        let replaced = both.pass(&post, "/pause_generation", Some("Bearer k"));
        assert_eq!(replaced, Pass::Refused, "the admin key replaces the other");
        assert_eq!(both.pass(&post, "/pause_generation", Some("Bearer a")), Pass::Granted);
        assert_eq!(both.pass(&post, "/generate", Some("Bearer a")), Pass::Refused);

        let admin = access(None, Some("a"));
        assert_eq!(admin.pass(&post, "/generate", None), Pass::Granted);
        assert_eq!(admin.pass(&post, "/flush_cache", None), Pass::Refused);
    }
}
