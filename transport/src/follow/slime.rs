//! Follows a directory that slime's trainer writes.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Json;
use driftless_store::{Store, chain_text};
use serde::Deserialize;

use super::{Core, Follower, FollowerOptions, Prepared};
use crate::activate::Activate;
use crate::error::{Error, Result};
use crate::ids::Version;
use crate::replica::Plan;
use crate::slime::{self, Feed};

/// How long a trainer's request waits for the follower's own round to end.
const PULL_DEADLINE: Duration = Duration::from_secs(600);

impl Follower {
    /// Opens a follower of slime's delta directories, which lie at the root of `store`. Version 0 is
    /// [`FollowerOptions::hf_checkpoint`]. Nothing is written to the store, not even acknowledgements.
    ///
    /// # Errors
    ///
    /// As [`Follower::open`]; [`Error::Unsupported`] if keys are trusted: the layout has no signatures.
    pub fn open_slime(
        store: Arc<dyn Store>,
        options: FollowerOptions,
        engines: Vec<Box<dyn Activate>>,
    ) -> Result<Self> {
        let feed = feed(store.clone(), &options)?;
        let follower = Self::open(store, options, engines)?;
        follower.core()?.feed = Some(feed);
        Ok(follower)
    }

    /// What a follower with these options would do to its directory now, up to [`FollowerOptions::until`]. Nothing is written, no
    /// lock is taken, no engine asked. Every changed tensor is read and taken through all versions in memory (twice the bytes of the
    /// tensors under way: 1 GiB, or one tensor), so what this accepts follows on from the weights that are here.
    ///
    /// # Errors
    ///
    /// Those that [`Follower::open_slime`] and [`Follower::prepare`] would give; [`Error::Busy`] if somebody else moves the
    /// directory meanwhile.
    pub fn plan_slime(store: Arc<dyn Store>, options: &FollowerOptions) -> Result<Plan> {
        slime::plan(feed(store, options)?, &options.checkpoint_dir, options.until)
    }

    pub(super) fn prepare_slime(&self, core: &mut Core, target: Option<Version>) -> Result<Prepared> {
        let Core { feed: Some(feed), replica, .. } = core else {
            return Err(Error::Cancelled { what: "following without a source" });
        };
        let started = Instant::now();
        let begun = replica.applied().is_some();
        let surveyed = feed.survey(replica);
        let newest = surveyed.as_ref().ok().copied();
        let moved = surveyed.and_then(|newest| {
            feed.advance(replica, target.or(self.options().last(Some(newest))).unwrap_or(newest))
        });
        {
            let mut status = self.status_mut();
            status.newest = newest.or(status.newest);
            status.run_id = replica.applied().map(|applied| applied.run_id);
        }
        // Version 0 is not among the steps that were counted.
        let moved = moved.map(|mut advanced| {
            advanced.links += u64::from(!begun);
            advanced
        });
        self.moved(core, started, moved)
    }

    /// Brings the checkpoint to `target` for a trainer that believes the directory to be `local`.
    fn pull(&self, local: &Path, target: Version) -> Result<()> {
        let ours = &self.options().checkpoint_dir;
        let resolve = |path: &Path| std::fs::canonicalize(path).ok();
        if resolve(local).is_none_or(|local| Some(local) != resolve(ours)) {
            return Err(Error::BadSetting {
                name: "local_checkpoint_dir",
                expected: format!("the follower's, `{}`", ours.display()),
                found: format!("`{}`", local.display()),
            });
        }
        let deadline = Instant::now() + PULL_DEADLINE;
        loop {
            let prepared = self.core().and_then(|mut core| match core.feed {
                Some(_) => self.prepare_in(&mut core, Some(target)),
                None => Err(Error::Unsupported {
                    what: "pull_weights".to_owned(),
                    hint: "this follower does not follow slime's layout; ask it to prepare".to_owned(),
                }),
            });
            match prepared {
                Err(Error::Busy { .. }) if Instant::now() < deadline => {
                    thread::sleep(Duration::from_millis(20));
                }
                prepared => return prepared.map(drop),
            }
        }
    }
}

/// The trainer's directory, as these options follow it.
fn feed(store: Arc<dyn Store>, options: &FollowerOptions) -> Result<Feed> {
    if options.trust_keys.is_empty() {
        return Ok(Feed::new(store, &options.model, options.hf_checkpoint.clone()));
    }
    Err(Error::Unsupported {
        what: "trusted keys with slime's layout".to_owned(),
        hint: "its versions are not signed; publish in our own layout".to_owned(),
    })
}

/// What slime's trainer sends to an engine.
#[derive(Deserialize)]
pub(crate) struct PullRequest {
    local_checkpoint_dir: PathBuf,
    target_version: Version,
}

/// `POST /pull_weights`, as slime's patched engines answer it: 200 or 400, `success` and `message`.
pub(crate) async fn pull_weights(
    State(follower): State<Follower>,
    Json(request): Json<PullRequest>,
) -> (StatusCode, Json<serde_json::Value>) {
    let pull = move || follower.pull(&request.local_checkpoint_dir, request.target_version);
    let failure = match tokio::task::spawn_blocking(pull).await {
        Ok(Ok(())) => {
            return (StatusCode::OK, Json(serde_json::json!({ "success": true, "message": "Success." })));
        }
        Ok(Err(error)) => chain_text(&error),
        Err(_) => "the request panicked; see the follower's log".to_owned(),
    };
    (StatusCode::BAD_REQUEST, Json(serde_json::json!({ "success": false, "message": failure })))
}
