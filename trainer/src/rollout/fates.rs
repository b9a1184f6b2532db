//! What became of the time in which engines drew tokens.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use driftless_bridge::engine::Meter;

use crate::goodput::Kept;

/// Why a step leaves out tokens, or groups of nothing else.
pub(super) const TOO_OLD: &str = "too old";

/// Times on engines' places, by what became of the tokens that were drawn in them.
#[derive(Debug)]
pub(super) struct Fates {
    began: SystemTime,
    trained: Duration,
    left_out: BTreeMap<&'static str, Duration>,
    /// Of groups of which a step may still learn.
    open: BTreeMap<u64, Meter>,
    evaluation: Meter,
}

impl Fates {
    /// Of nothing yet.
    pub(super) fn new(began: SystemTime) -> Self {
        let (trained, left_out) = (Duration::ZERO, BTreeMap::new());
        Fates { began, trained, left_out, open: BTreeMap::new(), evaluation: Meter::default() }
    }

    /// The meter of a group's requests, or of those that are measured only.
    pub(super) fn meter(&mut self, group: Option<u64>) -> Meter {
        match group {
            Some(group) => self.open.entry(group).or_default().clone(),
            None => self.evaluation.clone(),
        }
    }

    /// What is known by now.
    pub(super) fn kept(&self) -> Kept {
        let (began, trained, left_out) = (self.began, self.trained, self.left_out.clone());
        Kept { began, trained, evaluated: self.evaluation.decoded(), left_out }
    }

    /// A step learns from a group, but for this share of its tokens, which are too old.
    pub(super) fn take(&mut self, group: u64, too_old: f64) {
        // A step that is done again has counted its groups.
        let Some(meter) = self.open.remove(&group) else { return };
        let lost = meter.decoded().mul_f64(too_old.clamp(0.0, 1.0));
        self.trained += meter.decoded().saturating_sub(lost);
        if lost > Duration::ZERO {
            *self.left_out.entry(TOO_OLD).or_default() += lost;
        }
    }

    /// No step learns from a group.
    pub(super) fn leave_out(&mut self, group: u64, why: &'static str) {
        if let Some(meter) = self.open.remove(&group) {
            *self.left_out.entry(why).or_default() += meter.decoded();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_of_a_group_counts_once_where_it_ends() {
        let (mut fates, second) = (Fates::new(SystemTime::UNIX_EPOCH), Duration::from_secs(1));
        for group in 0..4 {
            fates.meter(Some(group)).add(second * 4);
            fates.meter(Some(group)).add(second * 4);
        }
        fates.meter(None).add(second);
        fates.take(0, 0.25);
        fates.take(0, 0.0);
        fates.take(1, 0.0);
        fates.leave_out(2, "filtered");
        fates.leave_out(2, "failed");
        let Kept { trained, evaluated, left_out, .. } = fates.kept();
        assert_eq!((trained, evaluated), (14 * second, second));
        assert_eq!(left_out, BTreeMap::from([("filtered", 8 * second), (TOO_OLD, 2 * second)]));
        assert_eq!(fates.meter(Some(3)).decoded(), 8 * second, "it is not known yet");
    }
}
