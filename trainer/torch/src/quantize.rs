//! Weights in fp8, as DeepSeek's and Qwen3's fp8 checkpoints have them and engines load them: each matrix of the
//! layers as e4m3, in blocks of 128 × 128 with an f32 scale each. What is not a matrix of the layers stays as it is.

use driftless_transport::snapshot::AuxFile;
use serde_json::json;
use tch::{Kind, Tensor};

use crate::config::{Config, edit_config};
use crate::error::{Error, Result, input};

/// Rows, and columns, of a block.
const BLOCK: i64 = 128;
/// The largest number of e4m3.
const E4M3_MAX: f64 = 448.0;
/// The least amplitude that a block is scaled for, as slime has it: a block of zeros gets a scale, and stays zeros.
const AMPLITUDE_MIN: f64 = 1e-10;

/// A matrix in fp8: element `(i, j)` is `weight[i, j] · scale_inv[i / 128, j / 128]`.
#[derive(Debug)]
pub struct Quantized {
    /// e4m3, of the matrix's shape.
    pub weight: Tensor,
    /// f32, `[⌈rows / 128⌉, ⌈columns / 128⌉]`: the largest magnitude of each block, or 1e-10 if that is more, over 448.
    pub scale_inv: Tensor,
}

/// Quantises a matrix `[rows, columns]` of bf16 or f32, on its device. The arithmetic is f32's, so that every device
/// gives the same bits: each element is divided by the scale of its block and rounded to the nearest e4m3, to even
/// where two are as near.
///
/// NaN stays NaN, and a block with an infinity gets an infinite scale: publishers refuse both.
///
/// # Errors
/// [`Error::Input`] for what is no matrix of bf16 or f32; [`Error::Torch`] if libtorch refuses.
pub fn quantize(matrix: &Tensor) -> Result<Quantized> {
    let (kind, size) = (matrix.f_kind()?, matrix.size());
    let (&[rows, columns], Kind::BFloat16 | Kind::Float) = (size.as_slice(), kind) else {
        let found = format!("{size:?} of {kind:?}");
        return Err(input("matrix in fp8", "[rows, columns] of bf16 or f32", found));
    };
    let [down, across] = [rows, columns].map(|length| (length + BLOCK - 1) / BLOCK);
    let padding = [0, across * BLOCK - columns, 0, down * BLOCK - rows];
    let padded = matrix.f_detach()?.f_to_kind(Kind::Float)?.f_constant_pad_nd(padding)?;
    let blocks = padded.f_view([down, BLOCK, across, BLOCK])?;
    let amplitude = blocks.f_abs()?.f_amax([1, 3], true)?.f_clamp_min(AMPLITUDE_MIN)?;
    // Not a number of the host's: CUDA would multiply by its inverse, which rounds otherwise.
    let scale = amplitude.f_divide(&Tensor::f_full([1], E4M3_MAX, (Kind::Float, matrix.device()))?)?;
    // e4m3 has no infinity: what is beyond its largest number would become NaN.
    let scaled = blocks.f_divide(&scale)?.f_clamp(-E4M3_MAX, E4M3_MAX)?;
    let scaled = scaled.f_view([down * BLOCK, across * BLOCK])?;
    let weight = scaled.f_narrow(0, 0, rows)?.f_narrow(1, 0, columns)?.f_to_kind(Kind::Float8e4m3fn)?;
    let weight = weight.f_contiguous()?;
    Ok(Quantized { weight, scale_inv: scale.f_view([down, across])? })
}

/// What is published of the weight `name` in fp8: a matrix of a layer as such and its scales, others as they are.
pub(crate) fn quantized_parts(name: &str, weight: Tensor) -> Result<Vec<(String, Tensor)>> {
    if !name.ends_with("_proj.weight") {
        return Ok(vec![(name.to_owned(), weight)]);
    }
    let Quantized { weight, scale_inv } = quantize(&weight)?;
    Ok(vec![(name.to_owned(), weight), (format!("{name}_scale_inv"), scale_inv)])
}

/// The files of a model, with a `config.json` that says how its layers are quantised.
pub(crate) fn quantized_files(files: &[AuxFile]) -> Result<Vec<AuxFile>> {
    edit_config(files, |config| {
        config["quantization_config"] = json!({
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [BLOCK, BLOCK],
        });
    })
}

/// Refuses a model that engines do not compute in fp8. SGLang joins queries, keys and values, and gates and ups, and
/// the blocks of each have to end where it ends; and it quantises activations in groups of 128.
pub(crate) fn check_shape(config: &Config) -> Result<()> {
    let widths = [
        ("num_attention_heads", config.query_width()),
        ("num_key_value_heads", config.key_width()),
        ("intermediate_size", config.intermediate_size),
        ("hidden_size", config.hidden_size),
    ];
    match widths.into_iter().find(|(_, width)| width % BLOCK != 0) {
        None => Ok(()),
        Some((field, width)) => {
            let expected = format!("one that makes a multiple of {BLOCK}, as fp8 in blocks wants");
            Err(Error::Config { field, expected, found: width.to_string() })
        }
    }
}
