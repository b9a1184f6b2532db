//! Where a follower's versions come from: the trait [`Source`]. A run of ours is one; slime's directories are
//! another (crate `driftless-slime`).

use crate::error::Result;
use crate::gc::Ack;
use crate::ids::{RunId, Version};
use crate::replica::{Advanced, Replica};

/// What a follower asks its source for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asked {
    /// The loop's next poll. Where the poll before found nothing new, the version behind the replica's is the
    /// newest.
    Poll,
    /// The newest version there is.
    Newest,
    /// This version, whatever the newest one is.
    Version(Version),
}

/// What a source has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Newest {
    /// The newest version; `None` before the first.
    pub version: Option<Version>,
    /// The replica holds it, and nothing has to be done.
    pub is_reached: bool,
}

/// Where versions come from. A follower asks for the newest one, and has its replica moved there; both calls
/// block.
pub trait Source: Send {
    /// The run that the versions are of, where that is known apart from the replica.
    fn run_id(&self) -> Option<RunId>;

    /// The newest version. A source may pin itself to what the replica holds, and give an empty replica
    /// version 0.
    ///
    /// # Errors
    /// What the source reports; [`Error::NoSuchRun`](crate::Error::NoSuchRun) while there is nothing to
    /// follow.
    fn newest(&mut self, replica: &mut Replica, asked: Asked) -> Result<Newest>;

    /// Moves the replica to version `to`.
    ///
    /// # Errors
    /// As [`Replica::advance`]. Versions applied before the error stay applied.
    fn advance(&mut self, replica: &mut Replica, to: Version) -> Result<Advanced>;

    /// Hears what is on the host, after each move and each activation.
    fn acknowledge(&self, ack: Ack);
}
