//! From hidden states to log-probs: the one function that trainer and embedded engine share, and its chunks.

use std::ops::Range;

use tch::{Kind, Tensor};

use crate::error::Result;
use crate::models::Model;

/// Logits that are held at once, unless told: in f32 half a GiB.
const LOGITS_MAX: i64 = 1 << 27;

/// Log-probs `[…, V]` of a softmax over `logits` `[…, V]` (f32) divided by `temperature`, a scalar or a
/// column.
///
/// # Errors
/// [`crate::Error::Torch`] if libtorch refuses.
pub(crate) fn log_softmax(logits: &Tensor, temperature: &Tensor) -> Result<Tensor> {
    // By a tensor, not by a number: on CUDA libtorch multiplies by a number's reciprocal, which rounds
    // otherwise.
    Ok(logits.f_div(temperature)?.f_log_softmax(-1, Kind::Float)?)
}

/// Entropy `[…]`, in nats, of distributions given by their log-probs `[…, V]`.
fn entropy(log_probs: &Tensor) -> Result<Tensor> {
    Ok(log_probs.f_exp()?.f_mul(log_probs)?.f_sum_dim_intlist(-1_i64, false, Kind::Float)?.f_neg()?)
}

/// Which tokens are looked at, and how.
pub(crate) struct Chosen<'a> {
    /// `[M, hidden]`: the hidden states that predict them.
    pub(crate) hidden: &'a Tensor,
    /// `[M]` i64.
    pub(crate) labels: &'a Tensor,
    /// f32, one element, that divides logits.
    pub(crate) temperature: Tensor,
    /// Rows of logits that are held at once.
    pub(crate) rows: i64,
}

/// What the head says of some of them.
pub(crate) struct Scores {
    /// `[m]`: log-probs of the labels.
    pub(crate) log_probs: Tensor,
    /// `[m]`, if it was asked for.
    pub(crate) entropy: Option<Tensor>,
}

/// What of the entropy is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entropy {
    Unasked,
    /// Its value.
    Watched,
    /// Its value and gradient.
    Differentiated,
}

/// Rows of logits to hold at once where nothing is said.
pub(crate) fn default_rows(vocabulary: i64) -> i64 {
    (LOGITS_MAX / vocabulary.max(1)).max(1)
}

impl Chosen<'_> {
    /// Log-probs `[M]` of all labels, without gradients.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] if shapes disagree or memory is short.
    pub(crate) fn log_probs(&self, model: &Model) -> Result<Tensor> {
        tch::no_grad(|| {
            let chunk = |range: Range<i64>| {
                let hidden = self.hidden.f_narrow(0, range.start, range.end - range.start)?;
                Ok(self.scores(model, &hidden, range, Entropy::Unasked)?.log_probs)
            };
            let chunks = self.chunks().map(chunk).collect::<Result<Vec<_>>>()?;
            Ok(Tensor::f_cat(&chunks, 0)?)
        })
    }

    /// Goes through all tokens, chunk by chunk and back: `loss(tokens of the chunk, their scores)` is a
    /// scalar. Returns the gradient `[M, hidden]` of the hidden states; that of the head goes to `collect`
    /// after each chunk, so that a sum over chunks is none of bf16's.
    ///
    /// # Errors
    /// Whatever libtorch, `loss` or `collect` answer.
    pub(crate) fn descend(
        &self,
        model: &Model,
        entropy: Entropy,
        mut loss: impl FnMut(Range<i64>, &Scores) -> Result<Tensor>,
        mut collect: impl FnMut(&Tensor) -> Result<()>,
    ) -> Result<Tensor> {
        let gradient = self.hidden.f_empty_like()?;
        for range in self.chunks() {
            let length = range.end - range.start;
            let hidden =
                self.hidden.f_narrow(0, range.start, length)?.f_detach()?.f_set_requires_grad(true)?;
            let scores = self.scores(model, &hidden, range.clone(), entropy)?;
            let loss = loss(range.clone(), &scores)?;
            let gradients = Tensor::f_run_backward(&[loss], &[&hidden, model.head()], false, false)?;
            gradient.f_narrow(0, range.start, length)?.f_copy_(&gradients[0])?;
            collect(&gradients[1])?;
        }
        Ok(gradient)
    }

    fn chunks(&self) -> impl Iterator<Item = Range<i64>> + use<> {
        let (rows, all) = (self.rows.max(1), self.labels.size().first().copied().unwrap_or(0));
        (0..(all + rows - 1) / rows).map(move |index| index * rows..((index + 1) * rows).min(all))
    }

    fn scores(&self, model: &Model, hidden: &Tensor, range: Range<i64>, wanted: Entropy) -> Result<Scores> {
        let labels = self.labels.f_narrow(0, range.start, range.end - range.start)?.f_unsqueeze(-1)?;
        let log_probs = log_softmax(&model.logits(hidden)?, &self.temperature)?;
        let entropy = match wanted {
            Entropy::Unasked => None,
            Entropy::Watched => Some(tch::no_grad(|| entropy(&log_probs))?),
            Entropy::Differentiated => Some(entropy(&log_probs)?),
        };
        Ok(Scores { log_probs: log_probs.f_gather(-1, &labels, false)?.f_squeeze_dim(-1)?, entropy })
    }
}
