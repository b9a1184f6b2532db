//! Several ranks publish one version: each stores its part, and one of them joins the parts.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use driftless_store::{Key, PutMode, if_found};

use super::encode::Done;
use super::options::{FullBecause, Mode, Published, Rank, Step};
use super::part::{Expected, PartManifest, PartSlice, holds, join};
use super::shard::{Shard, Slice};
use super::{Attempt, Publisher, Selection, Standing, plan};
use crate::error::{Error, Result};
use crate::ids::Version;
use crate::manifest::{Algorithms, FORMAT, Features, Kind, MANIFEST_BYTES_MAX, Tensor};
use crate::run::Committed;
use crate::snapshot::AuxFile;
use crate::tied::refuse_parted;

/// First and longest time between two polls of the store for what another rank does.
const POLL: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(500));

/// A rank's part of a version: stored, and not yet part of anything.
#[derive(Debug, Clone)]
pub struct PublishedPart {
    pub(super) part: PartManifest,
    /// Bytes stored: objects and the part's own document.
    pub publication_bytes: u64,
    /// Elements that differ from the base; all of the rank's in a full publication.
    pub changed: u64,
}

impl PublishedPart {
    /// The version that it is a part of.
    #[must_use]
    pub fn version(&self) -> Version {
        self.part.version
    }
}

impl Publisher {
    /// Publishes this rank's part of the next version. It counts once it is joined: [`Publisher::join`] on
    /// one rank, [`Publisher::await_join`] on the others.
    ///
    /// All ranks have a publisher of their own, with a baseline of its own, at the same version, and give the
    /// same step and mode.
    ///
    /// # Errors
    /// [`Error::BadSetting`] for a rank that cannot be. [`Error::TensorMismatch`] for a slice that leaves its tensor, or a tensor that the baseline has otherwise: publish in full then, on all ranks. What [`Publisher::publish`] refuses of the tensors' elements; whatever the store or the shard reports. What was stored is removed then.
    pub fn publish_part(
        &mut self,
        shard: &dyn Shard,
        step: Step,
        mode: Mode,
        rank: &Rank,
    ) -> Result<PublishedPart> {
        rank.check()?;
        self.catch_up(Mode::Delta)?;
        let version = self.next_version()?;
        let root = self.run.version_root(&self.options.model, version)?;
        self.on_sound_baseline(&root, |publisher, attempt| {
            let attempt = Attempt { version, root: &root, name: attempt };
            publisher.store_part(shard, step.clone(), mode, rank, &attempt)
        })
    }

    fn store_part(
        &mut self,
        shard: &dyn Shard,
        step: Step,
        mode: Mode,
        rank: &Rank,
        attempt: &Attempt<'_>,
    ) -> Result<PublishedPart> {
        let slices = shard.slices();
        check_order(slices)?;
        let plan = self.plan_part(mode, attempt.version)?;
        let chosen: Vec<usize> = (0..slices.len()).collect();
        let selection = Selection { slices: &chosen, tie: false, with_files: rank.rank == 0 };
        let (coded, files, objects) = self.store(shard, plan, &selection, attempt)?;
        let slices: Vec<PartSlice> =
            coded.into_iter().map(|coded| PartSlice::new(&slices[coded.index], coded)).collect();
        let changed = slices.iter().map(|slice| slice.changed).sum();
        let part = PartManifest {
            format: FORMAT,
            run_id: self.run.id(),
            model: self.options.model.clone(),
            version: attempt.version,
            base: self.newest,
            attempt: rank.attempt.clone(),
            rank: rank.rank,
            ranks: rank.ranks,
            kind: plan.kind,
            representation: self.options.representation.clone(),
            trainer_step: step.trainer_step,
            checkpoint: step.checkpoint,
            created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            algorithms: Algorithms::default(),
            features: Features::default(),
            objects,
            slices,
            files,
        };
        let bytes = self.sign("part", part.to_bytes()?, attempt.version)?;
        // Objects first: a reader of the part finds them.
        self.run.store().put(
            &part_key(attempt.root, &rank.attempt, rank.rank)?,
            &bytes,
            PutMode::Overwrite,
        )?;
        let stored: u64 = part.objects.iter().map(|object| object.size).sum();
        Ok(PublishedPart { part, publication_bytes: stored + bytes.len() as u64, changed })
    }

    /// Publishes this rank's part of the next version, and returns once the version is committed. Rank 0
    /// joins the parts, and gets the version's numbers.
    ///
    /// # Errors
    /// Those of [`Publisher::publish_part`], and of [`Publisher::join`] on rank 0 or
    /// [`Publisher::await_join`] on the others; on rank 0 also [`Error::TensorMismatch`] for an output head that
    /// is not the word embeddings, though its `config.json` ties them.
    pub fn publish_with_ranks(
        &mut self,
        shard: &dyn Shard,
        step: Step,
        mode: Mode,
        rank: &Rank,
        deadline: Duration,
    ) -> Result<(PublishedPart, Option<Published>)> {
        let part = self.publish_part(shard, step, mode, rank)?;
        let published = match rank.rank {
            0 => Some(self.join_with(rank, deadline, shard.files())?),
            _ => self.await_join(&part, deadline).map(|_| None)?,
        };
        let slices = part.part.slices.iter().enumerate();
        let done: Vec<_> =
            slices.map(|(index, slice)| Done { index, twins: Vec::new(), digest: slice.digest }).collect();
        if let Some(newest) = self.newest {
            self.devices.keep(shard, &done, newest);
        }
        Ok((part, published))
    }

    /// Waits for the parts of all ranks and commits the version that they make. Any rank may do this, also
    /// one that published no part, and also several: they commit the same.
    ///
    /// # Errors
    /// [`Error::PartsMissing`] names the ranks whose parts were not there within `deadline`;
    /// [`Error::PartConflict`], a rank that published against another base, at another step, or as one of
    /// another number of ranks; [`Error::Pieces`], elements that come from no rank or from two;
    /// [`Error::TensorMismatch`] if the tensors of a delta are not its base's, [`Error::LayoutChanged`] if
    /// those of a full version are not and that is not allowed; [`Error::Cancelled`] as
    /// [`Publisher::stop_on`] says; otherwise as [`Publisher::publish`]. Nothing is committed then, and the
    /// ranks may publish their parts again, as another attempt.
    ///
    /// Whether an output head parted from the embeddings that `config.json` ties it to is not looked at here: only
    /// [`Publisher::publish_with_ranks`] has the config at hand.
    pub fn join(&mut self, rank: &Rank, deadline: Duration) -> Result<Published> {
        self.join_with(rank, deadline, &[])
    }

    fn join_with(&mut self, rank: &Rank, deadline: Duration, files: &[AuxFile]) -> Result<Published> {
        rank.check()?;
        self.catch_up(Mode::Delta)?;
        let begin = Instant::now();
        let version = self.next_version()?;
        let root = self.run.version_root(&self.options.model, version)?;
        let parts = self.wait_for_parts(&root, version, rank, deadline)?;
        let encode = begin.elapsed();
        let replica = self.baseline.replica()?;
        let expected = Expected {
            run_id: self.run.id(),
            model: &self.options.model,
            version,
            base: self.newest,
            rank,
            representation: replica.manifest().map(|manifest| &manifest.representation),
        };
        let manifest = join(parts, &expected)?;
        refuse_parted(files, &manifest.tensors)?;
        let full_because = match (manifest.kind, replica.manifest()) {
            (Kind::Delta, Some(base)) => {
                crate::replica::check_same_form(base, &manifest)?;
                None
            }
            (_, Some(base)) => {
                let infos: Vec<_> = manifest.tensors.iter().map(Tensor::info).collect();
                let tensors: Vec<_> = infos.iter().collect();
                let allowed = self.options.allow_layout_change;
                plan::check_layout(base, &tensors, &manifest.representation, allowed)?;
                Some(FullBecause::Asked)
            }
            (_, None) => Some(FullBecause::FirstVersion),
        };
        let committed = self.commit(manifest)?;
        for number in 0..rank.ranks {
            // Best effort: a part beside a committed version is garbage.
            self.discard(&part_key(&root, &rank.attempt, number)?);
        }
        self.follow_commit(&committed);
        self.report(committed, full_because, encode, begin.elapsed())
    }

    /// Waits until the version that `part` belongs to is committed.
    ///
    /// # Errors
    /// [`Error::NotJoined`] if it was not within `deadline`; [`Error::LostRace`] if something else was
    /// committed under its number; whatever the store reports.
    pub fn await_join(&mut self, part: &PublishedPart, deadline: Duration) -> Result<Version> {
        let (begin, version) = (Instant::now(), part.version());
        let mut pause = POLL.0;
        loop {
            match self.run.get(&self.options.model, version) {
                Ok(committed) if holds(&committed.manifest, &part.part) => {
                    if self.newest.is_none_or(|newest| newest.version < version) {
                        self.note_committed(&committed);
                        self.follow_commit(&committed);
                    }
                    return Ok(version);
                }
                Ok(other) => {
                    self.standing = Standing::Fenced(other.identity());
                    return Err(self.lost(other.identity()));
                }
                Err(Error::NoSuchVersion { .. }) if begin.elapsed() < deadline => {}
                Err(Error::NoSuchVersion { .. }) => {
                    return Err(Error::NotJoined { version, waited: begin.elapsed() });
                }
                Err(error) => return Err(error),
            }
            self.pause(pause.min(deadline.saturating_sub(begin.elapsed())), "the wait for rank 0")?;
            pause = (pause * 2).min(POLL.1);
        }
    }

    /// Sleeps, unless the work is given up.
    fn pause(&self, time: Duration, what: &'static str) -> Result<()> {
        if self.stop.wait(time) { Err(Error::Cancelled { what }) } else { Ok(()) }
    }

    fn wait_for_parts(
        &self,
        root: &Key,
        version: Version,
        rank: &Rank,
        deadline: Duration,
    ) -> Result<Vec<PartManifest>> {
        let begin = Instant::now();
        let mut parts: Vec<Option<PartManifest>> = vec![None; rank.ranks as usize];
        let mut pause = POLL.0;
        loop {
            for (number, slot) in (0..).zip(&mut parts).filter(|(_, slot)| slot.is_none()) {
                let key = part_key(root, &rank.attempt, number)?;
                let found = if_found(self.run.store().get(&key, Some(0..MANIFEST_BYTES_MAX + 1)))?;
                *slot = found.map(|bytes| self.read_part(&bytes, version, &key)).transpose()?;
            }
            let missing: Vec<u32> =
                (0..).zip(&parts).filter(|(_, part)| part.is_none()).map(|(number, _)| number).collect();
            if missing.is_empty() {
                return Ok(parts.into_iter().flatten().collect());
            }
            if begin.elapsed() >= deadline {
                return Err(Error::PartsMissing { version, ranks: missing, waited: begin.elapsed() });
            }
            self.pause(pause.min(deadline.saturating_sub(begin.elapsed())), "the wait for the other ranks")?;
            pause = (pause * 2).min(POLL.1);
        }
    }

    fn read_part(&self, bytes: &[u8], version: Version, key: &Key) -> Result<PartManifest> {
        // The rank that joins the parts signs what is in them.
        match self.run.signed("part", bytes, &self.options.model, version, key.as_str())? {
            Some(signed) => PartManifest::parse(&signed, key.as_str()),
            None => PartManifest::parse(bytes, key.as_str()),
        }
    }

    /// Begins to move the baseline to a version just committed.
    pub(super) fn follow_commit(&mut self, committed: &Committed) {
        let (run, version) = (self.run.clone(), committed.clone());
        self.move_baseline(committed, move |replica| {
            replica.advance_with(&version, &|object| run.object(object)).map(drop)
        });
    }
}

/// Refuses slices that are not sorted by tensor and first element.
fn check_order(slices: &[Slice]) -> Result<()> {
    fn place(slice: &Slice) -> (&str, u64) {
        (&slice.tensor.name, slice.start)
    }
    let Some(pair) = slices.windows(2).find(|pair| place(&pair[0]) > place(&pair[1])) else { return Ok(()) };
    Err(Error::TensorMismatch {
        tensor: pair[1].tensor.name.clone(),
        what: "place among the slices",
        expected: "sorted by name and first element".to_owned(),
        found: format!("behind `{}`", pair[0].tensor.name),
    })
}

/// The key of a rank's part.
fn part_key(root: &Key, attempt: &str, rank: u32) -> Result<Key> {
    Ok(root.join(&format!("part-{attempt}-{rank:05}"))?)
}
