//! Stores of publications: the [`Store`] trait, the built-in [`Memory`] and [`Disk`], object stores, and
//! [`open`].
//!
//! A store offers atomic puts, create-if-absent, ranged reads and listings. Every implementation passes the
//! suite in `conformance`. `probe` tests at a publisher's start whether a store honours create-if-absent.

#[cfg(feature = "object")]
mod bucket;
mod disk;
mod memory;
mod probe;

use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

pub use disk::Disk;
pub use memory::Memory;
pub use probe::probe_conditional_put;

use crate::manifest::Object;
use crate::{Error, Key, Result};

/// Who is told how many bytes have come.
pub type Arrived = Arc<dyn Fn(u64) + Send + Sync>;

/// Nobody is told.
pub(crate) fn nobody() -> Arrived {
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

/// A persistent, one-sided place for objects. All calls block; all are safe from many threads and processes at once.
///
/// Implementations pass the suite in `conformance` (feature of that name), bare and under the wrappers of
/// [`wrap`](crate::wrap).
pub trait Store: fmt::Debug + fmt::Display + Send + Sync + 'static {
    /// Stores `bytes` under `key`. A reader sees the old object or the new one, never a part; on return the object is
    /// durable. After an error the object may be there or not.
    ///
    /// # Errors
    /// [`Error::AlreadyExists`] for [`PutMode::Create`] of a taken key: of many concurrent creates exactly one succeeds.
    /// Otherwise whatever the medium reports.
    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> Result<()>;

    /// The object's bytes, or those of `range`. A range is cut at the object's end.
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::RangeOutside`] if the range starts behind the end.
    fn get(&self, key: &Key, range: Option<Range<u64>>) -> Result<Vec<u8>>;

    /// A range of an object whose digest the caller knows and checks: the one way in which bytes may come from somewhere that
    /// nobody vouches for, such as a cache.
    ///
    /// `arrived` is told of bytes as they come, by a store that knows; those of a try that fails are told again.
    ///
    /// # Errors
    /// As [`Store::get`].
    fn get_known(&self, object: &Object, range: Range<u64>, arrived: &Arrived) -> Result<Vec<u8>> {
        let _ = arrived;
        self.get(&object.key, Some(range))
    }

    /// Hears that what [`Store::get_known`] gave of `object` was not what its digest says. True if the same call may now give
    /// something else, because whoever gave that is not asked again.
    fn doubt(&self, object: &Object) -> bool {
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

/// Opens the store that `url` names, as [`open_with`] without settings.
///
/// # Errors
/// As [`open_with`].
pub fn open(url: &str) -> Result<Arc<dyn Store>> {
    open_with(url, &[])
}

/// Opens the store that `url` names: `file:///absolute/dir`, a plain path, or `memory:` (a new, empty one). With the feature
/// `object` also `s3://bucket/prefix`, `gs://bucket/prefix` and `az://container/prefix`, each with `?endpoint=`, `&region=`
/// or `&account=` where that is needed.
///
/// `settings` are names and values as object stores take them from the environment (`AWS_ACCESS_KEY_ID`,
/// `AZURE_STORAGE_ACCOUNT_KEY`, `GOOGLE_SERVICE_ACCOUNT` and so on); other names are ignored, and what the URL says wins.
/// Secrets belong there: a URL that has one is refused. They are in no log, no error and no `Debug` of the store.
///
/// A directory is made when something is first put into it; a bucket has to exist.
///
/// # Errors
/// [`Error::Unsupported`] for a scheme that this build does not have; [`Error::BadText`], [`Error::BadKey`] or
/// [`Error::BadSetting`] for a URL or settings that describe no store. No request is made yet.
pub fn open_with(url: &str, settings: &[(String, String)]) -> Result<Arc<dyn Store>> {
    if url == "memory:" {
        return Ok(Arc::new(Memory::new()));
    }
    let path = match url.split_once("://") {
        None => url,
        Some(("file", path)) if path.starts_with('/') => path,
        Some(("file", _)) => {
            return Err(Error::Unsupported {
                what: format!("the store `{}`", redact(url)),
                hint: "a file URL has three slashes: file:///absolute/dir".to_owned(),
            });
        }
        Some((scheme, _)) => return open_bucket(scheme, url, settings),
    };
    if path.is_empty() {
        return Err(Error::BadText {
            what: "store URL",
            text: url.to_owned(),
            expected: "file:///absolute/dir, a plain path, or memory:",
        });
    }
    let path = std::path::absolute(Path::new(path)).map_err(|source| Error::io("resolve", path, source))?;
    Ok(Arc::new(Disk::new(path)))
}

/// A URL or an address as it may be shown: without user and password, and without what stands behind `?` or `#`. All of them can
/// hold a secret.
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

#[cfg(feature = "object")]
fn open_bucket(_: &str, url: &str, settings: &[(String, String)]) -> Result<Arc<dyn Store>> {
    Ok(Arc::new(bucket::open(url, settings)?))
}

#[cfg(not(feature = "object"))]
fn open_bucket(scheme: &str, _: &str, _: &[(String, String)]) -> Result<Arc<dyn Store>> {
    let hint = match scheme {
        "s3" | "gs" | "az" => "build with the feature `object`, or use file:///absolute/dir",
        _ => "use file:///absolute/dir, a plain path, or memory:",
    };
    Err(Error::Unsupported { what: format!("a store with the scheme `{scheme}`"), hint: hint.to_owned() })
}

/// The part of an object of `size` bytes that a get asks for.
fn clamp(key: &Key, range: Option<Range<u64>>, size: u64) -> Result<Range<u64>> {
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
    fn urls_name_stores() {
        assert_eq!(open("memory:").unwrap().to_string(), "memory:");
        assert_eq!(open("file:///srv/runs").unwrap().to_string(), "file:///srv/runs");
        assert!(open("some/dir").unwrap().to_string().starts_with("file:///"));
        for (url, hint) in [("ftp://x", "file:///"), ("file://x", "three")] {
            let Err(Error::Unsupported { hint: found, .. }) = open(url) else { panic!("{url}") };
            assert!(found.contains(hint), "{found}");
        }
        assert!(matches!(open(""), Err(Error::BadText { .. })));
    }

    #[test]
    fn what_may_be_a_secret_is_not_shown() {
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
        let error = open("file://user:hidden@host/store").unwrap_err().to_string();
        assert!(error.contains("host/store") && !error.contains("hidden"), "{error}");
    }

    #[cfg(not(feature = "object"))]
    #[test]
    fn a_light_build_says_what_it_lacks() {
        let Err(Error::Unsupported { hint, .. }) = open("s3://bucket/prefix") else { panic!() };
        assert!(hint.contains("feature `object`"), "{hint}");
    }
}
