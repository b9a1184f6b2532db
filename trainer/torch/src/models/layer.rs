//! One layer: attention and SwiGLU, each behind an RMSNorm and added to the residual stream; forward, and
//! back by hand.

use tch::Tensor;

use super::attention::Attended;
use super::gradients::Gradients;
use super::parts::Linear;
use super::weights::{Weight, Weights};
use crate::error::Result;
use crate::ops::{Angles, HeadNorms, Heads, Ops};

#[derive(Debug)]
pub(super) struct Layer {
    input_norm: Weight,
    /// Of queries and keys, in families that have them.
    head_norms: Option<[Weight; 2]>,
    qkv: Linear,
    output: Linear,
    mlp_norm: Weight,
    gate_up: Linear,
    down: Linear,
}

/// What the way back through a layer needs. Norms and the product in SwiGLU are computed again.
#[derive(Debug)]
pub(super) struct Kept<A> {
    x: Tensor,
    qkv: Tensor,
    attended: A,
    middle: Tensor,
    gate_up: Tensor,
}

impl Layer {
    pub(super) fn new(weights: &Weights<'_>, index: i64) -> Result<Layer> {
        let name = |part: &str| format!("model.layers.{index}.{part}");
        let linear = |parts: &[&str]| {
            let names =
                |kind: &str| parts.iter().map(|part| name(&format!("{part}.{kind}"))).collect::<Vec<_>>();
            let biases = names("bias");
            let bias = weights.find(&biases[0])?.map(|_| weights.joined(&biases)).transpose()?;
            Ok::<_, crate::error::Error>(Linear { weight: weights.joined(&names("weight"))?, bias })
        };
        let query_norm = weights.find(&name("self_attn.q_norm.weight"))?;
        let key_norm = weights.find(&name("self_attn.k_norm.weight"))?;
        Ok(Layer {
            input_norm: weights.get(&name("input_layernorm.weight"))?,
            head_norms: query_norm.zip(key_norm).map(|(query, key)| [query, key]),
            qkv: linear(&["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"])?,
            output: linear(&["self_attn.o_proj"])?,
            mlp_norm: weights.get(&name("post_attention_layernorm.weight"))?,
            gate_up: linear(&["mlp.gate_proj", "mlp.up_proj"])?,
            down: linear(&["mlp.down_proj"])?,
        })
    }

    /// The residual stream `[…, hidden]` after this layer. `attend` makes of queries, keys and values
    /// `[…, heads, head_dim]` what each query attends to, of that shape, and says what its way back needs.
    pub(super) fn forward<A>(
        &self,
        ops: &Ops,
        x: &Tensor,
        angles: &Angles,
        attend: impl FnOnce([Tensor; 3]) -> Result<(Tensor, A)>,
    ) -> Result<(Tensor, Kept<A>)> {
        let qkv = self.qkv.forward(&ops.norm(x, &self.input_norm.tensor)?)?;
        let (mixed, attended) = attend(ops.turn(&qkv, self.head_norms(), angles)?)?;
        let middle = x.f_add(&self.output.forward(&mixed.f_flatten(-2, -1)?)?)?;
        let gate_up = self.gate_up.forward(&ops.norm(&middle, &self.mlp_norm.tensor)?)?;
        let y = middle.f_add(&self.down.forward(&ops.gate(&gate_up)?)?)?;
        Ok((y, Kept { x: x.shallow_clone(), qkv, attended, middle, gate_up }))
    }

    /// The gradient `[N, hidden]` of the stream before this layer, given that of the stream after it.
    pub(super) fn backward(
        &self,
        ops: &Ops,
        gradient: &Tensor,
        kept: Kept<Attended>,
        angles: &Angles,
        gradients: &mut Gradients,
    ) -> Result<Tensor> {
        let Kept { x, qkv, attended, middle, gate_up } = kept;
        let (of_gate_up, product) = ops.gate_backward(&self.down.pull(gradient)?, &gate_up)?;
        self.down.collect(gradient, &product, gradients)?;
        drop((gate_up, product));
        let normed = ops.norm(&middle, &self.mlp_norm.tensor)?;
        let of_normed = self.gate_up.backward(&of_gate_up, &normed, gradients)?;
        let norm = &self.mlp_norm;
        let (of_middle, of_norm) = ops.norm_backward(&of_normed, &middle, &norm.tensor, Some(gradient))?;
        gradients.add(norm, &of_norm)?;

        let of_mixed = self.output.backward(&of_middle, &attended.mixed().f_flatten(-2, -1)?, gradients)?;
        let Heads { heads, head_dim, .. } = ops.heads;
        let of_parts = attended.backward(&of_mixed.f_unflatten(-1, [heads, head_dim])?)?;
        let norms = self.head_norms();
        let (of_qkv, of_norms) = ops.turn_backward(of_parts.each_ref(), &qkv, norms, angles)?;
        for (norm, gradient) in self.head_norms.iter().flatten().zip(of_norms.iter().flatten()) {
            gradients.add(norm, gradient)?;
        }
        let normed = ops.norm(&x, &self.input_norm.tensor)?;
        let of_normed = self.qkv.backward(&of_qkv, &normed, gradients)?;
        let norm = &self.input_norm;
        let (of_x, of_norm) = ops.norm_backward(&of_normed, &x, &norm.tensor, Some(&of_middle))?;
        gradients.add(norm, &of_norm)?;
        Ok(of_x)
    }

    fn head_norms(&self) -> HeadNorms<'_> {
        self.head_norms.as_ref().map(|norms| norms.each_ref().map(|norm| &norm.tensor))
    }
}
