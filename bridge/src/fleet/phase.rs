//! Where an engine is on its way through a fleet, as a function over what is known of it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::member::Standing;
use crate::engine::Label;

/// Where an engine is on its way through a fleet.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Phase {
    /// It has not answered yet since it was added.
    Joining,
    /// It fits, and does not serve yet what is asked for.
    Syncing,
    /// It gets requests.
    Serving,
    /// It gets no more requests, and leaves once it has none.
    Draining,
    /// It was refused, went down, or joined or synced too slowly. It comes back by itself once that is over.
    Lost {
        /// What was wrong last.
        why: String,
    },
}

impl Phase {
    /// Its name, in a word.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Joining => "joining",
            Self::Syncing => "syncing",
            Self::Serving => "serving",
            Self::Draining => "draining",
            Self::Lost { .. } => "lost",
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lost { why } => write!(f, "lost: {why}"),
            other => f.write_str(other.name()),
        }
    }
}

/// Is told of each phase that an engine comes to, by its URL, and of engines that leave: these have none. It is called on
/// the fleet's runtime, and must not block.
#[derive(Clone)]
pub struct PhaseTold(Arc<Told>);

type Told = dyn Fn(&str, Option<&Phase>) + Send + Sync;

impl PhaseTold {
    /// Calls `tell`.
    pub fn new(tell: impl Fn(&str, Option<&Phase>) + Send + Sync + 'static) -> Self {
        Self(Arc::new(tell))
    }

    pub(super) fn tell(&self, url: &str, phase: Option<&Phase>) {
        (self.0)(url, phase);
    }
}

impl fmt::Debug for PhaseTold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PhaseTold").finish_non_exhaustive()
    }
}

/// How long engines may take for what leads to requests.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    /// To answer for the first time.
    pub(super) joining: Duration,
    /// To come to what is asked for.
    pub(super) syncing: Duration,
}

/// The newest version that was asked for, and since when.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    pub(super) label: Label,
    pub(super) since: Instant,
}

impl Wanted {
    /// Whether a request for this version changes what is wanted: an earlier one of the same run does not.
    pub(super) fn is_behind(&self, label: &Label) -> bool {
        label.run() != self.label.run() || !self.label.at_least(label)
    }
}

pub(super) fn phase(standing: &Standing, wanted: Option<&Wanted>, bounds: Bounds, now: Instant) -> Phase {
    let lasted = |since: Instant| now.saturating_duration_since(since);
    let lost = |why: String| Phase::Lost { why };
    if standing.draining.is_some() {
        return Phase::Draining;
    }
    if !standing.up {
        let is_new = standing.identity.is_none() && !standing.refused;
        return match lasted(standing.since) {
            time if is_new && time < bounds.joining => Phase::Joining,
            _ => lost(standing.failure.clone().unwrap_or_else(|| "it does not answer".into())),
        };
    }
    let Some(wanted) = wanted.filter(|wanted| !standing.may_take(Some(&wanted.label))) else {
        return Phase::Serving;
    };
    if lasted(standing.since.max(wanted.since)) < bounds.syncing {
        return Phase::Syncing;
    }
    lost(format!("{}, not {} within {:?}", standing.describe(), wanted.label, bounds.syncing))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Identity;

    const OLD: &str = "3f0c9a12b7de:1";
    const NEW: &str = "3f0c9a12b7de:2";

    #[test]
    fn phase_of_each_standing() {
        let seconds = Duration::from_secs;
        let bounds = Bounds { joining: seconds(60), syncing: seconds(30) };
        let (begin, identity) = (Instant::now(), Identity::made_up());
        let standing = |up: bool, is_known: bool, refused: bool| Standing {
            up,
            refused,
            identity: is_known.then(|| identity.clone()),
            serving: Some(OLD.to_owned()),
            failure: (!up).then(|| "no answer".to_owned()),
            ..Standing::new(0, begin)
        };
        // Up, attached once, refused; the version wanted, since when; the time; the phase.
        for (what, wanted, time, expected) in [
            ((false, false, false), None, 0, "joining"),
            ((false, false, false), None, 59, "joining"),
            ((false, false, false), None, 60, "lost: no answer"),
            ((false, false, true), None, 0, "lost: no answer"),
            ((false, true, false), None, 0, "lost: no answer"),
            ((true, true, false), None, 0, "serving"),
            ((true, true, false), Some((OLD, 0)), 100, "serving"),
            ((true, true, false), Some((NEW, 0)), 29, "syncing"),
            ((true, true, false), Some((NEW, 50)), 79, "syncing"),
            (
                (true, true, false),
                Some((NEW, 50)),
                80,
                "lost: serves 3f0c9a12b7de:1, not 3f0c9a12b7de:2 within 30s",
            ),
            // Time without a wish does not count.
            ((true, true, false), Some((NEW, 1000)), 1001, "syncing"),
        ] {
            let standing = standing(what.0, what.1, what.2);
            let wanted = wanted.map(|(label, since): (&str, u64)| Wanted {
                label: label.parse().unwrap(),
                since: begin + seconds(since),
            });
            let found = phase(&standing, wanted.as_ref(), bounds, begin + seconds(time));
            assert_eq!(found.to_string(), expected, "{what:?} {wanted:?} at {time}");
            let draining = Standing { draining: Some(begin), ..standing };
            assert_eq!(phase(&draining, wanted.as_ref(), bounds, begin), Phase::Draining);
        }
    }

    #[test]
    fn wanted_goes_on_to_later_versions_and_other_runs() {
        let wanted = Wanted { label: "3f0c9a12b7de:2".parse().unwrap(), since: Instant::now() };
        for (label, expected) in
            [("3f0c9a12b7de:1", false), (NEW, false), ("3f0c9a12b7de:3", true), ("aaaaaaaaaaaa:1", true)]
        {
            assert_eq!(wanted.is_behind(&label.parse().unwrap()), expected, "{label}");
        }
    }
}
