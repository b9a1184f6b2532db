//! The kernels of `kernels.cu` as functions of tensors.
#![expect(unsafe_code, reason = "kernels work on addresses")]

use tch::{Kind, Tensor};

use super::{Angles, HeadNorms, Heads, device};
use crate::config::Config;
use crate::error::{Result, input};

/// Widest model: a thread has eight columns of it, and a block 1,024 threads.
const HIDDEN_MAX: i64 = 8192;
/// Widest head: what a warp keeps of it in registers.
const HEAD_DIM_MAX: i64 = 256;
/// Of most kernels.
const THREADS: u32 = 256;
const SCORE_THREADS: u32 = 512;
/// Rows, or heads, that are taken at once.
const ROWS: u32 = 4;
/// Blocks of kernels that end with a sum over blocks: three on each multiprocessor of an H100. The sums, and
/// so their bits, depend on it.
const SUMMING_BLOCKS: u32 = 3 * 132;
/// Blocks of kernels that go through everything in strides.
const STRIDING_BLOCKS: u64 = 16 * 132;

/// The kernels by name.
pub(super) const KERNELS: [&str; 8] = [
    "norm_forward",
    "norm_backward",
    "turn_forward",
    "turn_backward",
    "gate_forward",
    "gate_backward",
    "scores_forward",
    "scores_backward",
];

/// What a kernel is told: addresses, then numbers, in the order of its struct in `kernels.cu`. A float is given as its
/// bits.
#[repr(C)]
pub(super) struct Arguments<const A: usize, const N: usize> {
    addresses: [u64; A],
    numbers: [u32; N],
}

/// What runs them.
#[derive(Debug)]
pub(super) enum Machine {
    Device(device::Device),
    /// This processor, on tensors in host memory.
    #[cfg(test)]
    Twin(super::tests::Twin),
}

/// The kernels for one model.
#[derive(Debug)]
pub(super) struct Kernels {
    machine: Machine,
    hidden: i64,
    heads: Heads,
    /// Bits of an f32.
    eps: u32,
}

/// What the compiler must know of a model.
pub(super) fn definitions(config: &Config) -> [String; 2] {
    [format!("-DHIDDEN={}", config.hidden_size), format!("-DHEAD_DIM={}", config.head_dim)]
}

impl Kernels {
    /// Whether there are kernels for a model of this shape.
    pub(super) fn take(config: &Config) -> bool {
        let widths = [config.hidden_size, config.intermediate_size, config.head_dim];
        widths.iter().all(|width| width % 8 == 0)
            && config.hidden_size <= HIDDEN_MAX
            && config.head_dim <= HEAD_DIM_MAX
    }

    pub(super) fn new(machine: Machine, config: &Config) -> Kernels {
        let (hidden, eps) = (config.hidden_size, (config.rms_norm_eps as f32).to_bits());
        Kernels { machine, hidden, heads: Heads::of(config), eps }
    }

    fn launch<const A: usize, const N: usize>(
        &self,
        kernel: &'static str,
        blocks: u32,
        threads: u32,
        addresses: [u64; A],
        numbers: [u32; N],
    ) -> Result<()> {
        if blocks == 0 {
            return Ok(());
        }
        let arguments = Arguments { addresses, numbers };
        match &self.machine {
            // SAFETY: callers give addresses of tensors of this device that live until the call is queued;
            // libtorch gives their memory only to what it queues later.
            Machine::Device(device) => unsafe { device.launch(kernel, blocks, threads, &arguments) },
            #[cfg(test)]
            Machine::Twin(twin) => {
                twin.launch(kernel, blocks, threads, &arguments);
                Ok(())
            }
        }
    }

    pub(super) fn norm(&self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        let (x, rows) = (x.f_contiguous()?, rows(x, self.hidden)?);
        let y = x.f_empty_like()?;
        let (threads, blocks) = (self.norm_threads(), rows.div_ceil(ROWS));
        let addresses = [at(&x), at(weight), at(&y)];
        self.launch("norm_forward", blocks, threads, addresses, [rows, self.eps])?;
        Ok(y)
    }

    pub(super) fn norm_backward(
        &self,
        gradient: &Tensor,
        x: &Tensor,
        weight: &Tensor,
        rest: Option<&Tensor>,
    ) -> Result<(Tensor, Tensor)> {
        let (gradient, x, rows) = (gradient.f_contiguous()?, x.f_contiguous()?, rows(x, self.hidden)?);
        let rest = rest.map(Tensor::f_contiguous).transpose()?;
        let (threads, blocks) = (self.norm_threads(), rows.div_ceil(ROWS).min(SUMMING_BLOCKS));
        let (out, partial) = (x.f_empty_like()?, floats(&x, &[i64::from(blocks), self.hidden])?);
        let rest = rest.as_ref().map_or(0, at);
        let addresses = [at(&gradient), at(&x), at(weight), rest, at(&out), at(&partial)];
        self.launch("norm_backward", blocks, threads, addresses, [rows, self.eps])?;
        Ok((out, sum(&partial)?))
    }

    pub(super) fn turn(&self, qkv: &Tensor, norms: HeadNorms<'_>, angles: &Angles) -> Result<[Tensor; 3]> {
        let Heads { heads, kv_heads, head_dim } = self.heads;
        let (qkv, rows) = (qkv.f_contiguous()?, rows(qkv, (heads + 2 * kv_heads) * head_dim)?);
        let parts = qkv.f_unflatten(-1, [heads + 2 * kv_heads, head_dim])?;
        let part = |start: i64, length: i64| parts.f_narrow(-2, start, length);
        let empty = |part: Tensor| Tensor::f_empty(part.size(), (part.f_kind()?, part.device()));
        let (query, key) = (empty(part(0, heads)?)?, empty(part(heads, kv_heads)?)?);
        let [query_norm, key_norm] = norms.map_or([0; 2], |norms| norms.map(at));
        let (cos, sin) = (at(&angles.cos), at(&angles.sin));
        let addresses = [at(&qkv), query_norm, key_norm, cos, sin, at(&query), at(&key)];
        let numbers = [rows, heads as u32, kv_heads as u32, self.eps];
        let items = rows * (heads + kv_heads) as u32;
        let blocks = items.div_ceil(ROWS * THREADS / 32);
        self.launch("turn_forward", blocks, THREADS, addresses, numbers)?;
        Ok([query, key, part(heads + kv_heads, kv_heads)?])
    }

    pub(super) fn turn_backward(
        &self,
        gradients: [&Tensor; 3],
        qkv: &Tensor,
        norms: HeadNorms<'_>,
        angles: &Angles,
    ) -> Result<(Tensor, Option<[Tensor; 2]>)> {
        let Heads { heads, kv_heads, head_dim } = self.heads;
        let (qkv, rows) = (qkv.f_contiguous()?, rows(qkv, (heads + 2 * kv_heads) * head_dim)?);
        let [query, key, value] = gradients;
        let gradients = [query.f_contiguous()?, key.f_contiguous()?, value.f_contiguous()?];
        let items = rows * (heads + 2 * kv_heads) as u32;
        let blocks = items.div_ceil(ROWS * THREADS / 32).min(SUMMING_BLOCKS);
        let (out, partial) = (qkv.f_empty_like()?, floats(&qkv, &[i64::from(blocks), 2, head_dim])?);
        let [query, key, value] = gradients.each_ref().map(at);
        let [query_norm, key_norm] = norms.map_or([0; 2], |norms| norms.map(at));
        let (cos, sin) = (at(&angles.cos), at(&angles.sin));
        let (joined, result, sums) = (at(&qkv), at(&out), at(&partial));
        let addresses = [query, key, value, joined, query_norm, key_norm, cos, sin, result, sums];
        let numbers = [rows, heads as u32, kv_heads as u32, self.eps];
        self.launch("turn_backward", blocks, THREADS, addresses, numbers)?;
        let Some(_) = norms else { return Ok((out, None)) };
        let sums = sum(&partial)?;
        Ok((out, Some([sums.f_select(0, 0)?, sums.f_select(0, 1)?])))
    }

    pub(super) fn gate(&self, gate_up: &Tensor) -> Result<Tensor> {
        let gate_up = gate_up.f_contiguous()?;
        let (mut size, width) = halved(&gate_up);
        let rows = rows(&gate_up, 2 * width)?;
        if let Some(last) = size.last_mut() {
            *last = width;
        }
        let out = Tensor::f_empty(size, (gate_up.f_kind()?, gate_up.device()))?;
        let addresses = [at(&gate_up), at(&out)];
        self.launch("gate_forward", strides(rows, width), THREADS, addresses, [rows, width as u32])?;
        Ok(out)
    }

    pub(super) fn gate_backward(&self, gradient: &Tensor, gate_up: &Tensor) -> Result<(Tensor, Tensor)> {
        let (gradient, gate_up) = (gradient.f_contiguous()?, gate_up.f_contiguous()?);
        let (_, width) = halved(&gate_up);
        let rows = rows(&gate_up, 2 * width)?;
        let (out, product) = (gate_up.f_empty_like()?, gradient.f_empty_like()?);
        let addresses = [at(&gradient), at(&gate_up), at(&out), at(&product)];
        self.launch("gate_backward", strides(rows, width), THREADS, addresses, [rows, width as u32])?;
        Ok((out, product))
    }

    /// Log-probs, entropies, and logarithms of the sums of exponentials, each `[m]` f32.
    pub(super) fn score(&self, logits: &Tensor, labels: &Tensor, temperature: f64) -> Result<[Tensor; 3]> {
        let (rows, width) = logits.size2()?;
        let found = [floats(logits, &[rows])?, floats(logits, &[rows])?, floats(logits, &[rows])?];
        let [log_probs, entropy, log_sum] = found.each_ref().map(at);
        let addresses = [at(logits), at(labels), log_probs, entropy, log_sum];
        let numbers = [width as u32, (temperature as f32).to_bits()];
        self.launch("scores_forward", rows as u32, SCORE_THREADS, addresses, numbers)?;
        Ok(found)
    }

    /// Writes the gradient of the logits over them.
    pub(super) fn score_backward(
        &self,
        logits: &Tensor,
        labels: &Tensor,
        entropy: &Tensor,
        log_sum: &Tensor,
        gradients: (&Tensor, Option<&Tensor>),
        temperature: f64,
    ) -> Result<()> {
        let (rows, width) = logits.size2()?;
        let gradient = gradients.0.f_contiguous()?;
        let entropy_gradient = gradients.1.map(Tensor::f_contiguous).transpose()?;
        let (gradient, of_entropy) = (at(&gradient), entropy_gradient.as_ref().map_or(0, at));
        let addresses = [at(logits), at(labels), at(entropy), at(log_sum), gradient, of_entropy];
        let numbers = [width as u32, (temperature as f32).to_bits()];
        self.launch("scores_backward", rows as u32, SCORE_THREADS, addresses, numbers)
    }

    fn norm_threads(&self) -> u32 {
        (self.hidden as u32 / 8).next_multiple_of(32)
    }
}

/// Where a tensor's first element lies, as long as the tensor is there.
fn at(tensor: &Tensor) -> u64 {
    tensor.data_ptr() as u64
}

/// Rows of a tensor that is so wide.
fn rows(x: &Tensor, width: i64) -> Result<u32> {
    let (elements, last) = (x.numel() as i64, x.size().last().copied().unwrap_or(0));
    match u32::try_from(elements / width.max(1)) {
        // Heads of rows are counted in 32 bits, too.
        Ok(rows) if last == width && elements < 1 << 40 => Ok(rows),
        _ => Err(input("activations", format!("rows of {width}"), format!("{:?}", x.size()))),
    }
}

fn halved(gate_up: &Tensor) -> (Vec<i64>, i64) {
    let size = gate_up.size();
    let width = size.last().map_or(0, |last| last / 2);
    (size, width)
}

fn strides(rows: u32, width: i64) -> u32 {
    (u64::from(rows) * (width as u64 / 8)).div_ceil(u64::from(THREADS)).min(STRIDING_BLOCKS) as u32
}

fn floats(beside: &Tensor, size: &[i64]) -> Result<Tensor> {
    Ok(Tensor::f_empty(size, (Kind::Float, beside.device()))?)
}

fn sum(partial: &Tensor) -> Result<Tensor> {
    Ok(partial.f_sum_dim_intlist(0_i64, false, Kind::Float)?)
}
