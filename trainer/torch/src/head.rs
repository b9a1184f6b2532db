//! From hidden states to log-probs: the one function that trainer and embedded engine share, and its chunks.

use std::ops::Range;

use tch::Tensor;

use crate::error::Result;
use crate::models::Gradients;
use crate::models::Model;
use crate::ops::Scored;

/// Logits that are held at once, unless told: in f32 half a GiB.
const LOGITS_MAX: i64 = 1 << 27;

/// Which tokens are looked at, and how.
pub(crate) struct Chosen<'a> {
    /// `[M, hidden]`: the hidden states that predict them.
    pub(crate) hidden: &'a Tensor,
    /// `[M]` i64.
    pub(crate) labels: &'a Tensor,
    /// Divides logits.
    pub(crate) temperature: f64,
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
                let (_, labels, logits) = self.logits(model, &range)?;
                Ok(model.ops.score(logits, &labels, self.temperature, false)?.log_probs)
            };
            let chunks = self.chunks().map(chunk).collect::<Result<Vec<_>>>()?;
            Ok(Tensor::f_cat(&chunks, 0)?)
        })
    }

    /// Goes through all tokens, chunk by chunk and back: `loss(tokens of the chunk, their scores)` is a
    /// scalar. Returns the gradient `[M, hidden]` of the hidden states; that of the head is added to
    /// `gradients`.
    ///
    /// # Errors
    /// Whatever libtorch or `loss` answer.
    pub(crate) fn descend(
        &self,
        model: &Model,
        entropy: Entropy,
        gradients: &mut Gradients,
        mut loss: impl FnMut(Range<i64>, &Scores) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let found = self.hidden.f_empty_like()?;
        for range in self.chunks() {
            let (hidden, labels, logits) = tch::no_grad(|| self.logits(model, &range))?;
            let wanted = entropy != Entropy::Unasked;
            let scored = tch::no_grad(|| model.ops.score(logits, &labels, self.temperature, wanted))?;
            let scores = Scores::leaves(&scored, entropy)?;
            let loss = loss(range.clone(), &scores)?;
            let inputs: Vec<&Tensor> = match (&scores.entropy, entropy) {
                (Some(entropy), Entropy::Differentiated) => vec![&scores.log_probs, entropy],
                _ => vec![&scores.log_probs],
            };
            let of_scores = Tensor::f_run_backward(&[loss], &inputs, false, false)?;
            let of_entropy = of_scores.get(1).filter(|gradient| gradient.defined());
            tch::no_grad(|| {
                let (ops, temperature) = (&model.ops, self.temperature);
                let of_logits =
                    ops.score_backward(scored, &labels, temperature, &of_scores[0], of_entropy)?;
                let gradient = model.head().backward(&of_logits, &hidden, gradients)?;
                found.f_narrow(0, range.start, range.end - range.start)?.f_copy_(&gradient)?;
                Ok::<_, crate::error::Error>(())
            })?;
        }
        Ok(found)
    }

    fn chunks(&self) -> impl Iterator<Item = Range<i64>> + use<> {
        let (rows, all) = (self.rows.max(1), self.labels.size().first().copied().unwrap_or(0));
        (0..(all + rows - 1) / rows).map(move |index| index * rows..((index + 1) * rows).min(all))
    }

    /// Hidden states, labels and logits of a chunk, the logits in the model's kind.
    fn logits(&self, model: &Model, range: &Range<i64>) -> Result<(Tensor, Tensor, Tensor)> {
        let chunk = |x: &Tensor| x.f_narrow(0, range.start, range.end - range.start);
        let (hidden, labels) = (chunk(self.hidden)?, chunk(self.labels)?);
        let logits = model.head().forward(&hidden)?;
        Ok((hidden, labels, logits))
    }
}

impl Scores {
    /// Copies that collect gradients, as far as those are wanted.
    fn leaves(scored: &Scored, wanted: Entropy) -> Result<Scores> {
        let log_probs = scored.log_probs.f_detach()?.f_set_requires_grad(true)?;
        let entropy = scored
            .entropy
            .as_ref()
            .map(|entropy| entropy.f_detach()?.f_set_requires_grad(wanted == Entropy::Differentiated));
        Ok(Scores { log_probs, entropy: entropy.transpose()? })
    }
}
