//! Why an answer failed, told by one word everywhere.

use serde::{Deserialize, Serialize};

/// Why an answer failed: its `outcome` on the wire of hooks, in the log and in the metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "&'static str", from = "String")]
pub enum Failure {
    /// What it was made in died: an environment, a process, a service.
    Environment,
    /// Its time was up.
    Deadline,
    /// Its context was full.
    Context,
    /// An engine or the gateway refused what it asked for.
    Refused,
    /// What the policy wrote could not be read.
    Parser,
    /// Its hook has a bug.
    Hook,
    /// No reward could be given. A hook that makes answers does not say so.
    Reward,
}

impl Failure {
    /// All of them, in the order of their discriminants.
    pub const ALL: [Failure; 7] = [
        Failure::Environment,
        Failure::Deadline,
        Failure::Context,
        Failure::Refused,
        Failure::Parser,
        Failure::Hook,
        Failure::Reward,
    ];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Failure::Environment => "environment",
            Failure::Deadline => "deadline",
            Failure::Context => "context",
            Failure::Refused => "refused",
            Failure::Parser => "parser",
            Failure::Hook => "hook",
            Failure::Reward => "reward",
        }
    }

    /// The one of this name, if there is one.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|failure| failure.name() == name)
    }
}

impl From<Failure> for &'static str {
    fn from(failure: Failure) -> Self {
        failure.name()
    }
}

/// One that a later release has is read as a hook's.
impl From<String> for Failure {
    fn from(name: String) -> Self {
        Failure::named(&name).unwrap_or(Failure::Hook)
    }
}
