//! Sessions of any name, under the gateway's token or a key of their own.

use super::key::KeyMaker;
use async_trait::async_trait;
use driftless::agent::message::{Answer, Ask, Converse, Refusal};

/// Letters that a session's name may have.
const NAME_MAX: usize = 128;
/// The session of clients that bring the token and no name.
const DEFAULT: &str = "default";

/// Lets clients with the token into a session of any name, and all clients where there is none. A key of one session opens
/// that one.
pub(super) struct Open<S> {
    sessions: S,
    token: Option<Token>,
    /// Seconds since 1970.
    clock: fn() -> u64,
}

/// The token's digest, and the maker of keys: digests of equal length compare in constant time.
struct Token {
    digest: blake3::Hash,
    maker: KeyMaker,
}

impl Token {
    fn is(&self, text: &str) -> bool {
        blake3::hash(text.as_bytes()) == self.digest
    }
}

impl<S: Converse> Open<S> {
    /// `sessions` begin with their first request, without a key. `clock` tells the seconds since 1970.
    pub(super) fn new(sessions: S, token: Option<String>, clock: fn() -> u64) -> Self {
        let made =
            |text: String| Token { digest: blake3::hash(text.as_bytes()), maker: KeyMaker::new(&text) };
        Self { sessions, token: token.map(made), clock }
    }

    /// The session's own name: neither the token is one nor a key, which clients without a name in the path come with.
    fn name<'a>(&self, session: &'a str) -> &'a str {
        match &self.token {
            Some(token) if token.is(session) => DEFAULT,
            Some(token) => token.maker.read(session).map_or(session, |(name, _)| name),
            None => session,
        }
    }

    /// Whether a key opens the session of a name now.
    fn lets_in(&self, name: &str, key: Option<&str>) -> bool {
        let Some(token) = &self.token else { return true };
        key.is_some_and(|key| {
            let made = token.maker.read(key);
            token.is(key) || made.is_some_and(|(session, expiry)| session == name && (self.clock)() < expiry)
        })
    }
}

/// Whether a session may have this name.
pub(crate) fn is_name(text: &str) -> bool {
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

    /// A client that has a key of one session alone asks there, and does not take away what was said.
    async fn close(&self, session: &str, key: Option<&str>) -> Result<(), Refusal> {
        let is_owner = self.token.as_ref().is_none_or(|token| key.is_some_and(|key| token.is(key)));
        if !is_owner {
            return Err(Refusal::Unknown("expected the gateway's token, which alone closes sessions".into()));
        }
        self.sessions.close(self.name(session), None).await
    }

    fn check(&self) -> Result<(), Refusal> {
        self.sessions.check()
    }

    fn opens(&self, session: &str, key: Option<&str>) -> bool {
        let name = self.name(session);
        self.lets_in(name, key) && is_name(name) && self.sessions.opens(name, None)
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
        let open = Open::new(Opened::default(), Some("secret".to_owned()), || 0);
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
        assert!(Open::new(Opened::default(), None, || 0).opens("any", Some("whatever")));
    }

    #[test]
    fn key_of_a_session_opens_that_one_until_it_expires() {
        let at = |clock| Open::new(Opened::default(), Some("secret".to_owned()), clock);
        let key = KeyMaker::new("secret").make("task.1", 100);
        let before = at(|| 99);
        assert!(before.opens("task.1", Some(&key)) && before.opens(&key, Some(&key)));
        assert_eq!(
            *before.sessions.0.lock().expect("no panic"),
            ["task.1", "task.1"],
            "the key is in no name"
        );
        let others = ["task", "task.1.100", "task.2", DEFAULT, "secret"];
        assert!(others.iter().all(|other| !before.opens(other, Some(&key))));
        assert!(!before.opens("task.1", Some(&key.replace(".100.", ".200."))), "another expiry");
        assert!(!before.opens("task.1", Some(&KeyMaker::new("other").make("task.1", 100))), "another token");
        assert!(!before.opens(&key, None) && !before.opens(&key, Some("other")));
        // A clock that jumps is believed, in either direction.
        for late in [at(|| 100), at(|| u64::MAX)] {
            assert!(!late.opens("task.1", Some(&key)) && !late.opens(&key, Some(&key)));
            assert!(late.opens("task.1", Some("secret")), "the token does not expire");
        }
        assert!(at(|| 0).opens("task.1", Some(&key)));
    }
}
