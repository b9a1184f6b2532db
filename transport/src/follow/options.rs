//! What a follower is given when it is opened.

use std::path::{Path, PathBuf};
use std::time::Duration;

use derive_setters::Setters;
use driftless_store::download::DownloadOptions;
use driftless_store::os;

use crate::ids::Version;
use crate::prepared::OfferWhen;
use crate::sign::TrustKey;

/// How long one engine may take to activate a version, by default.
pub const ACTIVATE_DEADLINE: Duration = Duration::from_secs(600);
/// How long an engine's driver may take to end a call that has run out of time, by default.
pub const LEAVE_DEADLINE: Duration = Duration::from_secs(15);

/// What a follower follows, and where to.
#[derive(Clone, Debug, Setters)]
#[setters(prefix = "with_", strip_option)]
#[non_exhaustive]
pub struct FollowerOptions {
    /// The run's name in the store.
    #[setters(into)]
    pub run: String,
    /// The model within the run.
    #[setters(into)]
    pub model: String,
    /// The directory that holds the materialised checkpoint; the follower owns it.
    #[setters(into)]
    pub checkpoint_dir: PathBuf,
    /// The checkpoint that version 0 refers to, when it was published by reference.
    #[setters(into)]
    pub hf_checkpoint: Option<PathBuf>,
    /// The follower's name in the store, unique within the run.
    #[setters(into)]
    pub id: String,
    /// The last version to follow: later ones are left alone, and
    /// [`Follower::run_until`](crate::Follower::run_until) ends when every engine has it.
    pub until: Option<Version>,
    /// Leave it to a coordinator to prepare and activate versions:
    /// [`Follower::run_until`](crate::Follower::run_until) then only renews the lease, and activates again
    /// what was activated before on engines that were restarted.
    pub coordinated: bool,
    /// Time between two polls of the store.
    pub poll: Duration,
    /// Time between two looks at the engines, which tell that one was restarted or paused. A version that was
    /// prepared brings one at once.
    pub engine_poll: Duration,
    /// Time between two samples of the weights of an engine that serves the version, which tell that another program
    /// wrote them; zero for none. The first is compared when the engine is first seen to serve it.
    pub sample_poll: Duration,
    /// Longest time between two renewals of the lease, which keeps what this follower needs from being
    /// collected.
    pub renew: Duration,
    /// Longest time between two attempts after failures.
    pub backoff_max: Duration,
    /// Longest time between two attempts to activate a version on an engine that is there and does not take
    /// it.
    pub refusal_backoff_max: Duration,
    /// If given, only versions that one of these keys has signed are followed.
    pub trust_keys: Vec<TrustKey>,
    /// How objects are kept while they arrive.
    pub download: DownloadOptions,
    /// Bytes of the checkpoint that [`Follower::run_until`](crate::Follower::run_until) reads in an hour,
    /// beside following, to compare them with their digests; 0 for none. What is damaged is built anew from
    /// the store, and engines load it again.
    pub scrub_bytes_per_hour: u64,
    /// The directory of engines' plugins. While a plugin is there, each delta is also written there as a
    /// [prepared delta](crate::prepared), for engines that write it into their weights.
    #[setters(into)]
    pub plugin_dir: Option<PathBuf>,
    /// When a version is offered to those engines. With [`OfferWhen::Decoded`] the loop of
    /// [`Follower::run_until`](crate::Follower::run_until) has engines take it before its journal is durable, and
    /// acknowledges it afterwards.
    pub offer: OfferWhen,
    /// How long one engine may take to say which version it serves.
    pub serving_deadline: Duration,
    /// How long one engine may take to activate a version.
    pub activate_deadline: Duration,
    /// How long an engine's driver may take to end a call that has run out of time. After that it is no
    /// longer waited for.
    pub leave_deadline: Duration,
}

impl FollowerOptions {
    /// Options for the model `policy` of `run`. Polls of the store and looks at the engines come every 500 ms, samples
    /// of their weights every 30 s, renewals of the lease every minute.
    /// Retries back off to 30 s, or to 5 minutes at an engine that refuses. An engine has 10 s to report its
    /// version, 10 minutes to activate one, and 15 s to end that. 64 GiB are scrubbed in an hour.
    #[must_use]
    pub fn new(run: impl Into<String>, checkpoint_dir: impl Into<PathBuf>, id: impl Into<String>) -> Self {
        Self {
            run: run.into(),
            model: "policy".into(),
            checkpoint_dir: checkpoint_dir.into(),
            hf_checkpoint: None,
            id: id.into(),
            until: None,
            coordinated: false,
            poll: Duration::from_millis(500),
            engine_poll: Duration::from_millis(500),
            sample_poll: Duration::from_secs(30),
            renew: Duration::from_secs(60),
            backoff_max: Duration::from_secs(30),
            refusal_backoff_max: Duration::from_secs(300),
            trust_keys: Vec::new(),
            download: DownloadOptions::default(),
            scrub_bytes_per_hour: 64 << 30,
            plugin_dir: None,
            offer: OfferWhen::Durable,
            serving_deadline: Duration::from_secs(10),
            activate_deadline: ACTIVATE_DEADLINE,
            leave_deadline: LEAVE_DEADLINE,
        }
    }

    /// The version to go to where the store has `newest`.
    pub(super) fn last(&self, newest: Option<Version>) -> Option<Version> {
        newest.map(|newest| self.until.map_or(newest, |until| until.min(newest)))
    }
}

/// The name of a follower that was given none: the host's, and a digest of the directory's path. Followers of one host
/// have two names, and each keeps its own from start to start.
#[must_use]
pub fn default_id(checkpoint_dir: &Path) -> String {
    let path = std::path::absolute(checkpoint_dir).unwrap_or_else(|_| checkpoint_dir.to_owned());
    let digest = blake3::hash(path.as_os_str().as_encoded_bytes()).to_hex();
    format!("{}-{}", os::host_name(), &digest[..8])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_ids_of_one_host_differ_and_stay() {
        let [one, other] = ["/dev/shm/a", "/dev/shm/b"].map(|dir| default_id(Path::new(dir)));
        assert_ne!(one, other);
        assert_eq!(one, default_id(Path::new("/dev/shm/./a")));
        assert!(one.starts_with(&os::host_name()));
    }
}
