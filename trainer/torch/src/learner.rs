//! libtorch as what trains: [`Policy`] behind the loop's trait.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use derive_setters::Setters;
use driftless_delta::cuda::Codec;
use driftless_trainer::learner::{self, Child, Learner, Progress, Stepped, Weights, Workspace};
use driftless_trainer::metrics::StepStats;
use driftless_trainer::options::{Dtype, LearnOptions};
use driftless_trainer::{Error as LoopError, Result as LoopResult};
use driftless_transport::Tensors;
use driftless_transport::checkpoint::write_checkpoint;
use tch::{Device, Kind};

use crate::checkpoint;
use crate::config::Config;
use crate::critic::Critic;
use crate::error::{Error, Result, input, io};
use crate::learn::{self, Learned};
use crate::lent::Lender;
use crate::libtorch;
use crate::models::Model;
use crate::optimizer::AdamWOptions;
use crate::policy::Policy;
use crate::ranks::{Failed, Listening, Others, OverNccl, RANKS_MAX, RankOptions, Ranks, Star};
use crate::settings::Settings;
use crate::snapshot::{self, SHARD_BYTES_MAX};
use crate::trained::Trained;

/// Where the ranks meet, in the state directory of a run.
const SOCKET: &str = "ranks";

/// Settings of a [`TorchLearner`].
#[derive(Debug, Clone, Setters)]
#[setters(prefix = "with_", strip_option)]
#[non_exhaustive]
pub struct TorchOptions {
    /// What the optimiser and the loss are told.
    pub learn: LearnOptions,
    /// Temperature of the rollouts.
    pub temperature: f64,
    /// CPU threads of libtorch.
    pub num_threads: usize,
    /// As for [`crate::libtorch::device`]. Of several ranks, `cpu`, or `cuda`, of which rank N takes device N.
    #[setters(into)]
    pub device: String,
    /// Engines get the layers' matrices in fp8 (`--rollout-dtype fp8`).
    pub fp8: bool,
    /// The processes that train together; this one alone, if `None`.
    pub ranks: Option<RankOptions>,
}

impl TorchOptions {
    /// One process on the CPU with two threads, at temperature 1.
    #[must_use]
    pub fn new(learn: LearnOptions) -> Self {
        TorchOptions {
            learn,
            temperature: 1.0,
            num_threads: 2,
            device: "cpu".to_owned(),
            fp8: false,
            ranks: None,
        }
    }
}

/// A policy that the loop trains with libtorch, in this process.
#[derive(Debug)]
pub struct TorchLearner {
    options: TorchOptions,
    role: Role,
    loaded: Option<Loaded>,
    /// Present once the loop has asked for a codec, where there is one: weights are published from the device.
    lender: Option<Lender>,
    /// Of the last step, until they are asked for.
    log_probs: Option<Vec<f32>>,
}

/// What this process is to the others.
#[derive(Debug)]
enum Role {
    /// Rank 0, with those that it has started; none, if it is alone.
    First(Others),
    /// Another rank, which finds rank 0 at a socket, and checkpoints in a directory of it.
    Other { rank: usize, socket: PathBuf, checkpoints: PathBuf },
}

#[derive(Debug)]
struct Loaded {
    policy: Policy,
    critic: Option<Critic>,
    place: Workspace,
}

impl TorchLearner {
    /// Makes ready to train; [`Learner::load`] reads the model.
    #[must_use]
    pub fn new(options: TorchOptions) -> Self {
        TorchLearner {
            options,
            role: Role::First(Others::default()),
            loaded: None,
            lender: None,
            log_probs: None,
        }
    }

    /// Opens the model, with the other ranks if there are any.
    fn open(
        &self,
        place: &Workspace,
        device: Device,
        ranks: Option<&Ranks>,
    ) -> Result<(Loaded, Option<Progress>)> {
        libtorch::set_threads(self.options.num_threads)?;
        let learn = &self.options.learn;
        let adamw = AdamWOptions::of(learn);
        let published = Config::published_kind(&place.hf_checkpoint)?;
        // As engines compute, unless told: with activations that round otherwise, log-probs would differ.
        let kind = learn.dtype.map_or(published, kind_of);
        let model = Model::open(&place.hf_checkpoint, kind, device)?;
        let train = |model: Model| -> Result<Trained> {
            let trained = Trained::new(model, published, adamw, ranks)?;
            Ok(Trained { recompute: learn.recomputes(), ..trained })
        };
        let mut policy = Policy::of(train(model)?).with_log_probs_chunk_size(learn.log_probs_chunk_size);
        if learn.has_reference() {
            let dir = learn.ref_load.as_ref().unwrap_or(&place.hf_checkpoint);
            policy = policy
                .with_reference(Model::open(dir, kind, device)?, learn.ref_update_interval.is_some())?;
        }
        if let Some(dir) = learn.opd_teacher_load.as_ref().filter(|_| learn.use_opd) {
            policy = policy.with_teacher(Model::open(dir, kind, device)?)?;
        }
        let critic = learn.critic().map(|critic| {
            let dir = critic.critic_load.as_ref().unwrap_or(&place.hf_checkpoint);
            Critic::of(train(Model::open_critic(dir, kind, device)?)?)
        });
        let mut loaded = Loaded { policy, critic: critic.transpose()?, place: place.clone() };
        let Loaded { policy, critic, .. } = &mut loaded;
        let dir = match &self.role {
            Role::First(_) => checkpoint::dir(&place.save),
            Role::Other { checkpoints, .. } => checkpoints.clone(),
        };
        let progress = checkpoint::load(&dir, policy, critic.as_mut())?;
        Ok((loaded, progress))
    }

    /// As rank 0: alone, or with others, which are started now.
    fn open_first(&mut self, place: &Workspace) -> LoopResult<(Loaded, Option<Progress>)> {
        let Some(options) = self.options.ranks.clone().filter(|options| options.ranks > 1) else {
            let opened =
                libtorch::device(&self.options.device).and_then(|device| self.open(place, device, None));
            return opened.map_err(|error| self.failed(error));
        };
        let prepared = || -> Result<_> {
            let device = device_of_rank(&self.options.device, 0, options.ranks)?;
            std::fs::create_dir_all(&place.save).map_err(io("create", &place.save))?;
            let absolute = |path: PathBuf| std::path::absolute(path).map_err(io("name", &place.save));
            let (socket, checkpoints) =
                (absolute(place.save.join(SOCKET))?, absolute(checkpoint::dir(&place.save))?);
            let TorchOptions { learn, temperature, .. } = &self.options;
            let others = Others::new(&options, &socket, &checkpoints, learn, *temperature);
            Ok((device, Listening::at(&socket)?, others))
        };
        let (device, listening, mut others) = prepared().map_err(|error| self.failed(error))?;
        // Where a rank keeps its socket and its lock.
        let of_rank = |rank| Workspace { save: place.save.join(format!("rank-{rank}")), ..place.clone() };
        let opened = others.together(
            |rank, child| child.load(&of_rank(rank)).map(drop),
            |hopeful| {
                let star = listening.accept(options.ranks, options.deadline, hopeful);
                let opened = star.and_then(|star| self.open(place, device, Some(&exchange(star, device)?)));
                opened.map_err(|error| self.unable(error))
            },
        )?;
        self.role = Role::First(others);
        Ok(opened)
    }

    /// As another rank than 0.
    fn open_other(&self, place: &Workspace) -> Result<(Loaded, Option<Progress>)> {
        let Role::Other { rank, socket, .. } = &self.role else {
            return Err(input("rank", "another than 0", 0));
        };
        let options = self.options.ranks.as_ref().ok_or_else(|| input("rank", "others", "none"))?;
        let device = device_of_rank(&self.options.device, *rank, options.ranks)?;
        let star = Star::join(socket, *rank, options.ranks, options.deadline)?;
        self.open(place, device, Some(&exchange(star, device)?))
    }

    /// Asks the other ranks while this one does its part; an error leaves none of them.
    fn together<T>(
        &mut self,
        ask: impl Fn(&mut Child) -> LoopResult<()> + Sync,
        own: impl FnOnce(&mut Self) -> Result<T>,
    ) -> LoopResult<T> {
        let mut others = match &mut self.role {
            Role::First(others) => std::mem::take(others),
            Role::Other { .. } => Others::default(),
        };
        let shared = self.options.ranks.as_ref().is_some_and(|options| options.ranks > 1);
        let done = others.together(
            |_, child| ask(child),
            |_| {
                own(self).map_err(|error| {
                    if shared {
                        // Those that wait for this rank see its connections end.
                        self.loaded = None;
                    }
                    self.unable(error)
                })
            },
        )?;
        if let Role::First(place) = &mut self.role {
            *place = others;
        }
        Ok(done)
    }

    /// The error as the loop has it, and whether another rank was the reason.
    fn unable(&self, error: Error) -> Failed {
        match error {
            Error::Rank { .. } => Failed::Elsewhere(LoopError::LearnerLost {
                learner: self.describe(),
                call: "its part of a step, from each rank",
                found: error.to_string(),
            }),
            error => Failed::Here(self.failed(error)),
        }
    }

    fn loaded(&mut self) -> Result<&mut Loaded> {
        self.loaded.as_mut().ok_or_else(|| input("learner", "one that was loaded", "none"))
    }

    /// The error as the loop has it.
    fn failed(&self, error: Error) -> LoopError {
        match error {
            Error::Transport(error) => LoopError::Transport(error),
            Error::Loop(error) => error,
            error => LoopError::Learner { learner: self.describe(), source: Box::new(error) },
        }
    }

    fn copied(&mut self, fp8: bool) -> Result<Tensors<'static>> {
        let Loaded { policy, place, .. } = self.loaded()?;
        snapshot::policy_snapshot(policy, &place.hf_checkpoint, fp8)
    }

    /// The weights where they are, or a copy on the host.
    fn weights(&mut self) -> Result<Weights> {
        let fp8 = self.options.fp8;
        if let (Some(lender), Some(Loaded { policy, place, .. })) = (&self.lender, &self.loaded) {
            let files = snapshot::files(policy.model(), &place.hf_checkpoint, fp8)?;
            match lender.lend(&policy.trained, files, fp8) {
                Err(error) if fp8 && error.is_memory() => {
                    tracing::warn!(%error, "the device has no memory for the weights in fp8: they are copied to the host");
                }
                lent => return Ok(Weights::Tensors(Box::new(lent?))),
            }
        }
        Ok(Weights::Tensors(Box::new(self.copied(fp8)?)))
    }

    fn train(&mut self, batch: &learner::Batch<'_>) -> Result<StepStats> {
        if matches!(self.role, Role::Other { .. }) {
            fail::fail_point!("train.rank");
        }
        if let Some(lender) = &self.lender {
            lender.check()?;
        }
        let TorchOptions { learn: mut options, temperature, .. } = self.options.clone();
        let Loaded { policy, critic, .. } = self.loaded()?;
        let begin = Instant::now();
        let learned = learn::learn_within_memory(policy, critic.as_mut(), batch, &mut options, temperature);
        let mfu = mfu(policy, batch, begin.elapsed());
        self.options.learn = options;
        let Learned { stats, log_probs } = learned?;
        self.log_probs = log_probs.filter(|_| matches!(self.role, Role::First(_)));
        Ok(StepStats { mfu, ..stats })
    }

    /// Writes a training checkpoint; of several ranks the first does, from all.
    fn write(&mut self, progress: &Progress) -> Result<()> {
        let save = self.options.learn.critic().and_then(|critic| critic.critic_save.clone());
        let first = matches!(self.role, Role::First(_));
        let Loaded { policy, critic, place } = self.loaded()?;
        if !first {
            return checkpoint::give(policy, critic.as_ref());
        }
        checkpoint::save(&checkpoint::dir(&place.save), policy, critic.as_ref(), progress, place.keep)?;
        if let (Some(dir), Some(critic)) = (save, critic) {
            let snapshot = snapshot::of_critic(critic, &place.hf_checkpoint)?;
            write_checkpoint(&dir, &snapshot, SHARD_BYTES_MAX)?;
        }
        Ok(())
    }

    fn log_probs_of(&mut self, batch: &learner::Batch<'_>) -> Result<Vec<Vec<f32>>> {
        let TorchOptions { learn: options, temperature, .. } = self.options.clone();
        let Loaded { policy, .. } = self.loaded()?;
        let mut found = vec![Vec::new(); batch.samples.len()];
        // Of all response tokens, those that are not trained on included.
        let unmasked =
            batch.samples.iter().map(|sample| learner::Sample { loss_mask: &[], stale: 0, ..*sample });
        let packed = learn::pack(policy.model(), &unmasked.collect::<Vec<_>>(), &options)?;
        for (chosen, packed) in packed.chosen.into_iter().zip(packed.batches) {
            let log_probs: Vec<f32> = Vec::try_from(policy.log_probs(&packed, temperature)?)?;
            let mut rest = log_probs.as_slice();
            for index in chosen {
                let (own, others) = rest.split_at(batch.samples[index].response_len().min(rest.len()));
                found[index] = own.to_vec();
                rest = others;
            }
        }
        Ok(found)
    }
}

impl Learner for TorchLearner {
    fn describe(&self) -> String {
        match (&self.role, &self.options.ranks) {
            (Role::Other { rank, .. }, _) => format!("rank {rank}, libtorch on {}", self.options.device),
            (_, Some(ranks)) => format!("{} ranks, libtorch on {}", ranks.ranks, self.options.device),
            _ => format!("libtorch on {}", self.options.device),
        }
    }

    fn settings(&self) -> Option<serde_json::Value> {
        serde_json::to_value(Settings::of(&self.options)).ok()
    }

    fn load(&mut self, place: &Workspace) -> LoopResult<Option<Progress>> {
        // Two models at once may not fit, nor two of a rank.
        self.loaded = None;
        let (loaded, progress) = match &mut self.role {
            Role::First(others) => {
                *others = Others::default();
                self.open_first(place)?
            }
            Role::Other { .. } => self.open_other(place).map_err(|error| self.failed(error))?,
        };
        self.loaded = Some(loaded);
        Ok(progress)
    }

    fn codec(&mut self) -> Option<Codec> {
        if let (None, Some(loaded)) = (&self.lender, &self.loaded) {
            self.lender = Lender::open(&loaded.policy.trained, self.options.fp8);
        }
        self.lender.as_ref()?.codec()
    }

    fn log_probs(&mut self, batch: &learner::Batch<'_>) -> LoopResult<Vec<Vec<f32>>> {
        self.log_probs_of(batch).map_err(|error| self.failed(error))
    }

    fn step(&mut self, batch: &learner::Batch<'_>) -> LoopResult<Stepped> {
        self.together(
            |child| child.step(batch).map(drop),
            |learner| match learner.train(batch) {
                Ok(stats) => Ok(Stepped::Done(stats)),
                Err(Error::NotFinite { what, found, .. }) => {
                    Ok(Stepped::NotFinite(format!("{what} is {found}")))
                }
                Err(error) => Err(error),
            },
        )
    }

    fn take_log_probs(&mut self) -> Option<Vec<f32>> {
        self.log_probs.take()
    }

    fn snapshot(&mut self, _step: u64) -> LoopResult<Weights> {
        self.weights().map_err(|error| self.failed(error))
    }

    fn save(&mut self, progress: &Progress) -> LoopResult<()> {
        self.together(|child| child.save(progress), |learner| learner.write(progress))
    }

    fn save_hf(&mut self, dir: &Path) -> LoopResult<()> {
        let snapshot = self.copied(false).map_err(|error| self.failed(error))?;
        Ok(write_checkpoint(dir, &snapshot, SHARD_BYTES_MAX)?)
    }
}

/// Share of the operations that the devices are made for, if that is known; else 0.
fn mfu(policy: &Policy, batch: &learner::Batch<'_>, took: Duration) -> f64 {
    let Some(peak) = libtorch::operations_per_second(policy.model().device()) else { return 0.0 };
    let [of_token, of_pair] = policy.model().config().operations();
    let of_sample = |tokens: f64| of_token * tokens + of_pair * tokens * tokens;
    let operations: f64 = batch.samples.iter().map(|sample| of_sample(sample.tokens.len() as f64)).sum();
    let devices = policy.optimizer().rank().1 as f64;
    operations / (took.as_secs_f64() * peak * devices)
}

/// Trains as a rank of several, until the process of rank 0, which has started this one, hangs up at the socket
/// `loop_socket`. `options` are those of rank 0, but that the loss comes from there; `rank`, `socket` and
/// `checkpoints` are what was added to [`RankOptions::command`].
///
/// # Errors
/// As for [`driftless_trainer::learner::serve`].
pub fn serve_rank(
    loop_socket: &Path,
    options: &TorchOptions,
    rank: usize,
    socket: &Path,
    checkpoints: &Path,
) -> LoopResult<()> {
    learner::serve(loop_socket, |told| {
        let options =
            TorchOptions { learn: told.options.clone(), temperature: told.temperature, ..options.clone() };
        let role = Role::Other { rank, socket: socket.to_owned(), checkpoints: checkpoints.to_owned() };
        Box::new(TorchLearner { role, ..TorchLearner::new(options) })
    })
}

/// Checks that a host has a device for each of so many ranks.
///
/// # Errors
/// [`Error::Input`] for more ranks than there are GPUs, or than can share a model; [`Error::Device`].
pub fn check_ranks(device: &str, ranks: usize) -> Result<()> {
    (0..ranks).try_for_each(|rank| device_of_rank(device, rank, ranks).map(drop))
}

fn device_of_rank(device: &str, rank: usize, ranks: usize) -> Result<Device> {
    if !(1..=RANKS_MAX).contains(&ranks) {
        return Err(input("RankOptions::ranks", format!("1..={RANKS_MAX}"), ranks));
    }
    match device {
        _ if ranks == 1 => libtorch::device(device),
        "cpu" => Ok(Device::Cpu),
        "cuda" => match libtorch::cuda_devices() {
            Ok(count) if count < ranks => {
                let expected = format!("at most the {count} GPUs that this process sees");
                Err(input("RankOptions::ranks", expected, ranks))
            }
            _ => libtorch::device(&format!("cuda:{rank}")),
        },
        other => Err(input("device", format!("cpu or cuda, for {ranks} ranks"), other)),
    }
}

/// What ranks on these devices exchange over.
fn exchange(star: Star, device: Device) -> Result<Ranks> {
    Ok(match device {
        Device::Cuda(index) => Arc::new(Mutex::new(OverNccl::join(star, index)?)),
        _ => Arc::new(Mutex::new(star)),
    })
}

fn kind_of(dtype: Dtype) -> Kind {
    match dtype {
        Dtype::Bfloat16 => Kind::BFloat16,
        Dtype::Float32 => Kind::Float,
    }
}

#[cfg(test)]
mod tests {
    use driftless_transport::snapshot::{AuxFile, TensorInfo};
    use driftless_transport::{Dtype as Published, Snapshot};
    use tempfile::TempDir;

    use super::*;
    use crate::batch::tests::short;
    use crate::lent::tests::FAULT;
    use crate::models::tests::{Family, config};
    use crate::optimizer::AdamWOptions;

    /// A learner that has loaded a model of these shapes from a checkpoint in the directory, and lends its weights from
    /// a device that is this processor.
    fn lending(config: Config, fp8: bool) -> (TorchLearner, TempDir) {
        let dir = tempfile::tempdir().unwrap();
        let json = serde_json::to_vec(&config.to_json(Kind::Float)).unwrap();
        let files = vec![AuxFile::new("config.json", json).unwrap()];
        let model = Model::fresh(config, 1, Kind::Float, Device::Cpu).unwrap();
        let policy = Policy::new(model, Kind::Float, AdamWOptions::default()).unwrap();
        let hf_checkpoint = dir.path().join("hf");
        write_checkpoint(&hf_checkpoint, &snapshot::of_trained(&policy.trained, &files).unwrap(), 1 << 30)
            .unwrap();
        let place = Workspace {
            save: dir.path().join("rl"),
            hf_checkpoint,
            log: dir.path().join("log"),
            store: "memory:".into(),
            run: "test".into(),
            run_id: "01".repeat(16),
            model: "policy".into(),
            baseline: dir.path().join("baseline"),
            keep: 1,
            anchor_every: None,
            anchor_share: None,
        };
        let mut learner = TorchLearner::new(TorchOptions {
            fp8,
            learn: LearnOptions::default(),
            temperature: 1.0,
            num_threads: 1,
            device: "cpu".into(),
            ranks: None,
        });
        learner.load(&place).unwrap();
        learner.lender = Some(Lender::with(Codec::twin(0, 1 << 30)));
        (learner, dir)
    }

    /// One whose layers are whole blocks of fp8.
    fn lending_fp8() -> (TorchLearner, TempDir) {
        let config = Config {
            hidden_size: 128,
            intermediate_size: 128,
            num_key_value_heads: 4,
            head_dim: 32,
            ..config(Family::Qwen3, true)
        };
        lending(config, true)
    }

    fn snapshot(learner: &mut TorchLearner) -> LoopResult<Box<dyn Snapshot + Sync>> {
        learner.snapshot(0).map(|weights| match weights {
            Weights::Tensors(snapshot) => snapshot,
            _ => panic!("tensors"),
        })
    }

    /// All of a version.
    fn told(snapshot: &dyn Snapshot) -> (Vec<(TensorInfo, Vec<u8>)>, Vec<AuxFile>) {
        let bytes = |index| snapshot.bytes(index).unwrap().into_owned();
        let tensors = snapshot.tensors().iter().enumerate().map(|(index, info)| (info.clone(), bytes(index)));
        (tensors.collect(), snapshot.files().to_vec())
    }

    #[test]
    fn fp8_snapshot_without_device_memory_is_a_copy() {
        let (mut learner, _dir) = lending_fp8();
        let lent = snapshot(&mut learner).unwrap();
        assert!(lent.on_device(0).is_some());
        let expected = told(&*lent);
        drop(lent);
        FAULT.set(Some(short));
        let copied = snapshot(&mut learner);
        FAULT.set(None);
        let copied = copied.unwrap();
        assert!((0..copied.tensors().len()).all(|index| copied.on_device(index).is_none()));
        assert!(told(&*copied) == expected);
        assert!(expected.0.iter().any(|(info, _)| info.dtype == Published::F8E4M3));
        // The next step need not wait until a copy was published.
        learner.lender.as_ref().unwrap().check().unwrap();
        // The device is asked again each time.
        assert!(snapshot(&mut learner).unwrap().on_device(0).is_some());
    }

    #[test]
    fn fp8_snapshot_failing_otherwise_is_refused() {
        let (mut learner, _dir) = lending_fp8();
        FAULT.set(Some(|| input("the device", "there", "gone")));
        let refused = snapshot(&mut learner).map(drop);
        FAULT.set(None);
        assert!(matches!(refused, Err(LoopError::Learner { .. })), "{refused:?}");
    }

    #[test]
    fn step_while_weights_are_lent_is_refused() {
        let (mut learner, _dir) = lending(config(Family::Qwen3, true), false);
        let sample = learner::Sample {
            position: driftless_buffer::Position(0),
            tokens: &[1, 2, 3, 4],
            prompt_len: 2,
            loss_mask: &[],
            stale: 0,
            log_probs: &[-1.0, -1.0],
            teacher_log_probs: &[],
            answer: 0,
            advantage: 1.0,
        };
        let batch = learner::Batch { rollout_id: 0, samples: vec![sample] };
        let lent = snapshot(&mut learner).unwrap();
        assert!(lent.on_device(0).is_some());
        let refused = learner.step(&batch).unwrap_err().to_string();
        drop(lent);
        assert!(matches!(learner.step(&batch).unwrap(), Stepped::Done(_)), "{refused}");
    }
}
