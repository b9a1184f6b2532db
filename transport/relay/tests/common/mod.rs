//! UCX, where there is one.

use driftless_relay::Error;
use driftless_relay::fabric::ucx::{Ucx, UcxOptions};

/// Says so and gives none where there is no libucp, unless `DRIFTLESS_UCX_REQUIRED` names the release that is
/// to be there.
pub(crate) fn fabric(options: &UcxOptions) -> Option<Ucx> {
    match Ucx::open(options) {
        Ok(fabric) => {
            let required = std::env::var("DRIFTLESS_UCX_REQUIRED").unwrap_or_else(|_| fabric.version());
            assert!(required.starts_with(&fabric.version()), "{required}, not {}", fabric.version());
            Some(fabric)
        }
        Err(error @ Error::Library { .. }) if std::env::var_os("DRIFTLESS_UCX_REQUIRED").is_none() => {
            println!("skipped: {error}: {}", std::error::Error::source(&error).unwrap());
            None
        }
        Err(error) => panic!("{error:?}"),
    }
}
