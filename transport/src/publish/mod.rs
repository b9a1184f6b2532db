//! Publishes versions of a model: encodes, stores, commits, and moves the baseline of the next delta.
//!
//! A publication goes through these files:
//!
//! | File | Does |
//! |---|---|
//! | `options` | what a publisher is given, and what it returns |
//! | `plan` | decides over tensor tables: delta, anchor or full |
//! | `shard` | all tensors of a version, or one rank's slices |
//! | `finite` | refuses NaN and infinities |
//! | `tied` | leaves out output heads that engines get back from the word embeddings |
//! | `slices` | hands tensors to several threads, and packs what they make, in order |
//! | `encode` | encodes one tensor |
//! | `device` | encodes those that lie on CUDA devices there (feature `cuda`) |
//! | `upload` | packs payloads into objects and stores them meanwhile |
//! | `sound` | finds a baseline that rotted, and builds it anew |
//! | `commit` | signs and creates the manifest, resolves races, and sweeps what belongs to no version |
//! | `baseline`, `catch_up` | applies the committed delta to the baseline, and brings one that lags to the newest version |
//! | `ranks`, `part` | several ranks store parts, and one of them joins them |

mod baseline;
mod catch_up;
mod commit;
#[cfg_attr(not(feature = "cuda"), path = "no_device.rs")]
mod device;
mod encode;
mod finite;
mod options;
mod part;
mod plan;
mod ranks;
mod shard;
mod slices;
mod sound;
mod tied;
mod upload;

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use driftless_store::wait::Stop;
use driftless_store::{Key, Object, Store, probe_conditional_put};

use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::ids::Version;
use crate::manifest::{
    Algorithms, Base, FORMAT, Features, File, Kind, Manifest, Tables, Tensor, VERSION_MAX,
};
use crate::replica::refuse_foreign_place;
use crate::run::{Committed, Run};
use crate::sign::signature_bytes;
use crate::snapshot::{Snapshot, TensorInfo};
use crate::tied::refuse_parted;
use baseline::Baseline;
use catch_up::is_lost;
use device::{DeviceUse as Used, Devices};
use driftless_store::pool::Bounds;
use encode::{BaseView, Coded, Coder, Done, Encoder};
use plan::{Anchors, Encoding};
use upload::Uploads;

#[cfg(feature = "cuda")]
pub use device::{BaseMemory, DeviceUse};
pub use driftless_delta::Profile;
pub use finite::check as check_finite;
pub use options::{
    FullBecause, LeftOut, Mode, Notify, Progress, ProgressFn, Published, PublisherOptions, Rank, Start, Step,
};
pub use ranks::PublishedPart;
pub use shard::{Shard, Slice, Sliced};

/// Publishes the versions of one model of one run, one after the other.
///
/// The baseline, a [`Replica`](crate::Replica) of the newest committed version, is what deltas start from. It
/// moves only after a manifest is committed, on a thread of its own. A publication that fails leaves it
/// alone, and the next one starts from it again. Dropping the publisher waits for that thread.
pub struct Publisher {
    run: Run,
    options: PublisherOptions,
    baseline: Baseline,
    devices: Devices,
    /// The newest version that is known to be committed.
    newest: Option<Base>,
    standing: Standing,
    /// Whether an earlier attempt may have left objects behind that no manifest names.
    sweep_due: bool,
    /// Bytes of the deltas since the newest anchor; `None` if they have to be counted.
    chain_bytes: Option<u64>,
    progress: Option<Box<ProgressFn>>,
    stop: Stop,
}

/// What is known about the store beyond the baseline.
#[derive(Debug, Clone)]
enum Standing {
    /// The baseline is at the newest version, or on its way there.
    InSync,
    /// The store may hold this version, which is ours, and the baseline does not yet.
    Lagging(Base),
    /// Another publisher committed this version.
    Fenced(Base),
}

/// One attempt at a version: its objects are `<root>/<name>-<index>`.
struct Attempt<'a> {
    version: Version,
    root: &'a Key,
    name: &'a str,
}

/// What of a shard is published.
struct Selection<'a> {
    /// The slices, by their number in the shard.
    slices: &'a [usize],
    /// Tensors of equal content share their payloads.
    tie: bool,
    with_files: bool,
}

/// A version that is encoded and stored, and not yet committed.
struct Encoded {
    kind: Kind,
    full_because: Option<FullBecause>,
    left_out: Vec<LeftOut>,
    tables: Tables,
    objects: Vec<Object>,
    done: Vec<Done>,
}

impl fmt::Debug for Publisher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Publisher")
            .field("run", &self.run)
            .field("model", &self.options.model)
            .field("version", &self.version())
            .field("standing", &self.standing)
            .finish_non_exhaustive()
    }
}

impl Publisher {
    /// Opens a publisher: checks that the store honours create-if-absent, claims or opens the run, and brings
    /// the baseline to the newest committed version.
    ///
    /// # Errors
    /// [`ConditionalPutIgnored`](driftless_store::Error::ConditionalPutIgnored), [`Error::RunExists`],
    /// [`Error::NoSuchRun`]; [`Error::ForeignRun`] or [`Error::ForeignModel`] for a baseline of something
    /// else; [`Error::Rewind`] for a baseline newer than the store; [`Error::BadSetting`]; whatever the store
    /// or the file system reports.
    pub fn open(store: Arc<dyn Store>, options: PublisherOptions) -> Result<Self> {
        options.check()?;
        refuse_foreign_place(&options.baseline_dir, options.reference_dir.as_deref())?;
        probe_conditional_put(&*store)?;
        let mut baseline = Baseline::open(&options.baseline_dir)?;
        let run = match options.start {
            Start::Resume => Run::open(store, &options.run)?,
            Start::NewRun => {
                // Before the name is claimed: a run that cannot be published to should not exist.
                if let Some(applied) = baseline.replica()?.applied() {
                    if let Ok(run) = Run::open(store, &options.run) {
                        return Err(Error::RunExists { name: options.run, run_id: run.id() });
                    }
                    return Err(Error::BadSetting {
                        name: "baseline_dir",
                        expected: "a directory without a version, for a new run; remove it, or name another"
                            .to_owned(),
                        found: format!(
                            "`{}`, with version {} of run {}",
                            options.baseline_dir.display(),
                            applied.version,
                            applied.run_id
                        ),
                    });
                }
                Run::create(store, &options.run)?
            }
        };
        let run = run.trusting(&options.trusted());
        let sweep_due = options.start == Start::Resume;
        let standing = Standing::InSync;
        let mut publisher = Self {
            run,
            options,
            baseline,
            devices: Devices::default(),
            newest: None,
            standing,
            sweep_due,
            chain_bytes: None,
            progress: None,
            stop: Stop::new(),
        };
        if let Err(error) = publisher.restore_baseline() {
            let Some(newest) = publisher.newest.filter(|_| is_lost(&error)) else { return Err(error) };
            tracing::warn!(version = %newest.version, %error, "only a full version can be published behind this one");
            publisher.standing = Standing::Lagging(newest);
        }
        Ok(publisher)
    }

    /// The run.
    #[must_use]
    pub fn run(&self) -> &Run {
        &self.run
    }

    /// The newest version that this publisher knows to be committed.
    #[must_use]
    pub fn version(&self) -> Option<Version> {
        self.newest.map(|newest| newest.version)
    }

    /// Waits until the baseline holds [`Publisher::version`]. It is never necessary: the next publication
    /// waits too.
    ///
    /// # Errors
    /// What kept the baseline from moving; the next publication tries again.
    pub fn wait(&mut self) -> Result<()> {
        let moved = self.baseline.wait();
        if let (Err(error), Standing::InSync, Some(newest)) = (&moved, &self.standing, self.newest) {
            tracing::warn!(version = %newest.version, %error, "the baseline lags; the next publication moves it first");
            self.standing = Standing::Lagging(newest);
        }
        moved
    }

    /// Has `progress` called after every tensor of a publication, on the publishing thread.
    pub fn on_progress(&mut self, progress: Box<ProgressFn>) {
        self.progress = Some(progress);
    }

    /// Has publications end with [`Error::Cancelled`] when `stop` is thrown: before the next tensor is
    /// encoded, or while ranks wait for each other. The store is then left as after any other failure. A
    /// publication that is being committed is not stopped.
    pub fn stop_on(&mut self, stop: &Stop) {
        self.stop = stop.clone();
    }

    /// Has tensors that lie on the device of `codec` ([`Snapshot::on_device`]) encoded there, where they are
    /// the difference to the version before. Payloads are the same as the host's. Four streams work at a time;
    /// the device or the host gives memory for the base of the next delta.
    ///
    /// # Errors
    /// What the driver says.
    #[cfg(feature = "cuda")]
    pub fn encode_on(
        &mut self,
        codec: driftless_delta::cuda::Codec,
        base: BaseMemory,
    ) -> driftless_delta::cuda::Result<()> {
        self.devices.add(codec, base)
    }

    /// Has devices make the base of the next delta now, which that would do: best while `shard`, what is published
    /// next, is still what the newest version has. Waits until the baseline holds that version. What a device
    /// cannot take is told by [`Publisher::device_use`].
    ///
    /// # Errors
    /// Those of a baseline that cannot be brought there; [`Error::Cancelled`].
    #[cfg(feature = "cuda")]
    pub fn place_bases(&mut self, shard: &dyn Shard) -> Result<()> {
        self.catch_up(Mode::Delta)?;
        let Self { options, baseline, devices, stop, .. } = self;
        let Some(base) = BaseView::of(baseline.replica()?)? else { return Ok(()) };
        let chosen: Vec<usize> = (0..shard.slices().len()).collect();
        let host_because = devices.complete(shard, &chosen, &base, options.threads, stop)?;
        devices.used = DeviceUse { host_because, ..DeviceUse::default() };
        Ok(())
    }

    /// What became of the tensors of the last publication that lie on devices.
    #[must_use]
    #[cfg(feature = "cuda")]
    pub fn device_use(&self) -> &DeviceUse {
        &self.devices.used
    }

    /// Publishes version 0 by reference: the digests of a checkpoint directory that every host has already.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the run has a version already; otherwise as [`Publisher::publish`].
    pub fn publish_reference(&mut self, dir: &Path, step: Step) -> Result<Published> {
        self.catch_up(Mode::Delta)?;
        if let Some(version) = self.version() {
            return Err(Error::Unsupported {
                what: format!("publishing by reference behind version {version}"),
                hint: "only version 0 can be a reference; publish this checkpoint as a delta or in full"
                    .to_owned(),
            });
        }
        let begin = Instant::now();
        let checkpoint = Checkpoint::open(dir)?;
        if !self.options.allow_non_finite {
            finite::check_all(&checkpoint)?;
        }
        let tables = Tables::of(&checkpoint)?;
        refuse_parted(checkpoint.files(), &tables.tensors)?;
        let manifest = self.manifest(Kind::Reference, &checkpoint, step, tables, Vec::new())?;
        let encode = begin.elapsed();
        let committed = self.commit(manifest)?;
        self.options.reference_dir = Some(dir.to_path_buf());
        let (dir, version) = (dir.to_path_buf(), committed.clone());
        self.move_baseline(&committed, move |replica| replica.adopt(&dir, &version));
        self.report(committed, None, encode, begin.elapsed())
    }

    /// Publishes `snapshot` as the next version and returns once it is committed.
    ///
    /// # Errors
    /// [`Error::LostRace`] if another publisher committed the version; this publisher then refuses to go on.
    /// [`Error::CommitUnknown`] if the store took the manifest but could not confirm it; the next call looks
    /// first. [`Error::DuplicateTensor`] or [`Error::TensorMismatch`] for a snapshot that contradicts itself;
    /// [`Error::ChangedWhileRead`] for one that is being written to; [`Error::TensorMismatch`] also for an
    /// output head that `config.json` ties to the word embeddings, which are others. [`Error::LayoutChanged`] and
    /// [`Error::NotFinite`], unless the options allow it. [`Error::DamagedReplica`] for a baseline that
    /// rotted and cannot be built anew. Whatever the store, the file system or the snapshot reports. After
    /// any error the store shows the old version or, whole, the new one.
    pub fn publish(&mut self, snapshot: &dyn Snapshot, step: Step, mode: Mode) -> Result<Published> {
        self.catch_up(mode)?;
        let begin = Instant::now();
        let version = self.next_version()?;
        let root = self.run.version_root(&self.options.model, version)?;
        let Encoded { kind, full_because, left_out, tables, objects, done } =
            self.on_sound_baseline(&root, |publisher, attempt| {
                publisher.encode(snapshot, mode, &Attempt { version, root: &root, name: attempt })
            })?;
        let encode = begin.elapsed();
        let manifest = self.manifest(kind, snapshot, step, tables, objects)?;
        let committed = self.commit(manifest)?;
        // Also where a full version left out what the store has lost.
        self.standing = Standing::InSync;
        self.follow_commit(&committed);
        self.devices.keep(&Sliced::whole(snapshot)?, &done, committed.identity());
        Ok(Published { left_out, ..self.report(committed, full_because, encode, begin.elapsed())? })
    }

    fn next_version(&self) -> Result<Version> {
        let version = self.version().map_or(Version(0), Version::next);
        if version.0 > VERSION_MAX {
            return Err(Error::Unsupported {
                what: format!("version {version}"),
                hint: format!("versions end at {VERSION_MAX}; begin a new run"),
            });
        }
        Ok(version)
    }

    fn encode(&mut self, snapshot: &dyn Snapshot, mode: Mode, attempt: &Attempt<'_>) -> Result<Encoded> {
        let mut unique = plan::unique_tensors(snapshot)?;
        let representation = self.representation(snapshot);
        let anchor_due = self.anchor_due(attempt.version)?;
        let base = self.baseline.replica()?.manifest();
        let left_out = tied::leave_out(snapshot, &self.devices, base, &mut unique)?;
        let tensors: Vec<_> = unique.iter().map(|&index| &snapshot.tensors()[index]).collect();
        let allowed = self.options.allow_layout_change;
        let (plan, full_because) = plan::plan(base, &tensors, &representation, mode, anchor_due, allowed)?;
        let shard = Sliced::whole(snapshot)?;
        let (coded, files, objects) =
            self.store(&shard, plan, &Selection { slices: &unique, tie: true, with_files: true }, attempt)?;
        let mut tables = Tables { tensors: Vec::with_capacity(coded.len()), files, changed: 0 };
        let mut done = Vec::with_capacity(coded.len());
        for Coded { index, twins, digest, changed, pieces, anchor } in coded {
            let TensorInfo { name, dtype, shape } = snapshot.tensors()[index].clone();
            let aliases = twins.iter().map(|&twin| snapshot.tensors()[twin].name.clone()).collect();
            tables.tensors.push(Tensor { name, dtype, shape, digest, aliases, pieces, anchor });
            tables.changed += changed;
            done.push(Done { index, twins, digest });
        }
        refuse_parted(snapshot.files(), &tables.tensors)?;
        Ok(Encoded { kind: plan.kind, full_because, left_out, tables, objects, done })
    }

    /// What a rank publishes, which does not see what the others have: a delta, unless a full version is asked
    /// for or there is no base.
    fn plan_part(&mut self, mode: Mode, version: Version) -> Result<Encoding> {
        if mode == Mode::Full || self.baseline.replica()?.manifest().is_none() {
            return Ok(Encoding { kind: Kind::Full, anchor: false });
        }
        Ok(Encoding { kind: Kind::Delta, anchor: self.anchor_due(version)? })
    }

    /// Encodes slices and files, and stores them as objects `<root>/<attempt>-<index>`.
    fn store(
        &mut self,
        shard: &dyn Shard,
        plan: Encoding,
        selection: &Selection<'_>,
        attempt: &Attempt<'_>,
    ) -> Result<(Vec<Coded>, Vec<File>, Vec<Object>)> {
        let Self { run, options, baseline, devices, progress, stop, .. } = self;
        let mut used = Used::default();
        let replica = &*baseline.replica()?;
        let base = if plan.kind == Kind::Delta { BaseView::of(replica)? } else { None };
        let object_bytes_max = options.object_bytes_max as usize;
        let bounds = Bounds { threads: options.threads, weight: options.buffer_bytes };
        #[cfg(feature = "cuda")]
        if let Some(base) = base.as_ref().filter(|_| !plan.anchor) {
            used.host_because = devices.complete(shard, selection.slices, base, options.threads, stop)?;
        }
        let (profile, allow_non_finite) = (options.profile, options.allow_non_finite);
        let coder = Coder { plan, profile, object_bytes_max, allow_non_finite };
        let encoder = Encoder { shard, devices, base, coder, bounds, tie: selection.tie, stop };
        let ((coded, files), objects) = upload::with_uploads(
            &**run.store(),
            attempt,
            Uploads { threads: options.uploads, object_bytes_max },
            |packer| {
                let coded = encoder.slices(selection.slices, packer, progress.as_deref_mut(), &mut used)?;
                let files = if selection.with_files { encoder.files(packer)? } else { Vec::new() };
                Ok((coded, files))
            },
        )?;
        devices.used = used;
        Ok((coded, files, objects))
    }

    /// Whether the next version is due to be an anchor.
    fn anchor_due(&mut self, version: Version) -> Result<bool> {
        let anchors = Anchors { every: self.options.anchor_every, share: self.options.anchor_share };
        let (chain, tensors) = match (anchors.share, self.newest) {
            (Some(_), Some(newest)) => {
                (self.chain_bytes(newest.version)?, self.baseline.replica()?.manifest())
            }
            _ => (0, None),
        };
        Ok(anchors.are_due(version, chain, tensors.map_or(u64::MAX, Manifest::tensor_bytes)))
    }

    /// Bytes of the deltas from the newest anchor to `newest`.
    fn chain_bytes(&mut self, newest: Version) -> Result<u64> {
        if let Some(bytes) = self.chain_bytes {
            return Ok(bytes);
        }
        let (mut bytes, mut version) = (0u64, newest);
        loop {
            let manifest = self.run.get(&self.options.model, version)?.manifest;
            match manifest.base {
                Some(base) if !manifest.is_anchor() => {
                    bytes = bytes.saturating_add(manifest.delta_piece_bytes());
                    version = base.version;
                }
                _ => break,
            }
        }
        self.chain_bytes = Some(bytes);
        Ok(bytes)
    }

    fn representation(&self, snapshot: &dyn Snapshot) -> crate::manifest::Representation {
        let all = || plan::representation(&snapshot.tensors().iter().collect::<Vec<_>>());
        self.options.representation.clone().unwrap_or_else(all)
    }

    fn manifest(
        &self,
        kind: Kind,
        snapshot: &dyn Snapshot,
        step: Step,
        tables: Tables,
        objects: Vec<Object>,
    ) -> Result<Manifest> {
        Ok(Manifest {
            format: FORMAT,
            run_id: self.run.id(),
            model: self.options.model.clone(),
            version: self.next_version()?,
            kind,
            representation: self.representation(snapshot),
            base: self.newest,
            trainer_step: step.trainer_step,
            checkpoint: step.checkpoint,
            created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            changed: tables.changed,
            algorithms: Algorithms::default(),
            features: Features::default(),
            objects,
            tensors: tables.tensors,
            files: tables.files,
        })
    }

    fn report(
        &self,
        Committed { manifest, digest }: Committed,
        full_because: Option<FullBecause>,
        encode: Duration,
        total: Duration,
    ) -> Result<Published> {
        let signature = self.options.sign_key.as_ref().map_or(0, |_| signature_bytes());
        Ok(Published {
            version: manifest.version,
            label: manifest.label(),
            manifest_digest: digest,
            kind: manifest.kind,
            full_because,
            left_out: Vec::new(),
            anchor: manifest.is_anchor(),
            publication_bytes: manifest.object_bytes() + manifest.to_bytes()?.len() as u64 + signature,
            full_bytes: manifest.tensor_bytes(),
            changed: manifest.changed,
            elements: manifest.elements(),
            encode,
            upload: total.saturating_sub(encode),
            manifest,
        })
    }
}
