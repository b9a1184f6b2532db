//! Sessions of any name, under the run's one key.

use async_trait::async_trait;
use driftless::agent::message::{Answer, Ask, Converse, Refusal};

/// Letters that a session's name may have.
const NAME_MAX: usize = 128;
/// The session of clients that bring the token and no name.
const DEFAULT: &str = "default";

/// Lets in whoever has the token, or anybody where there is none, to a session of any name.
pub(super) struct Open<S> {
    sessions: S,
    token: Option<Token>,
}

/// The token, and its digest: digests of equal length compare in constant time.
struct Token {
    text: String,
    digest: blake3::Hash,
}

impl<S: Converse> Open<S> {
    /// `sessions` begin with their first request, without a key.
    pub(super) fn new(sessions: S, token: Option<String>) -> Self {
        let digest = |text: String| Token { digest: blake3::hash(text.as_bytes()), text };
        Self { sessions, token: token.map(digest) }
    }

    /// The session's own name: the token is none.
    fn name<'a>(&self, session: &'a str) -> &'a str {
        if self.token.as_ref().is_some_and(|token| token.text == session) { DEFAULT } else { session }
    }
}

/// Whether a session may have this name.
fn is_name(text: &str) -> bool {
    let is_letter = |letter: u8| letter.is_ascii_alphanumeric() || b".-_".contains(&letter);
    !text.is_empty() && text.len() <= NAME_MAX && text.bytes().all(is_letter)
}

#[async_trait]
impl<S: Converse> Converse for Open<S> {
    async fn ask(&self, session: &str, ask: Ask) -> Result<Answer, Refusal> {
        self.sessions.ask(self.name(session), ask).await
    }

    async fn count(&self, session: &str, ask: Ask) -> Result<u64, Refusal> {
        self.sessions.count(self.name(session), ask).await
    }

    fn opens(&self, session: &str, key: Option<&str>) -> bool {
        let given = key.map(|key| blake3::hash(key.as_bytes()));
        let is_let_in = self.token.as_ref().is_none_or(|token| given == Some(token.digest));
        let name = self.name(session);
        is_let_in && is_name(name) && self.sessions.opens(name, None)
    }

    fn model(&self) -> &str {
        self.sessions.model()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    /// Opens all, and remembers what.
    #[derive(Default)]
    struct Opened(Mutex<Vec<String>>);

    #[async_trait]
    impl Converse for Opened {
        async fn ask(&self, _: &str, _: Ask) -> Result<Answer, Refusal> {
            Err(Refusal::Busy(String::new()))
        }

        async fn count(&self, _: &str, _: Ask) -> Result<u64, Refusal> {
            Ok(0)
        }

        fn opens(&self, session: &str, key: Option<&str>) -> bool {
            self.0.lock().expect("no panic").push(session.to_owned());
            key.is_none()
        }

        fn model(&self) -> &str {
            "none"
        }
    }

    #[test]
    fn sessions_are_open_to_those_who_have_the_token() {
        let open = Open::new(Opened::default(), Some("secret".to_owned()));
        assert!(open.opens("task-1", Some("secret")) && open.opens("secret", Some("secret")));
        for key in [None, Some("Secret"), Some("secret2"), Some("")] {
            assert!(!open.opens("task-2", key), "{key:?}");
        }
        let long = "a".repeat(NAME_MAX + 1);
        for odd in ["", "a/b", "a b", "é", "..\\", &long] {
            assert!(!open.opens(odd, Some("secret")), "{odd}");
        }
        assert_eq!(
            *open.sessions.0.lock().expect("no panic"),
            ["task-1", DEFAULT],
            "the token is in no name"
        );
        assert!(Open::new(Opened::default(), None).opens("any", Some("whatever")));
    }
}
