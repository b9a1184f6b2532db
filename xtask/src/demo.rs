//! The demo: SFT, then GRPO with two engine processes, each with its follower, through a disk store.

use crate::error::{Error, Result};
use crate::process::{self, Background};
use crate::{install, libtorch, smollm2};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Seed of the weights, the data and the sampling.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// What learns: a Qwen3 of 1.2 M parameters from fresh weights, or SmolLM2-135M-Instruct. The latter wants a GPU.
    #[arg(long, value_enum, default_value_t = Model::Tiny)]
    model: Model,
    /// Where trainer and engines compute: cpu, or cuda:N with a libtorch for CUDA in LIBTORCH.
    #[arg(long, default_value = "cpu")]
    device: String,
    /// The driftless command, instead of building it.
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
    /// Where the run lives [default: target/demo/seed-N, or target/demo/smollm2-seed-N]. An interrupted run is
    /// continued, a finished one begun anew.
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Only a few steps, with the development build: shows that the parts fit together, not that the model
    /// learns.
    #[arg(long)]
    smoke: bool,
    /// Steps of RL [default: 120, or 80 with SmolLM2, or 3 with --smoke].
    #[arg(long, value_name = "N")]
    steps: Option<usize>,
    /// Kill an engine with SIGKILL once so many steps are complete: the run goes on with the other one, and the engine
    /// joins it again.
    #[arg(long, value_name = "N")]
    kill_engine_behind: Option<usize>,
}

/// Each engine has a host of its own: a port, a directory, a follower.
const HOSTS: usize = 2;

/// How often a process that died is started again before the demo gives up on it.
const RESTARTS_MAX: usize = 5;

/// An engine loads libtorch and a model of a megabyte; a loaded machine may take its time.
const READY_DEADLINE: Duration = Duration::from_secs(120);

pub(crate) fn run(options: &Options) -> Result<()> {
    libtorch::install()?;
    let demo = Demo::new(options)?;
    demo.begin()?;
    demo.measure_pretrained()?;
    demo.cold_start()?;
    let mut fleet = Fleet::start(&demo)?;
    demo.learn(&mut fleet)?;
    drop(fleet);
    std::fs::write(demo.finished(), "").map_err(Error::io(demo.finished()))
}

/// What learns.
#[derive(Clone, Copy, PartialEq, clap::ValueEnum)]
enum Model {
    /// A Qwen3 of 1.2 M parameters, on sums of two-digit numbers.
    Tiny,
    /// SmolLM2-135M-Instruct, on four numbers to be sorted, asked for in words.
    Smollm2,
}

/// The problems of the model of fresh weights: an answer has three digits and an end mark at most.
const TINY_TASK: &str = "--task arithmetic --rollout-max-response-len 4";
/// What makes it learn in minutes on two cores.
const TINY_RL: &str = "--rollout-batch-size 256 --n-samples-per-prompt 4 --lr 2e-4 --save-interval 1";
/// SmolLM2's problems, and how much of an answer is read.
const SMOLLM2_TASK: &str =
    "--task number_sorting --task-difficulty 2 --apply-chat-template --rollout-max-response-len 16";
/// Its cold start: too few worked problems to learn to sort, enough to learn that only numbers are asked for.
const SMOLLM2_SFT: &str = "--num-rollout 20 --rollout-batch-size 64 --lr 2e-5";
const SMOLLM2_RL: &str = "--rollout-batch-size 64 --n-samples-per-prompt 8 --lr 1e-5";
/// A few steps of each, for [`Options::smoke`].
const SMOKE_SFT: &str = "--num-rollout 2 --rollout-batch-size 8";
const SMOKE_RL: &str = "--rollout-batch-size 8";

struct Demo {
    program: PathBuf,
    dir: PathBuf,
    seed: u64,
    smoke: bool,
    device: String,
    /// The pretrained model; none for fresh weights.
    pretrained: Option<PathBuf>,
    steps: Option<usize>,
    kill_engine_behind: Option<usize>,
}

impl Demo {
    fn new(options: &Options) -> Result<Self> {
        let pretrained = match options.model {
            Model::Tiny => None,
            Model::Smollm2 => Some(smollm2::install(&crate::cache_dir()?)?),
        };
        let name = if options.smoke { "smoke".to_owned() } else { format!("seed-{}", options.seed) };
        let name = if pretrained.is_some() { format!("smollm2-{name}") } else { name };
        Ok(Demo {
            program: options.program.clone().map_or_else(|| build(options.smoke), Ok)?,
            dir: options.dir.clone().unwrap_or_else(|| crate::workspace().join("target/demo").join(name)),
            seed: options.seed,
            smoke: options.smoke,
            device: options.device.clone(),
            pretrained,
            steps: options.steps,
            kill_engine_behind: options.kill_engine_behind,
        })
    }

    /// Clears a finished run away; an interrupted one stays and is continued.
    fn begin(&self) -> Result<()> {
        if self.smoke || self.finished().exists() {
            install::remove(&self.dir)?;
        }
        std::fs::create_dir_all(&self.dir).map_err(Error::io(&self.dir))?;
        println!("demo: seed {}, everything it writes is in {}", self.seed, self.dir.display());
        Ok(())
    }

    fn finished(&self) -> PathBuf {
        self.dir.join("finished")
    }

    /// `driftless train` with what all its runs are told.
    fn train(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(["train", "--die-with-parent", "--seed", &self.seed.to_string()]);
        command.args(["--device", &self.device]);
        command.envs([process::NO_SPINNING]);
        command.args(if self.pretrained.is_some() { SMOLLM2_TASK } else { TINY_TASK }.split(' '));
        if self.smoke && self.pretrained.is_some() {
            command.args(["--n-eval-prompts", "24"]);
        }
        command
    }

    /// Shows what the pretrained model solves before anything is learned.
    fn measure_pretrained(&self) -> Result<()> {
        let Some(model) = self.pretrained.as_ref().filter(|_| !self.sft().exists()) else {
            return Ok(());
        };
        println!("demo: the pretrained model, before it has learned anything");
        let port = process::free_port()?;
        let mut engine = Supervised::start("engine-pretrained", &self.dir, self.engine(model, port))?;
        engine.running.wait_listening(port, READY_DEADLINE)?;
        let mut command = self.train();
        command.args(["--debug-rollout-only", "--num-rollout", "1", "--rollout-batch-size", "1"]);
        command.args(["--n-samples-per-prompt", "1"]);
        command.arg("--hf-checkpoint").arg(model).arg("--save").arg(self.dir.join("pretrained"));
        command.args(["--rollout-external-engine-addrs", &format!("127.0.0.1:{port}")]);
        // The summary of a run that trains nothing says nothing.
        process::run(command.stdout(Stdio::null()))
    }

    fn cold_start(&self) -> Result<()> {
        if self.sft().join("config.json").exists() {
            return Ok(());
        }
        let mut command = self.train();
        command.args(["--loss-type", "sft_loss"]);
        command.arg("--save").arg(self.dir.join("sft"));
        command.arg("--save-hf").arg(self.sft());
        if let Some(model) = &self.pretrained {
            command.args(["--loss-mask-type", "qwen"]).arg("--hf-checkpoint").arg(model);
            command.args(if self.smoke { SMOKE_SFT } else { SMOLLM2_SFT }.split(' '));
        } else if self.smoke {
            command.args(["--num-rollout", "20"]);
        }
        process::run(&mut command)
    }

    /// An engine that serves `model`.
    fn engine(&self, model: &Path, port: u16) -> Command {
        let mut command = Command::new(&self.program);
        command.args(["serve", "--die-with-parent", "--device", &self.device]).arg("--model-path").arg(model);
        command.args(["--port", &port.to_string(), "--num-threads", "1"]);
        command
    }

    fn learn(&self, fleet: &mut Fleet) -> Result<()> {
        let mut command = self.train();
        command.args(["--run", "demo"]).arg("--hf-checkpoint").arg(self.sft());
        command.arg("--store").arg(self.store());
        command.arg("--save").arg(self.dir.join("rl"));
        command.arg("--rollout-external-engine-addrs");
        command.args(fleet.hosts.iter().map(|host| format!("127.0.0.1:{}", host.port)));
        let (settings, steps) = match (self.smoke, &self.pretrained) {
            (true, _) => (SMOKE_RL, 3),
            (false, Some(_)) => (SMOLLM2_RL, 80),
            (false, None) => (TINY_RL, 120),
        };
        command.args(settings.split(' '));
        command.args(["--num-rollout", &self.steps.unwrap_or(steps).to_string()]);
        let mut trainer = command.spawn().map_err(process::start(&command))?;
        let outcome = fleet.keep_alive(&mut trainer, self);
        if outcome.is_err() {
            // The fleet is lost; a trainer that waits for it is of no use. It may be gone already.
            let _ = trainer.kill();
            let _ = trainer.wait();
        }
        outcome
    }

    /// Steps of RL that are complete.
    fn steps_done(&self) -> usize {
        let metrics = std::fs::read_to_string(self.dir.join("rl/metrics.jsonl"));
        metrics.map_or(0, |text| text.lines().count())
    }

    fn sft(&self) -> PathBuf {
        self.dir.join("sft-hf")
    }

    fn store(&self) -> PathBuf {
        self.dir.join("store")
    }
}

/// Builds the command and says where it is.
pub(crate) fn build(smoke: bool) -> Result<PathBuf> {
    // The development build is the one that the test lanes have made.
    if smoke {
        return crate::test::command_for_tests();
    }
    let mut command = Command::new("cargo");
    command.args(["build", "-p", "driftless", "--release", "--features", "torch"]);
    process::run(command.current_dir(crate::workspace()))?;
    Ok(crate::target_dir().join("release/driftless"))
}

/// The rollout hosts: an engine and a follower each.
struct Fleet {
    hosts: Vec<Host>,
}

struct Host {
    port: u16,
    engine: Supervised,
    follower: Supervised,
}

impl Fleet {
    fn start(demo: &Demo) -> Result<Self> {
        let hosts = (0..HOSTS).map(|index| Host::start(demo, index)).collect::<Result<_>>()?;
        Ok(Fleet { hosts })
    }

    /// Waits for the trainer's end; meanwhile starts again what dies, and what is killed as it was asked for.
    fn keep_alive(&mut self, trainer: &mut std::process::Child, demo: &Demo) -> Result<()> {
        let mut kill_behind = demo.kill_engine_behind;
        loop {
            match trainer.try_wait().map_err(Error::io("driftless train"))? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => {
                    let status = format!("{status}; the same command continues the run");
                    return Err(Error::Failed { command: "driftless train".to_owned(), status, log: None });
                }
                None => {}
            }
            if let Some(host) = self.hosts.first_mut()
                && kill_behind.take_if(|steps| demo.steps_done() >= *steps).is_some()
            {
                host.engine.running.kill()?;
            }
            for host in &mut self.hosts {
                host.engine.revive()?;
                host.follower.revive()?;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

impl Host {
    fn start(demo: &Demo, index: usize) -> Result<Self> {
        let port = process::free_port()?;
        let dir = demo.dir.join(format!("host-{index}"));
        let mut engine = Supervised::start(&format!("engine-{index}"), &dir, demo.engine(&demo.sft(), port))?;
        engine.running.wait_listening(port, READY_DEADLINE)?;
        let mut follow = Command::new(&demo.program);
        follow.args(["follow", "--die-with-parent", "--run", "demo"]).arg("--store").arg(demo.store());
        follow.arg("--checkpoint-dir").arg(dir.join("checkpoint")).arg("--hf-checkpoint").arg(demo.sft());
        follow.args(["--engine", &format!("http://127.0.0.1:{port}")]);
        follow.args(["--id", &format!("host-{index}"), "--poll-ms", "50"]);
        let follower = Supervised::start(&format!("follower-{index}"), &dir, follow)?;
        Ok(Host { port, engine, follower })
    }
}

/// A background process with the command that starts it again.
struct Supervised {
    running: Background,
    command: Command,
    restarts: usize,
}

impl Supervised {
    fn start(name: &str, dir: &Path, mut command: Command) -> Result<Self> {
        let running = Background::start(name, &mut command, &dir.join(format!("{name}.log")))?;
        Ok(Supervised { running, command, restarts: 0 })
    }

    fn revive(&mut self) -> Result<()> {
        let Some(status) = self.running.ended() else {
            return Ok(());
        };
        let (name, log) = (self.running.name.clone(), self.running.log.clone());
        if self.restarts == RESTARTS_MAX {
            let status = format!("{status}, for the {RESTARTS_MAX}th time");
            return Err(Error::Failed { command: name, status, log: Some(log) });
        }
        println!("demo: {name} ended with {status}, starting it again");
        self.restarts += 1;
        self.running = Background::start(&name, &mut self.command, &log)?;
        Ok(())
    }
}
