//! Bindings to [UCX](https://openucx.org) (`libucp`), which is opened at run time: a program that has them
//! starts on a machine without UCX, and is told what to install when it wants to use it.
//!
//! `src/bindings.rs` is committed; `bindgen.sh` makes it anew, for which alone clang and UCX's headers are
//! needed. Nothing here is safe to call but [`open`]; the safe surface is `driftless_relay::fabric`.

use std::ffi::CStr;
use std::path::{Path, PathBuf};

#[allow(
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    unsafe_code,
    unreachable_pub,
    clippy::all,
    clippy::allow_attributes_without_reason,
    clippy::undocumented_unsafe_blocks,
    reason = "generated; the declarations are UCX's, and their documentation is in ucp.h"
)]
#[rustfmt::skip]
mod bindings;

pub use bindings::*;

/// The library's name: of every release since 1.0.
const LIBRARY: &str = "libucp.so.0";

/// The oldest release that is taken, major and minor number. 1.13 ends the process by an assertion
/// (`ucp_request.c:684`) when a peer dies while a connection over TCP to it is being made; UCX removed it in
/// 1.14.
pub const LEAST: (u32, u32) = (1, 14);

/// Why UCX cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The library is not there, or something that it needs is not.
    #[error(
        "cannot open `{library}`: install UCX {least} or newer ({SOURCES})",
        library = library.display(),
        least = least(),
    )]
    Missing {
        /// What was looked for.
        library: PathBuf,
        /// What the system's loader says.
        source: libloading::Error,
    },
    /// The library lacks a function that is needed.
    #[error("`{library}` is no UCX of {least} or newer", library = library.display(), least = least())]
    NotUcx {
        /// What was opened.
        library: PathBuf,
        /// The function that it lacks.
        source: libloading::Error,
    },
    /// The library is a release before [`LEAST`].
    #[error(
        "`{library}` is UCX {found}, which ends the process when a peer dies: install {least} or newer ({SOURCES})",
        library = library.display(),
        least = least(),
    )]
    TooOld {
        /// What was opened.
        library: PathBuf,
        /// What it says that it is, such as `1.13.1`.
        found: String,
    },
}

/// Where UCX is to be had, for errors.
const SOURCES: &str =
    "Debian 13, Ubuntu 24.04: libucx0; PyPI: libucx-cu13, whose lib directory goes into LD_LIBRARY_PATH";

fn least() -> String {
    format!("{}.{}", LEAST.0, LEAST.1)
}

/// Whether a release, such as `1.22.0`, is [`LEAST`] or newer.
fn is_new_enough(version: &str) -> bool {
    let mut numbers = version.split('.').map(|number| number.parse::<u32>().ok());
    matches!((numbers.next().flatten(), numbers.next().flatten()), (Some(major), Some(minor)) if (major, minor) >= LEAST)
}

/// Opens `libucp.so.0` as the system's loader finds it, or the file at `library`. It stays for as long as the
/// process runs: UCX hooks the allocation of memory, which nothing can undo.
///
/// # Errors
/// [`Error`], if there is none, or none that can be used, such as one before [`LEAST`].
pub fn open(library: Option<&Path>) -> Result<&'static Ucp, Error> {
    let path = library.unwrap_or(Path::new(LIBRARY));
    // SAFETY: the constructors of UCX's libraries have no precondition, and it is never unloaded. That this
    // is UCX, whose functions have the types of the bindings, is what its name promises, within a major
    // version; no test can show more than that for the releases it runs with.
    #[allow(unsafe_code, reason = "loads a foreign library")]
    let opened = unsafe { Ucp::new(path) };
    let ucp = match opened {
        Ok(ucp) => ucp,
        Err(source @ (libloading::Error::DlSym { .. } | libloading::Error::DlSymUnknown)) => {
            return Err(Error::NotUcx { library: path.to_path_buf(), source });
        }
        Err(source) => return Err(Error::Missing { library: path.to_path_buf(), source }),
    };
    let found = version(&ucp);
    if !is_new_enough(&found) {
        // The memory of UCX's hooks stays in use.
        Box::leak(Box::new(ucp));
        return Err(Error::TooOld { library: path.to_path_buf(), found });
    }
    Ok(Box::leak(Box::new(ucp)))
}

/// What the library says that it is, such as `1.22.0`.
#[must_use]
pub fn version(ucp: &Ucp) -> String {
    // SAFETY: it returns a constant string that ends with 0.
    #[allow(unsafe_code, reason = "foreign call")]
    let text = unsafe { CStr::from_ptr(ucp.ucp_get_version_string()) };
    text.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_an_error_that_says_what_to_install() {
        let missing = Path::new("/nonexistent/libucp.so.0");
        let Err(error @ Error::Missing { .. }) = open(Some(missing)) else { panic!("it is not there") };
        let text = error.to_string();
        assert!(text.contains("libucx0") && text.contains("/nonexistent/libucp.so.0"), "{text}");
    }

    #[test]
    fn another_library_is_not_taken_for_ucx() {
        let Err(Error::NotUcx { source, .. }) = open(Some(Path::new("libc.so.6"))) else { panic!("not UCX") };
        assert!(source.to_string().contains("uc"), "{source}");
    }

    #[test]
    fn releases_before_the_least_are_refused() {
        for good in ["1.14.0", "1.14.1", "1.22.0", "2.0.0", "1.14"] {
            assert!(is_new_enough(good), "{good}");
        }
        for bad in ["1.13.1", "1.9.0", "0.99.0", "1", "", "one.two", "1.x.3"] {
            assert!(!is_new_enough(bad), "{bad}");
        }
        let error = Error::TooOld { library: PathBuf::from("/lib/libucp.so.0"), found: "1.13.1".to_owned() };
        let text = error.to_string();
        assert!(text.contains("/lib/libucp.so.0` is UCX 1.13.1") && text.contains("1.14"), "{text}");
    }

    /// Which shows something where there is an old one.
    #[test]
    fn what_is_opened_is_new_enough() {
        match open(None) {
            Ok(ucp) => assert!(is_new_enough(&version(ucp)), "{}", version(ucp)),
            Err(error) => println!("skipped: {error}"),
        }
    }

    /// The layouts are compared with those that clang found when the bindings were made, at compile time;
    /// here with sizes that the 64-bit C ABI gives the declarations in ucp.h, by hand.
    #[test]
    fn structures_have_the_layout_of_the_c_declarations() {
        assert_eq!(size_of::<ucp_params_t>(), 10 * 8);
        assert_eq!(size_of::<ucp_worker_params_t>(), 16 + 128 + 7 * 8);
        assert_eq!(size_of::<ucp_ep_params_t>(), 13 * 8);
        assert_eq!(size_of::<ucp_mem_map_params_t>(), 5 * 8);
        assert_eq!(size_of::<ucp_request_param_t>(), 9 * 8);
        assert_eq!(size_of::<ucs_status_t>(), 1);
        assert_eq!(UCS_ERR_CANCELED, -16);
        assert_eq!((UCP_FEATURE_TAG, UCP_FEATURE_RMA), (1, 2));
    }
}
