//! Which prompt of the data is the n-th of a run: a function of numbers.

use crate::seed::mix;

/// The order in which a run takes the prompts of its data, epoch after epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Order {
    /// Prompts of the data; at least 1.
    pub prompts: u64,
    /// Whether each epoch has an order of its own.
    pub shuffle: bool,
    /// Seed of these orders.
    pub seed: u64,
}

impl Order {
    /// The prompt that is `number`-th of a run, and its epoch; both from 0.
    #[must_use]
    pub fn at(&self, number: u64) -> (u64, u64) {
        let prompts = self.prompts.max(1);
        let (epoch, place) = (number / prompts, number % prompts);
        (if self.shuffle { self.shuffled(place, epoch) } else { place }, epoch)
    }

    /// Where `place` is sent by the permutation of `epoch`: four rounds of a Feistel network over the
    /// smallest square of a power of two that holds all prompts, repeated until the result is one of them.
    /// Nothing is stored, however many prompts there are.
    fn shuffled(&self, place: u64, epoch: u64) -> u64 {
        let bits = (64 - (self.prompts.max(2) - 1).leading_zeros()).div_ceil(2);
        let mask = (1 << bits) - 1;
        let key = mix(self.seed ^ mix(epoch));
        let mut value = place;
        loop {
            let (mut left, mut right) = (value >> bits, value & mask);
            for round in 0..4 {
                (left, right) = (right, left ^ (mix(right ^ mix(key ^ round)) & mask));
            }
            value = left << bits | right;
            if value < self.prompts {
                return value;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_epoch_has_every_prompt_once_in_an_order_of_its_own() {
        for prompts in [1, 2, 3, 17, 64, 1000] {
            let order = Order { prompts, shuffle: true, seed: 42 };
            let epochs: Vec<Vec<u64>> = (0..3)
                .map(|epoch| {
                    let at = |place| order.at(epoch * prompts + place);
                    assert!((0..prompts).all(|place| at(place).1 == epoch));
                    (0..prompts).map(|place| at(place).0).collect()
                })
                .collect();
            for epoch in &epochs {
                let mut sorted = epoch.clone();
                sorted.sort_unstable();
                assert_eq!(sorted, (0..prompts).collect::<Vec<_>>());
            }
            if prompts >= 17 {
                assert_ne!(epochs[0], epochs[1]);
                assert_ne!(epochs[0], Order { seed: 43, ..order }.first(prompts));
            }
        }
    }

    #[test]
    fn without_shuffling_the_data_is_taken_as_it_is() {
        let order = Order { prompts: 3, shuffle: false, seed: 42 };
        assert_eq!((0..7).map(|number| order.at(number).0).collect::<Vec<_>>(), [0, 1, 2, 0, 1, 2, 0]);
    }

    impl Order {
        fn first(&self, prompts: u64) -> Vec<u64> {
            (0..prompts).map(|number| self.at(number).0).collect()
        }
    }
}
