//! One optimiser step of Qwen3 shapes: tokens a second and MFU, on one GPU and on several; CUDA against the CPU; and
//! the way of the weights from a step to a manifest.
//!
//! ```sh
//! cargo bench -p driftless-torch --bench learner -- speed --shapes 0.6b --lengths 2x4096 --device cuda:0
//! cargo bench -p driftless-torch --bench learner -- check --device cuda:0
//! CUBLAS_WORKSPACE_CONFIG=:4096:8 cargo bench -p driftless-torch --bench learner -- deterministic --device cuda:0
//! cargo bench -p driftless-torch --bench learner -- ranks --ranks 2 --shapes 0.6b --lengths mixed:65536 --device cuda --dir /tmp/ranks
//! cargo bench -p driftless-torch --bench learner -- publish --shapes 4b --lr 1e-6 --device cuda:0 --dir /dev/shm/publish
//! cargo bench -p driftless-torch --bench learner -- publish --sides device --fp8 --shapes 0.6b --lr 1e-6 --device cuda:0 --dir /dev/shm/fp8
//! ```

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a bench fails by panicking, and prints its figures"
)]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use driftless_buffer::{Identity, Log, Options, Position, Record, Scalars};
use driftless_store::open;
use driftless_torch::batch::{Reduction, token_weights};
use driftless_torch::libtorch::{CUBLAS_WORKSPACE, device, set_deterministic, set_threads};
use driftless_torch::optimizer::AdamWOptions;
use driftless_torch::quantize::{Quantized, quantize};
use driftless_torch::sft::{SftOptions, SftTask, sft};
use driftless_torch::tasks::text::{Text, WINDOW};
use driftless_torch::{
    Batch, Config, Family, Model, Policy, RankOptions, Sample, TorchLearner, TorchOptions,
    quantize_checkpoint, serve_rank,
};
use driftless_trainer::learner::{self, Learner as _, Stepped, Workspace};
use driftless_trainer::metrics::StepStats;
use driftless_trainer::options::{CriticOptions, Estimator, LearnOptions};
use driftless_transport::Publisher;
use driftless_transport::publish::{BaseMemory, DeviceUse, Mode, PublisherOptions, Start, Step};
use tch::{Cuda, Device, Kind, Tensor};

/// Dense bf16 operations a second of an H100 or H200.
const PEAK: f64 = 989e12;
const SEED: i64 = 1;

/// Arguments as `--name value`.
struct Arguments(Vec<String>);

impl Arguments {
    fn get(&self, name: &str, default: &str) -> String {
        let place = self.0.iter().position(|argument| argument.strip_prefix("--") == Some(name));
        place.and_then(|place| self.0.get(place + 1)).map_or(default, String::as_str).to_owned()
    }

    fn has(&self, name: &str) -> bool {
        self.0.iter().any(|argument| argument == name)
    }
}

/// hidden, intermediate, layers, heads, kv heads.
fn shapes(size: &str) -> Config {
    let [hidden_size, intermediate_size, num_hidden_layers, num_attention_heads] = match size {
        "0.6b" => [1024, 3072, 28, 16],
        "1.7b" => [2048, 6144, 28, 16],
        "4b" => [2560, 9728, 36, 32],
        "tiny" => [256, 512, 2, 8],
        other => panic!("shapes: expected 0.6b, 1.7b, 4b or tiny, found {other}"),
    };
    Config {
        family: Family::Qwen3,
        vocab_size: if size == "tiny" { 1024 } else { 151_936 },
        hidden_size,
        intermediate_size,
        num_hidden_layers,
        num_attention_heads,
        num_key_value_heads: if size == "tiny" { 2 } else { 8 },
        head_dim: if size == "tiny" { 32 } else { 128 },
        rms_norm_eps: 1e-6,
        rope_theta: 1e6,
        rope_scaling: None,
        max_position_embeddings: 40_960,
        tie_word_embeddings: true,
        initializer_range: 0.02,
        bos_token_id: None,
        eos_token_ids: vec![1],
        pad_token_id: Some(0),
    }
}

/// `2x4096`: so many of one length; `mixed:16384`: lengths from 200 to 4,096 that add up to about so many.
fn lengths(text: &str) -> Vec<usize> {
    if let Some(total) = text.strip_prefix("mixed:") {
        let total: usize = total.parse().unwrap();
        let (mut lengths, mut state) = (Vec::new(), 88_172_645_463_325_252_u64);
        while lengths.iter().sum::<usize>() + 200 < total {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let rest = total - lengths.iter().sum::<usize>();
            // Log-uniform: many short, few long.
            let length = 200.0 * (4096.0_f64 / 200.0).powf((state >> 11) as f64 / (1_u64 << 53) as f64);
            lengths.push((length as usize).min(rest));
        }
        lengths.sort_unstable_by(|a, b| b.cmp(a));
        return lengths;
    }
    let (count, length) = text.split_once('x').unwrap();
    vec![length.parse().unwrap(); count.parse().unwrap()]
}

/// Sequences of these lengths, all of whose tokens but the first are trained on.
fn batch(lengths: &[usize], vocabulary: i64, device: Device) -> Batch {
    rows(0, lengths, vocabulary, device)
}

/// What a sequence is made of depends on its number. One more than is read, since the last is only predicted.
fn tokens(row: usize, length: usize, vocabulary: i64) -> Vec<i32> {
    (0..=length).map(|place| ((row * 7919 + place * 104_729 + 13) as i64 % vocabulary) as i32).collect()
}

/// The same, the first of them being number `first`.
fn rows(first: usize, lengths: &[usize], vocabulary: i64, device: Device) -> Batch {
    let row = |(row, &length): (usize, &usize)| tokens(first + row, length, vocabulary);
    let rows: Vec<Vec<i32>> = lengths.iter().enumerate().map(row).collect();
    let log_probs: Vec<Vec<f32>> = lengths.iter().map(|&length| vec![-12.0; length]).collect();
    let samples: Vec<Sample<'_>> = rows
        .iter()
        .zip(&log_probs)
        .zip(0..)
        .map(|((row, log_probs), index)| Sample {
            tokens: row,
            prompt_len: 1,
            log_probs,
            answer: index,
            advantage: if index % 2 == 0 { 1.0 } else { -1.0 },
            ..Sample::default()
        })
        .collect();
    Batch::new(&samples, &token_weights(&samples, Reduction::PerToken), vocabulary, device).unwrap()
}

fn synchronize(device: Device) {
    if let Device::Cuda(index) = device {
        Cuda::synchronize(index as i64);
    }
}

/// The median time of some calls in seconds, after two to warm up.
fn median(device: Device, calls: usize, mut call: impl FnMut()) -> f64 {
    let mut times: Vec<f64> = (0..calls + 2)
        .map(|_| {
            synchronize(device);
            let begin = Instant::now();
            call();
            synchronize(device);
            begin.elapsed().as_secs_f64()
        })
        .skip(2)
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// What the whole GPU uses, in MiB, as `nvidia-smi` says. libtorch keeps what it has had.
fn memory(device: Device) -> Option<u64> {
    let Device::Cuda(index) = device else { return None };
    let asked = ["--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", &index.to_string()];
    let said = Command::new("nvidia-smi").args(asked).output().ok()?;
    String::from_utf8(said.stdout).ok()?.trim().parse().ok()
}

fn speed(arguments: &Arguments) {
    let device = device(&arguments.get("device", "cpu")).unwrap();
    let size = arguments.get("shapes", "tiny");
    let config = shapes(&size);
    let text = arguments.get("lengths", "4x64");
    let lengths = lengths(&text);
    let recompute = arguments.get("recompute-granularity", "none") == "full";
    let steps: usize = arguments.get("steps", "6").parse().unwrap();
    let kind = if arguments.get("dtype", "bfloat16") == "float32" { Kind::Float } else { Kind::BFloat16 };
    set_threads(std::thread::available_parallelism().map_or(1, usize::from)).unwrap();
    let model = Model::fresh(config.clone(), SEED, kind, device).unwrap();
    let cpu_offload = arguments.has("--optimizer-cpu-offload");
    let options = AdamWOptions::default().with_cpu_offload(cpu_offload);
    let mut policy = Policy::new(model, kind, options).unwrap().with_recompute(recompute);
    let whole = [batch(&lengths, config.vocab_size, device)];
    let mut stats = Default::default();
    let step = median(device, steps, || {
        stats = match arguments.has("--policy-loss") {
            true => policy.policy_step(&whole, &LearnOptions::default(), 1.0, 1e-5).unwrap(),
            false => policy.sft_step(&whole, 1e-5).unwrap(),
        };
    });
    let used = memory(device).map_or("-".to_owned(), |used| used.to_string());
    let tokens = lengths.iter().sum::<usize>() as f64;
    let attention: f64 = lengths.iter().map(|&n| (n * n) as f64).sum();
    let width = (config.num_hidden_layers * config.num_attention_heads * config.head_dim) as f64;
    let operations = 6.0 * config.elements() as f64 * tokens + 6.0 * width * attention;
    println!(
        "driftless {size} {text} ({} sequences, {tokens} tokens), {kind:?}, recompute {recompute}, offload {cpu_offload}: \
         {:.0} tok/s, MFU {:.1} %, step {:.1} ms, GPU {used} MiB, loss {:.4}, grad norm {:.3}",
        lengths.len(),
        tokens / step,
        100.0 * operations / step / PEAK,
        1e3 * step,
        stats.loss,
        stats.grad_norm,
    );
    // A step on next to nothing is the optimiser's; log-probs are the way forward.
    let little = [batch(&[2], config.vocab_size, device)];
    let optimizer = median(device, steps, || assert!(policy.sft_step(&little, 1e-5).is_ok()));
    let forward = median(device, steps, || drop(policy.log_probs(&whole[0], 1.0).unwrap()));
    println!(
        "  of which forward {:.1} ms, optimiser {:.1} ms, back {:.1} ms",
        1e3 * forward,
        1e3 * optimizer,
        1e3 * (step - forward - optimizer)
    );
}

/// What one way through a small model computes.
struct Seen {
    log_probs: Tensor,
    /// How far log-probs of packed sequences are from those of each alone.
    packed: f64,
    /// Of three steps.
    grad_norms: Vec<f64>,
    /// After them.
    weights: Tensor,
}

fn see(device: Device, kind: Kind, recompute: bool, chunk: Option<usize>) -> Seen {
    let config = shapes("tiny");
    let lengths = [300, 300, 129, 64, 17, 5, 1];
    // Weights that bf16 can hold, whichever kind computes.
    let narrow = Model::fresh(config.clone(), SEED, Kind::BFloat16, Device::Cpu).unwrap();
    let model = Model::fresh(config.clone(), SEED, kind, device).unwrap();
    for (to, from) in model.parameters().iter().zip(narrow.parameters()) {
        to.tensor.shallow_clone().copy_(&from.tensor);
    }
    let policy = Policy::new(model, kind, AdamWOptions::default()).unwrap();
    let mut policy = policy.with_recompute(recompute).with_log_probs_chunk_size(chunk);
    let all = batch(&lengths, config.vocab_size, device);
    let log_probs_of = |batch: &Batch| policy.log_probs(batch, 1.0).unwrap().to_device(Device::Cpu);
    let log_probs = log_probs_of(&all);
    let alone: Vec<Tensor> = (0..lengths.len())
        .map(|row| log_probs_of(&rows(row, &lengths[row..=row], config.vocab_size, device)))
        .collect();
    let packed = furthest(&log_probs, &Tensor::cat(&alone, 0));
    let loss = LearnOptions::default();
    let step = |_| policy.policy_step(std::slice::from_ref(&all), &loss, 1.0, 1e-3).unwrap().grad_norm;
    let grad_norms = (0..3).map(step).collect();
    let weights =
        policy.model().parameters().iter().map(|weight| weight.tensor.flatten(0, -1)).collect::<Vec<_>>();
    Seen { log_probs, packed, grad_norms, weights: Tensor::cat(&weights, 0) }
}

fn furthest(a: &Tensor, b: &Tensor) -> f64 {
    f64::try_from((a - b).abs().max()).unwrap()
}

/// The device against f32 on the CPU, by every way there is through the model.
fn check(arguments: &Arguments) {
    let device = device(&arguments.get("device", "cpu")).unwrap();
    let reference = see(Device::Cpu, Kind::Float, false, None);
    let narrow = furthest(&see(Device::Cpu, Kind::BFloat16, false, None).log_probs, &reference.log_probs);
    println!(
        "CPU: gradient norms {:.6?}; log-probs in bf16 at most {narrow:.2e} from f32",
        reference.grad_norms
    );
    for (kind, bound) in [(Kind::Float, 2e-3), (Kind::BFloat16, 3.0 * narrow)] {
        for (recompute, chunk) in [(false, None), (true, None), (false, Some(100))] {
            let seen = see(device, kind, recompute, chunk);
            let distance = furthest(&seen.log_probs, &reference.log_probs);
            let apart = seen.grad_norms.iter().zip(&reference.grad_norms).map(|(a, b)| (a / b - 1.0).abs());
            let apart = apart.fold(0.0, f64::max);
            println!(
                "{device:?} {kind:?} recompute {recompute} chunk {chunk:?}: log-probs at most {distance:.2e} from the CPU's in \
                 f32, packed at most {:.2e} from alone, gradient norms {apart:.2e} apart: {:.6?}",
                seen.packed, seen.grad_norms
            );
            assert!(distance <= bound && seen.packed <= bound && apart < 0.05, "too far");
        }
        let matrix = (Tensor::randn([300, 520], (Kind::Float, Device::Cpu)) * 0.02).to_kind(kind);
        let bits = |device: Device| {
            let Quantized { weight, scale_inv } = quantize(&matrix.to_device(device)).unwrap();
            [weight.view_dtype(Kind::Uint8), scale_inv].map(|tensor| tensor.to_device(Device::Cpu))
        };
        let ([weight, scale_inv], [own_weight, own_scale_inv]) = (bits(Device::Cpu), bits(device));
        assert!(weight.equal(&own_weight) && scale_inv.equal(&own_scale_inv), "other bits in fp8");
    }
}

/// The same steps twice, by every way there is: their bits, and what that costs.
fn deterministic(arguments: &Arguments) {
    let (name, value) = CUBLAS_WORKSPACE;
    assert!(std::env::var_os(name).is_some(), "cuBLAS wants {name}={value} in the environment");
    let device = device(&arguments.get("device", "cpu")).unwrap();
    set_deterministic();
    for (kind, recompute) in [(Kind::Float, false), (Kind::BFloat16, false), (Kind::BFloat16, true)] {
        let [first, second] = [(); 2].map(|()| see(device, kind, recompute, None));
        assert_eq!(first.grad_norms, second.grad_norms);
        assert!(first.log_probs.equal(&second.log_probs) && first.weights.equal(&second.weights));
        println!("{device:?} {kind:?} recompute {recompute}: three steps twice, the same bits");
    }
}

/// A checkpoint of fresh weights in `dir`, unless it is there.
fn checkpoint(dir: &Path, config: Config, dtype: Kind, device: &str) {
    let task = SftTask::Text(Text::new(vec![0; WINDOW]).unwrap());
    let options = SftOptions::new(task, config, dir, 0).with_dtype(Some(dtype)).with_seed(SEED as u64);
    let options = options.with_device(device.to_owned());
    if !dir.join("config.json").exists() {
        sft(&options, |_, _| {}).unwrap();
    }
}

/// Sequences of these lengths in a log of their own.
fn logged(dir: &Path, lengths: &[usize], vocabulary: i64) -> (Log, Vec<Record>) {
    let identity = Identity { run_id: [1; 16], model: "policy".into(), tokenizer_digest: [0; 32] };
    let log = Log::open(dir, Options::new(identity)).unwrap();
    for (row, &length) in lengths.iter().enumerate() {
        let sample = driftless_buffer::Sample {
            scalars: Scalars { sample_id: row as u64, ..Scalars::default() },
            prompt_len: 1,
            tokens: &tokens(row, length, vocabulary),
            log_probs: &vec![-12.0; length],
            loss_mask: &vec![1; length],
            ..driftless_buffer::Sample::default()
        };
        log.append(&sample).unwrap().wait().unwrap();
    }
    let records = log.reader().iter(Position(0)).map(Result::unwrap).collect();
    (log, records)
}

fn options(arguments: &Arguments) -> TorchOptions {
    let ranks: usize = arguments.get("ranks", "1").parse().unwrap();
    let device = arguments.get("device", "cpu");
    let program = std::env::current_exe().unwrap();
    let ppo = arguments.has("--critic");
    let command = format!("exec '{}' rank --ranks {ranks} --device {device}", program.display());
    let learn = LearnOptions::default()
        .with_advantage_estimator(if ppo { Estimator::Ppo } else { Estimator::Grpo })
        .with_critic(CriticOptions::default().with_critic_lr(1e-5))
        .with_balance_data(true)
        .with_entropy_coef(0.01)
        .with_lr(arguments.get("lr", "1e-5").parse().unwrap())
        .with_optimizer_cpu_offload(arguments.has("--optimizer-cpu-offload"))
        .with_max_tokens_per_gpu(arguments.get("max-tokens-per-gpu", "16384").parse().unwrap());
    let mut options = TorchOptions::new(learn).with_fp8(arguments.has("--fp8"));
    options.device = if ranks == 1 && device == "cuda" { "cuda:0".into() } else { device };
    options.ranks =
        (ranks > 1).then(|| RankOptions::new(ranks, command).with_deadline(Duration::from_secs(120)));
    options
}

/// A run in a directory of its own, and what it learns from.
struct Stage {
    name: String,
    place: Workspace,
    lengths: Vec<usize>,
    records: Vec<Record>,
    _log: Log,
}

impl Stage {
    /// In `--dir`, with fresh weights of `--shapes` and sequences of `--lengths`; `what` tells it from other runs.
    fn new(arguments: &Arguments, device: &str, what: &str) -> Stage {
        let (dir, text) = (PathBuf::from(arguments.get("dir", "ranks")), arguments.get("lengths", "4x64"));
        let size = arguments.get("shapes", "tiny");
        let dtype =
            if arguments.get("dtype", "bfloat16") == "float32" { Kind::Float } else { Kind::BFloat16 };
        let config = shapes(&size);
        let hf_checkpoint = dir.join(format!("{size}-{dtype:?}"));
        checkpoint(&hf_checkpoint, config.clone(), dtype, device);
        let lengths = lengths(&text);
        let own = dir.join(format!("{size}-{dtype:?}-{text}-{what}"));
        let (log, records) = logged(&own.join("log"), &lengths, config.vocab_size);
        let place = Workspace {
            save: own.join("save"),
            hf_checkpoint,
            log: own.join("log"),
            store: own.join("store").display().to_string(),
            run: "bench".into(),
            run_id: "01".repeat(16),
            model: "policy".into(),
            baseline: own.join("baseline"),
            keep: 1,
            anchor_every: None,
            anchor_share: None,
        };
        Stage { name: format!("{size} {text}, {dtype:?}"), place, lengths, records, _log: log }
    }

    /// The sequences, with advantages on both sides of 0.
    fn batch(&self) -> learner::Batch<'_> {
        let sample = |(at, record)| learner::Sample::of(record, if at % 2 == 0 { 1.0 } else { -0.5 });
        learner::Batch { rollout_id: 0, samples: self.records.iter().enumerate().map(sample).collect() }
    }
}

/// Steps of the loop's learner on so many GPUs; prints each step's figures, for comparison between numbers of them.
fn ranks(arguments: &Arguments) {
    let options = options(arguments);
    let (steps, count) = (arguments.get("steps", "6").parse().unwrap(), arguments.get("ranks", "1"));
    let stage = Stage::new(arguments, if options.device == "cpu" { "cpu" } else { "cuda:0" }, &count);
    let mut learner = TorchLearner::new(options);
    learner.load(&stage.place).unwrap();
    let mut batch = stage.batch();
    let mut seen: Vec<StepStats> = Vec::new();
    let seconds = median(Device::Cpu, steps, || {
        let Stepped::Done(stats) = learner.step(&batch).unwrap() else { panic!("a step that is not finite") };
        batch.rollout_id += 1;
        seen.push(stats);
    });
    for (step, stats) in seen.iter().enumerate() {
        let StepStats { loss, grad_norm, entropy, log_prob_diff_mean, .. } = stats;
        println!(
            "step {step}: loss {loss:.9} grad_norm {grad_norm:.9} entropy {entropy:.9} diff {log_prob_diff_mean:.9}"
        );
    }
    let tokens = stage.lengths.iter().sum::<usize>() as f64;
    println!(
        "driftless {} ({} sequences, {tokens} tokens), {count} ranks: {:.0} tok/s, step {:.1} ms",
        stage.name,
        stage.lengths.len(),
        tokens / seconds,
        1e3 * seconds
    );
}

/// From the end of a step to the manifest in a store in `--dir`: first with weights that are copied to the host and
/// encoded there, then with weights that are encoded where they are, or one of `--sides`; in `--fp8`, as such.
fn publish(arguments: &Arguments) {
    let (options, turns) = (options(arguments), arguments.get("steps", "7").parse::<usize>().unwrap());
    let device = device(&options.device).unwrap();
    let stage = Stage::new(arguments, &options.device, &format!("publish-{}", std::process::id()));
    let (mut learner, mut batch) = (TorchLearner::new(options), stage.batch());
    learner.load(&stage.place).unwrap();
    let settings = PublisherOptions::new(&stage.place.run, Start::NewRun, &stage.place.baseline);
    let mut publisher = Publisher::open(open(&stage.place.store).unwrap(), settings).unwrap();
    let mut start = stage.place.hf_checkpoint.clone();
    if arguments.has("--fp8") {
        start = stage.place.save.with_file_name("fp8");
        quantize_checkpoint(&stage.place.hf_checkpoint, &start).unwrap();
    }
    publisher.publish_reference(&start, Step::default()).unwrap();
    for side in arguments.get("sides", "host,device").split(',') {
        if side == "device" {
            let Some(codec) = learner.codec() else { return println!("{device:?} encodes nothing") };
            publisher.encode_on(codec, BaseMemory::Device).unwrap();
        }
        let (mut until_snapshot, mut until_manifest) = (Vec::new(), Vec::new());
        // The first on the device makes its base there, and the next allocates.
        for turn in 0..turns + 2 {
            assert!(matches!(learner.step(&batch).unwrap(), Stepped::Done(_)));
            batch.rollout_id += 1;
            synchronize(device);
            publisher.wait().unwrap();
            let begin = Instant::now();
            let learner::Weights::Tensors(snapshot) = learner.snapshot(batch.rollout_id).unwrap() else {
                return;
            };
            let copied = begin.elapsed();
            let published = publisher.publish(&*snapshot, Step::default(), Mode::Delta).unwrap();
            if turn >= 2 {
                until_snapshot.push(copied.as_secs_f64());
                until_manifest.push(begin.elapsed().as_secs_f64());
            }
            let DeviceUse { device_bytes, host_bytes, host_because, .. } = publisher.device_use();
            println!(
                "{side} {turn}: {:.1} ms, {} bytes of {}, density {:.4}; on the device {device_bytes}, copied from there \
                 {host_bytes}, {host_because:?}",
                1e3 * begin.elapsed().as_secs_f64(),
                published.publication_bytes,
                published.full_bytes,
                published.density(),
            );
        }
        let [snapshot, manifest] = [until_snapshot, until_manifest].map(|mut times| {
            times.sort_by(f64::total_cmp);
            1e3 * times[times.len() / 2]
        });
        println!(
            "driftless {}, encoded on the {side}: snapshot after {snapshot:.1} ms, manifest after {manifest:.1} ms, medians \
             of {turns}",
            stage.name
        );
    }
}

/// A rank that [`ranks`] has started.
fn rank(arguments: &Arguments) {
    let [.., rank, socket, checkpoints] = arguments.0.as_slice() else { panic!("a rank, and two paths") };
    let told = std::env::var_os("DRIFTLESS_LEARNER_SOCKET").unwrap();
    let (options, rank) = (options(arguments), rank.parse().unwrap());
    serve_rank(Path::new(&told), &options, rank, Path::new(socket), Path::new(checkpoints)).unwrap();
}

fn main() {
    // Warnings, as of a pass that did not fit.
    tracing_subscriber::fmt().with_max_level(tracing::Level::WARN).with_writer(std::io::stderr).init();
    let arguments = Arguments(std::env::args().skip(1).collect());
    if arguments.has("--deterministic") {
        set_deterministic();
    }
    match arguments.0.iter().find(|argument| !argument.starts_with("--")).map(String::as_str) {
        Some("speed") => speed(&arguments),
        Some("check") => check(&arguments),
        Some("deterministic") => deterministic(&arguments),
        Some("ranks") => ranks(&arguments),
        Some("publish") => publish(&arguments),
        Some("rank") => rank(&arguments),
        // What `cargo test --benches` and a bare `cargo bench` run: a glance on the CPU.
        _ => speed(&arguments),
    }
}
