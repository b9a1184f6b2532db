//! Weight updates: publish the policy, wait until every engine serves it, and look at what became of it.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use driftless_bridge::engine::{Attached, LiveWeights};
use driftless_bridge::fleet::Newest;
use driftless_bridge::{Fleet, Label};
use driftless_store::{ContentDigest, Entry};
use driftless_transport::activate::Compared;
use driftless_transport::gc::{Ack, Phases};
use driftless_transport::manifest::Manifest;
#[cfg(feature = "cuda")]
use driftless_transport::publish::BaseMemory;
use driftless_transport::publish::{Mode, Published, Step};
use driftless_transport::snapshot::TensorInfo;
use driftless_transport::{Checkpoint, Publisher, Run, Snapshot, Version};

use super::converge::serves;
use super::versions::Versions;
use super::weights::weights_digest;
use crate::error::{Error, Result};
use crate::learner::MODEL;
use crate::metrics::{PublicationMetrics, unix_us};
use crate::rollout::EVAL_FOLLOWER;

/// Time between two looks at acknowledgements that are still to be written.
const ACK_AGAIN: Duration = Duration::from_millis(20);

/// The versions of the run: those that the loop publishes, or watches a learner publish.
pub(super) struct Updates {
    pub(super) run: Run,
    /// Absent where a learner publishes, once it can.
    publisher: Option<Publisher>,
    /// The newest version that is known here.
    newest: Option<Version>,
    /// Optimiser step of each version that has been asked for.
    steps: BTreeMap<u64, u64>,
    /// The same in the run's directory, for versions that the store has collected.
    versions: Versions,
    /// The newest version when this process began, of whose way hosts told the one before.
    newest_at_start: Option<Version>,
    /// The last version of whose way each host has told.
    heard: BTreeMap<String, Version>,
}

impl Updates {
    pub(super) fn new(publisher: Publisher, versions: Versions) -> Self {
        let (run, newest) = (publisher.run().clone(), publisher.version());
        Self::of(run, Some(publisher), newest, versions)
    }

    fn of(run: Run, publisher: Option<Publisher>, newest: Option<Version>, versions: Versions) -> Self {
        let (steps, heard) = (BTreeMap::new(), BTreeMap::new());
        Updates { run, publisher, newest, steps, versions, newest_at_start: newest, heard }
    }

    /// The versions of a run that a learner publishes.
    pub(super) fn watch(run: Run, versions: Versions) -> Result<Self> {
        let newest = run.newest_version(MODEL)?;
        Ok(Self::of(run, None, newest, versions))
    }

    /// The newest version with the optimiser step it was made at.
    pub(super) fn newest(&mut self) -> Result<Option<(Version, u64)>> {
        let Some(version) = self.newest else { return Ok(None) };
        Ok(Some((version, self.step_of(version.0)?)))
    }

    /// Looks for versions of a learner that ended before it could tell of them.
    pub(super) fn look(&mut self) -> Result<()> {
        if self.publisher.is_none() {
            self.newest = self.run.newest_version(MODEL)?;
        }
        Ok(())
    }

    /// The label engines carry for the newest version.
    pub(super) fn label(&self) -> Result<Option<Label>> {
        let run_id = self.run.id().to_string();
        Ok(self.newest.map(|version| Label::new(&run_id, version.0)).transpose()?)
    }

    /// The optimiser step that `version` was made at, from its manifest; from the run's directory, where the store
    /// no longer has that.
    pub(super) fn step_of(&mut self, version: u64) -> Result<u64> {
        if let Some(step) = self.steps.get(&version) {
            return Ok(*step);
        }
        let step = match self.run.get(MODEL, Version(version)) {
            Ok(committed) => committed.manifest.trainer_step,
            Err(error) => self.versions.step_of(version).ok_or(error)?,
        };
        self.note(version, step)?;
        Ok(step)
    }

    fn note(&mut self, version: u64, step: u64) -> Result<()> {
        self.steps.insert(version, step);
        self.versions.note(version, step)
    }

    /// Digest of the weights of version 0, if the store still tells it.
    pub(super) fn start(&self) -> Option<ContentDigest> {
        let committed = self.run.get(MODEL, Version(0)).ok()?;
        Some(weights_digest(&committed.manifest.tensors))
    }

    /// As [`publish_reference`].
    pub(super) fn publish_reference(&mut self, dir: &Path) -> Result<Published> {
        let published = publish_reference(self.publisher()?, dir)?;
        self.newest = Some(published.version);
        self.note(published.version.0, 0)?;
        Ok(published)
    }

    /// Has tensors that lie on the codec's device encoded there from now on.
    #[cfg(feature = "cuda")]
    pub(super) fn encode_on(&mut self, codec: driftless_delta::cuda::Codec) {
        let Some(publisher) = &mut self.publisher else { return };
        if let Err(error) = publisher.encode_on(codec, BaseMemory::Device) {
            tracing::warn!(%error, "weights are encoded on the host");
        }
    }

    pub(super) fn publish(
        &mut self,
        snapshot: &dyn Snapshot,
        step: Step,
        mode: Mode,
    ) -> Result<PublicationMetrics> {
        let trainer_step = step.trainer_step;
        let publisher = self.publisher()?;
        let published = publisher.publish(snapshot, step, mode)?;
        let device_bytes = encoded_on_device(publisher);
        self.newest = Some(published.version);
        self.note(published.version.0, trainer_step)?;
        Ok(PublicationMetrics { device_bytes, ..measured(&published) })
    }

    /// The newest version as the publisher's baseline holds it in `dir`, until the next publication.
    pub(super) fn at_rest(&mut self, dir: &Path) -> Result<(Checkpoint, Manifest)> {
        let publisher = self.publisher()?;
        publisher.wait()?;
        let version = publisher.version().ok_or(Error::Bug { what: "no version is published" })?;
        Ok((Checkpoint::open(dir)?, self.run.get(MODEL, version)?.manifest))
    }

    /// Whether versions are published here, and not by the learner.
    pub(super) fn publishes(&self) -> bool {
        self.publisher.is_some()
    }

    /// Whether the newest version, whose baseline is in `dir`, has these tensors.
    pub(super) fn holds(&mut self, own: &dyn Snapshot, dir: &Path) -> Result<bool> {
        let (newest, _) = self.at_rest(dir)?;
        Ok(difference(own, &newest)?.is_none())
    }

    /// Takes note of the version that a learner says it published after `step`; it has to be in the store.
    pub(super) fn published(&mut self, learner: &str, version: u64, step: u64) -> Result<()> {
        let wrong = |found: String| Error::LearnerReply {
            learner: learner.to_owned(),
            call: "publish",
            expected: "the newest version of the store, made at the step that was asked for",
            found: format!("version {version}, while {found}"),
        };
        let newest = self.run.newest_version(MODEL)?;
        if newest != Some(Version(version)) {
            let newest = newest.map_or("none".to_owned(), |newest| newest.to_string());
            return Err(wrong(format!("the newest of {} is {newest}", self.run)));
        }
        self.newest = newest;
        match self.step_of(version)? {
            made if made == step => Ok(()),
            made => Err(wrong(format!("it was made at step {made}, and step {step} was asked for"))),
        }
    }

    fn publisher(&mut self) -> Result<&mut Publisher> {
        self.publisher.as_mut().ok_or(Error::Bug { what: "a loop publishes whose learner does" })
    }

    /// What the store still tells of the newest version: its sizes, not the times it took.
    pub(super) fn recorded(&self, version: Version) -> Result<PublicationMetrics> {
        let manifest = self.run.get(MODEL, version)?.manifest;
        Ok(PublicationMetrics {
            version: version.0,
            weights_digest: Some(weights_digest(&manifest.tensors)),
            publication_bytes: manifest.object_bytes() + manifest.to_bytes()?.len() as u64,
            full_bytes: manifest.tensor_bytes(),
            density: manifest.changed as f64 / manifest.elements().max(1) as f64,
            ..PublicationMetrics::default()
        })
    }

    /// What the followers wrote about `version`. Those that have it are waited for, up to `deadline`, until they have
    /// written what became of their engines.
    pub(super) fn acknowledged(&mut self, version: Version, deadline: Duration) -> Result<Told> {
        let end = Instant::now() + deadline;
        loop {
            let told = self.told(version)?;
            if !told.unfinished || Instant::now() + ACK_AGAIN >= end {
                for (host, phases) in &told.hosts {
                    let newest = phases.iter().map(|phases| phases.version).max();
                    self.heard.extend(newest.map(|newest| (host.clone(), newest)));
                }
                return Ok(told);
            }
            std::thread::sleep(ACK_AGAIN);
        }
    }

    fn told(&self, version: Version) -> Result<Told> {
        let mut told = Told::default();
        // An evaluation brings old versions to engines of its own.
        let of_hosts = |entry: &Entry| !entry.key.name().starts_with(EVAL_FOLLOWER);
        for entry in self.run.followers()?.into_iter().filter(of_hosts) {
            let bytes = self.run.store().get(&entry.key, None).map_err(driftless_transport::Error::from)?;
            // A follower that is at another version, or of a newer program, tells nothing about this one.
            let Ok(ack) = serde_json::from_slice::<Ack>(&bytes) else { continue };
            let host = entry.key.name();
            told.add_phases(host, &ack, self.heard.get(host).copied().or(self.newest_at_start));
            if ack.version == version {
                told.add(&ack);
            }
        }
        Ok(told)
    }
}

/// Reads the newest label in the store, whoever published it and without waiting for this loop to hear of it.
pub(super) fn newest_in_store(run: Run) -> Newest {
    Newest::new(move || match run.newest_version(MODEL) {
        Ok(version) => Label::new(&run.id().to_string(), version?.0).ok(),
        Err(error) => {
            tracing::warn!(%error, "the store does not tell its newest version");
            None
        }
    })
}

/// What followers wrote about a version.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Told {
    /// The slowest prepare, in milliseconds.
    pub(super) prepare_ms: Option<f64>,
    /// The longest pause of an engine that serves the version, in milliseconds.
    pub(super) pause_ms: Option<f64>,
    /// The first engine that serves it and of whose weights nothing was compared, and why.
    pub(super) not_compared: Option<String>,
    /// What was not heard before of each host's versions.
    pub(super) hosts: BTreeMap<String, Vec<Phases>>,
    /// Whether an engine beside one of them is not there yet, and nothing keeps it from coming.
    unfinished: bool,
}

impl Told {
    /// Takes the phases of versions behind `heard`. Those of the last are complete once its engines serve it.
    fn add_phases(&mut self, host: &str, ack: &Ack, heard: Option<Version>) {
        let is_served = ack.engines.iter().all(|engine| engine.label.as_ref() == Some(&ack.label));
        let is_new = |phases: &&Phases| {
            heard.is_none_or(|heard| phases.version > heard) && (is_served || phases.version < ack.version)
        };
        let new: Vec<_> = ack.phases.iter().filter(is_new).cloned().collect();
        if !new.is_empty() {
            self.hosts.insert(host.to_owned(), new);
        }
    }

    fn add(&mut self, ack: &Ack) {
        self.prepare_ms = longer(self.prepare_ms, Some(ack.prepare_ms));
        for engine in &ack.engines {
            // The pause of an engine with another label is that of an earlier version.
            if engine.label.as_ref() == Some(&ack.label) {
                self.pause_ms = longer(self.pause_ms, engine.pause_ms);
                if let (None, Some(Compared::Not { why })) = (&self.not_compared, &engine.compared) {
                    self.not_compared = Some(format!("{}: {why}", engine.url));
                }
            } else {
                self.unfinished |= engine.error.is_none();
            }
        }
    }
}

/// The longer of two times, of those that are known.
pub(super) fn longer(one: Option<f64>, other: Option<f64>) -> Option<f64> {
    one.into_iter().chain(other).reduce(f64::max)
}

/// Refuses a checkpoint that engines start from and that differs from what the learner has at step 0.
pub(super) fn check_start(own: &dyn Snapshot, dir: &Path) -> Result<()> {
    let start = Checkpoint::open(dir)?;
    let difference = difference(own, &start)?.or_else(|| {
        let file = own.files().iter().find(|file| !start.files().contains(file))?;
        Some((file.name().to_owned(), "the learner's".to_owned(), "another, or none".to_owned()))
    });
    match difference {
        Some((what, expected, found)) => {
            Err(Error::OtherStart { path: dir.to_owned(), what, expected, found })
        }
        None => Ok(()),
    }
}

/// The first difference between the learner's tensors and a checkpoint's: its name, the learner's value, and the
/// checkpoint's.
fn difference(own: &dyn Snapshot, other: &Checkpoint) -> Result<Option<(String, String, String)>> {
    for (index, info) in own.tensors().iter().enumerate() {
        let differs = |expected: String, found: String| Ok(Some((info.name.clone(), expected, found)));
        let Some(at) = other.position(&info.name) else {
            return differs(shown(info), "none".to_owned());
        };
        let found = &other.tensors()[at];
        if found != info {
            return differs(shown(info), shown(found));
        }
        if other.bytes(at)? != own.bytes(index)? {
            return differs("the learner's values".to_owned(), "others".to_owned());
        }
    }
    let [wanted, found] = [own.tensors(), other.tensors()].map(<[_]>::len);
    Ok((wanted != found).then(|| ("tensors".to_owned(), wanted.to_string(), found.to_string())))
}

fn shown(info: &TensorInfo) -> String {
    format!("{} {:?}", info.dtype, info.shape)
}

/// Publishes version 0 by reference to the checkpoint that the engines start from.
pub(super) fn publish_reference(publisher: &mut Publisher, dir: &Path) -> Result<Published> {
    let step = Step { trainer_step: 0, checkpoint: Some(dir.display().to_string()) };
    Ok(publisher.publish_reference(dir, step)?)
}

/// Bytes of the tensors that the last publication encoded on their device. Says in the log why it did not encode
/// others there that it might have.
#[cfg(feature = "cuda")]
fn encoded_on_device(publisher: &Publisher) -> u64 {
    let used = publisher.device_use();
    if let Some(because) = &used.host_because {
        tracing::warn!(bytes = used.host_bytes, because, "tensors on the device were encoded on the host");
    }
    used.device_bytes
}

#[cfg(not(feature = "cuda"))]
fn encoded_on_device(_: &Publisher) -> u64 {
    0
}

/// A publication as it is measured, before it is anywhere.
pub(super) fn measured(published: &Published) -> PublicationMetrics {
    PublicationMetrics {
        version: published.version.0,
        weights_digest: Some(weights_digest(&published.manifest.tensors)),
        publication_bytes: published.publication_bytes,
        full_bytes: published.full_bytes,
        density: published.density(),
        encode_publish_ms: milliseconds(published.encode + published.upload),
        encode_ms: milliseconds(published.encode),
        put_ms: milliseconds(published.upload),
        committed_at_ms: unix_us(SystemTime::now()) / 1000,
        ..PublicationMetrics::default()
    }
}

/// Compares what the engines that serve `label` hold with `snapshot`, and returns how many could be compared.
pub(super) async fn check_equal(
    fleet: &Arc<Fleet>,
    label: &Label,
    snapshot: &dyn Snapshot,
    place: &Path,
) -> Result<u64> {
    let mut checked = 0;
    let mut there = fleet.status();
    there.retain(|engine| engine.up && serves(engine, label));
    let is_there = |engine: &Attached| there.iter().any(|there| there.url == engine.engine().url());
    for engine in fleet.engines().into_iter().filter(is_there) {
        match engine.check_live(&engine.sums(snapshot, place)?).await? {
            LiveWeights::Equal => checked += 1,
            LiveWeights::Unchecked { reason } => {
                return Err(Error::NotComparable { engine: engine.engine().url().to_owned(), reason });
            }
        }
    }
    Ok(checked)
}

pub(super) fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ack(label: &str, pause_ms: f64) -> Ack {
        let engine = serde_json::json!({"url": "e", "label": label, "pause_ms": pause_ms});
        let digest = "00".repeat(32);
        let ack = serde_json::json!({"version": 7, "label": "r:7", "manifest_digest": digest, "prepare_ms": 3.0,
            "bytes": 1, "engines": [engine]});
        serde_json::from_value(ack).unwrap()
    }

    #[test]
    fn pause_of_another_version_is_not_this_ones() {
        let mut told = Told::default();
        told.add(&ack("r:6", 74.5));
        assert_eq!(told, Told { prepare_ms: Some(3.0), unfinished: true, ..Told::default() });
        let mut told = Told::default();
        told.add(&ack("r:7", 19.0));
        told.add(&ack("r:7", 12.9));
        assert_eq!(told, Told { prepare_ms: Some(3.0), pause_ms: Some(19.0), ..Told::default() });
    }

    #[test]
    fn phases_are_heard_once_and_of_the_last_version_when_served() {
        let phases = |version| Phases { version: Version(version), ..Phases::default() };
        let versions = |label: &str, heard: Option<u64>| {
            let mut ack = ack(label, 1.0);
            ack.phases = vec![phases(5), phases(6), phases(7)];
            let mut told = Told::default();
            told.add_phases("host", &ack, heard.map(Version));
            told.hosts
                .get("host")
                .map(|phases| phases.iter().map(|phases| phases.version.0).collect::<Vec<_>>())
        };
        assert_eq!(versions("r:7", None), Some(vec![5, 6, 7]));
        assert_eq!(versions("r:7", Some(5)), Some(vec![6, 7]));
        assert_eq!(versions("r:6", Some(5)), Some(vec![6]), "its engine does not serve the last yet");
        assert_eq!(versions("r:7", Some(7)), None);
    }

    #[test]
    fn engine_that_was_not_compared_is_named() {
        let mut told = Told::default();
        let mut ack = ack("r:7", 19.0);
        told.add(&ack);
        assert_eq!(told.not_compared, None, "a follower of an older release does not tell");
        ack.engines[0].compared = Some(Compared::Not { why: "no plugin".into() });
        told.add(&ack);
        assert_eq!(told.not_compared.as_deref(), Some("e: no plugin"));
    }
}
