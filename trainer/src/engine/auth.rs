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

impl Access {
    /// Whether a request may pass. Probes are always open, so that an orchestrator needs no key for them.
    pub(super) fn allows(&self, method: &Method, path: &str, authorization: Option<&str>) -> bool {
        let probe = ["/health", "/ready", "/metrics"].iter().any(|prefix| path.starts_with(prefix));
        if probe || method == Method::OPTIONS {
            return true;
        }
        let needed = match ADMIN.contains(&path) {
            true => self.admin_key.as_ref().or(self.api_key.as_ref()),
            false => self.api_key.as_ref(),
        };
        needed.is_none_or(|key| bearer(authorization).is_some_and(|found| same(found, key)))
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
        assert!(open.allows(&post, "/update_weights_from_disk", None));

        let api = access(Some("k"), None);
        assert!(!api.allows(&post, "/generate", None));
        assert!(!api.allows(&post, "/generate", Some("Bearer x")));
        assert!(api.allows(&post, "/generate", Some("bearer k")));
        assert!(api.allows(&post, "/pause_generation", Some("Bearer k")));
        assert!(api.allows(&get, "/health", None) && api.allows(&get, "/ready", None));

        let both = access(Some("k"), Some("a"));
        assert!(
            !both.allows(&post, "/pause_generation", Some("Bearer k")),
            "the admin key replaces the other"
        );
        assert!(both.allows(&post, "/pause_generation", Some("Bearer a")));
        assert!(!both.allows(&post, "/generate", Some("Bearer a")));

        let admin = access(None, Some("a"));
        assert!(admin.allows(&post, "/generate", None));
        assert!(!admin.allows(&post, "/flush_cache", None));
    }
}
