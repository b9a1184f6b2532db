//! What pushing over NCCL costs, on a machine with two GPUs and a Python that has torch.
//!
//!     cargo bench -p driftless-bridge --features nccl --bench nccl -- alone PYTHON [GPUS]
//!     cargo bench -p driftless-bridge --features nccl --bench nccl -- engine PYTHON URL DIR_A DIR_B
//!     cargo bench -p driftless-bridge --features nccl --bench nccl -- colocate URL DIR_A DIR_B
//!     cargo bench -p driftless-bridge --features nccl --bench nccl -- host
//!     cargo bench -p driftless-bridge --features nccl --bench nccl -- snapshot PYTHON [LAYERS PERCENT…]
//!     cargo bench -p driftless-bridge --features nccl --bench nccl -- snapshot full PYTHON
//!
//! `alone`: the transfer without an engine, to a torch process on each other GPU, against one raw broadcast
//! of the same bytes. `engine`: into a running SGLang on the second GPU, HTTP included, against a torch rank
//! 0; DIR_A and DIR_B are two checkpoints of its model. `colocate`: into one on the first GPU, through memory
//! that it opens. `host`: host memory into buckets on one GPU, without an engine. `snapshot`: 8 billion
//! parameters from GPU to GPU, in full over NCCL and as deltas through shared memory. Both sides take turns,
//! and medians are printed. Rank 0 is on device 0, and NCCL is the one of that Python's torch.
#![allow(unsafe_code, reason = "device memory is a raw address")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a bench that cannot go on ends")]

mod alone;
mod colocate;
mod engine;
mod host;
mod memory;
mod python;
mod snapshot;

/// Turns that each side has; the median of them is printed.
const TURNS: usize = 9;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    match words[..] {
        ["alone", python] => alone::run(python, 2),
        ["alone", python, gpus] => alone::run(python, gpus.parse().unwrap()),
        ["engine", python, url, a, b] => engine::run(python, url, a.as_ref(), b.as_ref()),
        ["colocate", url, a, b] => colocate::run(url, a.as_ref(), b.as_ref()),
        ["host"] => host::run(),
        ["snapshot", "full", python] => snapshot::run(python, &[4, 36], &[]),
        ["snapshot", python] => snapshot::run(python, &[4, 36], &[0.1, 1.0, 5.0]),
        ["snapshot", python, layers, ref percents @ ..] => {
            let percents: Vec<f64> = percents.iter().map(|percent| percent.parse().unwrap()).collect();
            snapshot::run(python, &[layers.parse().unwrap()], &percents);
        }
        ["receiver", layers, density] => snapshot::receive(layers, density),
        // What `cargo bench` without words asks for: nothing that needs a GPU is run by accident.
        _ => println!(
            "nccl: say `alone PYTHON [GPUS]`, `engine PYTHON URL DIR_A DIR_B`, `colocate URL DIR_A DIR_B`, `host`, `snapshot PYTHON [LAYERS PERCENT…]` or `snapshot full PYTHON`"
        ),
    }
}

/// The middle one, with the smallest and the largest.
fn median(mut values: Vec<f64>) -> (f64, f64, f64) {
    values.sort_by(f64::total_cmp);
    (values[values.len() / 2], values[0], values[values.len() - 1])
}

/// Fails where NCCL would: it reads this variable by itself, and SGLang sets it to 0.
fn check_environment() {
    let found = std::env::var("NCCL_CUMEM_ENABLE").unwrap_or_default();
    assert_eq!(found, "0", "set NCCL_CUMEM_ENABLE=0, as SGLang does for itself");
}
