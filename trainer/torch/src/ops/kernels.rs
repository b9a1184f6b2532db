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

/// Kernels by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kernel {
    NormForward,
    NormBackward,
    TurnForward,
    TurnBackward,
    GateForward,
    GateBackward,
    ScoresForward,
    ScoresBackward,
}

impl Kernel {
    pub(super) const ALL: [Self; 8] = [
        Self::NormForward,
        Self::NormBackward,
        Self::TurnForward,
        Self::TurnBackward,
        Self::GateForward,
        Self::GateBackward,
        Self::ScoresForward,
        Self::ScoresBackward,
    ];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::NormForward => "norm_forward",
            Self::NormBackward => "norm_backward",
            Self::TurnForward => "turn_forward",
            Self::TurnBackward => "turn_backward",
            Self::GateForward => "gate_forward",
            Self::GateBackward => "gate_backward",
            Self::ScoresForward => "scores_forward",
            Self::ScoresBackward => "scores_backward",
        }
    }
}

/// What a kernel is told.
///
/// # Safety
/// Implementors are `repr(C)` and have the fields of the `struct` of the same name in `kernels.cu`.
pub(super) unsafe trait Arguments: Copy {}

macro_rules! arguments {
    ($($name:ident { $($address:ident),+ ; $($number:ident: $type:ty),+ })+) => {$(
        #[repr(C)]
        #[derive(Clone, Copy)]
        struct $name { $($address: u64,)+ $($number: $type,)+ }
        // SAFETY: addresses, then numbers, as the struct of this name has them.
        unsafe impl Arguments for $name {}
    )+};
}

arguments! {
    Norm { x, weight, y; rows: u32, eps: f32 }
    NormBack { gradient, x, weight, rest, out, partial; rows: u32, eps: f32 }
    Turn { qkv, query_norm, key_norm, cos, sin, query, key; rows: u32, heads: u32, kv_heads: u32, eps: f32 }
    TurnBack {
        query_gradient, key_gradient, value_gradient, qkv, query_norm, key_norm, cos, sin, out, partial;
        rows: u32, heads: u32, kv_heads: u32, eps: f32
    }
    Gate { gate_up, out; rows: u32, width: u32 }
    GateBack { gradient, gate_up, out, product; rows: u32, width: u32 }
    Scores { logits, labels, log_probs, entropy, log_sum; width: u32, temperature: f32 }
    ScoresBack { logits, labels, entropy, log_sum, gradient, entropy_gradient; width: u32, temperature: f32 }
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

    pub(super) fn open(ordinal: usize, config: &Config) -> Result<Kernels> {
        let device = device::Device::open(ordinal, &definitions(config))?;
        Ok(Kernels::new(Machine::Device(device), config))
    }

    pub(super) fn new(machine: Machine, config: &Config) -> Kernels {
        Kernels { machine, hidden: config.hidden_size }
    }

    fn launch<A: Arguments>(&self, kernel: Kernel, blocks: u32, threads: u32, arguments: A) -> Result<()> {
        if blocks == 0 {
            return Ok(());
        }
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

    pub(super) fn norm(&self, x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
        let (x, rows) = (x.f_contiguous()?, rows(x, self.hidden)?);
        let y = x.f_empty_like()?;
        let (threads, blocks) = (self.norm_threads(), rows.div_ceil(ROWS));
        let arguments = Norm { x: at(&x), weight: at(weight), y: at(&y), rows, eps: eps as f32 };
        self.launch(Kernel::NormForward, blocks, threads, arguments)?;
        Ok(y)
    }

    pub(super) fn norm_backward(
        &self,
        gradient: &Tensor,
        x: &Tensor,
        weight: &Tensor,
        rest: Option<&Tensor>,
        eps: f64,
    ) -> Result<(Tensor, Tensor)> {
        let (gradient, x, rows) = (gradient.f_contiguous()?, x.f_contiguous()?, rows(x, self.hidden)?);
        let rest = rest.map(Tensor::f_contiguous).transpose()?;
        let (threads, blocks) = (self.norm_threads(), rows.div_ceil(ROWS).min(SUMMING_BLOCKS));
        let (out, partial) = (x.f_empty_like()?, floats(&x, &[i64::from(blocks), self.hidden])?);
        let arguments = NormBack {
            gradient: at(&gradient),
            x: at(&x),
            weight: at(weight),
            rest: rest.as_ref().map_or(0, at),
            out: at(&out),
            partial: at(&partial),
            rows,
            eps: eps as f32,
        };
        self.launch(Kernel::NormBackward, blocks, threads, arguments)?;
        Ok((out, sum(&partial)?))
    }

    pub(super) fn turn(
        &self,
        qkv: &Tensor,
        norms: HeadNorms<'_>,
        angles: &Angles,
        heads: Heads,
        eps: f64,
    ) -> Result<[Tensor; 3]> {
        let Heads { heads, kv_heads, head_dim } = heads;
        let (qkv, rows) = (qkv.f_contiguous()?, rows(qkv, (heads + 2 * kv_heads) * head_dim)?);
        let parts = qkv.f_unflatten(-1, [heads + 2 * kv_heads, head_dim])?;
        let part = |start: i64, length: i64| parts.f_narrow(-2, start, length);
        let empty = |part: Tensor| Tensor::f_empty(part.size(), (part.f_kind()?, part.device()));
        let (query, key) = (empty(part(0, heads)?)?, empty(part(heads, kv_heads)?)?);
        let arguments = Turn {
            qkv: at(&qkv),
            query_norm: norms.map_or(0, |[query, _]| at(query)),
            key_norm: norms.map_or(0, |[_, key]| at(key)),
            cos: at(&angles.cos),
            sin: at(&angles.sin),
            query: at(&query),
            key: at(&key),
            rows,
            heads: heads as u32,
            kv_heads: kv_heads as u32,
            eps: eps as f32,
        };
        let items = rows * (heads + kv_heads) as u32;
        self.launch(Kernel::TurnForward, items.div_ceil(ROWS * THREADS / 32), THREADS, arguments)?;
        Ok([query, key, part(heads + kv_heads, kv_heads)?])
    }

    pub(super) fn turn_backward(
        &self,
        gradients: [&Tensor; 3],
        qkv: &Tensor,
        norms: HeadNorms<'_>,
        angles: &Angles,
        heads: Heads,
        eps: f64,
    ) -> Result<(Tensor, Option<[Tensor; 2]>)> {
        let Heads { heads, kv_heads, head_dim } = heads;
        let (qkv, rows) = (qkv.f_contiguous()?, rows(qkv, (heads + 2 * kv_heads) * head_dim)?);
        let [query, key, value] = gradients;
        let [query, key, value] = [query.f_contiguous()?, key.f_contiguous()?, value.f_contiguous()?];
        let items = rows * (heads + 2 * kv_heads) as u32;
        let blocks = items.div_ceil(ROWS * THREADS / 32).min(SUMMING_BLOCKS);
        let (out, partial) = (qkv.f_empty_like()?, floats(&qkv, &[i64::from(blocks), 2, head_dim])?);
        let arguments = TurnBack {
            query_gradient: at(&query),
            key_gradient: at(&key),
            value_gradient: at(&value),
            qkv: at(&qkv),
            query_norm: norms.map_or(0, |[query, _]| at(query)),
            key_norm: norms.map_or(0, |[_, key]| at(key)),
            cos: at(&angles.cos),
            sin: at(&angles.sin),
            out: at(&out),
            partial: at(&partial),
            rows,
            heads: heads as u32,
            kv_heads: kv_heads as u32,
            eps: eps as f32,
        };
        self.launch(Kernel::TurnBackward, blocks, THREADS, arguments)?;
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
        let arguments = Gate { gate_up: at(&gate_up), out: at(&out), rows, width: width as u32 };
        self.launch(Kernel::GateForward, strides(rows, width), THREADS, arguments)?;
        Ok(out)
    }

    pub(super) fn gate_backward(&self, gradient: &Tensor, gate_up: &Tensor) -> Result<(Tensor, Tensor)> {
        let (gradient, gate_up) = (gradient.f_contiguous()?, gate_up.f_contiguous()?);
        let (_, width) = halved(&gate_up);
        let rows = rows(&gate_up, 2 * width)?;
        let (out, product) = (gate_up.f_empty_like()?, gradient.f_empty_like()?);
        let arguments = GateBack {
            gradient: at(&gradient),
            gate_up: at(&gate_up),
            out: at(&out),
            product: at(&product),
            rows,
            width: width as u32,
        };
        self.launch(Kernel::GateBackward, strides(rows, width), THREADS, arguments)?;
        Ok((out, product))
    }

    /// Log-probs, entropies, and logarithms of the sums of exponentials, each `[m]` f32.
    pub(super) fn score(&self, logits: &Tensor, labels: &Tensor, temperature: f64) -> Result<[Tensor; 3]> {
        let (rows, width) = logits.size2()?;
        let found = [floats(logits, &[rows])?, floats(logits, &[rows])?, floats(logits, &[rows])?];
        let [log_probs, entropy, log_sum] = found.each_ref().map(at);
        let arguments = Scores {
            logits: at(logits),
            labels: at(labels),
            log_probs,
            entropy,
            log_sum,
            width: width as u32,
            temperature: temperature as f32,
        };
        self.launch(Kernel::ScoresForward, rows as u32, SCORE_THREADS, arguments)?;
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
        let arguments = ScoresBack {
            logits: at(logits),
            labels: at(labels),
            entropy: at(entropy),
            log_sum: at(log_sum),
            gradient: at(&gradient),
            entropy_gradient: entropy_gradient.as_ref().map_or(0, at),
            width: width as u32,
            temperature: temperature as f32,
        };
        self.launch(Kernel::ScoresBackward, rows as u32, SCORE_THREADS, arguments)
    }

    fn norm_threads(&self) -> u32 {
        (self.hidden as u32 / 8).next_multiple_of(32)
    }
}

/// Where a tensor's first element lies.
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
