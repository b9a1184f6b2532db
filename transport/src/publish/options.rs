//! What a publisher is given, and what it returns.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use derive_setters::Setters;
use driftless_store::{ContentDigest, Store};

use super::Profile;
use super::encode::PIECE_UNIT;
use crate::error::{Error, Result};
use crate::ids::Version;
use crate::manifest::{Kind, Manifest, OBJECT_BYTES_MAX, Representation};
use crate::replica::Applied;
use crate::run::Run;
use crate::sign::{SignKey, TrustKey};

/// Smallest limit on the size of an object: one piece of every element type has to fit.
const OBJECT_BYTES_MIN: u64 = 2 * PIECE_UNIT as u64;

/// Most ranks that can publish a version together.
const RANKS_MAX: u32 = 65_536;
/// Longest name of an attempt of several ranks, in bytes.
const ATTEMPT_BYTES_MAX: usize = 128;

/// Whether a publisher begins a run or goes on with one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// Claim the run's name; refused if it is taken.
    NewRun,
    /// Go on behind the newest committed version; refused if there is no such run.
    Resume,
}

impl Start {
    /// [`Start::Resume`] if the store has a run of this name, and otherwise [`Start::NewRun`]: for jobs that are started
    /// again by the same command.
    ///
    /// # Errors
    /// What the store reports; [`Error::BadName`].
    pub fn resume_or_new(store: &Arc<dyn Store>, run: &str) -> Result<Self> {
        match Run::open(store.clone(), run) {
            Err(Error::NoSuchRun { .. }) => Ok(Self::NewRun),
            opened => opened.map(|_| Self::Resume),
        }
    }
}

/// How a version is to be published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Every tensor in full.
    Full,
    /// Differences from the version in front; in full where there is none, or, if that is allowed, one with
    /// other tensors.
    Delta,
}

/// Why a version was published in full.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum FullBecause {
    /// There is no version before it.
    FirstVersion,
    /// [`Mode::Full`].
    Asked,
    /// The tensors are not those of the version before, which was allowed: the first few differences.
    LayoutChanged(String),
}

impl fmt::Display for FullBecause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::FirstVersion => f.write_str("it is the first version"),
            Self::Asked => f.write_str("that was asked for"),
            Self::LayoutChanged(differences) => write!(f, "the layout changed: {differences}"),
        }
    }
}

/// Hears of each version as soon as it is committed.
#[derive(Clone)]
pub struct Notify(Arc<dyn Fn(Version) + Send + Sync>);

impl Notify {
    /// Has `tell` called on the publishing thread, which it must not hold up. The version is committed, whatever
    /// becomes of the call.
    pub fn new(tell: impl Fn(Version) + Send + Sync + 'static) -> Self {
        Self(Arc::new(tell))
    }

    /// Tells of a version that was committed.
    pub fn tell(&self, version: Version) {
        (self.0)(version);
    }
}

impl fmt::Debug for Notify {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Notify")
    }
}

/// Where the trainer is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Step {
    /// Optimiser step.
    pub trainer_step: u64,
    /// The trainer's own checkpoint that belongs to the version, in the trainer's words.
    pub checkpoint: Option<String>,
}

/// Settings of a [`Publisher`](super::Publisher).
#[derive(Debug, Clone, Setters)]
#[setters(prefix = "with_", strip_option)]
#[non_exhaustive]
pub struct PublisherOptions {
    /// Name of the run.
    #[setters(into)]
    pub run: String,
    /// Name of the model within the run; `policy` by default. A second representation of the same policy is
    /// another model.
    #[setters(into)]
    pub model: String,
    /// Begin or go on.
    pub start: Start,
    /// Directory of the baseline: a copy of the newest committed version, kept by the publisher alone.
    #[setters(into)]
    pub baseline_dir: PathBuf,
    /// Directory of the checkpoint that version 0 was published from by reference, for rebuilding a lost
    /// baseline.
    #[setters(into)]
    pub reference_dir: Option<PathBuf>,
    /// Largest object in bytes, 8 MiB by default; at least 1 MiB, at most 256 MiB. Followers decode an
    /// object while the next ones arrive.
    pub object_bytes_max: u64,
    /// Objects stored at the same time, 4 by default. Memory holds two objects more than that.
    pub uploads: usize,
    /// Threads that encode; by default as many as there are cores, up to 8.
    pub threads: usize,
    /// Bytes of memory that tensors may take on their way from the snapshot to the objects, 1.5 GiB by
    /// default. A tensor counts three times: what the snapshot gives, what becomes of it, and a buffer that
    /// grows; four times with an anchor. One that counts for more passes alone. Each thread holds another MiB
    /// or two.
    pub buffer_bytes: u64,
    /// Whether deltas are small or quick to decode.
    pub profile: Profile,
    /// If set, every version whose number is a multiple of this carries full tensors beside its delta.
    pub anchor_every: Option<u64>,
    /// If set, a version carries full tensors beside its delta when the deltas since the newest anchor weigh
    /// this share of the tensors' bytes, or more. More than 0.
    pub anchor_share: Option<f64>,
    /// If set, signs every version (and every part of one). Then only versions that this key or one of
    /// `trust_keys` has signed are built on: others are refused.
    pub sign_key: Option<SignKey>,
    /// Other keys whose versions are trusted, such as the one before this.
    pub trust_keys: Vec<TrustKey>,
    /// Whether tensors may be lost, added, or have another shape or element type than in the version before.
    /// Such a version is published in full. By default it is refused, because it is mostly a mistake of the
    /// trainer.
    pub allow_layout_change: bool,
    /// Whether NaN and infinities are published; refused by default, in every element that changed.
    pub allow_non_finite: bool,
    /// Hears of each version right behind its commit, such as followers that look at the store then. Of ranks that
    /// publish together, the one that joins the parts tells.
    pub notify: Option<Notify>,
    /// The form of the tensors; by default the name of the element type that most of them have.
    pub representation: Option<Representation>,
}

impl PublisherOptions {
    /// The defaults for a run and the directory of its baseline.
    #[must_use]
    pub fn new(run: impl Into<String>, start: Start, baseline_dir: impl Into<PathBuf>) -> Self {
        Self {
            run: run.into(),
            model: "policy".to_owned(),
            start,
            baseline_dir: baseline_dir.into(),
            reference_dir: None,
            object_bytes_max: 8 << 20,
            uploads: 4,
            threads: driftless_store::pool::threads(8),
            buffer_bytes: 1536 << 20,
            profile: Profile::default(),
            anchor_every: None,
            anchor_share: None,
            sign_key: None,
            trust_keys: Vec::new(),
            allow_layout_change: false,
            allow_non_finite: false,
            notify: None,
            representation: None,
        }
    }

    /// The keys whose versions are read; none: any.
    pub(super) fn trusted(&self) -> Vec<TrustKey> {
        self.sign_key.iter().map(SignKey::public).chain(self.trust_keys.iter().copied()).collect()
    }

    pub(super) fn check(&self) -> Result<()> {
        let range = |name, found: u64, min: u64, max: u64| {
            let expected = format!("{min} to {max}");
            let ok = (min..=max).contains(&found);
            if ok { Ok(()) } else { Err(Error::BadSetting { name, expected, found: found.to_string() }) }
        };
        range("object_bytes_max", self.object_bytes_max, OBJECT_BYTES_MIN, OBJECT_BYTES_MAX)?;
        range("uploads", self.uploads as u64, 1, 64)?;
        range("threads", self.threads as u64, 1, 256)?;
        range("anchor_every", self.anchor_every.unwrap_or(1), 1, u64::MAX)?;
        if let Some(share) = self.anchor_share.filter(|share| !(share.is_finite() && *share > 0.0)) {
            let (expected, found) = ("a number above 0".to_owned(), share.to_string());
            return Err(Error::BadSetting { name: "anchor_share", expected, found });
        }
        crate::ids::check_model(&self.model)
    }
}

/// One of several ranks that publish a version together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rank {
    /// Number of this rank, from 0.
    pub rank: u32,
    /// Number of ranks.
    pub ranks: u32,
    /// What all ranks of this publication agree on and no other publication has: a name such as `<job
    /// id>-<step>`. Parts of different attempts are never joined, so that those of a trainer that died do not
    /// mix with those of the next one.
    pub attempt: String,
}

impl Rank {
    pub(super) fn check(&self) -> Result<()> {
        if self.rank >= self.ranks || self.ranks > RANKS_MAX {
            return Err(Error::BadSetting {
                name: "rank",
                expected: format!("a rank below the number of ranks, which is at most {RANKS_MAX}"),
                found: format!("{} of {}", self.rank, self.ranks),
            });
        }
        crate::ids::check_name("attempt", &self.attempt)?;
        // Room for the rest of the key's segment.
        if self.attempt.len() > ATTEMPT_BYTES_MAX {
            let text = self.attempt.clone();
            return Err(Error::BadName { what: "attempt", text, reason: "it is longer than 128 bytes" });
        }
        Ok(())
    }
}

/// How far a publication is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress {
    /// Tensors encoded.
    pub tensors: u64,
    /// Tensors in all.
    pub tensors_total: u64,
    /// Bytes of all tensors that are published, before encoding.
    pub bytes_total: u64,
    /// Bytes of the tensors encoded, before encoding.
    pub bytes_encoded: u64,
    /// Bytes stored.
    pub bytes_uploaded: u64,
}

/// Is called after every tensor of a publication.
pub type ProgressFn = dyn FnMut(Progress) + Send;

/// An output head that `config.json` ties to the word embeddings, and that equals them: engines get it back from them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeftOut {
    /// Its name.
    pub tensor: String,
    /// Name of the word embeddings.
    pub same_as: String,
}

/// A committed publication, in numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Published {
    /// The version.
    pub version: Version,
    /// The text engines are given for it.
    pub label: String,
    /// Its identity.
    pub manifest_digest: ContentDigest,
    /// What committed it.
    pub manifest: Manifest,
    /// What was published.
    pub kind: Kind,
    /// Why it was published in full, if it was.
    pub full_because: Option<FullBecause>,
    /// The tensors that were left out of it.
    pub left_out: Vec<LeftOut>,
    /// True if readers can start here.
    pub anchor: bool,
    /// Bytes stored: objects and manifest.
    pub publication_bytes: u64,
    /// Bytes of all tensors; tied weights count once.
    pub full_bytes: u64,
    /// Elements that differ from the version in front; all of them where there is none to compare with.
    pub changed: u64,
    /// Elements in all.
    pub elements: u64,
    /// From the start until the last tensor was encoded; uploads run beside it.
    pub encode: Duration,
    /// From there until the manifest was committed.
    pub upload: Duration,
}

impl Published {
    /// A delta of another layout, which led to `applied`: `publication_bytes` stored, `changed` elements, and
    /// the times of encoding and of the rest.
    #[must_use]
    pub fn of_delta(
        applied: &Applied,
        manifest: &Manifest,
        publication_bytes: u64,
        changed: u64,
        encode: Duration,
        upload: Duration,
    ) -> Self {
        Self {
            version: applied.version,
            label: applied.label(),
            manifest_digest: applied.manifest_digest,
            manifest: manifest.clone(),
            kind: Kind::Delta,
            full_because: None,
            left_out: Vec::new(),
            anchor: false,
            publication_bytes,
            full_bytes: manifest.tensor_bytes(),
            changed,
            elements: manifest.elements(),
            encode,
            upload,
        }
    }

    /// Share of elements that changed, 0 to 1.
    #[must_use]
    pub fn density(&self) -> f64 {
        if self.elements == 0 { 0.0 } else { self.changed as f64 / self.elements as f64 }
    }
}
