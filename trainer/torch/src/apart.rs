//! How far trained tokens are apart under trainer and engine, as counts that add up over passes, steps and ranks.

/// Bins of an octave: neighbouring ones are 4.4 % apart.
const BINS_OF_OCTAVE: f64 = 16.0;
/// What is smaller counts as `2^-LEAST`.
const LEAST: f64 = 30.0;
/// Up to `2^7`.
const BINS: usize = 37 * BINS_OF_OCTAVE as usize;

/// Counts of differences by their size.
#[derive(Debug, Clone)]
pub(crate) struct Apart(Vec<f64>);

/// What was compared with engines, of the tokens that some passes trained on.
#[derive(Debug, Default)]
pub(crate) struct Compared {
    pub(crate) apart: Apart,
    /// The trainer's log-prob of each token, in the order of the passes.
    pub(crate) log_probs: Vec<f32>,
}

impl Default for Apart {
    fn default() -> Self {
        Apart(vec![0.0; BINS])
    }
}

impl Apart {
    /// Counts differences, which are not negative.
    pub(crate) fn add(&mut self, differences: &[f32]) {
        for difference in differences {
            let bin = (f64::from(*difference).log2() + LEAST) * BINS_OF_OCTAVE;
            // Nothing, and what is not a number, is in the first.
            self.0[(bin.max(0.0) as usize).min(BINS - 1)] += 1.0;
        }
    }

    /// The counts, for addition.
    pub(crate) fn counts(&mut self) -> &mut [f64] {
        &mut self.0
    }

    /// What 99 % of the differences are below, at most 4.4 % too much; 0 without any.
    pub(crate) fn p99(&self) -> f64 {
        let all: f64 = self.0.iter().sum();
        let mut below = 0.0;
        let bin = self.0.iter().position(|count| {
            below += count;
            below >= 0.99 * all
        });
        match bin {
            Some(bin) if all > 0.0 => ((bin + 1) as f64 / BINS_OF_OCTAVE - LEAST).exp2(),
            _ => 0.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p99_is_that_of_the_sorted_differences_and_adds_up() {
        assert_eq!(Apart::default().p99(), 0.0);
        let differences: Vec<f32> =
            (1..=1000).map(|place| 1e-3 * place as f32 * place as f32 / 1000.0).collect();
        let mut whole = Apart::default();
        whole.add(&differences);
        let exact = f64::from(differences[989]);
        assert!((exact..1.045 * exact).contains(&whole.p99()), "{} {exact}", whole.p99());
        let mut parts = Apart::default();
        for part in differences.chunks(77) {
            let mut own = Apart::default();
            own.add(part);
            parts.counts().iter_mut().zip(own.counts()).for_each(|(sum, count)| *sum += *count);
        }
        assert_eq!(parts.p99(), whole.p99());
    }

    #[test]
    fn differences_of_any_size_are_counted() {
        let mut apart = Apart::default();
        apart.add(&[0.0, f32::NAN, f32::MIN_POSITIVE, f32::MAX, f32::INFINITY]);
        assert_eq!(apart.counts().iter().sum::<f64>(), 5.0);
        assert!(apart.p99() >= 128.0);
    }
}
