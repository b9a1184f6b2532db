//! The kernels, compiled for this processor (`twin.cpp`), against libtorch's operations in f32; and for
//! devices, as far as that goes without one.
#![expect(unsafe_code, reason = "the twin is a foreign library")]

use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use driftless_testkit::compiler::missing;
use tch::{Device, Kind, Tensor};

use super::kernels::{Arguments, Kernels, Machine, definitions};
use super::{Angles, Heads, Ops, device};
use crate::config::Config;
use crate::tasks::tiny;

type Launch = unsafe extern "C" fn(*const c_char, c_uint, c_uint, *mut c_void) -> c_int;

/// The kernels for one model, in this process.
#[derive(Debug)]
pub(super) struct Twin {
    launch: Launch,
    _library: libloading::Library,
}

impl Twin {
    /// Compiles them; `None` where there is no C++ compiler.
    fn compile(config: &Config) -> Option<Twin> {
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
        let folder = tempfile::tempdir().unwrap();
        let (library, own) = (folder.path().join("twin.so"), Path::new(env!("CARGO_MANIFEST_DIR")));
        let output = Command::new(&compiler)
            .args(["-std=c++17", "-O2", "-w", "-shared", "-fPIC", "-ffp-contract=off"])
            // longjmp between stacks is what it does for a living.
            .args(["-U_FORTIFY_SOURCE", "-fcf-protection=none", "-I"])
            .arg(own.join("../../delta/src/cuda/kernels"))
            .arg("-o")
            .arg(&library)
            .args(definitions(config))
            .arg(own.join("src/ops/twin.cpp"))
            .output();
        let output = match output {
            Ok(output) => output,
            Err(error) => {
                missing(&format!("{compiler} does not run here ({error}); CXX names a C++ compiler"));
                return None;
            }
        };
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        // SAFETY: the library has no constructors; `twin_launch` is what its C++ says, and lives as long as
        // the library.
        unsafe {
            let library = libloading::Library::new(&library).unwrap();
            let launch = *library.get::<Launch>(b"twin_launch\0").unwrap();
            Some(Twin { launch, _library: library })
        }
    }

    /// Runs a kernel. They keep state: one runs at a time.
    pub(super) fn launch<const A: usize, const N: usize>(
        &self,
        kernel: &'static str,
        blocks: u32,
        threads: u32,
        arguments: &Arguments<A, N>,
    ) {
        static ONE: Mutex<()> = Mutex::new(());
        let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let name = CString::new(kernel).unwrap();
        let arguments = std::ptr::from_ref(arguments).cast_mut().cast();
        // SAFETY: the arguments are the kernel's, and addresses in them of this process's tensors.
        let unknown = unsafe { (self.launch)(name.as_ptr(), blocks, threads, arguments) };
        assert_eq!(unknown, 0, "{kernel} is not in twin.cpp");
    }
}

const EPS: f64 = 1e-6;
/// Of bf16, relative to the largest value.
const CLOSE: f64 = 0.01;

fn config(hidden_size: i64, head_dim: i64) -> Config {
    Config {
        vocab_size: 40,
        hidden_size,
        intermediate_size: 48,
        num_hidden_layers: 1,
        num_attention_heads: 3,
        num_key_value_heads: 2,
        head_dim,
        rms_norm_eps: EPS,
        initializer_range: 0.1,
        ..tiny::config()
    }
}

/// By the kernels, and by libtorch.
fn both(hidden: i64, head_dim: i64) -> Option<[Ops; 2]> {
    let config = config(hidden, head_dim);
    let kernels = Kernels::new(Machine::Twin(Twin::compile(&config)?), &config);
    Some([Some(kernels.into()), None].map(|kernels| Ops { kernels, heads: Heads::of(&config), eps: EPS }))
}

/// Numbers that bf16 can hold.
fn numbers(size: &[i64], seed: i64) -> Tensor {
    let elements = size.iter().product::<i64>();
    let wave = Tensor::arange(elements, (Kind::Double, Device::Cpu)) * (0.37 + seed as f64) + seed as f64;
    (wave.sin() * 1.7).reshape(size).to_kind(Kind::BFloat16)
}

/// That what the kernels give is what libtorch gives in f32.
#[track_caller]
fn close(what: &str, found: &Tensor, expected: &Tensor) {
    assert_eq!(found.size(), expected.size(), "{what}");
    let (found, expected) = (found.to_kind(Kind::Double), expected.to_kind(Kind::Double));
    let largest = f64::try_from(expected.abs().max()).unwrap();
    let apart = f64::try_from((found - expected).abs().max()).unwrap();
    assert!(apart <= CLOSE * largest, "{what}: {apart} apart, of at most {largest}");
}

fn wide(x: &Tensor) -> Tensor {
    x.to_kind(Kind::Float)
}

#[test]
fn norms_of_every_width_are_those_of_libtorch() {
    // Less than a warp, and one that ends within a warp; rows that fill no group.
    for (hidden, rows) in [(64, 5), (576, 9), (1024, 4), (2560, 2)] {
        let Some([kernels, plain]) = both(hidden, 16) else { return };
        let (x, gradient, rest) =
            (numbers(&[rows, hidden], 1), numbers(&[rows, hidden], 2), numbers(&[rows, hidden], 3));
        let weight = numbers(&[hidden], 4);
        let what = format!("{rows} rows of {hidden}");
        close(&what, &kernels.norm(&x, &weight).unwrap(), &plain.norm(&wide(&x), &wide(&weight)).unwrap());
        for rest in [None, Some(&rest)] {
            let (own, of_weight) = kernels.norm_backward(&gradient, &x, &weight, rest).unwrap();
            let wide_rest = rest.map(wide);
            let expected =
                plain.norm_backward(&wide(&gradient), &wide(&x), &wide(&weight), wide_rest.as_ref()).unwrap();
            close(&what, &own, &expected.0);
            close(&what, &of_weight, &expected.1);
        }
    }
}

#[test]
fn queries_and_keys_are_turned_as_by_libtorch() {
    for head_dim in [16, 24, 64, 128, 256] {
        let Some([kernels, plain]) = both(64, head_dim) else { return };
        let rows = 5;
        let qkv = numbers(&[rows, 7 * head_dim], 1);
        let angles = numbers(&[rows, 1, head_dim / 2], 2).to_kind(Kind::Float);
        let angles = Angles { cos: angles.cos(), sin: angles.sin() };
        let (query_norm, key_norm) = (numbers(&[head_dim], 3), numbers(&[head_dim], 4));
        let gradients = [3, 2, 2].map(|heads| numbers(&[rows, heads, head_dim], 5 + heads));
        let wide_gradients = gradients.each_ref().map(wide);
        for norms in [None, Some([&query_norm, &key_norm])] {
            let what = format!("heads of {head_dim}, normed {}", norms.is_some());
            let wide_norms = norms.map(|norms| norms.map(wide));
            let wide_norms = wide_norms.as_ref().map(|norms| norms.each_ref());
            let found = kernels.turn(&qkv, norms, &angles).unwrap();
            let expected = plain.turn(&wide(&qkv), wide_norms, &angles).unwrap();
            for (found, expected) in found.iter().zip(&expected) {
                close(&what, found, expected);
            }
            let (own, of_norms) = kernels.turn_backward(gradients.each_ref(), &qkv, norms, &angles).unwrap();
            let expected =
                plain.turn_backward(wide_gradients.each_ref(), &wide(&qkv), wide_norms, &angles).unwrap();
            close(&what, &own, &expected.0);
            assert_eq!(of_norms.is_some(), norms.is_some());
            for (found, expected) in of_norms.iter().flatten().zip(expected.1.iter().flatten()) {
                close(&what, found, expected);
            }
        }
    }
}

#[test]
fn gates_are_those_of_libtorch() {
    let Some([kernels, plain]) = both(64, 16) else { return };
    let (gate_up, gradient) = (numbers(&[3, 7, 96], 1) * 3, numbers(&[3, 7, 48], 2));
    close("gate", &kernels.gate(&gate_up).unwrap(), &plain.gate(&wide(&gate_up)).unwrap());
    let (own, product) = kernels.gate_backward(&gradient, &gate_up).unwrap();
    let expected = plain.gate_backward(&wide(&gradient), &wide(&gate_up)).unwrap();
    close("gradient", &own, &expected.0);
    close("product", &product, &expected.1);
}

#[test]
fn scores_and_their_gradients_are_those_of_libtorch() {
    let Some([kernels, plain]) = both(64, 16) else { return };
    // More columns than a block has threads for at once.
    for (width, temperature) in [(40, 1.0), (8 * 512 + 64, 0.7)] {
        let (logits, labels) = (numbers(&[3, width], 1) * 8, Tensor::from_slice(&[0_i64, 17, width - 1]));
        let (gradient, spread) = (wide(&numbers(&[3], 2)), wide(&numbers(&[3], 3)));
        for entropy in [None, Some(&spread)] {
            let scored = kernels.score(logits.copy(), &labels, temperature, true).unwrap();
            let expected = plain.score(wide(&logits), &labels, temperature, true).unwrap();
            let apart = |a: &Tensor, b: &Tensor| f64::try_from((a - b).abs().max()).unwrap();
            assert!(apart(&scored.log_probs, &expected.log_probs) < 1e-5, "log-probs of {width}");
            let entropies = (scored.entropy.as_ref().unwrap(), expected.entropy.as_ref().unwrap());
            assert!(apart(entropies.0, entropies.1) < 1e-5, "entropies of {width}");
            let found = kernels.score_backward(scored, &labels, temperature, &gradient, entropy).unwrap();
            let expected = plain.score_backward(expected, &labels, temperature, &gradient, entropy).unwrap();
            close("gradient", &found, &expected);
        }
    }
}

#[test]
fn gradients_of_scores_are_those_of_autograd() {
    let plain = Ops { kernels: None, heads: Heads::of(&config(64, 16)), eps: EPS };
    let logits = numbers(&[4, 40], 1).to_kind(Kind::Float) * 4;
    let labels = Tensor::from_slice(&[0_i64, 5, 17, 39]);
    let (gradient, spread) = (wide(&numbers(&[4], 2)), wide(&numbers(&[4], 3)));
    let scored = plain.score(logits.copy(), &labels, 0.7, true).unwrap();
    let found = plain.score_backward(scored, &labels, 0.7, &gradient, Some(&spread)).unwrap();
    let leaf = logits.set_requires_grad(true);
    let scored = plain.score(leaf.shallow_clone(), &labels, 0.7, true).unwrap();
    let loss =
        (scored.log_probs * gradient).sum(Kind::Float) + (scored.entropy.unwrap() * spread).sum(Kind::Float);
    loss.backward();
    let apart = f64::try_from((found - leaf.grad()).abs().max()).unwrap();
    assert!(apart < 1e-6, "{apart}");
}

#[test]
fn the_kernels_compile_for_devices() {
    for (hidden, head_dim) in [(1024, 128), (2560, 128), (576, 64), (4096, 256)] {
        match device::compile("compute_90", &definitions(&config(hidden, head_dim))) {
            Ok(_) => {}
            Err(error) if error.to_string().contains("no libnvrtc") => {
                println!("skipped: {error}");
                return;
            }
            Err(error) => panic!("{hidden}, {head_dim}: {error}"),
        }
    }
}
