//! Everything the loop is told, in one place; the command line fills it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use derive_setters::Setters;
use driftless_bridge::activate::Compare;
use driftless_bridge::engine::Ca;
use driftless_bridge::{Keys, SamplingParams};
use driftless_store::Store;
use driftless_transport::publish::Notify;
use driftless_transport::sign::{SignKey, TrustKey};

use crate::door::Listen;
use crate::error::{Result, input};
use crate::options::{Debug, LearnOptions, Mode, Part, UpdateWeightMode};
use crate::push::Pushes;
use crate::rollout::{EvalSet, HOOK_RETRIES};
use crate::tasks::Task;

/// Settings of a run of the RL loop. Field names follow the flags of `driftless train`, which follow slime's.
#[derive(Debug, Clone, Setters)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct TrainOptions {
    /// Hugging Face checkpoint the policy starts from.
    pub hf_checkpoint: PathBuf,
    /// Hugging Face checkpoint that engines start from, where that is another: what the learner publishes of these
    /// weights, in another dtype. The learner must not publish by itself.
    pub rollout_hf_checkpoint: Option<PathBuf>,
    /// Directory of the run's state: training checkpoints, baseline, rollout log, metrics.
    pub save: PathBuf,
    /// Where the final policy goes as a Hugging Face checkpoint. With `{rollout_id}` in its name it is a
    /// series: one beside each training checkpoint, named by the steps done.
    pub save_hf: Option<PathBuf>,
    /// The store that publications go to.
    pub store: Arc<dyn Store>,
    /// The same store as its user names it.
    pub store_url: String,
    /// Name of the run in the store.
    pub run: String,
    /// What signs the versions, if they are signed; those that it has not signed are not gone on from.
    pub sign_key: Option<SignKey>,
    /// Other keys whose versions are gone on from.
    pub trust_keys: Vec<TrustKey>,
    /// Engines, as `host:port` or URLs.
    pub rollout_external_engine_addrs: Vec<String>,
    /// A file with a line for each further engine, followed while the run runs.
    pub rollout_external_engines_file: Option<PathBuf>,
    /// `name:port`: each address of the name is an engine, without keys; followed while the run runs.
    pub rollout_external_engines_dns: Option<String>,
    /// Where the engines are listed and changed over HTTP while the run runs, beside the socket in its directory.
    pub fleet_listen: Option<Listen>,
    /// The engines' API keys.
    pub keys: Keys,
    /// Who vouches for engines at `https://` addresses; those that the system trusts, if `None`.
    pub engine_ca: Option<Ca>,
    /// How the loop brings versions into the engines by itself; followers do, if `None`.
    pub push: Option<Pushes>,
    /// How generation and training overlap.
    pub mode: Mode,
    /// What to leave out, for debugging.
    pub debug: Debug,
    /// Which half of the run this process is. Both halves are given the same settings.
    pub part: Part,
    /// Steps of the whole run; with 0, the newest policy is measured, and that is all.
    pub num_rollout: u64,
    /// Prompts of a rollout.
    pub rollout_batch_size: u64,
    /// Prompts under way until a rollout has its own; those of a rollout, if `None`.
    pub over_sampling_batch_size: Option<u64>,
    /// Whether answers that are not finished with their rollout go on while it is trained on, and behind the update. They
    /// are stopped otherwise, and begin again.
    pub partial_rollout: bool,
    /// Whether only tokens of the weights that a step begins with are trained on, where answers go on behind updates.
    pub mask_offpolicy_in_partial_rollout: bool,
    /// Samples of a prompt; they form a group.
    pub n_samples_per_prompt: u64,
    /// What is learned.
    pub task: Task,
    /// Settings of the prompts and rewards, by name. A run that goes on with others says so.
    pub data: BTreeMap<String, String>,
    /// How tokens of rollouts are drawn; each sample gets a seed of its own.
    pub sampling: SamplingParams,
    /// Tokens that prompt and response may have together.
    pub rollout_max_context_len: Option<usize>,
    /// Requests an engine is given at once.
    pub server_concurrency: usize,
    /// Full or delta publications.
    pub update_weight_mode: UpdateWeightMode,
    /// Publish after every so many steps.
    pub update_weights_interval: u64,
    /// Carry full tensors too in every version whose number is a multiple of this; never, if `None`.
    pub anchor_every: Option<u64>,
    /// The same whenever the deltas since the last full tensors weigh this share of their bytes, or more.
    pub anchor_share: Option<f64>,
    /// Hears of each version right behind its commit, such as followers that look at the store then.
    pub notify: Option<Notify>,
    /// Remove what no follower needs but for so many of the newest versions; never, if `None`.
    pub keep_versions: Option<u64>,
    /// After every update compare the engines' checksums with those of the trainer's bytes.
    pub check_weight_update_equal: bool,
    /// Whether the run goes on with engines of whose live weights their followers could compare nothing.
    pub compare: Compare,
    /// The directory of engines' plugins on this host, to tell at the start what each engine gets.
    pub plugin_dir: Option<PathBuf>,
    /// Measure on held-out prompts after every so many steps; only at both ends, if 0.
    pub eval_interval: u64,
    /// The held-out prompts; no two sets have one name.
    pub eval: Vec<EvalSet>,
    /// Write a training checkpoint after every so many steps.
    pub save_interval: u64,
    /// Bytes of the log, beyond which it gives back what no step learns from again.
    pub rollout_log_bytes_max: u64,
    /// Steps in a row that may be left out because they are not finite.
    pub max_skipped_steps: u64,
    /// What rewards become, and what the learner does with it.
    pub learn: LearnOptions,
    /// Seed of data and sampling.
    pub seed: u64,
    /// How many engines have to answer before the run starts, and to serve a version before it goes on.
    pub engines_min: usize,
    /// How long so many may take, until the run ends.
    pub update_deadline: Duration,
    /// How long one generation may take, retries included.
    pub generate_deadline: Duration,
    /// Times that an answer is made again whose hook died or was late.
    pub hook_retries: u64,
    /// Prompts whose answers have at least this mean reward rest in the next epoch, longer each time; none do, if `None`.
    pub easy_threshold: Option<f64>,
}

/// Stands for the number of steps done in [`TrainOptions::save_hf`].
const ROLLOUT_ID: &str = "{rollout_id}";
/// The setting that a run cannot change.
pub(super) const GROUP_SIZE: &str = "n_samples_per_prompt";

/// Whether the name stands for a series of directories.
pub(super) fn is_series(dir: &Path) -> bool {
    dir.to_str().is_some_and(|dir| dir.contains(ROLLOUT_ID))
}

impl TrainOptions {
    /// One synchronous step on 32 prompts with 8 samples each, without engines; each step is published. The policy
    /// is that of `hf_checkpoint`, and `store_url` names `store`.
    #[must_use]
    pub fn new(
        hf_checkpoint: impl Into<PathBuf>,
        save: impl Into<PathBuf>,
        store: Arc<dyn Store>,
        store_url: impl Into<String>,
        run: impl Into<String>,
        task: Task,
    ) -> Self {
        TrainOptions {
            hf_checkpoint: hf_checkpoint.into(),
            save: save.into(),
            store_url: store_url.into(),
            run: run.into(),
            ..Self::unnamed(store, task)
        }
    }

    /// The defaults, without names and places.
    fn unnamed(store: Arc<dyn Store>, task: Task) -> Self {
        TrainOptions {
            hf_checkpoint: PathBuf::new(),
            rollout_hf_checkpoint: None,
            save: PathBuf::new(),
            save_hf: None,
            store,
            store_url: String::new(),
            run: String::new(),
            sign_key: None,
            trust_keys: Vec::new(),
            rollout_external_engine_addrs: Vec::new(),
            rollout_external_engines_file: None,
            rollout_external_engines_dns: None,
            fleet_listen: None,
            keys: Keys::default(),
            engine_ca: None,
            push: None,
            mode: Mode::Synchronous,
            debug: Debug::Off,
            part: Part::Whole,
            num_rollout: 1,
            rollout_batch_size: 32,
            over_sampling_batch_size: None,
            partial_rollout: false,
            mask_offpolicy_in_partial_rollout: false,
            n_samples_per_prompt: 8,
            task,
            data: BTreeMap::new(),
            sampling: SamplingParams::default(),
            rollout_max_context_len: None,
            server_concurrency: 512,
            update_weight_mode: UpdateWeightMode::Delta,
            update_weights_interval: 1,
            anchor_every: None,
            anchor_share: None,
            notify: None,
            keep_versions: None,
            check_weight_update_equal: false,
            compare: Compare::Auto,
            plugin_dir: None,
            eval_interval: 20,
            eval: Vec::new(),
            save_interval: 20,
            rollout_log_bytes_max: 64 << 30,
            max_skipped_steps: 3,
            learn: LearnOptions::default(),
            seed: 1,
            engines_min: 1,
            update_deadline: Duration::from_secs(300),
            generate_deadline: Duration::from_secs(600),
            hook_retries: HOOK_RETRIES,
            easy_threshold: None,
        }
    }

    /// What engines start from; version 0 refers to it.
    pub(super) fn start(&self) -> &Path {
        self.rollout_hf_checkpoint.as_ref().unwrap_or(&self.hf_checkpoint)
    }

    /// The Hugging Face checkpoint of a series after `step` steps, if there is a series.
    pub(super) fn save_hf_after(&self, step: u64) -> Option<PathBuf> {
        let dir = self.save_hf.as_deref().filter(|dir| is_series(dir))?.to_str()?;
        Some(dir.replace(ROLLOUT_ID, &step.to_string()).into())
    }

    /// Refuses settings that do not go together.
    pub(super) fn check(&self) -> Result<()> {
        let followed = [
            ("rollout_external_engines_file", self.rollout_external_engines_file.is_some()),
            ("rollout_external_engines_dns", self.rollout_external_engines_dns.is_some()),
        ];
        let mut followed = followed.into_iter().filter(|(_, is_given)| *is_given);
        if let Some((name, _)) = followed.next().filter(|_| self.push.is_some()) {
            let expected = "none where the loop pushes (`push`): engines that are pushed into stay the same";
            return Err(input(name, expected, "both"));
        }
        if let Some((name, _)) = followed.next() {
            return Err(input(name, "one that engines are followed by: a file or a name", "both"));
        }
        self.fleet_listen.as_ref().map_or(Ok(()), Listen::check)?;
        self.check_surplus()?;
        self.check_part()?;
        let Mode::Bounded { max_staleness } = self.mode else { return Ok(()) };
        // Weights that are published less often are always too old for some steps.
        if self.update_weights_interval > max_staleness.saturating_add(1) {
            let expected =
                format!("at most {}, one more than `max_staleness`", max_staleness.saturating_add(1));
            return Err(input("update_weights_interval", expected, self.update_weights_interval));
        }
        Ok(())
    }

    /// Refuses what takes both halves in one process.
    fn check_part(&self) -> Result<()> {
        let asks = [
            ("debug", self.debug != Debug::Off),
            ("push", self.push.is_some()),
            ("check_weight_update_equal", self.check_weight_update_equal),
            ("compare", self.compare == Compare::Require),
            ("max_staleness", !matches!(self.mode, Mode::Bounded { .. })),
        ];
        let asked = asks.into_iter().find(|(_, is_asked)| *is_asked && self.part != Part::Whole);
        match asked {
            Some(("max_staleness", _)) => {
                let expected =
                    "at least 1: rollouts that are a process of their own go on while the trainer trains";
                Err(input("max_staleness", expected, self.mode.max_staleness()))
            }
            Some((name, _)) => Err(input(name, "none where rollouts are a process of their own", "both")),
            None => Ok(()),
        }
    }

    /// Whether this process has engines.
    pub(super) fn generates(&self) -> bool {
        self.part != Part::Trainer && self.debug != Debug::TrainOnly
    }

    /// Whether this process has a learner that trains.
    pub(super) fn learns(&self) -> bool {
        self.part != Part::Rollouts && self.debug != Debug::RolloutOnly
    }

    fn check_surplus(&self) -> Result<()> {
        let least = self.rollout_batch_size;
        if let Some(found) = self.over_sampling_batch_size.filter(|found| *found < least) {
            let expected = format!("at least {least}, which is `rollout_batch_size`");
            return Err(input("over_sampling_batch_size", expected, found));
        }
        if self.mode == Mode::OneStepOff && self.surplus() > 0 {
            let expected = "no more than `rollout_batch_size` with batches that are one step off; a \
                            `max_staleness` of 1 has a surplus without that";
            return Err(input("over_sampling_batch_size", expected, self.surplus() + least));
        }
        if self.partial_rollout && (self.mode != Mode::Synchronous || self.surplus() == 0) {
            let expected = "an `over_sampling_batch_size` above `rollout_batch_size`, and no `max_staleness`, with which \
                            answers go on anyway";
            return Err(input("partial_rollout", expected, "true without that"));
        }
        if self.mask_offpolicy_in_partial_rollout && !self.partial_rollout {
            return Err(input("mask_offpolicy_in_partial_rollout", "`partial_rollout`", "none"));
        }
        Ok(())
    }

    /// How many steps old the weights may be of tokens that are trained on, if that is bounded.
    pub(super) fn oldest(&self) -> Option<u64> {
        match self.mode {
            Mode::Bounded { max_staleness } => Some(max_staleness),
            Mode::Synchronous if self.mask_offpolicy_in_partial_rollout => Some(0),
            Mode::Synchronous | Mode::OneStepOff => None,
        }
    }

    /// Prompts under way beyond those of a rollout.
    pub(super) fn surplus(&self) -> u64 {
        self.over_sampling_batch_size.map_or(0, |all| all.saturating_sub(self.rollout_batch_size))
    }

    /// What samples and steps depend on, by name.
    pub(super) fn settings(&self) -> BTreeMap<String, String> {
        let mut settings = self.of_samples();
        settings.extend(self.learn.by_name().into_iter().map(|(name, value)| (name, value.to_string())));
        settings
    }

    /// What both halves of a run have to be told alike, by name.
    pub(super) fn of_both_halves(&self) -> BTreeMap<String, String> {
        let own = [
            ("num_rollout", self.num_rollout.to_string()),
            ("run", self.run.clone()),
            ("seed", self.seed.to_string()),
        ];
        let mut settings = self.of_samples();
        settings.extend(own.map(|(name, value)| (name.to_owned(), value)));
        settings
    }

    /// What samples depend on, by name.
    fn of_samples(&self) -> BTreeMap<String, String> {
        let sampling = &self.sampling;
        [
            ("rollout_batch_size", self.rollout_batch_size.to_string()),
            (GROUP_SIZE, self.n_samples_per_prompt.to_string()),
            ("rollout_temperature", sampling.temperature.to_string()),
            ("rollout_top_p", sampling.top_p.to_string()),
            ("rollout_top_k", sampling.top_k.to_string()),
            ("rollout_max_response_len", sampling.max_new_tokens.to_string()),
            ("rollout_stop", format!("{:?}", sampling.stop)),
            ("rollout_stop_token_ids", format!("{:?}", sampling.stop_token_ids)),
            ("max_staleness", self.mode.max_staleness().to_string()),
            ("over_sampling_batch_size", (self.rollout_batch_size + self.surplus()).to_string()),
            ("partial_rollout", self.partial_rollout.to_string()),
            ("mask_offpolicy_in_partial_rollout", self.mask_offpolicy_in_partial_rollout.to_string()),
            ("update_weights_interval", self.update_weights_interval.to_string()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into()
    }
}
