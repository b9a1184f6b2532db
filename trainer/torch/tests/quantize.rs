//! Matrices in fp8: what numpy and PyTorch make of them, bit for bit, and what follows from the definition.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::process::Command;

use driftless_torch::Error;
use driftless_torch::quantize::{Quantized, quantize};
use tch::{Device, Kind, Tensor};

/// Names an interpreter that has torch and numpy.
const PYTHON: &str = "DRIFTLESS_TRANSFORMERS_PYTHON";
/// Matrices that `quantize.py` makes.
const CASES: usize = 13;

fn bytes(tensor: &Tensor) -> Vec<u8> {
    let mut bytes = vec![0; tensor.numel() * tensor.kind().elt_size_in_bytes()];
    tensor.contiguous().copy_data_u8(&mut bytes, tensor.numel());
    bytes
}

/// The bits of e4m3 and of the scales.
fn bits(Quantized { weight, scale_inv }: &Quantized) -> [Vec<u8>; 2] {
    [bytes(weight), bytes(scale_inv)]
}

/// What an e4m3 stands for, by its definition.
fn value(bits: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(bits >> 3 & 15), f64::from(bits & 7) / 8.0);
    let magnitude =
        if exponent == 0 { mantissa * 2f64.powi(-6) } else { (1.0 + mantissa) * 2f64.powi(exponent - 7) };
    if bits & 0x80 == 0 { magnitude } else { -magnitude }
}

/// A matrix of f32 whose rows differ in size by a factor of up to 2^24, with a block of zeros.
fn matrix(rows: i64, columns: i64, seed: i64) -> Tensor {
    tch::manual_seed(seed);
    let like = (Kind::Float, Device::Cpu);
    let amplitude = Tensor::rand([rows, 1], like) * 24.0 - 12.0;
    let matrix = Tensor::randn([rows, columns], like) * amplitude.exp2() * 10f64.powi(seed as i32 % 7 - 3);
    let _ = matrix.narrow(0, 0, rows.min(128)).narrow(1, 0, columns.min(128)).zero_();
    matrix
}

#[test]
fn numpy_and_pytorch_make_the_same_bits() {
    let Ok(python) = std::env::var(PYTHON) else {
        println!("skipped: {PYTHON} names no Python interpreter that has torch");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/quantize.py");
    let output = Command::new(python).arg(script).arg(dir.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let cases: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(cases.len(), CASES);
    for case in cases {
        let read = |name: &str| std::fs::read(case.join(name)).unwrap();
        let shape: Vec<i64> = serde_json::from_slice(&read("shape.json")).unwrap();
        let elements: i64 = shape.iter().product();
        let kind = if read("matrix").len() as i64 == 2 * elements { Kind::BFloat16 } else { Kind::Float };
        let found = quantize(&Tensor::from_data_size(&read("matrix"), &shape, kind)).unwrap();
        assert_eq!(found.weight.size(), shape);
        assert!(bits(&found) == [read("weight"), read("scale_inv")], "{}", case.display());
    }
}

#[test]
fn each_element_is_the_nearest_that_its_scale_allows() {
    for (seed, (rows, columns)) in
        [(1, 1), (128, 128), (127, 129), (300, 70), (256, 384)].into_iter().enumerate()
    {
        let matrix = matrix(rows, columns, seed as i64);
        let [weight, scales] = bits(&quantize(&matrix).unwrap());
        let scales: Vec<f32> =
            scales.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect();
        let wanted = Vec::<f32>::try_from(matrix.flatten(0, 1)).unwrap();
        let across = (columns as usize).div_ceil(128);
        assert_eq!(scales.len(), across * (rows as usize).div_ceil(128));
        assert!(scales.iter().all(|scale| scale.is_finite() && *scale > 0.0));
        for (at, (wanted, bits)) in wanted.into_iter().zip(weight).enumerate() {
            let (row, column) = (at / columns as usize, at % columns as usize);
            let scaled = f64::from(wanted) / f64::from(scales[row / 128 * across + column / 128]);
            let found = value(bits);
            let exponent = scaled.abs().log2().floor().max(-6.0);
            let half = 2f64.powf(exponent - 3.0) / 2.0;
            // The quotient was rounded to an f32 before.
            assert!(
                (found - scaled).abs() <= half * (1.0 + 1e-5),
                "{scaled} became {found} in {rows} x {columns}"
            );
        }
    }
}

#[test]
fn quantised_weights_stay_as_they_are() {
    let quantised = quantize(&matrix(300, 200, 5)).unwrap();
    let spread = |dim| quantised.scale_inv.repeat_interleave_self_int(128, dim, None);
    let scales = spread(0).repeat_interleave_self_int(128, 1, None).narrow(0, 0, 300).narrow(1, 0, 200);
    let again = quantize(&(quantised.weight.to_kind(Kind::Float) * scales)).unwrap();
    assert!(bits(&again)[0] == bits(&quantised)[0]);
    let change = (again.scale_inv / &quantised.scale_inv - 1.0).abs().max();
    assert!(f32::try_from(change).unwrap() <= f32::EPSILON);
}

#[test]
fn nan_and_infinities_are_left_for_the_publisher_to_refuse() {
    let of = |value: f32| quantize(&Tensor::from_slice(&[1.0, value]).view([1, 2])).unwrap();
    assert_eq!(bits(&of(f32::NAN))[0][1] & 0x7f, 0x7f);
    assert!(f32::try_from(of(f32::INFINITY).scale_inv.view([1])).unwrap().is_infinite());
}

#[test]
fn other_shapes_and_kinds_are_refused() {
    for wrong in [
        Tensor::ones([4], (Kind::Float, Device::Cpu)),
        Tensor::ones([2, 2, 2], (Kind::BFloat16, Device::Cpu)),
        Tensor::ones([2, 2], (Kind::Half, Device::Cpu)),
        Tensor::ones([2, 2], (Kind::Float, Device::Cpu)).to_kind(Kind::Float8e4m3fn),
    ] {
        assert!(matches!(quantize(&wrong), Err(Error::Input { .. })), "{wrong:?}");
    }
}
