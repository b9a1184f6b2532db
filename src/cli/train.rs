//! `driftless train`.

use crate::cli::error::{Error, Result};
use crate::cli::output::{Output, line_out, say};
use crate::cli::report::{self, Summary};
use crate::cli::task::TaskArgs;
use crate::cli::transport::check_object_store;
use crate::cli::{keys, numbers, paths, progress, store};
use driftless::bridge::SamplingParams;
use driftless::torch::tasks::arithmetic::Recipe;
use driftless::torch::tasks::text::{self, Text};
use driftless::torch::{
    Config, Debug, Estimator, Event, Kind, LearnOptions, Observer, SftOptions, SftTask, TrainOptions,
    UpdateWeightMode, checkpoint, sft, train,
};
use driftless::trainer::Mode;
use indicatif::ProgressBar;
use serde_json::json;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  A cold start on the arithmetic task, from fresh weights:
    driftless train --loss-type sft_loss --save runs/sft --save-hf runs/sft-hf

  The RL loop with two engines that are already running, each with a `driftless follow` beside it:
    driftless train --task arithmetic --hf-checkpoint runs/sft-hf --save runs/rl --store file:///shared/store --run demo \\
        --rollout-external-engine-addrs 10.0.0.1:30000 10.0.0.2:30000

  A model, prompts and a reward of your own:
    driftless train --hf-checkpoint models/Qwen3-0.6B --save runs/math --store file:///shared/store --run math \\
        --prompt-data train.jsonl --input-key question --label-key answer --apply-chat-template --rm-type math \\
        --eval-prompt-data test test.jsonl --rollout-external-engine-addrs 10.0.0.1:30000

  The same with the engines elsewhere: through an object store, signed, and with followers that are told at once:
    driftless train --task arithmetic --hf-checkpoint runs/sft-hf --save runs/rl --store s3://bucket/prefix --run demo \\
        --update-weight-transport object --sign-key trainer.key --notify http://10.0.0.1:9750 --notify http://10.0.0.2:9750 \\
        --rollout-external-engine-addrs 10.0.0.1:30000 10.0.0.2:30000

A run that was interrupted is continued by the same command: from its last training checkpoint, with the
rollouts that are already in its log.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// What to minimise.
    #[arg(long, value_enum, default_value_t = LossType::Policy)]
    loss_type: LossType,
    /// Checkpoint directory to start from; required for the RL loop.
    #[arg(long, value_name = "DIR", required_if_eq("loss_type", "policy_loss"))]
    hf_checkpoint: Option<PathBuf>,
    /// Directory of the run's state: training checkpoints, rollout log, baseline, metrics, report.
    #[arg(long, value_name = "DIR")]
    save: PathBuf,
    /// Write the final policy there as a Hugging Face checkpoint. For SFT: `{rollout_id}` in the name writes one after
    /// each step, named by the steps done.
    #[arg(long, value_name = "DIR")]
    save_hf: Option<PathBuf>,
    /// Steps of the run; for SFT, optimiser steps [default: as many as --num-epoch needs].
    #[arg(long, value_parser = numbers::count::<u64>())]
    num_rollout: Option<u64>,
    /// Seed of weights, data and sampling.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Learning rate [default: 1e-6; that of the demo with --task arithmetic and for SFT].
    #[arg(long, value_parser = numbers::positive)]
    lr: Option<f64>,
    /// CPU threads of libtorch.
    #[arg(long, default_value_t = 2, value_parser = numbers::count::<usize>())]
    num_threads: usize,
    /// Where to train: cpu, or cuda:N.
    #[arg(long, default_value = "cpu")]
    device: String,
    #[command(flatten)]
    sft: SftArgs,
    #[command(flatten)]
    task: TaskArgs,
    #[command(flatten)]
    rollout: RolloutArgs,
    #[command(flatten)]
    update: UpdateArgs,
    #[command(flatten)]
    learn: LearnArgs,
}

/// Only for `--loss-type sft_loss`.
#[derive(clap::Args)]
#[command(next_help_heading = "SFT")]
struct SftArgs {
    /// Learn to predict this text byte by byte, instead of the arithmetic task.
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// State directory of an earlier SFT to go on from: its weights, moments and steps.
    #[arg(long, value_name = "DIR")]
    load: Option<PathBuf>,
    /// `config.json` of the fresh model [default: a Qwen3 of 1.2 M parameters; with --text, of 21 M].
    #[arg(long, value_name = "FILE", conflicts_with = "hf_checkpoint")]
    model_config: Option<PathBuf>,
    /// dtype of the checkpoint that is written.
    #[arg(long, value_enum, default_value_t = SaveDtype::Bfloat16)]
    dtype: SaveDtype,
}

#[derive(clap::Args)]
#[command(next_help_heading = "Rollouts")]
struct RolloutArgs {
    /// Running engines to attach, as host:port, or vllm+http://host:port for vLLM.
    #[arg(long, value_name = "ADDR", num_args = 1..)]
    rollout_external_engine_addrs: Vec<String>,
    /// Prompts of a step; for SFT, examples [default: 32; 256 with --task arithmetic].
    #[arg(long, value_parser = numbers::count::<u64>())]
    rollout_batch_size: Option<u64>,
    /// Samples of a prompt [default: 8; 4 with --task arithmetic].
    #[arg(long, value_parser = numbers::count::<u64>())]
    n_samples_per_prompt: Option<u64>,
    /// Tokens a response may have [default: 1024; 4 with --task arithmetic].
    #[arg(long, value_parser = numbers::count::<u32>())]
    rollout_max_response_len: Option<u32>,
    /// Sampling temperature.
    #[arg(long, default_value_t = 1.0, value_parser = numbers::positive)]
    rollout_temperature: f64,
    /// Sample from the smallest set of tokens with this much probability. Log-probs are of the whole distribution.
    #[arg(long, default_value_t = 1.0, value_parser = numbers::share)]
    rollout_top_p: f64,
    /// Sample from so many of the likeliest tokens; -1: from all.
    #[arg(long, default_value_t = -1, allow_negative_numbers = true, value_parser = clap::value_parser!(i64).range(-1..=1 << 31))]
    rollout_top_k: i64,
    /// Texts that end a response, for engines with a tokenizer.
    #[arg(long, value_name = "TEXT", num_args = 1..)]
    rollout_stop: Vec<String>,
    /// Tokens that end a response, besides the model's own.
    #[arg(long, value_name = "ID", num_args = 1.., value_parser = clap::value_parser!(i32).range(0..))]
    rollout_stop_token_ids: Vec<i32>,
    /// Requests an engine is given at once.
    #[arg(long, default_value_t = 512, value_parser = numbers::count::<usize>())]
    sglang_server_concurrency: usize,
    /// Generate the next rollout while training on this one: samples are at most one step old.
    #[arg(long)]
    train_async: bool,
    /// Measure success on held-out problems after every so many steps; 0: only at both ends.
    #[arg(long, default_value_t = 20, value_parser = numbers::ordinal())]
    eval_interval: u64,
    /// How many of the held-out problems of --task arithmetic.
    #[arg(long, default_value_t = 512, value_parser = numbers::ordinal())]
    n_eval_prompts: u64,
    /// Seconds that one generation may take, retries and recovering engines included.
    #[arg(long, default_value_t = 600, value_name = "SECONDS", value_parser = numbers::deadline())]
    generate_deadline: u64,
    /// Generate and log, with the weights the engines serve; do not train or publish.
    #[arg(long, conflicts_with = "debug_train_only")]
    debug_rollout_only: bool,
    /// Train on what the log holds; do not talk to engines or publish.
    #[arg(long)]
    debug_train_only: bool,
    #[command(flatten)]
    keys: keys::KeyArgs,
}

#[derive(clap::Args)]
#[command(next_help_heading = "Weight updates")]
struct UpdateArgs {
    /// Store of the publications: file:///dir, a path, s3://bucket/prefix, gs://…, az://….
    #[arg(long, value_name = "URL", conflicts_with = "update_weight_disk_dir")]
    store: Option<String>,
    /// The same as --store file://DIR.
    #[arg(long, value_name = "DIR")]
    update_weight_disk_dir: Option<PathBuf>,
    /// Name of the run in the store.
    #[arg(long, default_value = "default")]
    run: String,
    /// Publish whole versions or differences.
    #[arg(long, value_enum, default_value_t = WeightMode::Delta)]
    update_weight_mode: WeightMode,
    /// How versions travel.
    #[arg(long, value_enum, default_value_t = UpdateTransport::Disk)]
    update_weight_transport: UpdateTransport,
    /// Publish after every so many steps.
    #[arg(long, default_value_t = 1, value_parser = numbers::count::<u64>())]
    update_weights_interval: u64,
    /// Carry full tensors too in every version whose number is a multiple of this, so that a late joiner need not replay the chain.
    #[arg(long, value_name = "VERSIONS", value_parser = numbers::count::<u64>())]
    anchor_every: Option<u64>,
    #[command(flatten)]
    sign: keys::SignArgs,
    #[command(flatten)]
    notify: store::NotifyArgs,
    /// After every update compare the engines' checksums with those of the trainer's bytes; a difference ends the run.
    #[arg(long)]
    check_weight_update_equal: bool,
    /// Seconds that an engine may take to come to a new version.
    #[arg(long, default_value_t = 300, value_name = "SECONDS", value_parser = numbers::deadline())]
    update_deadline: u64,
    /// Write a training checkpoint after every so many steps [default: 20; 1 with --task arithmetic].
    #[arg(long, value_parser = numbers::count::<u64>())]
    save_interval: Option<u64>,
}

#[derive(clap::Args)]
#[command(next_help_heading = "Learning")]
struct LearnArgs {
    /// How rewards become advantages.
    #[arg(long, value_enum, default_value_t = AdvantageEstimator::Grpo)]
    advantage_estimator: AdvantageEstimator,
    /// Do not divide by the group's standard deviation.
    #[arg(long)]
    disable_grpo_std_normalization: bool,
    /// Lower clip of the probability ratio.
    #[arg(long, default_value_t = 0.2, value_parser = numbers::positive)]
    eps_clip: f64,
    /// Upper clip of the probability ratio [default: --eps-clip].
    #[arg(long, value_parser = numbers::positive)]
    eps_clip_high: Option<f64>,
    /// Weight of the entropy bonus.
    #[arg(long, default_value_t = 0.0, value_parser = numbers::at_least_zero)]
    entropy_coef: f64,
    /// Weight decay of AdamW.
    #[arg(long, default_value_t = 0.0, value_parser = numbers::at_least_zero)]
    weight_decay: f64,
    /// Decay of the first moment.
    #[arg(long, default_value_t = 0.9, value_parser = numbers::decay)]
    adam_beta1: f64,
    /// Decay of the second moment.
    #[arg(long, default_value_t = 0.95, value_parser = numbers::decay)]
    adam_beta2: f64,
    /// Gradient norm to clip to.
    #[arg(long, default_value_t = 1.0, value_parser = numbers::positive)]
    clip_grad: f64,
    /// Padded tokens of one forward and backward pass.
    #[arg(long, default_value_t = 16384, value_parser = numbers::count::<usize>())]
    max_tokens_per_gpu: usize,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum LossType {
    #[value(name = "policy_loss")]
    Policy,
    #[value(name = "sft_loss")]
    Sft,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum SaveDtype {
    Bfloat16,
    Float32,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum WeightMode {
    Full,
    Delta,
}

#[derive(Clone, Copy, PartialEq, clap::ValueEnum)]
enum UpdateTransport {
    /// Through any store: each engine's follower keeps the checkpoint that it loads.
    Disk,
    /// As `disk`, and --store must be an object store: s3://…, gs://… or az://….
    Object,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum AdvantageEstimator {
    Grpo,
    #[value(name = "reinforce_plus_plus_baseline")]
    ReinforcePlusPlusBaseline,
}

pub(crate) fn run(args: Args, output: Output) -> Result<()> {
    if let Some(dir) = &args.hf_checkpoint {
        paths::check_checkpoint("--hf-checkpoint", dir)?;
    }
    for (name, dir) in [("--save", Some(&args.save)), ("--save-hf", args.save_hf.as_ref())] {
        dir.map_or(Ok(()), |dir| paths::check_place(name, dir))?;
    }
    for (name, file) in [("--text", &args.sft.text), ("--model-config", &args.sft.model_config)] {
        file.as_ref().map_or(Ok(()), |file| paths::open(name, file).map(drop))?;
    }
    args.sft.load.as_ref().map_or(Ok(()), |dir| paths::check_dir("--load", dir))?;
    match args.loss_type {
        LossType::Sft => cold_start(args, output),
        LossType::Policy => reinforce(args, output),
    }
}

fn cold_start(args: Args, output: Output) -> Result<()> {
    let options = sft_options(args)?;
    let bar = progress::bar(options.steps, "sft");
    let mut losses = Vec::new();
    let summary = sft(&options, |step, loss| {
        losses.push(loss);
        bar.set_position(step);
        bar.set_message(format!("loss {loss:.3}"));
    })?;
    bar.finish();
    let value = json!({
        "steps": summary.steps, "loss": summary.loss, "losses": losses, "parameters": summary.parameters,
        "hf_checkpoint": options.save_hf.display().to_string(), "seed": options.seed,
    });
    output.print(&value, |_| {
        let place = options.save_hf.display();
        format!(
            "sft: {} parameters, {} steps, loss {:.3}, seed {}: {place}",
            summary.parameters, summary.steps, summary.loss, options.seed
        )
    })
}

/// Sequences of text in one step, unless told.
const TEXT_BATCH_SIZE: u64 = 16;

fn sft_options(args: Args) -> Result<SftOptions> {
    let recipe = Recipe::default();
    let (task, config, batch_size) = match &args.sft.text {
        Some(path) => (SftTask::Text(Text::open(path)?), text::config(), TEXT_BATCH_SIZE),
        None => (SftTask::Arithmetic, recipe.config, recipe.sft_batch_size),
    };
    let until_solved = args.num_rollout.is_none() && task == SftTask::Arithmetic;
    Ok(SftOptions {
        task,
        config: args.sft.model_config.as_deref().map_or(Ok(config), Config::read)?,
        hf_checkpoint: args.hf_checkpoint,
        load: args.sft.load.as_deref().map(checkpoint::dir),
        save: Some(checkpoint::dir(&args.save)),
        save_hf: args.save_hf.unwrap_or_else(|| args.save.join("hf")),
        published: match args.sft.dtype {
            SaveDtype::Bfloat16 => Kind::BFloat16,
            SaveDtype::Float32 => Kind::Float,
        },
        steps: args.num_rollout.unwrap_or(recipe.sft_steps),
        stop_loss: until_solved.then_some(recipe.sft_stop_loss),
        batch_size: args.rollout.rollout_batch_size.unwrap_or(batch_size),
        lr: args.lr.unwrap_or(recipe.sft_lr),
        seed: args.seed,
        num_threads: args.num_threads,
        device: args.device,
    })
}

fn reinforce(args: Args, output: Output) -> Result<()> {
    let (save, notify) = (args.save.clone(), args.update.notify.clone());
    let options = train_options(args)?;
    let outcome = train(&options, observer(options.num_rollout, notify))?;
    let summary = Summary::of(&outcome.steps, outcome.eval_start);
    let page = report::write(&save, &outcome.steps, &summary)?;
    output.print(&summary, Summary::table)?;
    if !output.json {
        line_out(&format!("report: {}", page.display()))?;
    }
    Ok(())
}

fn train_options(args: Args) -> Result<TrainOptions> {
    let (rollout, update, learn) = (args.rollout, args.update, args.learn);
    let debug = match (rollout.debug_rollout_only, rollout.debug_train_only) {
        (true, _) => Debug::RolloutOnly,
        (_, true) => Debug::TrainOnly,
        _ => Debug::Off,
    };
    let store = update.store.or(update.update_weight_disk_dir.map(|dir| dir.display().to_string()));
    let missing = |what: &str, expected: &str| Error::Usage {
        what: what.to_owned(),
        expected: expected.to_owned(),
        found: "nothing".to_owned(),
    };
    if debug == Debug::Off && store.is_none() {
        return Err(missing("store", "--store URL or --update-weight-disk-dir DIR"));
    }
    if debug != Debug::TrainOnly && rollout.rollout_external_engine_addrs.is_empty() {
        return Err(missing("engines", "--rollout-external-engine-addrs host:port …"));
    }
    if let Some(url) = store.as_deref().filter(|_| update.update_weight_transport == UpdateTransport::Object)
    {
        check_object_store(url)?;
    }
    let (sign_key, trust_keys) = update.sign.read()?;
    let hf_checkpoint = args.hf_checkpoint.ok_or_else(|| missing("policy", "--hf-checkpoint DIR"))?;
    let chosen = args.task.choose(&hf_checkpoint, args.seed)?;
    let defaults = &chosen.defaults;
    let rollout_batch_size = rollout.rollout_batch_size.unwrap_or(defaults.rollout_batch_size);
    let mut stop_token_ids = chosen.task.stop_token_ids();
    stop_token_ids.extend(&rollout.rollout_stop_token_ids);
    let sampling = SamplingParams {
        temperature: rollout.rollout_temperature,
        top_p: rollout.rollout_top_p,
        // SGLang knows no 0.
        top_k: if rollout.rollout_top_k == 0 { -1 } else { rollout.rollout_top_k },
        max_new_tokens: rollout.rollout_max_response_len.unwrap_or(defaults.rollout_max_response_len),
        stop_token_ids,
        stop: rollout.rollout_stop,
        ..SamplingParams::default()
    };
    let eval = args.task.evaluation(&chosen, &hf_checkpoint, rollout.n_eval_prompts, &sampling)?;
    Ok(TrainOptions {
        hf_checkpoint,
        num_rollout: args.num_rollout.map_or_else(|| chosen.num_rollout(rollout_batch_size), Ok)?,
        rollout_batch_size,
        n_samples_per_prompt: rollout.n_samples_per_prompt.unwrap_or(defaults.n_samples_per_prompt),
        rollout_max_context_len: chosen.context_len,
        sampling,
        eval,
        save: args.save,
        save_hf: args.save_hf,
        // Debugging leaves it alone.
        store: store::open(store.as_deref().unwrap_or("memory:"))?,
        run: update.run,
        sign_key,
        trust_keys,
        rollout_external_engine_addrs: rollout.rollout_external_engine_addrs,
        keys: rollout.keys.read()?,
        mode: if rollout.train_async { Mode::OneStepOff } else { Mode::Synchronous },
        debug,
        server_concurrency: rollout.sglang_server_concurrency,
        update_weight_mode: match update.update_weight_mode {
            WeightMode::Full => UpdateWeightMode::Full,
            WeightMode::Delta => UpdateWeightMode::Delta,
        },
        update_weights_interval: update.update_weights_interval,
        anchor_every: update.anchor_every,
        check_weight_update_equal: update.check_weight_update_equal,
        eval_interval: rollout.eval_interval,
        save_interval: update.save_interval.unwrap_or(defaults.save_interval),
        keep_checkpoints: 2,
        learn: LearnOptions {
            lr: args.lr.unwrap_or(defaults.lr),
            weight_decay: learn.weight_decay,
            adam_beta1: learn.adam_beta1,
            adam_beta2: learn.adam_beta2,
            clip_grad: learn.clip_grad,
            eps_clip: learn.eps_clip,
            eps_clip_high: learn.eps_clip_high.unwrap_or(learn.eps_clip),
            entropy_coef: learn.entropy_coef,
            advantage_estimator: match learn.advantage_estimator {
                AdvantageEstimator::Grpo => Estimator::Grpo,
                AdvantageEstimator::ReinforcePlusPlusBaseline => Estimator::ReinforcePlusPlusBaseline,
            },
            grpo_std_normalization: !learn.disable_grpo_std_normalization,
            max_tokens_per_gpu: learn.max_tokens_per_gpu,
        },
        task: chosen.task,
        seed: args.seed,
        num_threads: args.num_threads,
        device: args.device,
        update_deadline: Duration::from_secs(update.update_deadline),
        generate_deadline: Duration::from_secs(rollout.generate_deadline),
    })
}

/// Shows a run on a progress bar, and its turning points as lines; tells followers of its versions.
fn observer(steps: u64, notify: store::NotifyArgs) -> Observer {
    let bar = progress::bar(steps, "rl");
    Arc::new(move |event| {
        if let Event::Published { .. } = event {
            notify.tell();
        }
        show(&bar, &event);
    })
}

fn show(bar: &ProgressBar, event: &Event<'_>) {
    match event {
        Event::Begin { step, of } => {
            if *step > 0 {
                line(bar, &format!("rl: going on at step {step} of {of}"));
            }
            bar.set_position(*step);
        }
        Event::Waiting { what } => bar.set_message(format!("waiting for {what}")),
        Event::Generating { rollout, done, total } => {
            bar.set_message(format!("rollout {rollout}: {done} of {total} samples"));
        }
        Event::Evaluated { step, eval } => {
            if eval.problems > 0 {
                let (sampled, problems, greedy) = (eval.sampled, eval.problems, eval.greedy);
                let solved =
                    format!("{sampled:.3} of {problems} held-out problems solved ({greedy:.3} greedily)");
                line(bar, &format!("rl: step {step}: {solved}"));
            }
            for (name, set) in &eval.sets {
                line(bar, &format!("rl: step {step}: {name}: {}", report::describe(set)));
            }
        }
        Event::Step(step) => {
            bar.set_position(step.rollout_id + 1);
            bar.set_message(format!("reward {:.3}", step.reward));
        }
        _ => {}
    }
}

/// A line above the bar; plain where there is no bar to be seen.
fn line(bar: &ProgressBar, text: &str) {
    if bar.is_hidden() { say(text) } else { bar.println(text) }
}
