//! Classifies errors: what an error of the operating system means, whether a retry can help, whether bytes
//! were refused.

use std::io;
use std::path::Path;

use super::Error;
use crate::regular::NotRegular;

impl Error {
    /// Wraps an I/O error of the file system, keeping the path and telling apart what an operator treats differently.
    pub(crate) fn io(action: &'static str, path: impl AsRef<Path>, source: io::Error) -> Self {
        let path = path.as_ref().to_path_buf();
        if let Some(NotRegular(found)) = source.get_ref().and_then(|source| source.downcast_ref()) {
            return Self::NotAFile { path, found };
        }
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                Self::NoSpace { path, action, source }
            }
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                Self::PermissionDenied { path, action, source }
            }
            _ => Self::Io { path, action, source },
        }
    }

    /// True if the same call may succeed later without anybody changing its arguments.
    pub(crate) fn is_retryable(&self) -> bool {
        matches!(
            self,
            Self::Io { .. }
                | Self::NoSpace { .. }
                | Self::Injected { .. }
                | Self::Unreachable { .. }
                | Self::CommitUnknown { .. }
                | Self::Busy { .. }
                | Self::Collected { .. }
                | Self::Engine { .. }
                | Self::EngineTimeout { .. }
                | Self::LinkLost { .. }
                | Self::LinkTimeout { .. }
        )
    }

    /// True if bytes that came from a store are not what they must be, or not signed by who must; nothing of them was used.
    pub(crate) fn is_refusal(&self) -> bool {
        matches!(
            self,
            Self::Corrupt { .. }
                | Self::Parse { .. }
                | Self::DigestMismatch { .. }
                | Self::TensorMismatch { .. }
                | Self::Codec { .. }
                | Self::Unsigned { .. }
                | Self::BadSignature { .. }
        )
    }

    /// True if the object asked for is not there.
    pub(crate) fn is_not_found(&self) -> bool {
        matches!(self, Self::NotFound { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn io_errors_are_told_apart_and_keep_the_path() {
        let full = Error::io("write", "/data/x", io::Error::from_raw_os_error(28));
        assert!(matches!(&full, Error::NoSpace { path, .. } if path == Path::new("/data/x")), "{full:?}");
        let denied = Error::io("open", "/data/x", io::Error::from_raw_os_error(13));
        assert!(matches!(denied, Error::PermissionDenied { .. }));
        let read_only = Error::io("open", "/data/x", io::Error::from_raw_os_error(30));
        assert!(matches!(read_only, Error::PermissionDenied { .. }));
        let other = Error::io("open", "/data/x", io::Error::from_raw_os_error(5));
        assert!(matches!(other, Error::Io { .. }));
        assert_eq!(full.to_string(), "no space left for `/data/x` while trying to write");
    }
}
