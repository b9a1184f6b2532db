//! Weight updates: publish the policy, wait until every engine serves it, and look at what became of it.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use driftless_bridge::{Fleet, Label, LiveWeights, checksums};
use driftless_transport::{Ack, Mode, Published, Publisher, Run, Snapshot, Step, Version};

use crate::error::{Error, Result};
use driftless_trainer::metrics::PublicationMetrics;

/// The publishing side of the loop.
pub(super) struct Updates {
    publisher: Publisher,
    /// Optimiser step of each version that has been asked for.
    steps: BTreeMap<u64, u64>,
}

impl Updates {
    pub(super) fn new(publisher: Publisher) -> Self {
        Updates { publisher, steps: BTreeMap::new() }
    }

    pub(super) fn run(&self) -> &Run {
        self.publisher.run()
    }

    /// The newest version with the optimiser step it was made at.
    pub(super) fn newest(&mut self) -> Result<Option<(Version, u64)>> {
        let Some(version) = self.publisher.version() else {
            return Ok(None);
        };
        Ok(Some((version, self.step_of(version.0)?)))
    }

    /// The label engines carry for the newest version.
    pub(super) fn label(&self) -> Result<Option<Label>> {
        let run_id = self.run().id().to_string();
        Ok(self.publisher.version().map(|version| Label::new(&run_id, version.0)).transpose()?)
    }

    /// The optimiser step that `version` was made at, from its manifest.
    pub(super) fn step_of(&mut self, version: u64) -> Result<u64> {
        if let Some(step) = self.steps.get(&version) {
            return Ok(*step);
        }
        let step = self.publisher.run().get(super::MODEL, Version(version))?.manifest.trainer_step;
        self.steps.insert(version, step);
        Ok(step)
    }

    /// Publishes version 0 by reference to the checkpoint that the run starts from.
    pub(super) fn publish_reference(&mut self, dir: &Path) -> Result<Published> {
        let step = Step { trainer_step: 0, checkpoint: Some(dir.display().to_string()) };
        Ok(self.publisher.publish_reference(dir, step)?)
    }

    pub(super) fn publish(&mut self, snapshot: &dyn Snapshot, step: Step, mode: Mode) -> Result<Published> {
        Ok(self.publisher.publish(snapshot, step, mode)?)
    }

    /// What the store still tells of the newest version: its sizes, not the times it took.
    pub(super) fn recorded(&self, version: Version) -> Result<PublicationMetrics> {
        let manifest = self.run().get(super::MODEL, version)?.manifest;
        Ok(PublicationMetrics {
            version: version.0,
            publication_bytes: manifest.object_bytes() + manifest.to_bytes()?.len() as u64,
            full_bytes: manifest.tensor_bytes(),
            density: manifest.changed as f64 / manifest.elements().max(1) as f64,
            ..PublicationMetrics::default()
        })
    }

    /// What the followers wrote about `version`: the slowest prepare and the longest pause, in milliseconds.
    pub(super) fn acknowledged(&self, version: Version) -> Result<(f64, f64)> {
        let (mut prepare, mut pause) = (0.0_f64, 0.0_f64);
        for entry in self.run().followers()? {
            let bytes = self.run().store().get(&entry.key, None).map_err(driftless_transport::Error::from)?;
            // A follower that went on to a newer version, or of a newer program, tells nothing about this one.
            let Ok(ack) = serde_json::from_slice::<Ack>(&bytes) else { continue };
            if ack.version == version {
                prepare = prepare.max(ack.prepare_ms);
                pause = ack.engines.iter().filter_map(|engine| engine.pause_ms).fold(pause, f64::max);
            }
        }
        Ok((prepare, pause))
    }
}

/// Waits until every engine serves `label`, and describes the publication.
pub(super) async fn converge(
    fleet: &Fleet,
    label: &Label,
    published: &Published,
    deadline: Duration,
) -> Result<PublicationMetrics> {
    let begin = Instant::now();
    fleet.wait_for_label(label, deadline).await?;
    Ok(PublicationMetrics {
        version: published.version.0,
        publication_bytes: published.publication_bytes,
        full_bytes: published.full_bytes,
        density: published.density(),
        encode_publish_ms: milliseconds(published.encode + published.upload),
        convergence_ms: milliseconds(begin.elapsed()),
        ..PublicationMetrics::default()
    })
}

/// Compares what every engine holds with `snapshot`, and returns how many could be compared.
pub(super) async fn check_equal(fleet: &Arc<Fleet>, snapshot: &dyn Snapshot, place: &Path) -> Result<u64> {
    let expected = checksums(snapshot, place)?;
    let mut checked = 0;
    for engine in fleet.engines() {
        match engine.check_live(&expected).await? {
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
