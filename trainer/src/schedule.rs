//! Which rollout is generated while which is trained on: the whole scheduling policy, as a function over
//! numbers.
//!
//! Rollout `r` is the batch of samples that optimiser step `r` learns from. *Step weights* `s` are the
//! weights after `s` optimiser steps; a run starts with step weights 0.

use crate::options::Mode;

/// The plan of a run of `rollouts` steps.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Schedule {
    /// How generation and training overlap.
    pub(crate) mode: Mode,
    /// How many rollouts the run has.
    pub(crate) rollouts: u64,
}

impl Schedule {
    /// The rollout to have in flight while step `rollout` trains.
    pub(crate) fn ahead(&self, rollout: u64) -> Option<u64> {
        match self.mode {
            Mode::Synchronous => None,
            Mode::OneStepOff => Some(rollout + 1).filter(|next| *next < self.rollouts),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The largest number of steps between the weights that generated a token and those that learn from it,
    /// when every `interval`-th step is published.
    fn staleness_max(mode: Mode, interval: u64) -> u64 {
        u64::from(mode == Mode::OneStepOff) + interval - 1
    }

    /// Walks a run as the loop does and returns (generated, weights it was generated with) in order.
    fn walk(schedule: Schedule, interval: u64) -> Vec<(u64, u64)> {
        let (mut weights, mut generated) = (0, Vec::new());
        let mut ready = None;
        for rollout in 0..schedule.rollouts {
            if ready != Some(rollout) {
                generated.push((rollout, weights));
            }
            ready = schedule.ahead(rollout);
            if let Some(next) = ready {
                generated.push((next, weights));
            }
            if (rollout + 1) % interval == 0 {
                weights = rollout + 1;
            }
        }
        generated
    }

    #[test]
    fn every_rollout_is_generated_once_and_in_order() {
        for mode in [Mode::Synchronous, Mode::OneStepOff] {
            for rollouts in 0..5 {
                let walked = walk(Schedule { mode, rollouts }, 1);
                let ids: Vec<_> = walked.iter().map(|(id, _)| *id).collect();
                assert_eq!(ids, (0..rollouts).collect::<Vec<_>>(), "{mode:?}");
            }
        }
    }

    #[test]
    fn weights_are_never_older_than_the_mode_allows() {
        for mode in [Mode::Synchronous, Mode::OneStepOff] {
            for interval in 1..4 {
                let schedule = Schedule { mode, rollouts: 9 };
                let stale: Vec<_> =
                    walk(schedule, interval).iter().map(|(id, weights)| id - weights).collect();
                assert_eq!(stale.iter().max(), Some(&staleness_max(mode, interval)), "{mode:?} {interval}");
            }
        }
    }

    #[test]
    fn a_step_off_keeps_exactly_one_in_flight() {
        let schedule = Schedule { mode: Mode::OneStepOff, rollouts: 3 };
        assert_eq!(schedule.ahead(0), Some(1));
        assert_eq!(schedule.ahead(1), Some(2));
        assert_eq!(schedule.ahead(2), None);
    }
}
