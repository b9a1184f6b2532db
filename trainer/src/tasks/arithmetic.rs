//! Addition, one character a token: `<bos>34+58=92<eos>`.
//!
//! Every problem belongs to one of three [`Split`]s by a hash of its operands, so that what is trained on by
//! supervision, what is practised in RL, and what is tested never overlap.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};

use crate::config::Config;

/// Fills unused places.
pub const PAD: i32 = 0;
/// Begins every prompt.
pub const BOS: i32 = 1;
/// Ends every answer.
pub const EOS: i32 = 2;
const PLUS: i32 = 13;
const EQUALS: i32 = 14;
/// The vocabulary, by id.
const VOCABULARY: [&str; 16] =
    ["<pad>", "<bos>", "<eos>", "0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "+", "=", "<unk>"];

/// Operands lie in `OPERAND_MIN..=OPERAND_MAX`.
const OPERAND_MIN: u32 = 10;
const OPERAND_MAX: u32 = 99;

/// Longest answer with its end mark.
pub const ANSWER_LEN: usize = 4;

/// What a problem is used for; by a hash of the problem, so the three never overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// Supervised cold start.
    Sft,
    /// Practised in RL.
    Rl,
    /// Only for measuring.
    HeldOut,
}

/// A problem: two operands to be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Problem {
    a: u32,
    b: u32,
}

impl Problem {
    /// The problem of a group: a function of its arguments alone.
    #[must_use]
    pub fn draw(split: Split, group_id: u64, seed: u64) -> Problem {
        let mut rng = StdRng::seed_from_u64(mix(seed ^ mix(group_id ^ mix(split as u64))));
        loop {
            let mut operand = || rng.random_range(OPERAND_MIN..=OPERAND_MAX);
            let problem = Problem { a: operand(), b: operand() };
            if problem.split() == split {
                return problem;
            }
        }
    }

    /// All problems of a split, in order.
    #[must_use]
    pub fn all(split: Split) -> Vec<Problem> {
        let operands = OPERAND_MIN..=OPERAND_MAX;
        let pairs = operands.clone().flat_map(|a| operands.clone().map(move |b| Problem { a, b }));
        pairs.filter(|problem| problem.split() == split).collect()
    }

    /// Which split the problem belongs to: of ten hash classes one is held out, three are for SFT.
    #[must_use]
    pub fn split(&self) -> Split {
        match mix(u64::from(self.a) << 32 | u64::from(self.b)) % 10 {
            0 => Split::HeldOut,
            1..=3 => Split::Sft,
            _ => Split::Rl,
        }
    }

    /// The prompt: `<bos>34+58=`.
    #[must_use]
    pub fn prompt(&self) -> Vec<i32> {
        let mut ids = vec![BOS];
        push_number(&mut ids, self.a);
        ids.push(PLUS);
        push_number(&mut ids, self.b);
        ids.push(EQUALS);
        ids
    }

    /// The right answer: `92<eos>`.
    #[must_use]
    pub fn answer(&self) -> Vec<i32> {
        let mut ids = Vec::new();
        push_number(&mut ids, self.a + self.b);
        ids.push(EOS);
        ids
    }

    /// 1 for exactly the right answer and nothing after it, else 0.
    #[must_use]
    pub fn reward(&self, response: &[i32]) -> f32 {
        f32::from(response == self.answer())
    }
}

fn push_number(ids: &mut Vec<i32>, number: u32) {
    ids.extend(number.to_string().bytes().map(|digit| 3 + i32::from(digit - b'0')));
}

/// SplitMix64's finaliser (Steele et al. 2014).
fn mix(value: u64) -> u64 {
    let z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
