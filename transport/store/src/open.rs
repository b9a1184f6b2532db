//! From a URL to a store: [`open`].

use std::path::PathBuf;
use std::sync::Arc;

use crate::disk::Disk;
use crate::error::{Error, Result};
use crate::memory::Memory;
use crate::store::{Store, redact};

/// Opens the store that `url` names, as [`open_with`] without settings.
///
/// # Errors
/// As [`open_with`].
pub fn open(url: &str) -> Result<Arc<dyn Store>> {
    open_with(url, &[])
}

/// Opens the store that `url` names: `file:///absolute/dir`, a plain path, or `memory:` (a new, empty one).
/// With the feature `object` also `s3://bucket/prefix`, `gs://bucket/prefix` and `az://container/prefix`,
/// each with `?endpoint=`, `&region=` or `&account=` where that is needed.
///
/// `settings` are names and values as object stores take them from the environment (`AWS_ACCESS_KEY_ID`,
/// `AZURE_STORAGE_ACCOUNT_KEY`, `GOOGLE_SERVICE_ACCOUNT` and so on). Other names are ignored. What the URL
/// says wins. Secrets belong there: a URL that has one is refused. They are in no log, no error and no
/// `Debug` of the store.
///
/// A directory is made when something is first put into it; a bucket has to exist.
///
/// # Errors
/// [`Error::Unsupported`] for a scheme that this build does not have; [`Error::BadText`], [`Error::BadKey`]
/// or [`Error::BadSetting`] for a URL or settings that describe no store. No request is made yet.
pub fn open_with(url: &str, settings: &[(String, String)]) -> Result<Arc<dyn Store>> {
    if url == "memory:" {
        return Ok(Arc::new(Memory::new()));
    }
    if let Some(directory) = directory(url) {
        return Ok(Arc::new(Disk::new(directory)));
    }
    let unsupported = |what: String, hint: &str| Err(Error::Unsupported { what, hint: hint.to_owned() });
    match url.split_once("://") {
        None if looks_like_url(url) => {
            let hint = "a URL has two, as in s3://bucket/prefix; a path that begins like that is ./…";
            unsupported("a store whose URL has one slash behind its colon".to_owned(), hint)
        }
        Some(("file", _)) => {
            let hint = "a file URL has three slashes: file:///absolute/dir";
            unsupported(format!("the store `{}`", redact(url)), hint)
        }
        Some((scheme, _)) => open_object_store(scheme, url, settings),
        None => {
            let expected = "file:///absolute/dir, a plain path, or memory:";
            Err(Error::BadText { what: "store URL", text: url.to_owned(), expected })
        }
    }
}

/// The directory that `url` names, if it names one.
#[must_use]
pub fn directory(url: &str) -> Option<PathBuf> {
    let path = match url.split_once("://") {
        None if url != "memory:" && !looks_like_url(url) => url,
        Some(("file", path)) if path.starts_with('/') => path,
        _ => return None,
    };
    // Not of an empty path.
    std::path::absolute(path).ok()
}

/// Whether a text without `://` begins as only a mistyped URL does. It may have a password in it.
fn looks_like_url(text: &str) -> bool {
    let scheme = text.split_once(":/").map_or("", |(scheme, _)| scheme);
    scheme.len() > 1 && scheme.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit())
}

#[cfg(feature = "object")]
fn open_object_store(_: &str, url: &str, settings: &[(String, String)]) -> Result<Arc<dyn Store>> {
    Ok(Arc::new(crate::object::open(url, settings)?))
}

#[cfg(not(feature = "object"))]
fn open_object_store(scheme: &str, _: &str, _: &[(String, String)]) -> Result<Arc<dyn Store>> {
    let hint = match scheme {
        "s3" | "gs" | "az" => "build with the feature `object`, or use file:///absolute/dir",
        _ => "use file:///absolute/dir, a plain path, or memory:",
    };
    Err(Error::Unsupported { what: format!("a store with the scheme `{scheme}`"), hint: hint.to_owned() })
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
    fn a_secret_in_a_refused_url_is_not_shown() {
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
