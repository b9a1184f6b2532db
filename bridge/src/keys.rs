//! The keys that engines ask for.

use std::fmt;

use reqwest::header::HeaderValue;

use crate::error::{Error, Result};

/// The two keys an engine can ask for; neither is ever shown, by `Debug` or by an error.
///
/// SGLang's rule: with `--admin-api-key` the weight and lifecycle calls want the admin key and refuse the API
/// key; without it they want the API key, if there is one. [`Client`](crate::sglang::Client) follows it.
#[derive(Clone, Default)]
pub struct Keys {
    api: Option<HeaderValue>,
    admin: Option<HeaderValue>,
}

impl Keys {
    /// Keys as the caller found them, in its environment for example. Surrounding white space is dropped.
    ///
    /// # Errors
    /// [`Error::Key`] when a key is empty or cannot be sent in a header.
    pub fn new(api: Option<&str>, admin: Option<&str>) -> Result<Self> {
        Ok(Self {
            api: api.map(|key| bearer("api", key)).transpose()?,
            admin: admin.map(|key| bearer("admin", key)).transpose()?,
        })
    }

    /// Header of the calls that everyone with the API key may make.
    #[must_use]
    pub fn normal(&self) -> Option<&HeaderValue> {
        self.api.as_ref()
    }

    /// Header of the weight and lifecycle calls.
    #[must_use]
    pub fn control(&self) -> Option<&HeaderValue> {
        self.admin.as_ref().or(self.api.as_ref())
    }
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = |key: &Option<HeaderValue>| if key.is_some() { "set" } else { "not set" };
        f.debug_struct("Keys").field("api", &state(&self.api)).field("admin", &state(&self.admin)).finish()
    }
}

fn bearer(which: &'static str, key: &str) -> Result<HeaderValue> {
    let key = key.trim();
    if key.is_empty() {
        return Err(Error::Key { which, reason: "it is empty".into() });
    }
    let mut value = HeaderValue::from_str(&format!("Bearer {key}")).map_err(|_| Error::Key {
        which,
        reason: "it holds characters that an HTTP header cannot carry".into(),
    })?;
    value.set_sensitive(true);
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_never_shown() {
        let keys = Keys::new(Some("secret-one"), Some("secret-two\n")).unwrap();
        let shown = format!("{keys:?} {:?}", keys.control());
        assert!(!shown.contains("secret"), "{shown}");
        let error = Keys::new(Some("secret\u{7f}three"), None).unwrap_err();
        assert!(!format!("{error} {error:?}").contains("secret"));
    }

    #[test]
    fn the_admin_key_goes_first_on_control_calls() {
        let both = Keys::new(Some("a"), Some("b")).unwrap();
        assert_eq!(both.normal().unwrap(), "Bearer a");
        assert_eq!(both.control().unwrap(), "Bearer b");
        let one = Keys::new(Some("a"), None).unwrap();
        assert_eq!(one.control().unwrap(), "Bearer a");
    }
}
