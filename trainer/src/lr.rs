//! The learning rate of each step: a pure function of the number of steps done.

use serde::{Deserialize, Serialize};

/// How the rate falls after the warm-up (`--lr-decay-style`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decay {
    /// Not at all.
    Constant,
    /// In a straight line.
    Linear,
    /// Along half a cosine.
    Cosine,
}

/// Warm-up and decay, as Megatron's `OptimizerParamScheduler` has them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LrSchedule {
    /// Rate after the warm-up.
    pub lr: f64,
    /// Rate at the end of the decay and after it.
    pub min_lr: f64,
    /// Steps over which the rate rises from 0 in a straight line; step 0 is then made with rate 0.
    pub warmup_iters: u64,
    /// How the rate falls.
    pub decay: Decay,
    /// The step at which the decay ends, counted from the first of the run.
    pub decay_iters: u64,
}

impl LrSchedule {
    /// The rate of the step that follows `steps` others.
    #[must_use]
    pub fn at(&self, steps: u64) -> f64 {
        if self.warmup_iters > 0 && steps <= self.warmup_iters {
            return self.lr * steps as f64 / self.warmup_iters as f64;
        }
        if self.decay == Decay::Constant {
            return self.lr;
        }
        if steps > self.decay_iters {
            return self.min_lr;
        }
        let span = self.decay_iters.saturating_sub(self.warmup_iters).max(1) as f64;
        let done = (steps - self.warmup_iters) as f64 / span;
        let rest = match self.decay {
            Decay::Constant => 1.0,
            Decay::Linear => 1.0 - done,
            Decay::Cosine => 0.5 * ((std::f64::consts::PI * done).cos() + 1.0),
        };
        self.min_lr + rest * (self.lr - self.min_lr)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(decay: Decay, steps: &[u64]) -> Vec<f64> {
        let schedule = LrSchedule { lr: 1.0, min_lr: 0.2, warmup_iters: 4, decay, decay_iters: 12 };
        steps.iter().map(|&step| schedule.at(step)).collect()
    }

    #[test]
    fn warm_up_and_decay_by_hand() {
        let steps = [0, 1, 4, 6, 8, 12, 13, 1000];
        let close = |found: Vec<f64>, expected: [f64; 8]| {
            for (found, expected) in found.iter().zip(expected) {
                assert!((found - expected).abs() < 1e-12, "{found} {expected}");
            }
        };
        close(rates(Decay::Constant, &steps), [0.0, 0.25, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]);
        close(rates(Decay::Linear, &steps), [0.0, 0.25, 1.0, 0.8, 0.6, 0.2, 0.2, 0.2]);
        let quarter = 0.2 + 0.8 * 0.5 * (1.0 + 0.5_f64.sqrt());
        close(rates(Decay::Cosine, &steps), [0.0, 0.25, 1.0, quarter, 0.6, 0.2, 0.2, 0.2]);
        let constant =
            LrSchedule { lr: 0.5, min_lr: 0.0, warmup_iters: 0, decay: Decay::Constant, decay_iters: 0 };
        assert_eq!(constant.at(0), 0.5);
    }
}
