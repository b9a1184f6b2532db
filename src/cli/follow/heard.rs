//! How `driftless follow` hears of versions in a store that is a directory of this host: from the kernel.

use crate::cli::shared::slime::Layout;
use driftless::store::os::inotify::Watch;
use driftless::store::wait::Stop;
use driftless::store::{Store, directory};
use driftless::transport::{Follower, Run};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// Between two looks whether there is a run to hear of.
const AGAIN: Duration = Duration::from_secs(1);

/// A run in a directory.
struct Place {
    root: PathBuf,
    store: Arc<dyn Store>,
    run: String,
    model: String,
}

/// Has `follower` look at once when a version is committed, until `stop`. Polls go on: they find what the kernel does not
/// tell of, as on a file system of the network.
pub(super) fn hear(
    args: &super::Args,
    store: Arc<dyn Store>,
    follower: &Follower,
    stop: &Stop,
) -> io::Result<()> {
    let Some(root) = directory(&args.run.store).filter(|_| args.run.layout == Layout::Driftless) else {
        return Ok(());
    };
    let options = follower.options();
    let place = Place { root, store, run: options.run.clone(), model: options.model.clone() };
    let (follower, stop) = (follower.clone(), stop.clone());
    let listen = move || {
        let mut watch: Option<Watch> = None;
        while !stop.is_stopped() {
            if watch.as_ref().is_none_or(Watch::is_over) {
                let told = follower.clone();
                match place.watch(move || _ = told.notify()) {
                    Some(Ok(Some(begun))) => {
                        tracing::info!(run = place.run, "hears of versions from the store's directory");
                        // One may have come before.
                        follower.notify();
                        watch = Some(begun);
                    }
                    Some(Ok(None)) => {
                        return tracing::info!(
                            run = place.run,
                            "polls: the store's file system does not tell of versions"
                        );
                    }
                    Some(Err(error)) => tracing::debug!(run = place.run, %error, "polls"),
                    None => {}
                }
            }
            thread::park_timeout(AGAIN);
        }
    };
    thread::Builder::new().name("head".to_owned()).spawn(listen).map(drop)
}

impl Place {
    /// As [`Watch::of`], for the hint at the newest version; `None` before there is a run.
    fn watch(&self, put: impl Fn() + Send + 'static) -> Option<io::Result<Option<Watch>>> {
        let head = Run::open(self.store.clone(), &self.run).ok()?.head_key(&self.model).ok()?;
        let path = self.root.join(head.as_str());
        Some(Watch::of(path.parent()?, head.name(), put))
    }
}
