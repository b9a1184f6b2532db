//! Who may call what, as SGLang's `utils/auth.py` decides it.

use axum::http::Method;

use driftless_bridge::Keys;

/// Routes that change weights or generation: the admin key guards them, where there is one.
const ADMIN: [&str; 15] = [
    "/abort_request",
    "/begin_weight_update",
    "/continue_generation",
    "/destroy_weights_update_group",
    "/end_weight_update",
    "/flush_cache",
    "/init_weights_update_group",
    "/pause_generation",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/update_weight_version",
    "/update_weights_from_disk",
    "/update_weights_from_distributed",
    "/update_weights_from_tensor",
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

/// What a request may do. Probes are always open, so that an orchestrator needs no key for them.
pub(super) fn pass(keys: &Keys, method: &Method, path: &str, authorization: Option<&[u8]>) -> Pass {
    let probe = ["/health", "/ready", "/metrics"].iter().any(|prefix| path.starts_with(prefix));
    if probe || method == Method::OPTIONS {
        return Pass::Probe;
    }
    let needed = if ADMIN.contains(&path) { keys.control() } else { keys.normal() };
    match needed.is_none_or(|key| authorization.is_some_and(|given| same(given, key.as_bytes()))) {
        true => Pass::Granted,
        false => Pass::Refused,
    }
}

/// Equality of two `Bearer` headers in a time that depends on their lengths only, so that a key cannot be guessed
/// byte by byte. The case of the scheme does not count.
fn same(given: &[u8], wanted: &[u8]) -> bool {
    const SCHEME: usize = "Bearer".len();
    if given.len() != wanted.len() || wanted.len() < SCHEME {
        return false;
    }
    let ((scheme, key), (other, wanted)) = (given.split_at(SCHEME), wanted.split_at(SCHEME));
    let differing = key.iter().zip(wanted).fold(0, |bits, (a, b)| bits | (a ^ b));
    scheme.eq_ignore_ascii_case(other) && differing == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_follow_sglang() {
        let (get, post) = (Method::GET, Method::POST);
        let pass = |(api, admin), method, path, given: Option<&str>| {
            pass(&Keys::new(api, admin).unwrap(), method, path, given.map(str::as_bytes))
        };
        assert_eq!(pass((None, None), &post, "/update_weights_from_disk", None), Pass::Granted);

        let api = (Some("k"), None);
        assert_eq!(pass(api, &post, "/generate", None), Pass::Refused);
        assert_eq!(pass(api, &post, "/generate", Some("Bearer x")), Pass::Refused);
        assert_eq!(pass(api, &post, "/generate", Some("Basic kk")), Pass::Refused);
        assert_eq!(pass(api, &post, "/generate", Some("bearer k")), Pass::Granted);
        assert_eq!(pass(api, &post, "/pause_generation", Some("Bearer k")), Pass::Granted);
        assert_eq!(["/health", "/ready"].map(|path| pass(api, &get, path, None)), [Pass::Probe; 2]);

        let both = (Some("k"), Some("a"));
        let replaced = pass(both, &post, "/pause_generation", Some("Bearer k"));
        assert_eq!(replaced, Pass::Refused, "the admin key replaces the other");
        assert_eq!(pass(both, &post, "/pause_generation", Some("Bearer a")), Pass::Granted);
        assert_eq!(pass(both, &post, "/generate", Some("Bearer a")), Pass::Refused);

        let admin = (None, Some("a"));
        assert_eq!(pass(admin, &post, "/generate", None), Pass::Granted);
        assert_eq!(pass(admin, &post, "/flush_cache", None), Pass::Refused);
    }
}
