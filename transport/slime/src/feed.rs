//! Follows a trainer's directory with a replica.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use driftless_store::os::crash_point;
use driftless_store::{ContentDigest, Entry, Error as StoreError, Store, if_found};
use driftless_transport::foreign::Foreign;
use driftless_transport::manifest::Manifest;
use driftless_transport::replica::{Advanced, Applied};
use driftless_transport::run::Committed;
use driftless_transport::{Checkpoint, Error, Replica, Result, Version};

use crate::release::Release;
use crate::{frame, identity, index_key};

/// Versions of a directory that a trainer writes, for a replica that follows them.
///
/// The layout has no run identity. What there is gets pinned: the weights of version 0, and the content of
/// version 1 and of the applied version. A directory that was begun anew or rewritten is refused before
/// anything of it is applied.
pub(crate) struct Feed {
    store: Arc<dyn Store>,
    model: String,
    /// The checkpoint that is version 0.
    reference: Option<PathBuf>,
    /// The applied version and the indexes, as they were when they were last found to belong together.
    pinned: Option<Pinned>,
}

struct Pinned {
    digest: ContentDigest,
    indexes: Indexes,
}

/// Those of version 1 and of the applied version.
type Indexes = [Option<Entry>; 2];

impl Feed {
    pub(crate) fn new(store: Arc<dyn Store>, model: impl Into<String>, reference: Option<PathBuf>) -> Self {
        Self { store, model: model.into(), reference, pinned: None }
    }

    /// Sees to it that the replica holds a version and that the directory still is the one it came from.
    /// Returns the newest version.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if version 0 is needed and not at hand; [`Error::ForeignRun`] if the directory
    /// holds another run; [`Error::Corrupt`] if the applied version is gone from it,
    /// [`DigestMismatch`](driftless_store::Error::DigestMismatch) if it became another one.
    pub(crate) fn survey(&mut self, replica: &mut Replica) -> Result<Version> {
        if replica.applied().is_none() {
            self.adopt(replica)?;
        }
        let applied = replica.held()?.0.clone();
        if let Some(manifest) = replica.manifest() {
            self.check_pins(replica.dir(), manifest, &applied)?;
        }
        self.newest(applied.version)
    }

    /// The newest of the versions that follow `version` without a gap.
    pub(crate) fn newest(&self, version: Version) -> Result<Version> {
        let mut newest = version;
        while self.look(newest.next())?.is_some() {
            newest = newest.next();
        }
        Ok(newest)
    }

    /// Where the versions lie.
    pub(crate) fn store(&self) -> &dyn Store {
        &*self.store
    }

    /// Moves the replica to version `to`, one version after the other.
    ///
    /// # Errors
    /// [`Error::Rewind`] for an older version, [`Error::NoSuchVersion`] for one that is not there; those of
    /// [`Feed::survey`]; [`Error::Corrupt`] and others for a version that cannot be trusted. Versions applied
    /// before the error stay applied.
    pub(crate) fn advance(&mut self, replica: &mut Replica, to: Version) -> Result<Advanced> {
        let mut total = Advanced::default();
        loop {
            let applied = replica.held()?.0.clone();
            if applied.version == to {
                return Ok(total);
            }
            check_forward(replica.dir(), &applied, to)?;
            total.add(self.step(replica, &applied)?);
        }
    }

    fn adopt(&self, replica: &mut Replica) -> Result<()> {
        let (checkpoint, link) = self.version_0()?;
        replica.adopt(checkpoint.dir(), &link)
    }

    /// Version 0: the checkpoint that the trainer and every host start from.
    pub(crate) fn version_0(&self) -> Result<(Checkpoint, Committed)> {
        let Some(reference) = &self.reference else {
            return Err(Error::Unsupported {
                what: format!("beginning without version 0 of {}", self.store),
                hint: "it is not published in this layout; give the checkpoint that the trainer starts from"
                    .to_owned(),
            });
        };
        let checkpoint = Checkpoint::open(reference)?;
        let link = identity::base_link(&checkpoint, &self.model)?;
        Ok((checkpoint, link))
    }

    /// The index of a version, or `None` if it has none.
    fn look(&self, version: Version) -> Result<Option<Entry>> {
        Ok(if_found(self.store.head(&index_key(version)?))?)
    }

    fn indexes(&self, applied: Version) -> Result<Indexes> {
        Ok([self.look(Version(1))?, self.look(applied)?])
    }

    fn elsewhere(&self, dir: &Path, applied: &Applied) -> Error {
        Error::Unsupported {
            what: format!("following {} with the replica `{}`", self.store, dir.display()),
            hint: format!("it holds {} of another store; choose another directory", applied.label()),
        }
    }

    /// The directory must hold the run and the version that the replica in `dir` has.
    pub(crate) fn check_pins(&mut self, dir: &Path, manifest: &Manifest, applied: &Applied) -> Result<()> {
        let Some(base) = manifest.base else {
            // Version 0 belongs to every run that starts from it; but it must be one of this layout.
            let ours = identity::is_base(manifest, applied.manifest_digest);
            return if ours { Ok(()) } else { Err(self.elsewhere(dir, applied)) };
        };
        let now = self.indexes(applied.version)?;
        let known = |pinned: &Pinned| pinned.digest == applied.manifest_digest && pinned.indexes == now;
        if self.pinned.as_ref().is_some_and(known) {
            return Ok(());
        }
        // Gone if the trainer made room; then the applied version alone has to do.
        if now[0].is_some() {
            let found = identity::run_id(identity::content(&Release::read(&*self.store, Version(1))?));
            if found != applied.run_id {
                let (subject, expected) = (self.store.to_string(), applied.run_id);
                return Err(Error::ForeignRun { subject, expected, found });
            }
        }
        let subject = format!("version {} in {}", applied.version, self.store);
        if now[1].is_none() {
            let what = "the applied version is gone: another run begins there, or it was removed too early";
            return Err(Error::corrupt(subject, what, index_key(applied.version)?, "nothing"));
        }
        let content = identity::content(&Release::read(&*self.store, applied.version)?);
        let found = identity::link(base.manifest_digest, content);
        if found != applied.manifest_digest {
            return Err(Error::Store(StoreError::DigestMismatch {
                subject,
                expected: applied.manifest_digest,
                found,
            }));
        }
        self.pinned = Some(Pinned { digest: applied.manifest_digest, indexes: now });
        Ok(())
    }

    /// Applies the version behind the applied one.
    fn step(&mut self, replica: &mut Replica, applied: &Applied) -> Result<Advanced> {
        let version = applied.version.next();
        let absent =
            || Error::NoSuchVersion { run_id: applied.run_id, model: applied.model.clone(), version };
        let index = self.look(version)?.ok_or_else(absent)?;
        let release = Release::read(&*self.store, version)?;
        let content = identity::content(&release);
        // Version 0 belongs to every run; this one begins with version 1.
        let run_id = if version == Version(1) { identity::run_id(content) } else { applied.run_id };
        let digest = identity::link(applied.manifest_digest, content);
        let (names, frames): (Vec<_>, Vec<_>) =
            release.tensors.iter().map(|(name, frame)| (name.as_str(), frame)).unzip();
        let next = Foreign { run_id, version, digest, tensors: names };
        crash_point("follow.fetch")?;
        let mut advanced = replica.advance_foreign(
            &next,
            &|at, base, rewriter| match (next.tensors.get(at), frames.get(at)) {
                (Some(name), Some(frame)) => frame::rewrite(
                    &*self.store,
                    name,
                    frame,
                    release.encoding,
                    release.checksum,
                    base,
                    &mut |slice| rewriter.push(slice),
                ),
                _ => Ok(()),
            },
            &|| self.confirm(applied, &index),
        )?;
        advanced.bytes = frames.iter().map(|frame| frame.range.end - frame.range.start).sum();
        let first = if version == Version(1) { Some(index.clone()) } else { self.look(Version(1))? };
        self.pinned = Some(Pinned { digest, indexes: [first, Some(index)] });
        Ok(advanced)
    }

    /// A trainer that begins anew empties the directory: what was read meanwhile may be of two runs.
    fn confirm(&self, applied: &Applied, index: &Entry) -> Result<()> {
        let pinned = self.pinned.as_ref().filter(|pinned| pinned.digest == applied.manifest_digest);
        let kept = match pinned {
            Some(pinned) => self.indexes(applied.version)? == pinned.indexes,
            None => true,
        };
        if kept && self.look(applied.version.next())?.as_ref() == Some(index) {
            return Ok(());
        }
        Err(Error::Busy {
            what: self.store.to_string(),
            with: "a trainer that replaces what was being read".into(),
        })
    }
}

/// Versions only go forward.
pub(crate) fn check_forward(dir: &Path, applied: &Applied, to: Version) -> Result<()> {
    if applied.version <= to {
        return Ok(());
    }
    Err(Error::Rewind {
        subject: format!("`{}`", dir.display()),
        run_id: applied.run_id,
        have: applied.version,
        wanted: to,
    })
}
