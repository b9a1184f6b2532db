//! The [`Store`] trait, and what its calls take and give.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use crate::digest::ContentDigest;
use crate::error::{Error, Result};
use crate::key::Key;

/// Called with the number of bytes that have arrived since the call before.
pub type OnBytes = Arc<dyn Fn(u64) + Send + Sync>;

/// An [`OnBytes`] that does nothing.
#[must_use]
pub fn no_progress() -> OnBytes {
    Arc::new(|_| ())
}

/// What a put does when the key is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PutMode {
    /// Replace the object, atomically.
    Overwrite,
    /// Leave the object alone and return [`Error::AlreadyExists`].
    Create,
}

/// An object whose content is known: what the document that names it says of it. It never changes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Object {
    /// Its key, from the root of the store.
    pub key: Key,
    /// Its size in bytes.
    pub size: u64,
    /// The digest of all its bytes.
    pub blake3: ContentDigest,
}

/// One object, as listed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Entry {
    /// Its key.
    pub key: Key,
    /// Its size in bytes.
    pub size: u64,
    /// When it was last put, by the store's own clock; `None` if the store cannot tell.
    pub modified: Option<SystemTime>,
}

impl Entry {
    /// An entry with these fields.
    #[must_use]
    pub fn new(key: Key, size: u64, modified: Option<SystemTime>) -> Self {
        Self { key, size, modified }
    }
}

/// A persistent, one-sided place for objects. All calls block; all are safe from many threads and processes
/// at once.
///
/// Implementations pass the suite in `conformance` (feature of that name), bare and under the wrappers of
/// [`wrap`](crate::wrap).
pub trait Store: fmt::Debug + fmt::Display + Send + Sync + 'static {
    /// Stores `bytes` under `key`. A reader sees the old object or the new one, never a part; on return the
    /// object is durable. After an error the object may be there or not.
    ///
    /// # Errors
    /// [`Error::AlreadyExists`] for [`PutMode::Create`] of a taken key: of many concurrent creates exactly
    /// one succeeds. Otherwise whatever the medium reports.
    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> Result<()>;

    /// The object's bytes, or those of `range`. A range is cut at the object's end.
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::RangeOutside`] if the range starts behind the end.
    fn get(&self, key: &Key, range: Option<Range<u64>>) -> Result<Vec<u8>>;

    /// A range of an object whose digest the caller checks. It is the one call that a cache of others may
    /// answer.
    ///
    /// `arrived` is called as bytes arrive, by stores that know; those of a try that fails count again.
    ///
    /// # Errors
    /// As [`Store::get`].
    fn get_cached(&self, object: &Object, range: Range<u64>, arrived: &OnBytes) -> Result<Vec<u8>> {
        let _ = arrived;
        self.get(&object.key, Some(range))
    }

    /// Reports that what [`Store::get_cached`] gave of `object` does not have its digest. True if the same
    /// call may now give other bytes, because the cache that gave these is skipped.
    fn report_corrupt(&self, object: &Object) -> bool {
        let _ = object;
        false
    }

    /// Size and date of the object.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    fn head(&self, key: &Key) -> Result<Entry>;

    /// All objects whose key lies under `prefix/`, at any depth, in the order of their keys.
    ///
    /// # Errors
    /// Whatever the medium reports; a prefix with nothing under it is an empty list.
    fn list(&self, prefix: &Key) -> Result<Vec<Entry>>;

    /// Removes the object. Removing one that is not there succeeds.
    ///
    /// # Errors
    /// Whatever the medium reports.
    fn delete(&self, key: &Key) -> Result<()>;
}

/// A URL or an address as it may be shown: without user and password, and without what stands behind `?` or
/// `#`. All of them can hold a secret.
#[must_use]
pub fn redact(url: &str) -> String {
    let (scheme, rest) = match url.split_once("://") {
        Some((scheme, rest)) => (format!("{scheme}://"), rest),
        None => (String::new(), url),
    };
    match rest.rsplit_once('@') {
        // Where a password ends and a query begins cannot be told.
        Some((user, _)) if user.contains(['?', '#']) => format!("{scheme}…"),
        Some((_, place)) => format!("{scheme}…@{}", without_query(place)),
        None => format!("{scheme}{}", without_query(rest)),
    }
}

fn without_query(text: &str) -> &str {
    text.split(['?', '#']).next().unwrap_or_default()
}

/// The part of an object of `size` bytes that a get asks for.
pub(crate) fn clamp(key: &Key, range: Option<Range<u64>>, size: u64) -> Result<Range<u64>> {
    let range = range.unwrap_or(0..size);
    if range.start > size {
        return Err(Error::RangeOutside { key: key.clone(), start: range.start, size });
    }
    Ok(range.start..range.end.clamp(range.start, size))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redact_hides_users_passwords_and_queries() {
        for (url, shown) in [
            ("http://user:hidden@host:1/path", "http://…@host:1/path"),
            ("http://user:hid?den@host:1", "http://…"),
            ("http://host:1/?key=hidden@hidden", "http://…"),
            ("user:hidden@host:1", "…@host:1"),
            ("https://bucket.host/key?X-Amz-Signature=hidden#hidden", "https://bucket.host/key"),
            ("file:///srv/store", "file:///srv/store"),
        ] {
            assert_eq!(redact(url), shown, "{url}");
        }
    }
}
