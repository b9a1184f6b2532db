//! Where sequences lie in a row of tokens.

use tch::{Device, Kind, Tensor};

use crate::error::{Result, input};

/// Whole sequences one after the other, without padding: what attention and rotary positions need to know of
/// them.
#[derive(Debug)]
pub(super) struct Layout {
    /// `[N]` i64: position of each token in its sequence.
    pub(super) positions: Tensor,
    /// Neighbours of one length, in order.
    pub(super) runs: Vec<Run>,
    /// For kernels that take sequences of many lengths at once.
    pub(super) bounds: Bounds,
}

/// Sequences of one length that lie side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) start: i64,
    pub(super) count: i64,
    pub(super) length: i64,
}

/// Cumulative lengths, as flash attention takes them.
#[derive(Debug)]
pub(super) struct Bounds {
    /// `[sequences + 1]` i32: where each sequence begins, and where the last ends.
    pub(super) starts: Tensor,
    pub(super) longest: i64,
}

impl Layout {
    /// Sequences of `lengths` tokens that are `tokens` together, none longer than `longest_allowed`.
    pub(super) fn new(lengths: &[i64], tokens: i64, longest_allowed: i64, device: Device) -> Result<Layout> {
        if let Some(length) = lengths.iter().find(|&&length| !(1..=longest_allowed).contains(&length)) {
            return Err(input("sequence length", format!("1..={longest_allowed}"), length));
        }
        if lengths.iter().sum::<i64>() != tokens || tokens == 0 {
            let found = format!("{tokens} tokens");
            return Err(input("sequences", format!("{} tokens", lengths.iter().sum::<i64>()), found));
        }
        let mut starts = vec![0];
        let mut runs: Vec<Run> = Vec::new();
        for &length in lengths {
            let start = starts[starts.len() - 1];
            match runs.last_mut() {
                Some(run) if run.length == length => run.count += 1,
                _ => runs.push(Run { start, count: 1, length }),
            }
            starts.push(start + length);
        }
        let integers = (Kind::Int64, device);
        let positions =
            runs.iter().map(|run| Ok(Tensor::f_arange(run.length, integers)?.f_repeat([run.count])?));
        let positions = Tensor::f_cat(&positions.collect::<Result<Vec<_>>>()?, 0)?;
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let starts = Tensor::f_from_slice(&starts)?.f_to_device(device)?.f_to_kind(Kind::Int)?;
        Ok(Layout { positions, runs, bounds: Bounds { starts, longest } })
    }
}
