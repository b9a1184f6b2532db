//! Keys of one session each, which the gateway's token makes, and which are kept nowhere.

use std::fmt::Write as _;
use std::time::{SystemTime, UNIX_EPOCH};

/// What the token is derived for here. Other words are keys of another kind.
const CONTEXT: &str = "driftless 2026-11-29 keys of single sessions of a gateway";

/// Makes keys, `SESSION.EXPIRY.MAC`, and knows its own. The expiry is in seconds since 1970.
pub(crate) struct KeyMaker([u8; 32]);

impl KeyMaker {
    pub(crate) fn new(token: &str) -> Self {
        KeyMaker(blake3::derive_key(CONTEXT, token.as_bytes()))
    }

    /// The key of a session until a time.
    pub(crate) fn make(&self, session: &str, expiry: u64) -> String {
        let mut key = format!("{session}.{expiry}");
        let mac = self.mac(&key);
        // A `String` takes all that is written.
        let _ = write!(key, ".{mac}");
        key
    }

    /// The session of a key and its expiry; none for what was not made by this token.
    pub(super) fn read<'a>(&self, key: &'a str) -> Option<(&'a str, u64)> {
        let (claim, mac) = key.rsplit_once('.')?;
        // Hashes compare in constant time.
        if blake3::Hash::from_hex(mac).ok()? != self.mac(claim) {
            return None;
        }
        let (session, expiry) = claim.rsplit_once('.')?;
        Some((session, expiry.parse().ok()?))
    }

    fn mac(&self, claim: &str) -> blake3::Hash {
        blake3::keyed_hash(&self.0, claim.as_bytes())
    }
}

/// Seconds since 1970, by this host's clock.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_says_what_it_was_made_for_and_no_other() {
        let maker = KeyMaker::new("secret");
        for session in ["task-1", "a.b", "a.1.2"] {
            assert_eq!(maker.read(&maker.make(session, 70)), Some((session, 70)));
        }
        let key = maker.make("task-1", 70);
        let tampered = [
            key.replace("task-1", "task-2"),
            key.replace(".70.", ".71."),
            key.replace(".70.", ".070."),
            key[..key.len() - 1].to_owned(),
            format!("{key}0"),
            key.rsplit_once('.').expect("a mac").0.to_owned(),
        ];
        for other in tampered.iter().map(String::as_str).chain(["", ".", "..", "secret"]) {
            assert_eq!(maker.read(other), None, "{other}");
        }
        assert_eq!(KeyMaker::new("other").read(&key), None);
    }
}
