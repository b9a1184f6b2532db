//! What happens in a run, as data with a clock.
//!
//! The loop tells an [`Observer`]. A [`Bus`] is one that never holds it up: it hands facts to [`Sink`]s on a thread of its
//! own, such as the [`EventFile`].

mod alerts;
mod bus;
mod file;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::SystemTime;

use serde::{Serialize, Serializer};

use crate::metrics::{EvalMetrics, StepMetrics, unix_us};

pub use alerts::{Alert, Alerts, Change};
pub use bus::{Bus, Sink};
pub use file::{EARLIER, EVENTS, EventFile};

/// What a [`Event::Waiting`] waits for where a process of the run begins, and where its learner was lost.
pub const LEARNER_STARTS: &str = "the learner to start";

/// Is told what the loop is doing; called from several threads, which wait for it.
pub type Observer = Arc<dyn Fn(Fact) + Send + Sync>;

/// Something that happened. Its JSON is one object: the time, the event's name as `event`, and its fields.
#[derive(Debug, Clone, Serialize)]
pub struct Fact {
    /// When, in milliseconds since 1970.
    pub at_ms: u64,
    /// What.
    #[serde(flatten)]
    pub event: Event,
}

impl Fact {
    /// An event of this moment.
    #[must_use]
    pub fn new(at: SystemTime, event: Event) -> Self {
        Fact { at_ms: unix_us(at) / 1000, event }
    }
}

/// What may happen.
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Event {
    /// The run begins, or goes on, at this step of so many.
    Begin {
        /// Steps done before.
        step: u64,
        /// Steps of the whole run.
        of: u64,
    },
    /// The half of the run that generates begins, or goes on, as a process of its own. What engines do is told anew.
    Rollouts {
        /// Steps that the trainer has done.
        step: u64,
        /// Steps of the whole run.
        of: u64,
    },
    /// Something slow is being waited for. Told again when more is known of it.
    Waiting {
        /// What.
        what: String,
        /// Where it lacks, and why; empty while that is not known.
        on: String,
    },
    /// An engine is attached.
    Engine {
        /// Its URL.
        url: String,
        /// What it gets of the run's versions, as far as it shows from this host: whether it is patched, loaded or pushed
        /// into, and what is compared.
        gets: String,
    },
    /// The run's engines can be changed over HTTP.
    Listening {
        /// The address, with the port that it got.
        addr: SocketAddr,
    },
    /// An engine has come to another phase of its way through the fleet.
    Phase {
        /// Its URL.
        url: String,
        /// The phase: `joining`, `syncing`, `serving`, `draining`, `lost` or `gone`.
        phase: &'static str,
        /// Why it is lost; empty otherwise.
        why: String,
    },
    /// Samples of a rollout have arrived and are durable.
    Generating {
        /// The rollout.
        rollout: u64,
        /// Samples in the log.
        done: u64,
        /// Samples of the rollout.
        total: u64,
    },
    /// A run goes on with other prompts than it had before, or in another order: some that were trained on may be
    /// taken again, and others never.
    OtherPrompts,
    /// The rollout log is empty although steps were done: the prompts that these were trained on are taken again.
    LogMissing {
        /// The steps.
        step: u64,
    },
    /// A run goes on with another setting than before.
    Changed {
        /// Its name.
        name: String,
        /// What it said then.
        then: String,
        /// What it says now.
        now: String,
    },
    /// A step was not finite, and was left out.
    Skipped {
        /// Its rollout.
        rollout: u64,
        /// The quantity and its value.
        what: String,
    },
    /// The learner was lost, for this reason; it is loaded again.
    LearnerLost {
        /// What became of it.
        error: String,
    },
    /// A version is committed.
    Published {
        /// Its number.
        version: u64,
        /// The optimiser steps that its weights have.
        step: u64,
    },
    /// Every engine that answers serves a version.
    Served {
        /// Its number.
        version: u64,
        /// Engines that the loop goes on without.
        behind: u64,
    },
    /// Held-out prompts were measured on.
    Evaluated {
        /// After this many steps.
        step: u64,
        /// What came of each set.
        eval: EvalMetrics,
    },
    /// A step is complete: learned, saved, published. `metrics.jsonl` has its figures; the JSON has its number alone.
    Step(#[serde(serialize_with = "number")] Box<StepMetrics>),
    /// Something spoils the run without ending it, or does so no more.
    Alert {
        /// [`Alert::name`].
        alert: &'static str,
        /// Whether it begins.
        begins: bool,
        /// The figure, in words.
        text: String,
    },
    /// So many events were not told, as the sinks were too slow for them.
    Missed {
        /// How many.
        events: u64,
    },
}

fn number<S: Serializer>(step: &StepMetrics, serializer: S) -> Result<S::Ok, S::Error> {
    use serde::ser::SerializeMap as _;
    let mut map = serializer.serialize_map(Some(1))?;
    map.serialize_entry("rollout_id", &step.rollout_id)?;
    map.end()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::time::Duration;

    use super::*;

    #[test]
    fn fact_is_one_flat_object() {
        let at = SystemTime::UNIX_EPOCH + Duration::from_millis(7);
        let step = StepMetrics { rollout_id: 3, ..StepMetrics::default() };
        for (event, expected) in [
            (Event::Begin { step: 1, of: 2 }, r#"{"at_ms":7,"event":"begin","step":1,"of":2}"#),
            (Event::OtherPrompts, r#"{"at_ms":7,"event":"other_prompts"}"#),
            (Event::Step(step.into()), r#"{"at_ms":7,"event":"step","rollout_id":3}"#),
        ] {
            assert_eq!(serde_json::to_string(&Fact::new(at, event)).unwrap(), expected);
        }
    }
}
