//! A training run in a store: its identity, and the chain of versions of each model.

mod floor;
mod tombstone;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use driftless_store::wait::Stop;
use driftless_store::{
    ContentDigest, Entry, Error as StoreError, Key, Object, PutMode, Store, download, if_found,
};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::ids::{FOLLOWERS, RunId, Version, check_model, check_name};
use crate::manifest::{Base, MANIFEST_BYTES_MAX, Manifest};
use crate::sign::{self, Subject, TrustKey};

pub(crate) use floor::Floor;
pub(crate) use tombstone::Tombstone;

/// Largest run record or head hint in bytes.
const RECORD_BYTES_MAX: u64 = 4096;
/// How many versions the head hint may lag before a listing is cheaper than asking for one after the other.
const HINT_LAG_MAX: u64 = 16;
/// Between two looks for a run that rank 0 begins.
const POLL: Duration = Duration::from_millis(100);
/// The last segment of a manifest's key.
pub(crate) const MANIFEST: &str = "manifest";

/// What `runs/<name>` holds.
#[derive(Serialize, Deserialize)]
struct Record {
    format: u32,
    run_id: RunId,
}

/// A committed version: its manifest and that manifest's digest.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Committed {
    /// The manifest.
    pub manifest: Manifest,
    /// The digest of its bytes as stored.
    pub digest: ContentDigest,
}

impl Committed {
    /// A manifest and the digest of the bytes it was read from or stored as.
    #[must_use]
    pub fn new(manifest: Manifest, digest: ContentDigest) -> Self {
        Self { manifest, digest }
    }

    /// The version by identity, as the version behind it names it.
    #[must_use]
    pub fn identity(&self) -> Base {
        Base { version: self.manifest.version, manifest_digest: self.digest }
    }
}

/// A run in a store.
#[derive(Debug, Clone)]
pub struct Run {
    store: Arc<dyn Store>,
    name: String,
    id: RunId,
    /// If given, only what one of these keys has signed is read.
    trusted: Option<Arc<[TrustKey]>>,
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "run `{}` ({}) in {}", self.name, self.id, self.store)
    }
}

impl Run {
    /// Begins a new run: claims `name` and draws an identity.
    ///
    /// # Errors
    /// [`Error::RunExists`] if the name is taken, [`Error::BadName`] if it is not one segment of a key.
    pub fn create(store: Arc<dyn Store>, name: &str) -> Result<Self> {
        check_name("run", name)?;
        let key = run_key(name)?;
        let record = Record { format: crate::manifest::FORMAT, run_id: RunId::random() };
        let bytes = to_json(&key, &record)?;
        match store.put(&key, &bytes, PutMode::Create) {
            Ok(()) => Ok(Self { store, name: name.to_owned(), id: record.run_id, trusted: None }),
            Err(error) => match Self::open(store, name) {
                // The put took effect and its answer was lost: no other run draws the same identity.
                Ok(run) if run.id == record.run_id => Ok(run),
                Ok(run) => Err(Error::RunExists { name: name.to_owned(), run_id: run.id }),
                Err(_) => Err(error.into()),
            },
        }
    }

    /// Opens an existing run.
    ///
    /// # Errors
    /// [`Error::NoSuchRun`]; [`Error::Parse`] or [`Error::Unsupported`] for a record that this build cannot
    /// read.
    pub fn open(store: Arc<dyn Store>, name: &str) -> Result<Self> {
        check_name("run", name)?;
        let key = run_key(name)?;
        let bytes = if_found(store.get(&key, Some(0..RECORD_BYTES_MAX)))?
            .ok_or_else(|| Error::NoSuchRun { name: name.to_owned(), store: store.to_string() })?;
        let record: Record = from_json(&key, &bytes)?;
        if record.format != crate::manifest::FORMAT {
            return Err(Error::Unsupported {
                what: format!("format {} of `{key}`", record.format),
                hint: format!("this build reads format {}", crate::manifest::FORMAT),
            });
        }
        Ok(Self { store, name: name.to_owned(), id: record.run_id, trusted: None })
    }

    /// Opens a run that rank 0 begins, once it has.
    ///
    /// # Errors
    /// As [`Run::open`]: [`Error::NoSuchRun`] after `deadline`. [`Error::Cancelled`] once `stop` is thrown.
    pub fn open_within(store: Arc<dyn Store>, name: &str, deadline: Duration, stop: &Stop) -> Result<Self> {
        let begin = Instant::now();
        loop {
            match Self::open(store.clone(), name) {
                Err(Error::NoSuchRun { .. }) if begin.elapsed() < deadline => {}
                opened => return opened,
            }
            if stop.wait(POLL) {
                return Err(Error::Cancelled { what: "the wait for rank 0" });
            }
        }
    }

    /// This run, of which from here on only versions are read that one of `keys` has signed. No keys: any
    /// version.
    #[must_use]
    pub fn trusting(self, keys: &[TrustKey]) -> Self {
        Self { trusted: (!keys.is_empty()).then(|| keys.into()), ..self }
    }

    /// The names of all runs in a store, sorted.
    ///
    /// # Errors
    /// Whatever the store reports.
    pub fn names(store: &dyn Store) -> Result<Vec<String>> {
        let entries = store.list(&Key::new("runs")?)?;
        Ok(entries.into_iter().map(|entry| entry.key.name().to_owned()).collect())
    }

    /// The run's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The run's identity.
    #[must_use]
    pub fn id(&self) -> RunId {
        self.id
    }

    /// The store that the run lives in.
    #[must_use]
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// Refuses to go on with a run other than the one that `subject` is pinned to.
    ///
    /// # Errors
    /// [`Error::ForeignRun`] with both identities.
    pub fn check_id(&self, subject: impl fmt::Display, pinned: RunId) -> Result<()> {
        if pinned == self.id {
            return Ok(());
        }
        Err(Error::ForeignRun { subject: subject.to_string(), expected: self.id, found: pinned })
    }

    /// The models that have a committed version, sorted.
    ///
    /// # Errors
    /// Whatever the store reports.
    pub fn models(&self) -> Result<Vec<String>> {
        let root = self.root()?;
        let mut models: Vec<String> = Vec::new();
        for entry in self.store.list(&root)? {
            let Some(rest) = entry.key.under(&root) else { continue };
            let mut segments = rest.split('/');
            let (model, version, last) = (segments.next(), segments.next(), segments.next());
            if let (Some(model), Some(_), Some(MANIFEST)) = (model, version.and_then(parse_version), last)
                && models.last().is_none_or(|known| known != model)
            {
                models.push(model.to_owned());
            }
        }
        models.dedup();
        Ok(models)
    }

    /// The committed versions of a model, ascending, by listing; those below the floor are not among them.
    ///
    /// # Errors
    /// Whatever the store reports.
    pub fn versions(&self, model: &str) -> Result<Vec<Version>> {
        let root = self.model_root(model)?;
        let version = |entry: &Entry| {
            let (version, rest) = entry.key.under(&root)?.split_once('/')?;
            (rest == MANIFEST).then(|| parse_version(version)).flatten()
        };
        let listed = self.store.list(&root)?;
        let floor = listed.iter().filter_map(|entry| Floor::parse(&entry.key, &root)).max();
        let mut versions: Vec<Version> = listed.iter().filter_map(version).collect();
        versions.retain(|version| floor.is_none_or(|floor| *version >= floor.version));
        versions.sort_unstable();
        Ok(versions)
    }

    /// The committed version with this number.
    ///
    /// # Errors
    /// [`Error::NoSuchVersion`]; [`Error::Collected`]; [`Error::Unsigned`] or [`Error::BadSignature`] if keys
    /// are trusted and none of them has signed it for this run and version; [`Error::ForeignRun`],
    /// [`Error::ForeignModel`] or [`Error::Corrupt`] if the manifest there is of something else; the errors
    /// of [`Manifest::parse`].
    pub fn get(&self, model: &str, version: Version) -> Result<Committed> {
        self.unless_collected(model, version, self.read(model, version)).map(|(committed, _)| committed)
    }

    /// [`Run::get`] without reading the floor: of a collected version there may be nothing, or what is not
    /// to be used.
    pub(crate) fn read(&self, model: &str, version: Version) -> Result<Committed> {
        let key = self.manifest_key(model, version)?;
        let bytes = if_found(self.store.get(&key, Some(0..MANIFEST_BYTES_MAX + 1)))?
            .ok_or_else(|| Error::NoSuchVersion { run_id: self.id, model: model.to_owned(), version })?;
        if let Some(tombstone) = Tombstone::parse(&bytes) {
            self.check_is(&key, model, version, tombstone.run_id, &tombstone.model, tombstone.version)?;
            return Err(tombstone.into_error());
        }
        let manifest = match self.signed("manifest", &bytes, model, version, key.as_str())? {
            Some(signed) => Manifest::parse_named(&signed, key.as_str())?,
            None => Manifest::parse_named(&bytes, key.as_str())?,
        };
        self.check_is(&key, model, version, manifest.run_id, &manifest.model, manifest.version)?;
        Ok(Committed::new(manifest, ContentDigest::of(&bytes)))
    }

    /// The part of a document that a trusted key has signed for this place; `None` where no keys were given.
    pub(crate) fn signed(
        &self,
        what: &'static str,
        bytes: &[u8],
        model: &str,
        version: Version,
        subject: &str,
    ) -> Result<Option<Vec<u8>>> {
        let Some(trusted) = &self.trusted else { return Ok(None) };
        sign::verify(bytes, trusted, &self.place(what, model, version), subject).map(Some)
    }

    /// Where a document of this run belongs.
    pub(crate) fn place<'a>(&'a self, what: &'static str, model: &'a str, version: Version) -> Subject<'a> {
        Subject { what, run: &self.name, run_id: self.id, model, version }
    }

    /// Refuses what lies in a version's place and says that it is of another run, model or version.
    fn check_is(
        &self,
        key: &Key,
        model: &str,
        version: Version,
        found_run: RunId,
        found_model: &str,
        found_version: Version,
    ) -> Result<()> {
        let subject = key.to_string();
        if found_run != self.id {
            return Err(Error::ForeignRun { subject, expected: self.id, found: found_run });
        }
        if found_model != model {
            let (expected, found) = (model.to_owned(), found_model.to_owned());
            return Err(Error::ForeignModel { subject, expected, found });
        }
        if found_version != version {
            return Err(Error::Corrupt {
                subject,
                what: "it commits another version than its key says",
                expected: version.to_string(),
                found: found_version.to_string(),
            });
        }
        Ok(())
    }

    /// True if the version is committed.
    ///
    /// # Errors
    /// Whatever the store reports.
    pub fn has(&self, model: &str, version: Version) -> Result<bool> {
        Ok(if_found(self.store.head(&self.manifest_key(model, version)?))?.is_some())
    }

    /// The newest committed version of a model, or `None` if there is none.
    ///
    /// The head hint only says where to begin looking: a missing, broken, replayed or lying one costs time,
    /// not truth.
    ///
    /// # Errors
    /// As [`Run::get`].
    pub fn newest(&self, model: &str) -> Result<Option<Committed>> {
        match self.newest_version(model)? {
            None => Ok(None),
            Some(version) => self.get(model, version).map(Some),
        }
    }

    /// The number of the newest committed version, without reading its manifest. Costs two small calls when
    /// the head hint is right.
    ///
    /// # Errors
    /// Whatever the store reports.
    pub fn newest_version(&self, model: &str) -> Result<Option<Version>> {
        let Some(hint) = self.hint(model)? else {
            return Ok(self.versions(model)?.pop());
        };
        let mut newest = hint;
        while self.has(model, newest.next())? {
            newest = newest.next();
            if newest.0 - hint.0 == HINT_LAG_MAX {
                return Ok(self.versions(model)?.pop());
            }
        }
        Ok(Some(newest))
    }

    /// The newest version for a reader that has `have` and knew of no newer one; and its manifest, if it is
    /// the next one.
    ///
    /// Versions have no gaps, so one request, for the next manifest, tells that there is nothing new,
    /// whatever the head says. With `assume_latest`, a next one counts as the newest. A reader whose last poll
    /// found nothing has it one round trip sooner, and finds what is behind it with the next poll.
    pub(crate) fn newest_behind(
        &self,
        model: &str,
        have: Version,
        assume_latest: bool,
    ) -> Result<(Version, Option<Committed>)> {
        let next = match self.read(model, have.next()) {
            Err(Error::NoSuchVersion { .. }) => return Ok((have, None)),
            Err(Error::Collected { .. }) => None,
            next => Some(next?),
        };
        let next = next.filter(|_| have.next().0 < crate::manifest::VERSION_MAX);
        match next {
            Some(next) if assume_latest || !self.has(model, next.manifest.version.next())? => {
                Ok((next.manifest.version, Some(next)))
            }
            // Several, and the head says how many.
            _ => Ok((self.newest_version(model)?.unwrap_or(have), None)),
        }
    }

    /// A version that the head names and that is indeed committed.
    fn hint(&self, model: &str) -> Result<Option<Version>> {
        let key = self.head_key(model)?;
        let hint = match self.store.get(&key, Some(0..RECORD_BYTES_MAX)) {
            Err(StoreError::NotFound { .. }) => return Ok(None),
            Err(error @ StoreError::NotAFile { .. }) => Err(error.into()),
            bytes => from_json::<Base>(&key, &bytes?),
        };
        match hint {
            Ok(hint)
                if hint.version.0 <= crate::manifest::VERSION_MAX
                    && self.has(model, hint.version)?
                    && hint.version >= self.oldest(model)? =>
            {
                Ok(Some(hint.version))
            }
            Ok(hint) => {
                tracing::warn!(%key, version = %hint.version, "the head names a version that is not committed; listing instead");
                Ok(None)
            }
            Err(error) => {
                tracing::warn!(%key, %error, "the head is broken; listing instead");
                Ok(None)
            }
        }
    }

    /// The bytes of an object, checked against its digest.
    ///
    /// # Errors
    /// [`WrongSize`](driftless_store::Error::WrongSize) or [`DigestMismatch`](driftless_store::Error::DigestMismatch) if
    /// the object is not what the manifest says.
    pub fn object(&self, object: &Object) -> Result<Vec<u8>> {
        Ok(download::fetch(&*self.store, object)?)
    }

    /// Commits a manifest. Only its publisher calls this, after every object is durable. A number below the
    /// floor stays used.
    pub(crate) fn commit(&self, model: &str, version: Version, bytes: &[u8]) -> Result<()> {
        let key = self.manifest_key(model, version)?;
        self.store.put(&key, bytes, PutMode::Create)?;
        if version >= self.oldest(model)? {
            return Ok(());
        }
        // The number was used and collected while this publisher slept.
        self.store.delete(&key)?;
        Err(Error::Store(StoreError::AlreadyExists { key, store: self.store.to_string() }))
    }

    /// Points the head hint at a committed version.
    pub(crate) fn set_head(&self, model: &str, newest: Base) -> Result<()> {
        let key = self.head_key(model)?;
        Ok(self.store.put(&key, &to_json(&key, &newest)?, PutMode::Overwrite)?)
    }

    /// The key of a version's manifest.
    ///
    /// # Errors
    /// [`Error::BadName`] if `model` cannot name a model.
    pub fn manifest_key(&self, model: &str, version: Version) -> Result<Key> {
        Ok(self.version_root(model, version)?.join(MANIFEST)?)
    }

    /// The key under which a follower leaves its acknowledgement, which is also its lease; its date is the
    /// store's.
    ///
    /// # Errors
    /// [`Error::BadName`] if `follower` is not one segment of a key.
    pub fn follower_key(&self, follower: &str) -> Result<Key> {
        check_name("follower", follower)?;
        Ok(self.root()?.join(&format!("{FOLLOWERS}/{follower}"))?)
    }

    /// The acknowledgements of all followers, dated by the store.
    ///
    /// # Errors
    /// Whatever the store reports.
    pub fn followers(&self) -> Result<Vec<Entry>> {
        Ok(self.store.list(&self.root()?.join(FOLLOWERS)?)?)
    }

    /// What lies under this key belongs to one version: its manifest and its objects.
    pub(crate) fn version_root(&self, model: &str, version: Version) -> Result<Key> {
        Ok(self.model_root(model)?.join(&format!("v{:010}", version.0))?)
    }

    /// The key of the hint at the newest version, which is written anew behind each commit.
    ///
    /// # Errors
    /// [`Error::BadName`] if `model` cannot name a model.
    pub fn head_key(&self, model: &str) -> Result<Key> {
        Ok(self.model_root(model)?.join("head")?)
    }

    pub(crate) fn model_root(&self, model: &str) -> Result<Key> {
        check_model(model)?;
        Ok(self.root()?.join(model)?)
    }

    fn root(&self) -> Result<Key> {
        Ok(Key::new(self.id.to_string())?)
    }
}

fn run_key(name: &str) -> Result<Key> {
    Ok(Key::new(format!("runs/{name}"))?)
}

/// The number in a version's segment `v0000000042`.
pub(crate) fn parse_version(segment: &str) -> Option<Version> {
    let digits = segment.strip_prefix('v').filter(|digits| digits.len() == 10)?;
    digits.bytes().all(|digit| digit.is_ascii_digit()).then(|| digits.parse().ok().map(Version))?
}

fn to_json<T: Serialize>(key: &Key, value: &T) -> Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(|source| Error::Parse { subject: key.to_string(), source })
}

fn from_json<'de, T: Deserialize<'de>>(key: &Key, bytes: &'de [u8]) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|source| Error::Parse { subject: key.to_string(), source })
}
