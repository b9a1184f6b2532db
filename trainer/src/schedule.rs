//! Which rollout is generated while which is trained on: the whole scheduling policy, as a function over
//! numbers.
//!
//! Rollout `r` is the batch of samples that optimiser step `r` learns from. *Step weights* `s` are the
//! weights after `s` optimiser steps; a run starts with step weights 0.

use crate::options::Mode;

/// The rollout to have in flight while step `rollout` of a run of `rollouts` trains.
pub(crate) fn ahead(mode: Mode, rollouts: u64, rollout: u64) -> Option<u64> {
    match mode {
        Mode::Synchronous => None,
        Mode::OneStepOff => Some(rollout + 1).filter(|next| *next < rollouts),
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
    fn walk(mode: Mode, rollouts: u64, interval: u64) -> Vec<(u64, u64)> {
        let (mut weights, mut generated) = (0, Vec::new());
        let mut ready = None;
        for rollout in 0..rollouts {
            if ready != Some(rollout) {
                generated.push((rollout, weights));
            }
            ready = ahead(mode, rollouts, rollout);
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
                let walked = walk(mode, rollouts, 1);
                let ids: Vec<_> = walked.iter().map(|(id, _)| *id).collect();
                assert_eq!(ids, (0..rollouts).collect::<Vec<_>>(), "{mode:?}");
            }
        }
    }

    #[test]
    fn weights_are_never_older_than_the_mode_allows() {
        for mode in [Mode::Synchronous, Mode::OneStepOff] {
            for interval in 1..4 {
                let stale: Vec<_> =
                    walk(mode, 9, interval).iter().map(|(id, weights)| id - weights).collect();
                assert_eq!(stale.iter().max(), Some(&staleness_max(mode, interval)), "{mode:?} {interval}");
            }
        }
    }

    #[test]
    fn a_step_off_keeps_exactly_one_in_flight() {
        assert_eq!([0, 1, 2].map(|rollout| ahead(Mode::OneStepOff, 3, rollout)), [Some(1), Some(2), None]);
    }
}
