//! Addition of two numbers of two digits, one character a token: `<bos>34+58=29<eos>`.
//!
//! The answer is written **least significant digit first** (34 + 58 = 92 is answered `29`): each digit then
//! follows from two digits of the problem and one carry, which a small model learns in minutes.
//!
//! Every problem belongs to one of three [`Split`]s by a hash of its operands, so that what is trained on by
//! supervision, what is practised in RL, and what is tested never overlap.

mod recipe;
mod task;
mod tokenizer;

pub use recipe::Recipe;
pub use task::Arithmetic;
pub use tokenizer::{VOCABULARY, tokenizer, tokenizer_config};

use crate::seed::mix;

/// Fills unused places.
pub const PAD: i32 = 0;
/// Begins every prompt.
pub const BOS: i32 = 1;
/// Ends every answer.
pub const EOS: i32 = 2;

const ZERO: i32 = 3;
const PLUS: i32 = 13;
const EQUALS: i32 = 14;

/// The smallest and largest operand.
const OPERANDS: std::ops::RangeInclusive<u32> = 10..=99;

/// What a problem is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// Supervised cold start.
    Sft,
    /// Practised in RL.
    Rl,
    /// Only for measuring.
    HeldOut,
}

/// Two numbers to be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Problem {
    a: u32,
    b: u32,
}

impl Problem {
    /// Problem `number` of a split: a function of its arguments alone. The problems of a group of samples
    /// have the group's number.
    #[must_use]
    pub fn draw(split: Split, number: u64, seed: u64) -> Problem {
        let mut state = mix(seed ^ mix(number ^ mix(split as u64)));
        loop {
            state = mix(state);
            let operand = |bits: u32| OPERANDS.start() + bits % OPERANDS.count() as u32;
            let problem = Problem { a: operand(state as u32), b: operand((state >> 32) as u32) };
            if problem.split() == split {
                return problem;
            }
        }
    }

    /// All problems of a split, in an order that mixes easy and hard ones.
    #[must_use]
    pub fn all(split: Split) -> Vec<Problem> {
        let pairs = OPERANDS.flat_map(|a| OPERANDS.map(move |b| Problem { a, b }));
        let mut problems: Vec<_> = pairs.filter(|problem| problem.split() == split).collect();
        problems.sort_by_key(Problem::hash);
        problems
    }

    /// The split of the problem: of ten hash classes one is held out, three are for SFT, six for RL.
    #[must_use]
    pub fn split(&self) -> Split {
        match self.hash() % 10 {
            0 => Split::HeldOut,
            1..=3 => Split::Sft,
            _ => Split::Rl,
        }
    }

    /// The prompt: `<bos>34+58=`.
    #[must_use]
    pub fn prompt(&self) -> Vec<i32> {
        let [a, b] = [self.a, self.b].map(|operand| [operand / 10, operand % 10].map(digit));
        vec![BOS, a[0], a[1], PLUS, b[0], b[1], EQUALS]
    }

    /// The right answer, least significant digit first: `29<eos>`.
    #[must_use]
    pub fn answer(&self) -> Vec<i32> {
        let sum = self.a + self.b;
        let digits = [sum % 10, sum / 10 % 10, sum / 100].map(digit);
        let length = if sum < 100 { 2 } else { 3 };
        digits[..length].iter().copied().chain([EOS]).collect()
    }

    /// 1 for exactly the right answer and nothing after it, else 0.
    #[must_use]
    pub fn reward(&self, response: &[i32]) -> f32 {
        f32::from(response == self.answer())
    }

    fn hash(&self) -> u64 {
        mix(u64::from(self.a) << 32 | u64::from(self.b))
    }
}

/// Token of a digit.
fn digit(digit: u32) -> i32 {
    ZERO + digit as i32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_are_disjoint_whole_and_large_enough() {
        let sizes = [Split::Sft, Split::Rl, Split::HeldOut].map(|split| Problem::all(split).len());
        assert_eq!(sizes.iter().sum::<usize>(), 90 * 90);
        assert!(sizes[2] >= 500, "{sizes:?}");
    }

    #[test]
    fn drawing_is_a_function_of_split_number_and_seed() {
        let draw = |seed| (0..200).map(|number| Problem::draw(Split::Rl, number, seed)).collect::<Vec<_>>();
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
        assert!(draw(1).iter().all(|problem| problem.split() == Split::Rl));
        // A run that is continued after an update must see the same problems.
        assert_eq!(draw(1)[..2], [Problem { a: 33, b: 38 }, Problem { a: 30, b: 57 }]);
    }

    #[test]
    fn answers_are_exact() {
        let problem = Problem { a: 34, b: 58 };
        assert_eq!(problem.prompt(), [BOS, 6, 7, PLUS, 8, 11, EQUALS]);
        assert_eq!(problem.answer(), [5, 12, EOS]);
        assert_eq!(Problem { a: 99, b: 10 }.answer(), [12, 3, 4, EOS]);
        assert_eq!(problem.reward(&[5, 12, EOS]), 1.0);
        for wrong in [&[5, 12][..], &[5, 12, EOS, EOS], &[12, 5, EOS], &[5, 12, ZERO, EOS], &[]] {
            assert_eq!(problem.reward(wrong), 0.0, "{wrong:?}");
        }
    }
}
