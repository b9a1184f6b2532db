//! Which tokens of a stream have versions that are known before its end.
//!
//! A piece of a stream has the label that the engine had when it sent it. Its tokens may be of the version before, whose
//! label is still on its way, or of the one behind, whose label is not set yet. While no version behind the engine's can
//! exist, and the request began with its label, there is one version that they can be of.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// The newest version that there can be.
#[derive(Debug, Default)]
pub(super) struct Settled(Mutex<Option<String>>);

impl Settled {
    fn label(&self) -> MutexGuard<'_, Option<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// This is the newest. With `None`, there may be one behind any that is known.
    pub(super) fn set(&self, newest: Option<&str>) {
        *self.label() = newest.map(str::to_owned);
    }

    /// Whether no version is behind the one of this label.
    pub(super) fn is_newest(&self, label: &str) -> bool {
        self.label().as_deref() == Some(label)
    }
}

/// Follows one request, which began when its engine had this label.
pub(super) struct Versions<'a> {
    pub(super) settled: &'a Settled,
    pub(super) began: Option<&'a str>,
    /// Whether the version of each token was known so far.
    pub(super) known: bool,
}

impl Versions<'_> {
    /// Whether the tokens that come now, with this label, are of the version with that label, as all before them.
    pub(super) fn know(&mut self, label: &str) -> bool {
        self.known &= self.began == Some(label) && self.settled.is_newest(label);
        self.known
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn versions<'a>(settled: &'a Settled, began: Option<&'a str>) -> Versions<'a> {
        Versions { settled, began, known: true }
    }

    #[test]
    fn version_is_known_until_another_may_come() {
        let settled = Settled::default();
        assert!(!versions(&settled, Some("a")).know("a"), "nothing was said");
        settled.set(Some("a"));
        assert!(!versions(&settled, None).know("a"), "it may have begun with another");
        let mut request = versions(&settled, Some("a"));
        assert!(request.know("a") && request.know("a"));
        settled.set(None);
        assert!(!request.know("a"), "the next version may have drawn it");
        settled.set(Some("b"));
        assert!(!request.know("b"), "the version before may have drawn it");
        settled.set(Some("a"));
        assert!(!request.know("a"), "tokens before it are not known");
        settled.set(Some("b"));
        assert!(!versions(&settled, Some("a")).know("a"), "an engine that is behind may come to it");
    }
}
