//! Followers that are told of versions.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use reqwest::{Method, Url};

use crate::client::{Answer, Client, WORDS_MAX, exchange, parse_url};
use crate::error::Result;

/// How long a follower may take to hear of a version.
const DEADLINE: Duration = Duration::from_secs(2);

/// Followers that hear of new versions: `POST <url>/notify`.
///
/// [`Followers::tell`] never waits. A follower has at most one call under way; what came meanwhile is told by one more
/// call behind it. A follower that cannot be told finds the version with its next look at the store. The log says so
/// once, until that follower hears again.
///
/// Dropping this waits for the calls under way, 4 s at most.
#[derive(Debug)]
pub struct Followers(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    client: Client,
    urls: Vec<Url>,
    states: Mutex<Vec<State>>,
    changed: Condvar,
}

/// What is known of one follower.
#[derive(Debug, Clone, Default)]
struct State {
    /// A call is under way.
    telling: bool,
    /// There was another version since that call began.
    again: bool,
    /// The last call failed.
    deaf: bool,
}

impl Followers {
    /// Followers by the URLs of their HTTP interfaces; `token` is what they want, if they want one.
    ///
    /// # Errors
    /// [`BadUrl`](crate::Error::BadUrl) for something that is no URL of a server; [`Start`](crate::Error::Start).
    pub fn new(urls: &[String], token: Option<&str>) -> Result<Self> {
        let path = |text: &String| {
            let mut url = parse_url("follower", text)?;
            if let Ok(mut path) = url.path_segments_mut() {
                path.pop_if_empty().push("notify");
            }
            Ok(url)
        };
        let urls = urls.iter().map(path).collect::<Result<Vec<_>>>()?;
        let states = Mutex::new(vec![State::default(); urls.len()]);
        Ok(Self(Arc::new(Shared { client: Client::new(token)?, urls, states, changed: Condvar::new() })))
    }

    /// Has all followers look at the store, and returns at once.
    pub fn tell(&self) {
        for (index, state) in self.0.states().iter_mut().enumerate() {
            if std::mem::replace(&mut state.telling, true) {
                state.again = true;
            } else {
                self.0.client.runtime.spawn(self.0.clone().tell_one(index));
            }
        }
    }
}

impl Drop for Followers {
    fn drop(&mut self) {
        let is_telling = |states: &mut Vec<State>| states.iter().any(|state| state.telling);
        // One call, and one more behind it.
        drop(self.0.changed.wait_timeout_while(self.0.states(), 2 * DEADLINE, is_telling));
    }
}

impl Shared {
    fn states(&self) -> MutexGuard<'_, Vec<State>> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn tell_one(self: Arc<Self>, index: usize) {
        loop {
            let request = self.client.request(Method::POST, self.urls[index].clone());
            let heard = exchange(request, WORDS_MAX as u64, |_| {}, DEADLINE).await;
            if self.has_told(index, heard) {
                return;
            }
        }
    }

    /// Notes what became of a call. True unless there was another version meanwhile.
    fn has_told(&self, index: usize, heard: Result<Answer>) -> bool {
        let heard =
            heard.and_then(|answer| if answer.status.is_success() { Ok(()) } else { Err(answer.refusal()) });
        let mut states = self.states();
        let state = &mut states[index];
        let was_deaf = std::mem::replace(&mut state.deaf, heard.is_err());
        let url = &self.urls[index];
        match heard {
            Err(error) if !was_deaf => {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(%url, error, "a follower does not hear of versions; it finds them by itself");
            }
            Ok(()) if was_deaf => tracing::info!(%url, "the follower hears of versions again"),
            _ => {}
        }
        if std::mem::take(&mut state.again) {
            return false;
        }
        state.telling = false;
        self.changed.notify_all();
        true
    }
}
