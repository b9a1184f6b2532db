//! What can go wrong on a device.

/// Why the codec cannot work on a device, or what it refused there.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A library of CUDA is not on this machine.
    #[error(
        "no {library} on this machine (asked the dynamic loader for {searched}): install {package}, or add its folder to LD_LIBRARY_PATH"
    )]
    NoLibrary {
        /// Its name.
        library: &'static str,
        /// What brings it.
        package: &'static str,
        /// The file names tried, in order.
        searched: String,
    },
    /// The driver refused something.
    #[error("CUDA: {what}: {why}")]
    Driver {
        /// What was asked of it.
        what: String,
        /// Its answer.
        why: String,
    },
    /// The kernels did not compile: a runtime compiler too old for the device, or a bug.
    #[error("the codec's kernels do not compile for {architecture}: {log}")]
    Compile {
        /// The device's architecture.
        architecture: String,
        /// What the compiler says.
        log: String,
    },
    /// Memory of a tensor does not begin at a multiple of 16 bytes, which kernels read at once.
    #[error("{what} lies at address {address:#x}, expected a multiple of 16: copy it to memory of its own")]
    Misaligned {
        /// Which tensor.
        what: &'static str,
        /// Where it lies.
        address: u64,
    },
    /// A tensor lies on another device than the codec works on.
    #[error("{what} lies on device {found}, the codec works on device {expected}")]
    OtherDevice {
        /// Which tensor.
        what: &'static str,
        /// The codec's device.
        expected: usize,
        /// The tensor's.
        found: usize,
    },
    /// A slice begins inside of a 32-bit word of its tensor, of which digests are made.
    #[error("the slice begins at byte {first_byte} of its tensor, expected a multiple of 4")]
    OddSlice {
        /// Where it begins.
        first_byte: u64,
    },
    /// What the codec itself refuses, wherever it runs.
    #[error(transparent)]
    Codec(#[from] crate::error::Error),
}

/// Result of the codec on a device.
pub type Result<T> = std::result::Result<T, Error>;
