//! Asks of sessions. A session's tree is locked while a place in it is found, and while a turn is added; tokens are drawn
//! outside of that, those of its other asks beside them. Equal asks at once draw once.

use std::sync::{Arc, MutexGuard, PoisonError};

use driftless_bridge::SamplingParams;
use tokio::sync::{OwnedMutexGuard, watch};
use tokio::time::{Instant, timeout, timeout_at};

use super::draw::{self, Draw};
use super::record::Step;
use super::{Inner, Session};
use crate::message::{Answer, Ask, Refusal};
use crate::session::{Plan, Seen, Tree};

/// Messages of fewer bytes are encoded at once: that takes less time than to change threads twice on a busy machine.
const SHORT_BYTES: usize = 4 << 10;

/// An answer that is being drawn.
#[derive(Debug)]
pub(super) struct Drawing {
    plan: Arc<Plan>,
    /// Its other end goes once the answer is in the tree, or will not be.
    over: watch::Receiver<()>,
}

/// A place among the answers that are being drawn. It ends with this value.
struct Begun {
    session: Arc<Session>,
    plan: Arc<Plan>,
    _over: watch::Sender<()>,
}

impl Session {
    fn drawing(&self) -> MutexGuard<'_, Vec<Drawing>> {
        self.drawing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to draw, unless the same is being drawn.
    ///
    /// # Errors
    /// What to wait for. The answer is then in the tree, or may be drawn.
    fn begin(self: Arc<Self>, plan: Box<Plan>) -> Result<Begun, watch::Receiver<()>> {
        let mut drawing = self.drawing();
        if let Some(same) = drawing.iter().find(|drawing| plan.is_same(&drawing.plan)) {
            return Err(same.over.clone());
        }
        let plan: Arc<Plan> = plan.into();
        let (sender, over) = watch::channel(());
        drawing.push(Drawing { plan: plan.clone(), over });
        drop(drawing);
        Ok(Begun { session: self, plan, _over: sender })
    }

    /// Returns once all that is being drawn now has been.
    pub(super) async fn drawn(&self) {
        let drawing: Vec<_> = self.drawing().iter().map(|drawing| drawing.over.clone()).collect();
        for mut over in drawing {
            // An error is the end that is waited for.
            let _ = over.changed().await;
        }
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        self.session.drawing().retain(|drawing| !Arc::ptr_eq(&drawing.plan, &self.plan));
    }
}

impl<D: Draw> Inner<D> {
    /// Answers, whether or not somebody still waits for it.
    pub(super) async fn ask(self: Arc<Self>, name: String, mut ask: Ask) -> Result<Answer, Refusal> {
        self.check()?;
        let session = self.enter(&name).await?;
        self.look_aside();
        let Ok(_place) = session.asks.clone().try_acquire_owned() else {
            let most = self.settings.asks;
            return Err(Refusal::Busy(format!("session `{name}` has {most} requests already")));
        };
        let until = Instant::now() + self.settings.deadline;
        loop {
            let tree = self.tree(&name, &session).await?;
            let (tree, asked, seen) = self.clone().see(tree, ask).await?;
            ask = asked;
            let plan = match seen {
                Seen::Answered(at) => return Ok(tree.answer(at)),
                Seen::New(plan) => plan,
            };
            match session.clone().begin(plan) {
                Ok(begun) => {
                    let prompt = tree.prompt(&begun.plan);
                    drop(tree);
                    return self.turn(&name, begun, &ask, prompt).await;
                }
                Err(mut over) => {
                    drop(tree);
                    // An error is the end that is waited for.
                    let _ = timeout_at(until, over.changed()).await.map_err(|_| late(&name))?;
                }
            }
        }
    }

    /// The tree of a session that is open, locked.
    pub(super) async fn tree(
        &self,
        name: &str,
        session: &Arc<Session>,
    ) -> Result<OwnedMutexGuard<Tree>, Refusal> {
        let waiting = session.tree.clone().lock_owned();
        let tree = timeout(self.settings.deadline, waiting).await.map_err(|_| late(name))?;
        // It may have been closed meanwhile, and its name given to another one.
        match Arc::ptr_eq(&self.find(name)?, session) {
            true => Ok(tree),
            false => Err(Refusal::Over(format!("session `{name}` was closed"))),
        }
    }

    /// What is new in a long conversation is encoded on a thread of its own: that takes a while.
    pub(super) async fn see(
        self: Arc<Self>,
        tree: OwnedMutexGuard<Tree>,
        ask: Ask,
    ) -> Result<(OwnedMutexGuard<Tree>, Ask, Seen), Refusal> {
        let place = tree.place(&ask)?;
        if place.goes_on_by(SHORT_BYTES) && self.family.has_suffixes() {
            let seen = tree.see_at(&self.family, &ask, place)?;
            return Ok((tree, ask, seen));
        }
        let work = move || {
            let seen = tree.see_at(&self.family, &ask, place)?;
            Ok((tree, ask, seen))
        };
        let done = tokio::task::spawn_blocking(work).await;
        done.unwrap_or_else(|error| {
            Err(Refusal::Broken(format!("a conversation could not be read: {error}")))
        })
    }

    async fn turn(&self, name: &str, begun: Begun, ask: &Ask, prompt: Vec<i32>) -> Result<Answer, Refusal> {
        let (tokens, limit) = (prompt.len() as u64, self.settings.context as u64);
        if tokens >= limit {
            return Err(Refusal::ContextFull { tokens, limit });
        }
        let (session, plan) = (&begun.session, &begun.plan);
        let sampling = self.sampling(&session.opening.sampling, ask, (limit - tokens) as usize);
        let drawing = draw::whole(&self.draw, name, plan.number, prompt, sampling);
        let (made, draws) = timeout(self.settings.deadline, drawing).await.map_err(|_| late(name))??;
        let mut tree = self.tree(name, session).await?;
        // From here on nothing gives up: what the journal has, the tree has. Turns are in both in the same order.
        let turn = tree.turn(&self.family, Plan::clone(plan), made, draws)?;
        self.write(name, Step::Turned(Box::new(turn.clone()))).await?;
        let at = tree.commit(turn).map_err(Refusal::Broken)?;
        Ok(tree.answer(at))
    }

    /// The session's sampling within the client's bounds.
    fn sampling(&self, pinned: &SamplingParams, ask: &Ask, room: usize) -> SamplingParams {
        let mut sampling = pinned.clone();
        let room = u32::try_from(room).unwrap_or(u32::MAX);
        let most = ask.max_tokens.unwrap_or(u32::MAX).min(room);
        sampling.max_new_tokens = sampling.max_new_tokens.min(most).max(1);
        sampling.stop.extend(ask.stop.iter().cloned());
        for id in self.family.stops() {
            if !sampling.stop_token_ids.contains(id) {
                sampling.stop_token_ids.push(*id);
            }
        }
        sampling
    }
}

fn late(session: &str) -> Refusal {
    Refusal::Busy(format!("session `{session}` had no answer in time"))
}
