//! Flags of weight updates.

use super::hooks::missing;
use crate::cli::shared::engines::COMPARES;
use crate::cli::shared::error::Result;
use crate::cli::shared::transport::TransportArgs;
use crate::cli::shared::{keys, numbers, store};
use driftless::bridge::ClientOptions;
use driftless::bridge::activate::Compare;
use driftless::bridge::engine::Deadlines;
use driftless::bridge::live::{PLUGIN_DIR, plugin_dir};
use driftless::bridge::push::PushOptions;
use driftless::trainer::TrainOptions;
use driftless::trainer::options::{Debug, UpdateWeightMode};
use driftless::trainer::push::Pushes;
use std::path::{Path, PathBuf};
use std::time::Duration;

#[derive(clap::Args)]
#[command(next_help_heading = "Weight updates")]
pub(super) struct UpdateArgs {
    /// Store of the publications: file:///dir, a path, s3://bucket/prefix, gs://…, az://….
    #[arg(long, value_name = "URL", conflicts_with = "update_weight_disk_dir")]
    pub(super) store: Option<String>,
    /// The same as --store file://DIR.
    #[arg(long, value_name = "DIR")]
    pub(super) update_weight_disk_dir: Option<PathBuf>,
    /// Name of the run in the store.
    #[arg(long, default_value = "default")]
    pub(super) run: String,
    /// dtype that engines get the layers' matrices in: fp8, in blocks of 128 x 128 with f32 scales
    /// [default: as they are trained].
    #[cfg(feature = "torch")]
    #[arg(long, value_enum, requires = "rollout_hf_checkpoint", conflicts_with_all = ["learner", "check_weight_update_equal"])]
    pub(super) rollout_dtype: Option<RolloutDtype>,
    /// Checkpoint directory that engines and followers start from, where it is another than --hf-checkpoint:
    /// what `driftless quantize` makes of that.
    #[cfg(feature = "torch")]
    #[arg(long, value_name = "DIR", requires = "rollout_dtype")]
    pub(super) rollout_hf_checkpoint: Option<PathBuf>,
    /// Publish whole versions or differences.
    #[arg(long, value_enum, default_value_t = UpdateWeightMode::Delta)]
    pub(super) update_weight_mode: UpdateWeightMode,
    #[command(flatten)]
    pub(super) transport: TransportArgs,
    /// Publish after every so many steps.
    #[arg(long, default_value_t = 1, value_parser = numbers::count::<u64>())]
    pub(super) update_weights_interval: u64,
    /// Carry full tensors too in every version whose number is a multiple of this, so that a late joiner need
    /// not replay the chain.
    #[arg(long, value_name = "VERSIONS", value_parser = numbers::count::<u64>())]
    pub(super) anchor_every: Option<u64>,
    /// The same whenever the deltas since the last full tensors weigh this share of their bytes, or more.
    #[arg(long, value_name = "SHARE", value_parser = numbers::positive)]
    pub(super) anchor_share: Option<f64>,
    /// After each version remove those that no follower needs, as `driftless gc --keep` does.
    #[arg(long, value_name = "VERSIONS", value_parser = numbers::count::<u64>())]
    pub(super) keep: Option<u64>,
    #[command(flatten)]
    pub(super) sign: keys::SignArgs,
    #[command(flatten)]
    pub(super) notify: store::NotifyArgs,
    /// Whether the run goes on with an engine of whose live weights its follower could compare nothing, by a plugin or
    /// by checksums (auto), or ends (require). Each engine's outlook is told at the start.
    #[arg(long, value_parser = numbers::one_of(&COMPARES), default_value = "auto")]
    pub(super) compare: Compare,
    /// After every update compare the engines' checksums with those of the trainer's bytes; a difference ends
    /// the run.
    #[arg(long)]
    pub(super) check_weight_update_equal: bool,
    /// Engines that must answer before the run starts, and serve a version before it goes on. Once so many do, the run
    /// waits 10 s for the others, and goes on without them.
    #[arg(long, default_value_t = 1, value_name = "ENGINES", value_parser = numbers::count::<usize>())]
    pub(super) engines_min: usize,
    /// Seconds that so many engines may take to answer, and to come to a new version, before the run ends.
    #[arg(long, default_value_t = 300, value_name = "SECONDS", value_parser = numbers::deadline())]
    pub(super) update_deadline: u64,
    /// Write a training checkpoint after every so many steps.
    #[arg(long, default_value_t = 20, value_parser = numbers::count::<u64>())]
    pub(super) save_interval: u64,
}

impl UpdateArgs {
    /// The store, if one is named.
    pub(super) fn store_url(&self) -> Option<String> {
        let dir = self.update_weight_disk_dir.as_ref().map(|dir| dir.display().to_string());
        self.store.clone().or(dir)
    }

    /// How the loop brings versions into engines by itself, if it does.
    pub(super) fn pushes(&self, client: &ClientOptions, hf_checkpoint: &Path) -> Option<Pushes> {
        if !self.transport.pushes() {
            return None;
        }
        let deadlines = Deadlines::default().with_load(Duration::from_secs(self.update_deadline));
        let client = client.clone().with_deadlines(deadlines);
        let options =
            PushOptions::default().with_client(client).with_base(hf_checkpoint).with_compare(self.compare);
        let transport = self.transport.clone();
        Some(Pushes::new(move |engines| Ok(transport.push(engines, options.clone())?)))
    }

    /// The store's name; one in memory stands in where debugging leaves it alone.
    pub(super) fn store_or_memory(&self, debug: Debug) -> Result<String> {
        match self.store_url() {
            Some(store) => Ok(store),
            None if debug == Debug::Off => {
                Err(missing("store", "--store URL or --update-weight-disk-dir DIR"))
            }
            None => Ok("memory:".to_owned()),
        }
    }

    /// Takes over what these flags say of publications and updates.
    pub(super) fn apply(self, options: TrainOptions) -> Result<TrainOptions> {
        let (sign_key, trust_keys) = self.sign.read()?;
        #[cfg(feature = "torch")]
        let options = options.with_rollout_hf_checkpoint(self.rollout_hf_checkpoint);
        Ok(options
            .with_sign_key(sign_key)
            .with_trust_keys(trust_keys)
            .with_update_weight_mode(self.update_weight_mode)
            .with_update_weights_interval(self.update_weights_interval)
            .with_anchor_every(self.anchor_every)
            .with_anchor_share(self.anchor_share)
            .with_keep_versions(self.keep)
            .with_notify(self.notify.notify()?)
            .with_check_weight_update_equal(self.check_weight_update_equal)
            .with_compare(self.compare)
            .with_plugin_dir(Some(plugin_dir(std::env::var_os(PLUGIN_DIR))))
            .with_engines_min(self.engines_min)
            .with_update_deadline(Duration::from_secs(self.update_deadline)))
    }
}

#[cfg(feature = "torch")]
#[derive(Clone, Copy, clap::ValueEnum)]
pub(super) enum RolloutDtype {
    Fp8,
}
