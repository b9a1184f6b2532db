//! What became of tokens that engines drew, and of the time for them.

use std::collections::BTreeMap;
use std::time::SystemTime;

use driftless_bridge::engine::{Decoded, Meter};

use crate::goodput::Kept;

/// Why a step leaves out tokens, or groups of nothing else.
pub(super) const TOO_OLD: &str = "too old";
/// Why no step has what was drawn for an answer, or for a group.
pub(super) const FAILED: &str = "failed";

/// Tokens and times on engines' places, by what became of the former.
#[derive(Debug)]
pub(super) struct Fates {
    began: SystemTime,
    trained: Decoded,
    left_out: BTreeMap<&'static str, Decoded>,
    /// Of groups of which a step may still learn: a meter for each attempt at an answer.
    open: BTreeMap<u64, Vec<Meter>>,
    evaluation: Meter,
}

impl Fates {
    /// Of nothing yet.
    pub(super) fn new(began: SystemTime) -> Self {
        let (trained, left_out) = (Decoded::default(), BTreeMap::new());
        Fates { began, trained, left_out, open: BTreeMap::new(), evaluation: Meter::default() }
    }

    /// The meter of an attempt at an answer of a group, or of what is measured only.
    pub(super) fn meter(&mut self, group: Option<u64>) -> Meter {
        let Some(group) = group else { return self.evaluation.clone() };
        let meter = Meter::default();
        self.open.entry(group).or_default().push(meter.clone());
        meter
    }

    /// An attempt failed, and its group goes on without it.
    pub(super) fn fail(&mut self, group: u64, attempt: &Meter) {
        if let Some(meters) = self.open.get_mut(&group) {
            meters.retain(|meter| meter != attempt);
        }
        *self.left_out.entry(FAILED).or_default() += attempt.decoded();
    }

    /// What is known by now.
    pub(super) fn kept(&self) -> Kept {
        let (began, trained, left_out) = (self.began, self.trained, self.left_out.clone());
        Kept { began, trained, evaluated: self.evaluation.decoded(), left_out }
    }

    /// A step learns from a group, but for this share of its tokens, which are too old.
    pub(super) fn take(&mut self, group: u64, too_old: f64) {
        // A step that is done again has counted its groups.
        let Some(meters) = self.open.remove(&group) else { return };
        let (Decoded { time, tokens }, too_old) = (sum(&meters), too_old.clamp(0.0, 1.0));
        let lost = Decoded { time: time.mul_f64(too_old), tokens: (tokens as f64 * too_old).round() as u64 };
        self.trained +=
            Decoded { time: time.saturating_sub(lost.time), tokens: tokens.saturating_sub(lost.tokens) };
        if lost != Decoded::default() {
            *self.left_out.entry(TOO_OLD).or_default() += lost;
        }
    }

    /// No step learns from a group.
    pub(super) fn leave_out(&mut self, group: u64, why: &'static str) {
        if let Some(meters) = self.open.remove(&group) {
            *self.left_out.entry(why).or_default() += sum(&meters);
        }
    }
}

fn sum(meters: &[Meter]) -> Decoded {
    let mut sum = Decoded::default();
    meters.iter().for_each(|meter| sum += meter.decoded());
    sum
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn what_a_group_drew_counts_once_where_it_ends() {
        let mut fates = Fates::new(SystemTime::UNIX_EPOCH);
        let drawn = |tokens: u64| Decoded { time: Duration::from_secs(tokens) / 100, tokens };
        for group in 0..4 {
            fates.meter(Some(group)).add(drawn(400));
            fates.meter(Some(group)).add(drawn(400));
        }
        fates.meter(None).add(drawn(100));
        fates.take(0, 0.25);
        fates.take(0, 0.0);
        fates.take(1, 0.0);
        fates.leave_out(2, "filtered");
        fates.leave_out(2, "failed");
        let Kept { trained, evaluated, left_out, .. } = fates.kept();
        assert_eq!((trained, evaluated), (drawn(1400), drawn(100)));
        assert_eq!(left_out, BTreeMap::from([("filtered", drawn(800)), (TOO_OLD, drawn(200))]));
        assert_eq!(sum(&fates.open[&3]), drawn(800), "it is not known yet");
    }

    #[test]
    fn what_a_failed_attempt_drew_is_lost_to_its_group() {
        let mut fates = Fates::new(SystemTime::UNIX_EPOCH);
        let drawn = |tokens: u64| Decoded { time: Duration::from_secs(tokens) / 100, tokens };
        let attempts = [100, 200, 400].map(|tokens| {
            let attempt = fates.meter(Some(0));
            attempt.add(drawn(tokens));
            attempt
        });
        fates.fail(0, &attempts[1]);
        fates.take(0, 0.0);
        let Kept { trained, left_out, .. } = fates.kept();
        assert_eq!((trained, left_out), (drawn(500), BTreeMap::from([(FAILED, drawn(200))])));
    }
}
