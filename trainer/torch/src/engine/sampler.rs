//! Choosing the next token of every row of a batch, with tensor operations only.

use driftless_trainer::seed::mix;
use tch::{Kind, Tensor};

use crate::error::Result;
use crate::ops::log_softmax;

/// How one row is sampled.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row {
    /// Divides the logits; above 0.
    pub(super) temperature: f64,
    /// Mass of the nucleus, in (0, 1].
    pub(super) top_p: f64,
    /// Number of candidates; 1 is greedy.
    pub(super) top_k: i64,
    /// Smallest share of the best candidate's probability.
    pub(super) min_p: f64,
    /// A number in [0, 1) that decides the draw.
    pub(super) uniform: f64,
}

/// Samples one token per row of `logits` `[R, V]` (f32). Returns ids and their log-probabilities.
///
/// Log-probabilities are those of the whole softmax at the row's temperature, not of the truncated
/// distribution that is drawn from: so SGLang reports them, and so a trainer can recompute them. A row with
/// NaN in it gets any token, and NaN as its log-probability, which tells that this is no sample.
pub(super) fn sample(logits: &Tensor, rows: &[Row]) -> Result<(Vec<i64>, Vec<f32>)> {
    let vocabulary = logits.size2()?.1;
    let broken = logits.f_isnan()?.f_any_dim(-1, true)?;
    // One NaN would poison a row's cumulative sum, and the token would be none of the vocabulary.
    let logits = logits.f_nan_to_num(0.0, None, None)?;
    let log_probs = log_softmax(&logits, &column(rows, &logits, |row| row.temperature as f32)?)?;
    let is_plain = |row: &Row| row.top_p >= 1.0 && row.top_k >= vocabulary && row.min_p <= 0.0;
    let ids = if rows.iter().all(|row| row.top_k == 1) {
        logits.f_argmax(-1, true)?
    } else if rows.iter().all(is_plain) {
        draw(&log_probs.f_exp()?, rows)?
    } else {
        truncated(&log_probs.f_exp()?, rows)?
    };
    let chosen = log_probs.f_gather(-1, &ids, false)?.f_masked_fill(&broken, f64::NAN)?;
    Ok((Vec::try_from(ids.f_flatten(0, -1)?)?, Vec::try_from(chosen.f_flatten(0, -1)?)?))
}

/// Inverse transform: the first index whose cumulative weight exceeds the row's share of the total, `[R, 1]`.
fn draw(weights: &Tensor, rows: &[Row]) -> Result<Tensor> {
    // In f64, because a sum over a large vocabulary in f32 loses the tail.
    let cumulative = weights.f_cumsum(-1, Kind::Double)?;
    let last = cumulative.size()[1] - 1;
    let target = cumulative.f_narrow(1, last, 1)?.f_mul(&column(rows, weights, |row| row.uniform)?)?;
    let below = cumulative.f_le_tensor(&target)?;
    Ok(below.f_sum_dim_intlist(-1_i64, true, Kind::Int64)?.f_clamp_max(last)?)
}

/// Draws from the candidates that top-k, top-p and min-p leave, `[R, 1]`.
fn truncated(probs: &Tensor, rows: &[Row]) -> Result<Tensor> {
    let (sorted, ids) = probs.f_sort(-1, true)?;
    let before = sorted.f_cumsum(-1, Kind::Float)?.f_sub(&sorted)?;
    let rank = Tensor::f_arange(sorted.size()[1], (Kind::Int64, probs.device()))?;
    // A sum of all probabilities may round to more than 1.
    let nucleus = |row: &Row| if row.top_p < 1.0 { row.top_p as f32 } else { f32::INFINITY };
    let dropped = before
        .f_gt_tensor(&column(rows, probs, nucleus)?)?
        .f_logical_or(&rank.f_ge_tensor(&column(rows, probs, |row| row.top_k)?)?)?
        .f_logical_or(&sorted.f_lt_tensor(&sorted.f_narrow(1, 0, 1)?.f_mul(&column(
            rows,
            probs,
            |row| row.min_p as f32,
        )?)?)?)?;
    // Drawn in the order of the ids, as without truncation: the same number then means the same token
    // whichever way the batch as a whole is sampled.
    let kept = probs.f_zeros_like()?.f_scatter(-1, &ids, &sorted.f_masked_fill(&dropped, 0.0)?)?;
    draw(&kept, rows)
}

/// A `[R, 1]` tensor of one number per row, beside `like`.
fn column<T: tch::kind::Element>(rows: &[Row], like: &Tensor, of: impl Fn(&Row) -> T) -> Result<Tensor> {
    let values: Vec<T> = rows.iter().map(of).collect();
    Ok(Tensor::f_from_slice(&values)?.f_to_device(like.device())?.f_unsqueeze(1)?)
}

/// The number in [0, 1) that decides the `position`-th token of a request with this seed, whatever else runs.
///
/// SplitMix64 (Steele, Lea, Flood 2014); 32 bits are kept so that the product with a total stays below it.
pub(super) fn uniform(seed: i64, position: usize) -> f64 {
    let stream = (seed as u64).wrapping_mul(0xD129_0D4E_6AC9_2F25);
    let bits = mix(stream.wrapping_add((position as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15)));
    (bits >> 32) as f64 / f64::from(1_u32 << 31) / 2.0
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Row = Row { temperature: 1.0, top_p: 1.0, top_k: 1 << 30, min_p: 0.0, uniform: 0.0 };

    fn logits(rows: usize) -> Tensor {
        // Probabilities 0.1, 0.4, 0.3, 0.2.
        let row: Vec<f32> = [0.1_f32, 0.4, 0.3, 0.2].map(f32::ln).to_vec();
        Tensor::from_slice(&row).repeat([rows as i64, 1])
    }

    #[test]
    fn the_uniform_number_walks_the_distribution() {
        let at = |uniform| Row { uniform, ..PLAIN };
        let rows = [0.0, 0.09, 0.11, 0.49, 0.51, 0.79, 0.81, 0.999].map(at);
        let (ids, log_probs) = sample(&logits(rows.len()), &rows).unwrap();
        assert_eq!(ids, [0, 0, 1, 1, 2, 2, 3, 3]);
        assert!((log_probs[2] - 0.4_f32.ln()).abs() < 1e-6);
    }

    #[test]
    fn truncation_keeps_candidates_and_reports_full_softmax() {
        let high = Row { uniform: 0.9999, ..PLAIN };
        let rows = [
            Row { top_k: 2, ..high },
            Row { top_p: 0.3, ..high },
            Row { top_p: 0.5, ..high },
            Row { min_p: 0.6, ..high },
            Row { top_k: 1, ..high },
            high,
        ];
        let (ids, log_probs) = sample(&logits(rows.len()), &rows).unwrap();
        assert_eq!(ids, [2, 1, 2, 2, 1, 3]);
        assert!((log_probs[1] - 0.4_f32.ln()).abs() < 1e-6, "not renormalised");
    }

    #[test]
    fn temperature_sharpens_and_greedy_takes_the_best() {
        let cold = Row { temperature: 0.01, uniform: 0.9999, ..PLAIN };
        assert_eq!(sample(&logits(1), &[cold]).unwrap().0, [1]);
        let greedy = Row { top_k: 1, uniform: 0.9999, ..PLAIN };
        assert_eq!(sample(&logits(1), &[greedy]).unwrap().0, [1]);
    }

    #[test]
    fn broken_logits_give_a_token_and_no_log_prob() {
        let nan = Tensor::full([2, 4], f64::NAN, (Kind::Float, tch::Device::Cpu));
        let rows = [PLAIN, Row { top_p: 0.5, uniform: 0.7, ..PLAIN }, PLAIN];
        let (ids, log_probs) = sample(&Tensor::cat(&[nan, logits(1)], 0), &rows).unwrap();
        assert!(ids.iter().all(|id| (0..4).contains(id)));
        assert_eq!([0, 1, 2].map(|row| log_probs[row].is_nan()), [true, true, false]);
    }

    #[test]
    fn frequencies_match_probabilities() {
        let rows: Vec<Row> = (0..20_000).map(|i| Row { uniform: uniform(7, i), ..PLAIN }).collect();
        let (ids, _) = sample(&logits(rows.len()), &rows).unwrap();
        for (token, expected) in [0.1, 0.4, 0.3, 0.2].into_iter().enumerate() {
            let share = ids.iter().filter(|id| **id == token as i64).count() as f64 / rows.len() as f64;
            assert!((share - expected).abs() < 0.015, "token {token}: {share}");
        }
        assert_ne!(uniform(1, 0), uniform(2, 0));
        assert!((0..1000).all(|i| (0.0..1.0).contains(&uniform(i, 3))));
    }
}
