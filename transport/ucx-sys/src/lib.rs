//! Bindings to [UCX](https://openucx.org) (`libucp`), which is opened at run time: a program that has them starts on a machine
//! without UCX, and is told what to install when it wants to use it.
//!
//! `src/bindings.rs` is committed; `bindgen.sh` makes it anew, for which alone clang and UCX's headers are needed. Nothing here is
//! safe to call but [`open`]; the safe surface is `driftless_transport::fabric`.

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

/// Why UCX cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The library is not there, or something that it needs is not.
    #[error(
        "cannot open `{library}`: install UCX 1.13 or newer (Debian: libucx0; PyPI: libucx-cu13, whose lib directory goes into LD_LIBRARY_PATH)",
        library = library.display()
    )]
    Missing {
        /// What was looked for.
        library: PathBuf,
        /// What the system's loader says.
        source: libloading::Error,
    },
    /// The library lacks a function that is needed.
    #[error("`{library}` is no UCX of 1.13 or newer", library = library.display())]
    TooOld {
        /// What was opened.
        library: PathBuf,
        /// The function that it lacks.
        source: libloading::Error,
    },
}

/// Opens `libucp.so.0` as the system's loader finds it, or the file at `library`. It stays for as long as the process runs: UCX
/// hooks the allocation of memory, which nothing can undo.
///
/// # Errors
/// [`Error`], if there is none, or none that can be used.
pub fn open(library: Option<&Path>) -> Result<&'static Ucp, Error> {
    let path = library.unwrap_or(Path::new(LIBRARY));
    // SAFETY: the constructors of UCX's libraries have no precondition, and it is never unloaded. That this is UCX, whose functions have
    // the types of the bindings, is what its name promises, within a major version; no test can show more than that for the releases it runs with.
    #[allow(unsafe_code, reason = "loads a foreign library")]
    let opened = unsafe { Ucp::new(path) };
    match opened {
        Ok(ucp) => Ok(Box::leak(Box::new(ucp))),
        Err(source @ (libloading::Error::DlSym { .. } | libloading::Error::DlSymUnknown)) => {
            Err(Error::TooOld { library: path.to_path_buf(), source })
        }
        Err(source) => Err(Error::Missing { library: path.to_path_buf(), source }),
    }
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
        let Err(Error::TooOld { source, .. }) = open(Some(Path::new("libc.so.6"))) else { panic!("not UCX") };
        assert!(source.to_string().contains("uc"), "{source}");
    }

    /// The layouts are compared with those that clang found when the bindings were made, at compile time; here with sizes that the
    /// 64-bit C ABI gives the declarations in ucp.h, by hand.
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
