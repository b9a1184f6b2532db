//! The crate's error type. Its variants follow the way of a version: store, run, manifest, publisher,
//! replica, engine.

mod classify;

use std::path::PathBuf;
use std::time::Duration;

use driftless_store::{BoxError, ContentDigest};

use crate::ids::{RunId, Version};
use crate::sign::TrustKey;

/// What every fallible function of this crate returns.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong in this crate, by meaning.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    // What lies below.
    /// What a store or a file system said.
    #[error(transparent)]
    Store(#[from] driftless_store::Error),

    // What was asked for, or given, that cannot be.
    /// A name (run, model, follower, tensor or file) that breaks the rules for it.
    #[error("`{text}` cannot name a {what}: {reason}")]
    BadName {
        /// What it should have named.
        what: &'static str,
        /// The text as given.
        text: String,
        /// Which rule it breaks.
        reason: &'static str,
    },
    /// A text that does not parse as the identity it should be.
    #[error("`{text}` is not a {what}, expected {expected}")]
    BadText {
        /// What it should have been.
        what: &'static str,
        /// The text as given.
        text: String,
        /// The form that is accepted.
        expected: &'static str,
    },
    /// A name that an auxiliary file of a checkpoint cannot have.
    #[error("`{name}` cannot name an auxiliary file: it must be one plain, visible file name that no weight file would have", name = name.escape_default())]
    BadFileName {
        /// The name as given.
        name: String,
    },
    /// A setting that cannot work.
    #[error("the setting `{name}` is {found}, expected {expected}")]
    BadSetting {
        /// The setting's name.
        name: &'static str,
        /// What it has to be.
        expected: String,
        /// What was given.
        found: String,
    },
    /// Something is larger than this crate accepts.
    #[error("{what} is larger than {max} bytes")]
    TooLarge {
        /// What is too large.
        what: String,
        /// The limit in bytes.
        max: u64,
    },
    /// Something this build, this store or this version of the format cannot do.
    #[error("{what} is not supported: {hint}")]
    Unsupported {
        /// What was asked for.
        what: String,
        /// What to do instead.
        hint: String,
    },
    /// A manifest requires a feature that this build does not know.
    #[error("`{key}` requires the feature `{feature}`, which this build does not know; update the reader")]
    UnknownFeature {
        /// The manifest's key, or `manifest` when it was parsed from bare bytes.
        key: String,
        /// The feature's name.
        feature: String,
    },

    // Content that is not what it must be.
    /// Bytes that are not what they must be: a broken manifest, object, checkpoint, journal or state file.
    #[error("{subject} is corrupt: {what} (expected {expected}, found {found})")]
    Corrupt {
        /// The manifest, object, tensor or file.
        subject: String,
        /// The property that fails.
        what: &'static str,
        /// What it should have been.
        expected: String,
        /// What it is.
        found: String,
    },
    /// A document that does not parse.
    #[error("{subject} does not parse")]
    Parse {
        /// The document.
        subject: String,
        /// The parser's message, with line and column.
        source: serde_json::Error,
    },
    /// A document that no trusted key claims to have signed. Nothing that it names is fetched.
    #[error("{subject} is not signed by a trusted key (signed by: {signers})", signers = or_no_key(signers))]
    Unsigned {
        /// The manifest or part.
        subject: String,
        /// The keys that claim to have signed it, in hex.
        signers: Vec<String>,
    },
    /// A document whose signature is not the trusted key's that it names: it was changed, or it belongs to
    /// another run, model or version. Nothing that it names is fetched.
    #[error("{subject} has a false signature: `{key}` has not signed this for this run, model and version")]
    BadSignature {
        /// The manifest or part.
        subject: String,
        /// The trusted key that it names.
        key: Box<TrustKey>,
    },
    /// One tensor name stands twice in a snapshot, with different content.
    #[error("tensor `{tensor}` stands twice in the snapshot with different content")]
    DuplicateTensor {
        /// The name.
        tensor: String,
    },
    /// The tensors to publish are not those of the version before, by name, shape or type.
    #[error(
        "the tensors are not those of version {version}: {differences}. Nothing was published; publish the checkpoint that was meant, \
         or allow the change (allow_layout_change)"
    )]
    LayoutChanged {
        /// The version before.
        version: Version,
        /// The first few differences.
        differences: String,
    },
    /// Elements that are NaN or infinite.
    #[error(
        "tensor `{tensor}` holds NaN or infinite elements: {count} of them, the first at index {first}. Nothing was published; mend the \
         step that made them, or allow them (allow_non_finite)"
    )]
    NotFinite {
        /// The tensor.
        tensor: String,
        /// The first one, in row-major order from 0.
        first: u64,
        /// How many there are; in a delta, of those that changed.
        count: u64,
    },
    /// A tensor was read more than once and was not the same each time.
    #[error(
        "tensor `{tensor}` was not the same each time it was read. Nothing was published; publish it again once nothing writes to the \
         checkpoint, and test the machine's memory if nothing does"
    )]
    ChangedWhileRead {
        /// The tensor.
        tensor: String,
    },
    /// A tensor that lies on a device could not be copied to the host.
    #[error("tensor `{tensor}` could not be copied to the host. Nothing was published")]
    HostCopy {
        /// The tensor.
        tensor: String,
        /// What whoever copies it says.
        source: BoxError,
    },
    /// A tensor is not what the other side says it is.
    #[error("tensor `{tensor}`: {what} is {found}, expected {expected}")]
    TensorMismatch {
        /// The tensor's name.
        tensor: String,
        /// The property that differs.
        what: &'static str,
        /// What it should be.
        expected: String,
        /// What it is.
        found: String,
    },
    /// The delta codec refused.
    #[error("tensor `{tensor}`: the delta codec failed")]
    Codec {
        /// The tensor's name.
        tensor: String,
        /// The codec's error.
        source: driftless_delta::Error,
    },

    // Runs and chains.
    /// The run name is not in the store.
    #[error("no run named `{name}` in {store}")]
    NoSuchRun {
        /// The name asked for.
        name: String,
        /// The store, as it displays itself.
        store: String,
    },
    /// The run name is taken.
    #[error(
        "the run name `{name}` is taken by run {run_id}; go on with that run (resume), or choose another name"
    )]
    RunExists {
        /// The name asked for.
        name: String,
        /// The run that has it.
        run_id: RunId,
    },
    /// Something belongs to another run.
    #[error(
        "{subject} belongs to run {found}, expected run {expected}; versions of two runs are never comparable"
    )]
    ForeignRun {
        /// What belongs to the other run.
        subject: String,
        /// The run this side is pinned to.
        expected: RunId,
        /// The run found.
        found: RunId,
    },
    /// Something belongs to another model of the run.
    #[error("{subject} belongs to model `{found}`, expected `{expected}`")]
    ForeignModel {
        /// What belongs to the other model.
        subject: String,
        /// The model this side is pinned to.
        expected: String,
        /// The model found.
        found: String,
    },
    /// The run has no such version of the model.
    #[error("run {run_id} has no version {version} of model `{model}`")]
    NoSuchVersion {
        /// The run.
        run_id: RunId,
        /// The model.
        model: String,
        /// The version asked for.
        version: Version,
    },
    /// The version was committed once and has been collected since.
    #[error(
        "version {version} of model `{model}` in run {run_id} was collected; start from the anchor, version {anchor}"
    )]
    Collected {
        /// The run.
        run_id: RunId,
        /// The model.
        model: String,
        /// The version asked for.
        version: Version,
        /// The newest anchor at the time: a reader starts there, or at a newer one.
        anchor: Version,
    },
    /// A manifest names a base that is not the version in front of it.
    #[error(
        "version {version} builds on version {base} with manifest {expected}, but that manifest is {found}"
    )]
    BrokenChain {
        /// The version whose base does not fit.
        version: Version,
        /// Its base.
        base: Version,
        /// The base's manifest digest that it names.
        expected: ContentDigest,
        /// The base's manifest digest as found.
        found: ContentDigest,
    },
    /// Moving to an older version was asked for.
    #[error("{subject} is at version {have} of run {run_id} and cannot go back to version {wanted}")]
    Rewind {
        /// What would have gone back.
        subject: String,
        /// The run.
        run_id: RunId,
        /// The version it has.
        have: Version,
        /// The version asked for.
        wanted: Version,
    },

    // Publishing.
    /// Another publisher committed this version first.
    #[error(
        "version {version} of model `{model}` in run {run_id} was committed by another publisher (manifest {winner}); \
         stop one of the two, then resume the run"
    )]
    LostRace {
        /// The run.
        run_id: RunId,
        /// The model.
        model: String,
        /// The version both wanted.
        version: Version,
        /// Digest of the manifest that won.
        winner: ContentDigest,
    },
    /// The manifest was written, but the store did not confirm it and could not be asked.
    #[error(
        "it is unknown whether version {version} was committed in {store}; publish again: that reads the store first"
    )]
    CommitUnknown {
        /// The version.
        version: Version,
        /// The store, as it displays itself.
        store: String,
        /// What the store said.
        source: Box<Error>,
    },
    /// Ranks that publish a version together have not all done so in time.
    #[error("ranks {ranks:?} have not published their parts of version {version} for {waited:.1?}")]
    PartsMissing {
        /// The version.
        version: Version,
        /// The ranks whose parts are missing.
        ranks: Vec<u32>,
        /// How long they were waited for.
        waited: Duration,
    },
    /// A rank's part of a version contradicts the version or the other ranks.
    #[error(
        "rank {rank} published its part of version {version} with another {what}: {found}, expected {expected}"
    )]
    PartConflict {
        /// The version that the part is of.
        version: Version,
        /// The rank.
        rank: u32,
        /// What differs.
        what: &'static str,
        /// What it should be.
        expected: String,
        /// What it is.
        found: String,
    },
    /// Elements of a tensor that ranks publish together come from none of them, or from two.
    #[error(
        "tensor `{tensor}` of version {version}: elements {start} to {end} come from {found}, expected one rank"
    )]
    Pieces {
        /// The tensor.
        tensor: String,
        /// The version.
        version: Version,
        /// First element.
        start: u64,
        /// Behind the last element.
        end: u64,
        /// The ranks that published them.
        found: String,
    },
    /// The parts of a version were not joined in time.
    #[error("version {version} was not joined for {waited:.1?}; see what the rank that joins the parts says")]
    NotJoined {
        /// The version.
        version: Version,
        /// How long it was waited for.
        waited: Duration,
    },

    // Replicas.
    /// The replica holds no version that could be read.
    #[error("`{path}` holds no finished version yet", path = path.display())]
    NothingApplied {
        /// The replica's directory.
        path: PathBuf,
    },
    /// A replica's directory is not what its state says, and its journal cannot repair that.
    #[error("the replica `{path}` is damaged; once no weight files but its own are in it, it is rebuilt from the store", path = path.display())]
    DamagedReplica {
        /// The replica's directory.
        path: PathBuf,
        /// What is wrong with it.
        source: Box<Error>,
    },
    /// Something is in use and cannot be changed now; the same call may succeed later.
    #[error("{what} is busy with {with}")]
    Busy {
        /// What is in use.
        what: String,
        /// What uses it.
        with: String,
    },
    /// Work that ended because its switch was thrown, such as by
    /// [`Publisher::stop_on`](crate::Publisher::stop_on).
    #[error("{what} was stopped")]
    Cancelled {
        /// The work.
        what: &'static str,
    },
    /// A thread ended without a result: it panicked, which is a mistake of this program.
    #[error("{what} ended without a result, a mistake of driftless: please report it with its log")]
    Internal {
        /// The work.
        what: &'static str,
    },

    // Engines.
    /// An engine, or the code that drives it, failed.
    #[error("engine `{engine}` failed to {action}")]
    Engine {
        /// The engine's name.
        engine: String,
        /// What it was asked to do.
        action: &'static str,
        /// What it, or its driver, said.
        source: BoxError,
    },
    /// An engine did not answer within its deadline. The checkpoint is not touched before it does.
    #[error("engine `{engine}` has not answered for {waited:.1?} when asked to {action}")]
    EngineTimeout {
        /// The engine's name.
        engine: String,
        /// What it was asked to do.
        action: &'static str,
        /// How long it has been silent.
        waited: Duration,
    },
}

fn or_no_key(signers: &[String]) -> String {
    if signers.is_empty() { "no key".to_owned() } else { signers.join(", ") }
}
