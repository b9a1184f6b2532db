//! The seam between a follower and whatever serves the weights.

use std::time::Duration;

use crate::checkpoint::Checkpoint;
use crate::error::BoxError;
use crate::manifest::Manifest;

/// What an engine has to serve.
#[derive(Clone, Copy, Debug)]
pub struct Target<'a> {
    /// The directory, verified against the manifest; its bytes stay as they are until the call returns.
    pub checkpoint: &'a Checkpoint,
    /// The version string to give to the engine: `<first 12 hex digits of the run id>:<version>`.
    pub label: &'a str,
    /// The version's manifest.
    pub manifest: &'a Manifest,
}

/// What an activation cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Activated {
    /// How long the engine did not generate.
    pub pause: Duration,
}

/// One inference engine, as a follower drives it: blocking calls from a thread of its own.
///
/// A call should end within a deadline of its own. The follower stops waiting after its deadline and records
/// a failure, but it does not overwrite the checkpoint before the call has returned.
pub trait Activate: Send {
    /// How the engine is named in status, acknowledgements and errors: its URL.
    fn name(&self) -> String;

    /// The version label that the engine serves now, `None` if it serves something that no follower gave it
    /// (it was restarted).
    ///
    /// # Errors
    ///
    /// Whatever keeps the engine from answering.
    fn serving(&mut self) -> Result<Option<String>, BoxError>;

    /// Makes the engine serve `target` and checks that it does: pause, load, verify, continue.
    ///
    /// # Errors
    ///
    /// Whatever went wrong. The engine may then serve anything or nothing; it is asked again and activated again.
    fn activate(&mut self, target: &Target<'_>) -> Result<Activated, BoxError>;
}
