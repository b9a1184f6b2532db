//! Follows a directory that slime's trainer writes.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Json;
use axum::routing::post;
use driftless_store::wrap::Count;
use driftless_store::{Store, chain_text};
use driftless_transport::activate::Activate;
use driftless_transport::follow::FollowerOptions;
use driftless_transport::gc::Ack;
use driftless_transport::replica::{Advanced, Plan};
use driftless_transport::source::{Asked, Newest, Source};
use driftless_transport::{Error, Follower, Replica, Result, RunId, Version};
use serde::Deserialize;

use crate::feed::Feed;

/// How long a trainer's request waits for the follower's own round to end.
const PULL_DEADLINE: Duration = Duration::from_secs(600);

/// Opens a follower of slime's delta directories, which lie at the root of `store`. Version 0 is
/// [`FollowerOptions::hf_checkpoint`]. Nothing is written to the store, not even acknowledgements.
///
/// # Errors
///
/// As [`Follower::open`]; [`Error::Unsupported`] if keys are trusted: the layout has no signatures.
pub fn open(
    store: Arc<dyn Store>,
    options: FollowerOptions,
    engines: Vec<Box<dyn Activate>>,
) -> Result<Follower> {
    let store = Arc::new(Count::new(store));
    let source = Box::new(SlimeFeed::new(store.clone(), &options)?);
    Follower::open_source(source, store, options, engines)
}

/// What a follower with these options would do to its directory now, up to [`FollowerOptions::until`].
/// Nothing is written, no lock is taken, no engine asked. Every changed tensor is read and taken through all
/// versions in memory, so what this accepts follows on from the weights that are here. It takes twice the
/// bytes of the tensors under way: 1 GiB, or one tensor.
///
/// # Errors
///
/// Those that [`open`] and [`Follower::prepare`] would give; [`Error::Busy`] if another process moves the
/// directory meanwhile.
pub fn plan(store: Arc<dyn Store>, options: &FollowerOptions) -> Result<Plan> {
    crate::plan::plan(feed(store, options)?, &options.checkpoint_dir, options.until)
}

/// The route that slime's trainer calls, for
/// [`ServeOptions::routes`](https://docs.rs/driftless-follower): `POST /pull_weights`.
pub fn routes(follower: Follower) -> Router {
    Router::new().route("/pull_weights", post(pull_weights)).with_state(follower)
}

/// slime's delta directories, as a follower follows them.
pub struct SlimeFeed {
    feed: Feed,
    /// Whether the replica was given version 0 by the last look.
    adopted: bool,
}

impl SlimeFeed {
    /// The directories at the root of `store`, for a follower with these options.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] if keys are trusted: the layout has no signatures.
    pub fn new(store: Arc<dyn Store>, options: &FollowerOptions) -> Result<Self> {
        Ok(Self { feed: feed(store, options)?, adopted: false })
    }
}

impl Source for SlimeFeed {
    /// The layout has no run identity; what the replica was given tells it.
    fn run_id(&self) -> Option<RunId> {
        None
    }

    fn newest(&mut self, replica: &mut Replica, _: Asked) -> Result<Newest> {
        self.adopted = replica.applied().is_none();
        let version = self.feed.survey(replica)?;
        Ok(Newest { version: Some(version), is_reached: false })
    }

    fn advance(&mut self, replica: &mut Replica, to: Version) -> Result<Advanced> {
        let mut advanced = self.feed.advance(replica, to)?;
        // Version 0 is not among the steps that were counted.
        advanced.versions += u64::from(std::mem::take(&mut self.adopted));
        Ok(advanced)
    }

    /// Nothing is written to a trainer's directory.
    fn acknowledge(&self, _: Ack) {}
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

/// Brings the checkpoint to `target` for a trainer that believes the directory to be `local`.
fn pull(follower: &Follower, local: &Path, target: Version) -> Result<()> {
    let ours = &follower.options().checkpoint_dir;
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
        let left = deadline.saturating_duration_since(Instant::now());
        match follower.prepare(Some(target)).and_then(|_| follower.wait_written(left)) {
            Err(Error::Busy { .. }) if Instant::now() < deadline => {
                thread::sleep(Duration::from_millis(20));
            }
            written => return written,
        }
    }
}

/// What slime's trainer sends to an engine.
#[derive(Deserialize)]
struct PullRequest {
    local_checkpoint_dir: PathBuf,
    target_version: Version,
}

/// `POST /pull_weights`, as slime's patched engines answer it: 200 or 400, `success` and `message`.
async fn pull_weights(
    State(follower): State<Follower>,
    Json(request): Json<PullRequest>,
) -> (StatusCode, Json<serde_json::Value>) {
    let pull = move || pull(&follower, &request.local_checkpoint_dir, request.target_version);
    let failure = match tokio::task::spawn_blocking(pull).await {
        Ok(Ok(())) => {
            return (StatusCode::OK, Json(serde_json::json!({ "success": true, "message": "Success." })));
        }
        Ok(Err(error)) => chain_text(&error),
        Err(_) => "the request panicked; see the follower's log".to_owned(),
    };
    (StatusCode::BAD_REQUEST, Json(serde_json::json!({ "success": false, "message": failure })))
}
