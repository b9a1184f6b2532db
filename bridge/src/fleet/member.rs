//! One engine of a fleet: what is known of it, and how that is kept current.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use driftless_store::chain_text;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::newest::Known;
use super::phase::Wanted;
use super::settled::Settled;
use super::usage::{Cause, Clock, Free, Marks, Usage};
use crate::engine::{Attached, Decoded, Engine, Expected, Identity, Label};
use crate::error::{Error, Result};

/// Shortest time between two looks at an engine.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(50);

/// The right to look at an engine; inside, when the last look ended.
type Turn = tokio::sync::OwnedMutexGuard<Option<Instant>>;

/// An engine of the fleet.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) engine: Arc<dyn Engine>,
    pub(super) expected: Expected,
    pub(super) shared: Arc<Shared>,
    /// Notified after its own task may have something to do: it went down, is to drain or has drained, or another version
    /// is wanted.
    pub(super) changed: Notify,
    /// Whether it is no longer in the fleet.
    gone: watch::Sender<bool>,
    state: Mutex<Standing>,
    clock: Mutex<Clock>,
    looking: Arc<tokio::sync::Mutex<Option<Instant>>>,
}

/// What the engines of a fleet share.
#[derive(Debug)]
pub(super) struct Shared {
    /// Absent where any version will do.
    pub(super) known: Option<Arc<Known>>,
    pub(super) settled: Settled,
    /// The newest version that was asked for.
    pub(super) wanted: Mutex<Option<Wanted>>,
    /// Tells the task of places that an engine may have one.
    pub(super) stirred: Notify,
    /// Of each engine.
    pub(super) places: usize,
}

impl Shared {
    pub(super) fn wanted(&self) -> MutexGuard<'_, Option<Wanted>> {
        // Nothing in here can be left half-changed by a panic.
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What an engine says when it is looked at.
struct Answer {
    /// Absent if it was up before.
    identity: Option<Identity>,
    serving: Option<String>,
}

/// What is known of an engine.
#[derive(Debug, Clone)]
pub(super) struct Standing {
    /// Which engine it is: no other one of the fleet ever has this.
    pub(super) id: u64,
    /// Absent until it is attached.
    pub(super) identity: Option<Identity>,
    /// Whether it answered the last time it was asked anything.
    pub(super) up: bool,
    /// When it went up or down, or joined.
    pub(super) since: Instant,
    /// Until when it may finish its requests, where it is to go.
    pub(super) draining: Option<Instant>,
    /// Whether it answered as an engine that does not fit, the last time that it did not do.
    pub(super) refused: bool,
    /// What it serves, as far as known.
    pub(super) serving: Option<String>,
    pub(super) in_flight: usize,
    /// Whether it was waited for in vain, and has not caught up since.
    pub(super) left: bool,
    /// Why it did not do what it was asked, the last time that happened.
    pub(super) failure: Option<String>,
    /// The failure that the log told of last, until the engine gives a whole reply.
    pub(super) told: Option<String>,
}

impl Member {
    /// The engine, which is out until it is attached.
    pub(super) fn new(id: u64, engine: Arc<dyn Engine>, expected: Expected, shared: Arc<Shared>) -> Self {
        let now = Instant::now();
        let (state, clock) = (Standing::new(id, now).into(), Clock::new(shared.places, now).into());
        let (changed, gone) = (Notify::new(), watch::Sender::new(false));
        Self { engine, expected, shared, changed, gone, state, clock, looking: Arc::default() }
    }

    fn clock(&self) -> MutexGuard<'_, Clock> {
        self.clock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts time up to now, behind which the engine is in this state.
    fn turn_to(&self, state: &Standing, now: Instant) {
        let wanted = self.shared.wanted().as_ref().map(|wanted| wanted.label.clone());
        self.clock().turn(now, state.in_flight, Free::of(state, wanted.as_ref()));
    }

    /// Another version is wanted.
    pub(super) fn rewanted(&self) {
        self.turn_to(&self.state(), Instant::now());
        self.changed.notify_one();
    }

    /// What its places were doing up to now.
    pub(super) fn usage(&self) -> Usage {
        self.clock().read(Instant::now())
    }

    /// A request takes a place, from this moment on.
    pub(super) fn taken(&self) -> Instant {
        let mut state = self.state();
        let now = Instant::now();
        state.in_flight += 1;
        self.turn_to(&state, now);
        now
    }

    /// Attaches the engine.
    pub(super) async fn attach(&self) -> Result<()> {
        self.answered(self.ask().await?);
        Ok(())
    }

    /// What the engine says that it serves.
    async fn serving(&self) -> Result<Option<String>> {
        let serving = self.engine.label().await?;
        if let Some(label) = &serving {
            self.check_version("its version", label).await?;
        }
        Ok(serving)
    }

    /// Refuses a label, told by `call`, of a version that was not published.
    pub(super) async fn check_version(&self, call: &str, label: &str) -> Result<()> {
        match &self.shared.known {
            Some(known) => known.check(self.engine.url(), call, label).await,
            None => Ok(()),
        }
    }

    /// The engine, as it was last attached.
    pub(super) fn attached(&self) -> Option<Attached> {
        Some(Attached::new(self.engine.clone(), self.state().identity.clone()?))
    }

    /// The engine, and what there is to say about it where it does not do.
    pub(super) fn describe(&self) -> String {
        format!("{} ({})", self.engine.url(), self.state().describe())
    }

    pub(super) fn state(&self) -> MutexGuard<'_, Standing> {
        // Nothing in here can be left half-changed by a panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the engine what it serves. One that was down is attached anew: it may have come back as another.
    pub(super) async fn look(&self) {
        let turn = self.looking.clone().lock_owned().await;
        self.look_in(turn).await;
    }

    /// As [`Member::look`], without waiting for the answer, and not while another look runs or just ended.
    pub(super) fn look_aside(self: Arc<Self>) {
        if let Some(turn) = self.turn() {
            tokio::spawn(async move { self.look_in(turn).await });
        }
    }

    /// As [`Member::look`], unless another look runs or just ended.
    pub(super) async fn look_in_turn(&self) {
        if let Some(turn) = self.turn() {
            self.look_in(turn).await;
        }
    }

    fn turn(&self) -> Option<Turn> {
        let turn = self.looking.clone().try_lock_owned().ok()?;
        turn.is_none_or(|last| last.elapsed() >= LOOK_EVERY).then_some(turn)
    }

    async fn look_in(&self, mut turn: Turn) {
        match self.ask().await {
            Ok(answer) => self.answered(answer),
            Err(error) => self.failed(&error),
        }
        *turn = Some(Instant::now());
    }

    async fn ask(&self) -> Result<Answer> {
        let (up, is_new) = {
            let state = self.state();
            (state.up, state.identity.is_none())
        };
        let identity = match up {
            true => None,
            // The log tells of it.
            false if is_new => {
                Some(Attached::attach(self.engine.clone(), &self.expected).await?.identity().clone())
            }
            false => Some(self.engine.identify(&self.expected).await?),
        };
        Ok(Answer { identity, serving: self.serving().await? })
    }

    fn answered(&self, answer: Answer) {
        let mut state = self.state();
        if !state.up {
            state.since = Instant::now();
        }
        (state.up, state.serving) = (true, answer.serving);
        state.identity = answer.identity.or(state.identity.take());
        self.turn_to(&state, Instant::now());
        drop(state);
        self.shared.stirred.notify_one();
    }

    /// A reply says that it serves this.
    pub(super) fn serves(&self, label: String) {
        let mut state = self.state();
        state.serving = Some(label);
        self.turn_to(&state, Instant::now());
        drop(state);
        self.shared.stirred.notify_one();
    }

    /// A request is no longer under way. It had got on so far, and ended for `cause` unless it is whole; `again` says why
    /// it was made again. Returns what it drew that stays.
    pub(super) fn freed(&self, marks: Marks, cause: Option<Cause>, again: Option<Cause>) -> Decoded {
        let mut state = self.state();
        let now = Instant::now();
        let spent = marks.spent(now, cause.is_none());
        state.in_flight -= 1;
        self.turn_to(&state, now);
        self.clock().end(spent, cause, again);
        let has_drained = state.draining.is_some() && state.in_flight == 0;
        drop(state);
        if has_drained {
            self.changed.notify_one();
        }
        self.shared.stirred.notify_one();
        Decoded { time: spent.decoded, tokens: spent.tokens_kept }
    }

    /// Gives it no more requests, and those that it has until then; the earlier of two times counts.
    pub(super) fn drain(&self, until: Instant) {
        let mut state = self.state();
        state.draining = Some(state.draining.map_or(until, |earlier| earlier.min(until)));
        self.turn_to(&state, Instant::now());
        drop(state);
        self.changed.notify_one();
    }

    /// Until when it may finish its requests, and whether it has none.
    pub(super) fn drains(&self) -> (Option<Instant>, bool) {
        let state = self.state();
        (state.draining, state.in_flight == 0)
    }

    /// It is no longer in the fleet.
    pub(super) fn leave(&self) {
        self.clock().close(Instant::now());
        self.gone.send_replace(true);
    }

    /// Waits until it is no longer in the fleet.
    pub(super) async fn gone(&self) {
        // The other end is this engine's own.
        let _ = self.gone.subscribe().wait_for(|gone| *gone).await;
    }

    /// Which engine it is.
    pub(super) fn id(&self) -> u64 {
        self.state().id
    }

    /// Takes the engine out until it is attached again.
    pub(super) fn failed(&self, error: &Error) {
        let failure = chain_text(error);
        let mut state = self.state();
        let was_up = state.up;
        let now = Instant::now();
        let is_news = state.failed(&failure, !error.is_transient(), now);
        self.turn_to(&state, now);
        drop(state);
        if was_up {
            self.changed.notify_one();
        }
        if is_news {
            tracing::warn!(engine = self.engine.url(), error = failure, "engine is out");
        }
    }
}

impl Standing {
    /// Of an engine that joins.
    pub(super) fn new(id: u64, since: Instant) -> Self {
        Self {
            id,
            identity: None,
            up: false,
            since,
            draining: None,
            refused: false,
            serving: None,
            in_flight: 0,
            left: false,
            failure: None,
            told: None,
        }
    }

    /// Only what routing goes by.
    pub(super) fn for_routing(&self) -> Self {
        let Self { id, up, since, draining, in_flight, .. } = *self;
        Self { up, draining, in_flight, serving: self.serving.clone(), ..Self::new(id, since) }
    }

    /// Whether the engine is up and stays, and serves this version or a later one of its run; any will do where none is asked
    /// for.
    pub(super) fn may_take(&self, minimum: Option<&Label>) -> bool {
        self.up
            && self.draining.is_none()
            && minimum.is_none_or(|minimum| self.label().is_some_and(|label| label.at_least(minimum)))
    }

    /// It failed, or was refused. Returns whether the log has to tell of it: an engine that tells its version and fails
    /// at each generation comes back and goes out again all the time. That one which was out does not answer is no news.
    fn failed(&mut self, failure: &str, is_refused: bool, now: Instant) -> bool {
        if self.up {
            self.since = now;
        }
        self.refused = is_refused;
        let is_news = (self.up || is_refused) && self.told.as_deref() != Some(failure);
        if is_news {
            self.told = Some(failure.to_owned());
        }
        (self.up, self.failure) = (false, Some(failure.to_owned()));
        is_news
    }

    /// It gave a whole reply, and be it one that is too old to use: what it failed with is over.
    pub(super) fn replied(&mut self) {
        self.told = None;
    }

    fn label(&self) -> Option<Label> {
        self.serving.as_deref()?.parse().ok()
    }

    /// What there is to say about an engine that does not do.
    pub(super) fn describe(&self) -> String {
        match (&self.failure, self.up) {
            (Some(failure), false) => failure.clone(),
            _ => format!("serves {}", self.serving.as_deref().unwrap_or("nothing known")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_is_told_once_until_a_whole_reply_came() {
        let mut state = Standing { up: true, ..Standing::new(0, Instant::now()) };
        assert!(state.failed("a", false, Instant::now()) && !state.up, "it was up");
        assert!(!state.failed("b", false, Instant::now()), "it is out already");
        for (failure, is_news) in [("a", false), ("b", true), ("b", false)] {
            state.up = true;
            assert_eq!(state.failed(failure, false, Instant::now()), is_news, "{failure}");
            assert_eq!(state.describe(), failure);
        }
        state.replied();
        state.up = true;
        assert!(state.failed("b", false, Instant::now()));
    }

    #[test]
    fn failed_engine_that_comes_and_is_refused_is_told_of_once() {
        let mut state = Standing::new(0, Instant::now());
        for (failure, is_refused, is_news) in [
            ("no answer", false, false),
            ("another model", true, true),
            ("another model", true, false),
            ("no answer", false, false),
            ("another model", true, false),
            ("another dtype", true, true),
        ] {
            assert_eq!(state.failed(failure, is_refused, Instant::now()), is_news, "{failure}");
        }
    }
}
