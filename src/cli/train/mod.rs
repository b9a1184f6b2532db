//! `driftless train`.

mod environment;
pub(crate) mod evaluation;
pub(crate) mod hooks;
mod learn;
pub(crate) mod report;
#[cfg(feature = "torch")]
mod sft;
mod show;
pub(crate) mod task;
mod update;
mod watch;

#[cfg(not(feature = "torch"))]
use crate::cli::shared::error::absent;
use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::output::{Output, line_out};
use crate::cli::shared::signals::end_on_signals;
#[cfg(feature = "torch")]
use crate::cli::shared::transport::with_settings;
use crate::cli::shared::{keys, numbers, paths, store};
#[cfg(feature = "torch")]
use crate::cli::train_rank;
use crate::cli::{config, dashboard};
use driftless::bridge::{ClientOptions, connect};
#[cfg(feature = "torch")]
use driftless::torch::libtorch::{CUBLAS_WORKSPACE, set_deterministic};
#[cfg(feature = "torch")]
use driftless::torch::{TorchLearner, TorchOptions, check_ranks};
use driftless::trainer::door::Listen;
use driftless::trainer::events::{Bus, Event, EventFile, Fact, Sink};
use driftless::trainer::learner::{Child, ChildOptions, Learner};
use driftless::trainer::options::{Debug, Mode, Part};
use driftless::trainer::{TrainOptions, rollout as generate, train};
use evaluation::DrawArgs;
use hooks::missing;
use learn::LearnArgs;
use report::Summary;
#[cfg(feature = "torch")]
use sft::SftArgs;
use show::Show;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;
use task::TaskArgs;
use update::UpdateArgs;
use watch::{WatchArgs, Watched};

const EXAMPLES: &str = "\
Examples:
  A cold start on sums, from fresh weights:
    driftless train --loss-type sft_loss --task arithmetic --save runs/sft --save-hf runs/sft-hf

  The RL loop with two engines that are already running, each with a `driftless follow` beside it:
    driftless train --hf-checkpoint runs/sft-hf --save runs/rl --store file:///shared/store --run demo \\
        --task arithmetic --rollout-max-response-len 4 --rollout-batch-size 256 --n-samples-per-prompt 4 --lr 2e-4 \\
        --num-rollout 120 --rollout-external-engine-addrs 10.0.0.1:30000 10.0.0.2:30000

  A model, prompts and a reward of your own:
    driftless train --hf-checkpoint models/Qwen3-0.6B --save runs/math --store file:///shared/store --run math \\
        --prompt-data train.jsonl --input-key question --label-key answer --apply-chat-template --rm-type math \\
        --eval-prompt-data test test.jsonl --rollout-external-engine-addrs 10.0.0.1:30000

  The same with the engines elsewhere: through an object store, signed, and with followers that are told at once:
    driftless train --hf-checkpoint models/Qwen3-0.6B --save runs/math --store s3://bucket/prefix --run math \\
        --prompt-data train.jsonl --input-key question --label-key answer --apply-chat-template --rm-type math \\
        --update-weight-transport object --sign-key trainer.key --notify http://10.0.0.1:9750 --notify http://10.0.0.2:9750 \\
        --rollout-external-engine-addrs 10.0.0.1:30000 10.0.0.2:30000

A run that was interrupted is continued by the same command: from its last training checkpoint, with the
rollouts that are already in its log.";

/// Heading of what says where libtorch computes.
#[cfg(feature = "torch")]
const DEVICE: &str = "Device";
/// Prompts of a step of RL, unless told.
const BATCH_SIZE: u64 = 32;
/// Learning rate of RL, unless told.
const LR: f64 = 1e-6;

/// Train a policy: SFT, or the RL loop with external engines.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES, next_help_heading = "The run")]
pub(crate) struct Args {
    /// What to minimise.
    #[arg(long, value_enum, default_value_t = LossType::Policy)]
    loss_type: LossType,
    /// Checkpoint directory to start from; required for the RL loop.
    #[arg(long, value_name = "DIR", required_if_eq("loss_type", "policy_loss"))]
    hf_checkpoint: Option<PathBuf>,
    /// Command that trains, as a process of its own, instead of libtorch in this one: see
    /// docs/wire/learner.md. The command of the Python package has that package's learner as the default.
    #[arg(long, value_name = "COMMAND", env = "DRIFTLESS_LEARNER")]
    learner: Option<String>,
    /// Seconds that the command, or a rank, may take for its start and for each call.
    #[arg(long, value_name = "SECONDS", default_value_t = 1800, value_parser = numbers::deadline())]
    learner_deadline: u64,
    /// Directory of the run's state: training checkpoints, rollout log, baseline, metrics, report.
    #[arg(long, value_name = "DIR", required_unless_present = "rollouts")]
    save: Option<PathBuf>,
    /// Train what `driftless rollout`, a process of its own on this host, generates in this directory, which is its --save
    /// and this command's. Give both the same flags.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["debug_rollout_only", "debug_train_only"])]
    rollouts: Option<PathBuf>,
    /// Write the final policy there as a Hugging Face checkpoint. `{rollout_id}` in the name writes one
    /// beside each training checkpoint instead, for SFT after each step, named by the steps done.
    #[arg(long, value_name = "DIR")]
    save_hf: Option<PathBuf>,
    /// Steps of the run; for SFT, optimiser steps. 0 only measures on held-out prompts [default: as many as --num-epoch
    /// needs].
    #[arg(long, value_parser = numbers::ordinal(), conflicts_with = "num_epoch")]
    num_rollout: Option<u64>,
    /// Seed of weights, data and sampling.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Learning rate [default: 1e-6; for SFT 1e-5, of fresh weights 1e-3].
    #[arg(long, value_parser = numbers::positive, help_heading = "Learning")]
    lr: Option<f64>,
    /// CPU threads of libtorch.
    #[cfg(feature = "torch")]
    #[arg(long, default_value_t = 2, value_parser = numbers::count::<usize>(), help_heading = DEVICE)]
    num_threads: usize,
    /// Where to train: cpu, or cuda:N; of several GPUs: cuda.
    #[cfg(feature = "torch")]
    #[arg(long, default_value = "cpu", help_heading = DEVICE)]
    device: String,
    /// The same bits from the same samples and seed each time, on one kind of device; what it costs is in
    /// trainer/torch/README.md. Engines sample as they do.
    #[cfg(feature = "torch")]
    #[arg(long, conflicts_with = "learner", help_heading = DEVICE)]
    deterministic: bool,
    /// GPUs of this host that train together, a process each, with their optimiser states shared out; with
    /// --device cpu, processes.
    #[cfg(feature = "torch")]
    #[arg(
        long,
        value_name = "GPUS",
        default_value_t = 1,
        value_parser = numbers::count::<usize>(),
        conflicts_with = "learner",
        help_heading = DEVICE
    )]
    actor_num_gpus_per_node: usize,
    #[cfg(feature = "torch")]
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
    #[command(flatten)]
    watch: WatchArgs,
    /// What all of these are, for `--config`.
    #[arg(skip)]
    pub(crate) effective: String,
}

#[derive(clap::Args)]
#[command(next_help_heading = "Rollouts")]
struct RolloutArgs {
    /// Running engines to attach, as host:port or https://host/path, with vllm+ before the URL for vLLM.
    #[arg(long, value_name = "ADDR", num_args = 1..)]
    rollout_external_engine_addrs: Vec<String>,
    /// File with a line for each further engine: its address, and `with-keys` behind it if it gets the keys. It is looked at
    /// each second: engines that it names are added, and others drained.
    #[arg(long, value_name = "FILE")]
    rollout_external_engines_file: Option<PathBuf>,
    /// Name with a port, of which each address is a further engine, without keys: a headless service. It is looked up every
    /// 5 s: new addresses are added, and those that stay away drained.
    #[arg(long, value_name = "NAME:PORT", conflicts_with = "rollout_external_engines_file")]
    rollout_external_engines_dns: Option<String>,
    /// Address at which `driftless fleet` lists and changes the engines from other hosts, over HTTP.
    #[arg(long, value_name = "ADDR")]
    fleet_listen: Option<SocketAddr>,
    /// File holding the token that it has to bring; needed to listen beyond loopback [default: DRIFTLESS_TOKEN].
    #[arg(long, value_name = "FILE", requires = "fleet_listen")]
    fleet_token_file: Option<PathBuf>,
    /// Prompts of a step; for SFT, examples [default: 32; for SFT of fresh weights 256, with --text 16].
    #[arg(long, value_parser = numbers::count::<u64>())]
    rollout_batch_size: Option<u64>,
    /// Prompts under way until a rollout has its own: the first that finish make the step [default: as many as of a step].
    #[arg(long, value_name = "PROMPTS", conflicts_with = "train_async", value_parser = numbers::count::<u64>())]
    over_sampling_batch_size: Option<u64>,
    /// Let answers that are not finished then go on while the step trains, and behind its update. Otherwise they begin again.
    #[arg(long, requires = "over_sampling_batch_size", conflicts_with = "max_staleness")]
    partial_rollout: bool,
    /// Train only on their tokens that the step's own weights drew.
    #[arg(long, requires = "partial_rollout")]
    mask_offpolicy_in_partial_rollout: bool,
    /// Samples of a prompt.
    #[arg(long, default_value_t = 8, value_parser = numbers::count::<u64>())]
    n_samples_per_prompt: u64,
    /// Generate the next rollout while training on this one: samples are at most one step old.
    #[arg(long, conflicts_with = "max_staleness")]
    train_async: bool,
    /// Generate without regard to steps: a step learns from the oldest finished groups, and not from tokens that weights
    /// of more than so many optimiser steps ago drew. 0: generate and train in turns.
    #[arg(long, default_value_t = 0, value_name = "STEPS", value_parser = numbers::ordinal())]
    max_staleness: u64,
    /// Measure on held-out prompts after every so many steps; 0: only at both ends.
    #[arg(long, default_value_t = 20, value_parser = numbers::ordinal())]
    eval_interval: u64,
    /// GiB of the rollout log; beyond that, what no step learns from again is removed after a training
    /// checkpoint.
    #[arg(long, default_value_t = 64, value_name = "GIB", value_parser = numbers::ordinal())]
    rollout_log_gib_max: u64,
    /// Generate and log, with the weights the engines serve; do not train or publish.
    #[arg(long, conflicts_with = "debug_train_only")]
    debug_rollout_only: bool,
    /// Train on what the log holds; do not talk to engines or publish.
    #[arg(long)]
    debug_train_only: bool,
    #[command(flatten)]
    draw: DrawArgs,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum LossType {
    #[value(name = "policy_loss")]
    Policy,
    #[value(name = "sft_loss")]
    Sft,
}

/// Generates for a run that another process trains, until that has done all steps.
pub(crate) fn rollout(args: Args) -> Result<()> {
    if matches!(args.loss_type, LossType::Sft) {
        return Err(Error::usage("--loss-type", "policy_loss: SFT has no rollouts", "sft_loss"));
    }
    if let Some(dir) = &args.rollouts {
        return Err(Error::usage(
            "--rollouts",
            "`train`'s alone; here the directory is --save",
            dir.display(),
        ));
    }
    check_directories(&args)?;
    let save = args.save()?;
    let Watched { sinks, servers: _servers } = args.watch.open(&args.update.run, &save)?;
    let options = train_options(args)?.with_part(Part::Rollouts);
    let show = Show::new(options.num_rollout);
    let shown = show.clone();
    end_on_signals(move || shown.run())?;
    let own: [Box<dyn Sink>; 2] =
        [Box::new(move |fact: &Fact| show.take(fact)), Box::new(EventFile::new(&save))];
    let bus = Bus::start(own.into_iter().chain(sinks).collect())?;
    let ended = generate(&options, bus.observer());
    bus.end(TOLD_WITHIN);
    Ok(ended?)
}

pub(crate) fn run(args: Args, output: Output) -> Result<()> {
    #[cfg(not(feature = "torch"))]
    if matches!(args.loss_type, LossType::Policy) && args.learner.is_none() {
        let or = "`--learner \"python -m driftless_rl.learner\"` (the wheel of python/, torch and transformers), or ";
        return Err(absent("a learner", or));
    }
    if matches!((&args.loss_type, &args.rollouts), (LossType::Sft, Some(_))) {
        return Err(Error::usage("--rollouts", "none: SFT has no rollouts", "--loss-type sft_loss"));
    }
    check_directories(&args)?;
    #[cfg(feature = "torch")]
    if let Some(dir) = &args.update.rollout_hf_checkpoint {
        paths::check_checkpoint("--rollout-hf-checkpoint", dir)?;
    }
    #[cfg(feature = "torch")]
    if args.deterministic {
        deterministic(&args.device)?;
    }
    match args.loss_type {
        #[cfg(feature = "torch")]
        LossType::Sft if args.num_rollout == Some(0) => {
            Err(Error::usage("--num-rollout", "at least 1 with --loss-type sft_loss", "0"))
        }
        #[cfg(feature = "torch")]
        LossType::Sft => sft::run(args, output),
        #[cfg(not(feature = "torch"))]
        LossType::Sft => Err(absent("`--loss-type sft_loss`", "")),
        LossType::Policy => reinforce(args, output),
    }
}

/// Checks what is read, and refuses to write where something is read or where another output goes.
fn check_directories(args: &Args) -> Result<()> {
    let learn = &args.learn.options;
    let read = [
        ("--hf-checkpoint", &args.hf_checkpoint),
        ("--ref-load", &learn.ref_load),
        ("--opd-teacher-load", &learn.opd_teacher_load),
        ("--critic-load", &learn.critic.critic_load),
    ];
    let mut taken = Vec::new();
    for (name, dir) in read.into_iter().filter_map(|(name, dir)| Some((name, dir.as_ref()?))) {
        paths::check_checkpoint(name, dir)?;
        taken.push((name, dir));
    }
    let written = [
        ("--save", args.save.as_ref().or(args.rollouts.as_ref())),
        ("--save-hf", args.save_hf.as_ref()),
        ("--critic-save", learn.critic.critic_save.as_ref()),
    ];
    for (name, dir) in written.into_iter().filter_map(|(name, dir)| Some((name, dir?))) {
        paths::check_place(name, dir)?;
        taken.iter().try_for_each(|(other, place)| paths::check_apart(name, dir, other, place))?;
        taken.push((name, dir));
    }
    Ok(())
}

/// Has libtorch compute the same bits each time. For a GPU the process begins once more, with the environment
/// that cuBLAS looks at.
#[cfg(feature = "torch")]
pub(crate) fn deterministic(device: &str) -> Result<()> {
    with_settings(&[(device != "cpu", &[CUBLAS_WORKSPACE])])?;
    set_deterministic();
    Ok(())
}

/// The page that a run leaves in its directory.
const PAGE: &str = "report.html";
/// How long the last events of a run may take to be written.
const TOLD_WITHIN: Duration = Duration::from_secs(5);

fn reinforce(mut args: Args, output: Output) -> Result<()> {
    let (store, elsewhere, gpu) = (args.update.store_url(), args.learner.is_some(), gpu(&args));
    args.update.transport = args.update.transport.of_trainer(store.as_deref(), elsewhere, gpu)?;
    args.update.transport.prepare(&[])?;
    args.update.transport.log();
    #[cfg(feature = "torch")]
    check_ranks(&args.device, args.actor_num_gpus_per_node)?;
    let (save, effective) = (args.save()?, std::mem::take(&mut args.effective));
    let Watched { sinks, servers: _servers } = args.watch.open(&args.update.run, &save)?;
    let learner = learner(&args)?;
    let options = train_options(args)?;
    let show = Show::new(options.num_rollout);
    let shown = show.clone();
    end_on_signals(move || shown.run())?;
    let kept = save.clone();
    let keep = move |fact: &Fact| {
        if let Event::Begin { .. } = fact.event {
            config::keep(&kept, &effective);
        }
    };
    let own: [Box<dyn Sink>; 3] =
        [Box::new(move |fact: &Fact| show.take(fact)), Box::new(EventFile::new(&save)), Box::new(keep)];
    let bus = Bus::start(own.into_iter().chain(sinks).collect())?;
    let outcome = train(&options, learner(&options), bus.observer());
    bus.end(TOLD_WITHIN);
    let outcome = outcome?;
    let summary = Summary::of(&outcome.steps, outcome.eval_start);
    let page = save.join(PAGE);
    dashboard::export(std::slice::from_ref(&save), &page, None)?;
    output.print(&summary, Summary::table)?;
    if !output.json {
        line_out(&format!("report: {}", page.display()))?;
    }
    Ok(())
}

/// Number of the GPU that has the weights, of several GPUs rank 0's; `None` if none is named.
#[cfg(feature = "torch")]
fn gpu(args: &Args) -> Option<usize> {
    match args.device.as_str() {
        "cuda" => Some(0),
        device => device.strip_prefix("cuda:")?.parse().ok(),
    }
}

#[cfg(not(feature = "torch"))]
fn gpu(_: &Args) -> Option<usize> {
    None
}

/// The learner that was asked for, which `train` loads.
fn learner(args: &Args) -> Result<impl FnOnce(&TrainOptions) -> Box<dyn Learner> + use<>> {
    let (command, deadline) = (args.learner.clone(), Duration::from_secs(args.learner_deadline));
    #[cfg(feature = "torch")]
    let (num_threads, device, fp8) =
        (args.num_threads, args.device.clone(), args.update.rollout_dtype.is_some());
    #[cfg(feature = "torch")]
    let ranks = match args.actor_num_gpus_per_node {
        1 => None,
        ranks => {
            let of_rank = train_rank::OfRank { num_threads, deterministic: args.deterministic };
            Some(train_rank::options(ranks, &device, of_rank, args.learner_deadline)?)
        }
    };
    Ok(move |options: &TrainOptions| {
        let (learn, temperature) = (options.learn.clone(), options.sampling.temperature);
        #[cfg(feature = "torch")]
        if command.is_none() {
            let mut options =
                TorchOptions::new(learn).with_temperature(temperature).with_num_threads(num_threads);
            (options.device, options.fp8, options.ranks) = (device, fp8, ranks);
            return Box::new(TorchLearner::new(options)) as Box<dyn Learner>;
        }
        // Without libtorch, `run` has asked for it.
        let command = command.unwrap_or_default();
        let child = ChildOptions::new(command, learn).with_deadline(deadline).with_temperature(temperature);
        Box::new(Child::new(child.with_seed(options.seed))) as Box<dyn Learner>
    })
}

impl Args {
    /// The directory of the run.
    fn save(&self) -> Result<PathBuf> {
        match (&self.save, &self.rollouts) {
            (Some(save), Some(rollouts)) if save != rollouts => {
                Err(Error::usage("--rollouts", format!("the --save {}", save.display()), rollouts.display()))
            }
            (Some(dir), _) | (None, Some(dir)) => Ok(dir.clone()),
            (None, None) => Err(missing("directory of the run", "--save DIR")),
        }
    }
}

impl RolloutArgs {
    /// Where the engines are changed from other hosts.
    fn listen(&self) -> Result<Option<Listen>> {
        let Some(addr) = self.fleet_listen else { return Ok(None) };
        let token = keys::secret(self.fleet_token_file.as_deref(), "DRIFTLESS_TOKEN")?;
        Ok(Some(Listen { addr, token }))
    }

    /// Whether more engines may come than the list has.
    fn may_grow(&self) -> bool {
        self.rollout_external_engines_file.is_some() || self.rollout_external_engines_dns.is_some()
    }

    /// What is left out, for debugging.
    fn debug(&self) -> Debug {
        match (self.debug_rollout_only, self.debug_train_only) {
            (true, _) => Debug::RolloutOnly,
            (_, true) => Debug::TrainOnly,
            _ => Debug::Off,
        }
    }

    /// Refuses addresses of engines that cannot be called: the learner would load the policy first.
    fn check(&self, engines_min: usize) -> Result<()> {
        let engines = self.rollout_external_engine_addrs.len();
        if self.debug() != Debug::TrainOnly && engines_min > engines && !self.may_grow() && engines > 0 {
            let expected = format!("at most {engines}, the number of --rollout-external-engine-addrs");
            return Err(Error::usage("--engines-min", expected, engines_min));
        }
        if let Some(path) = &self.rollout_external_engines_file {
            paths::check_file("--rollout-external-engines-file", path)?;
        } else if self.debug() != Debug::TrainOnly
            && self.rollout_external_engine_addrs.is_empty()
            && self.rollout_external_engines_dns.is_none()
        {
            let flags = "--rollout-external-engine-addrs host:port …, or --rollout-external-engines-file FILE or -dns NAME:PORT";
            return Err(missing("engines", flags));
        }
        for address in &self.rollout_external_engine_addrs {
            connect(address, ClientOptions::default())?;
        }
        Ok(())
    }

    /// How generation and training overlap.
    fn mode(&self) -> Mode {
        match self.max_staleness {
            0 if self.train_async => Mode::OneStepOff,
            0 => Mode::Synchronous,
            max_staleness => Mode::Bounded { max_staleness },
        }
    }
}

fn train_options(args: Args) -> Result<TrainOptions> {
    let save = args.save()?;
    let (rollout, update, learn) = (args.rollout, args.update, args.learn);
    let debug = rollout.debug();
    let store = update.store_or_memory(debug)?;
    let part = if args.rollouts.is_some() { Part::Trainer } else { Part::Whole };
    if part == Part::Whole {
        rollout.check(update.engines_min)?;
    }
    let listen = rollout.listen()?;
    if args.learner.is_some() && update.check_weight_update_equal {
        let expected = "no --learner: its bytes are not here; followers compare what is live anyway";
        return Err(Error::usage("--check-weight-update-equal", expected, "both"));
    }
    let hf_checkpoint = args.hf_checkpoint.ok_or_else(|| missing("policy", "--hf-checkpoint DIR"))?;
    let chosen = args.task.choose(&hf_checkpoint, args.seed)?;
    let rollout_batch_size = rollout.rollout_batch_size.unwrap_or(BATCH_SIZE);
    let num_rollout = args.num_rollout.map_or_else(|| chosen.num_rollout(rollout_batch_size), Ok)?;
    let (lr, n_samples_per_prompt) = (args.lr.unwrap_or(LR), rollout.n_samples_per_prompt);
    let run = learn::Run { lr, num_rollout, rollout_batch_size, n_samples_per_prompt };
    let (mode, sampling) = (rollout.mode(), rollout.draw.sampling());
    let addresses = rollout.rollout_external_engine_addrs;
    let client = rollout.draw.call.client("--rollout-external-engine-addrs", &addresses)?;
    let opened = store::open(&store)?;
    let options = TrainOptions::new(&hf_checkpoint, save, opened, store, &update.run, chosen.task.clone())
        .with_part(part)
        .with_save_hf(args.save_hf)
        .with_push(update.pushes(&client, &hf_checkpoint))
        .with_eval(args.task.evaluation(&chosen, &hf_checkpoint, &sampling)?)
        .with_sampling(sampling)
        .with_rollout_max_context_len(chosen.context_len)
        .with_num_rollout(num_rollout)
        .with_rollout_batch_size(rollout_batch_size)
        .with_n_samples_per_prompt(n_samples_per_prompt)
        .with_over_sampling_batch_size(rollout.over_sampling_batch_size)
        .with_partial_rollout(rollout.partial_rollout)
        .with_mask_offpolicy_in_partial_rollout(rollout.mask_offpolicy_in_partial_rollout)
        .with_data(args.task.settings())
        .with_rollout_external_engine_addrs(addresses)
        .with_rollout_external_engines_file(rollout.rollout_external_engines_file)
        .with_rollout_external_engines_dns(rollout.rollout_external_engines_dns)
        .with_fleet_listen(listen)
        .with_keys(client.keys)
        .with_engine_ca(client.ca)
        .with_mode(mode)
        .with_debug(debug)
        .with_server_concurrency(rollout.draw.sglang_server_concurrency)
        .with_eval_interval(rollout.eval_interval)
        .with_save_interval(update.save_interval)
        .with_rollout_log_bytes_max(rollout.rollout_log_gib_max.saturating_mul(1 << 30))
        .with_max_skipped_steps(learn.max_skipped_steps)
        .with_learn(learn.options(&run)?)
        .with_seed(args.seed)
        .with_hook_retries(args.task.hook_retries())
        .with_easy_threshold(args.task.easy_threshold())
        .with_generate_deadline(Duration::from_secs(rollout.draw.generate_deadline));
    update.apply(options)
}
