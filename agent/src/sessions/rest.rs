//! Sessions that nobody asks for leave memory. The journal has them for some days more, for whoever exports them.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{SystemTime, UNIX_EPOCH};

use super::record::Step;
use super::{Draw, Inner, Session};
use crate::message::Refusal;

/// Sessions that are looked at, and let go, at once.
const LOOK: usize = 16;

/// What tells the seconds since 1970.
#[derive(Clone)]
pub struct Clock(Arc<dyn Fn() -> u64 + Send + Sync>);

impl Clock {
    /// A clock of one's own.
    #[must_use]
    pub fn new(now: impl Fn() -> u64 + Send + Sync + 'static) -> Self {
        Clock(Arc::new(now))
    }

    pub(super) fn now(&self) -> u64 {
        (self.0)()
    }
}

impl Default for Clock {
    /// This host's.
    fn default() -> Self {
        Clock::new(|| SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs())
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Clock")
    }
}

impl Session {
    /// Notes an ask, unless the last one was too long ago.
    pub(super) fn is_in_time(&self, now: u64, idle: u64) -> bool {
        let is_in_time = now.saturating_sub(self.asked.load(Ordering::Relaxed)) <= idle;
        if is_in_time {
            self.asked.store(now, Ordering::Relaxed);
        }
        is_in_time
    }
}

impl<D: Draw> Inner<D> {
    /// Has idle sessions leave, if there are any, while others go on.
    pub(super) fn look_aside(self: &Arc<Self>) {
        let (now, idle) = (self.settings.clock.now(), self.settings.idle.as_secs());
        let is_due = self.book().rests.first().is_some_and(|(asked, _)| now.saturating_sub(*asked) > idle);
        if is_due {
            let inner = self.clone();
            tokio::spawn(async move { inner.look().await });
        }
    }

    /// Has a few idle sessions leave.
    pub(super) async fn look(&self) {
        for _ in 0..LOOK {
            let Some((name, session)) = self.idle() else { return };
            if let Err(refusal) = self.let_go(&name, &session).await {
                tracing::warn!(session = name, %refusal, "an idle session could not be let go");
                return;
            }
        }
    }

    /// A session that nobody has asked for long enough. It is taken off the list.
    fn idle(&self) -> Option<(String, Arc<Session>)> {
        let (now, idle) = (self.settings.clock.now(), self.settings.idle.as_secs());
        let mut book = self.book();
        for _ in 0..LOOK {
            // Asked for at this time at the earliest: another ask changes nothing in the list.
            if now.saturating_sub(book.rests.first()?.0) <= idle {
                return None;
            }
            let (_, name) = book.rests.pop_first()?;
            let Some(session) = book.open.get(&name).cloned() else { continue };
            let asked = session.asked.load(Ordering::Relaxed);
            if now.saturating_sub(asked) > idle {
                return Some((name, session));
            }
            book.rests.insert((asked, name));
        }
        None
    }

    async fn let_go(&self, name: &str, session: &Arc<Session>) -> Result<(), Refusal> {
        let is_asked = session.asks.available_permits() < self.settings.asks;
        let Some(_tree) = session.tree.try_lock().ok().filter(|_| !is_asked) else {
            self.book().rests.insert((self.settings.clock.now(), name.to_owned()));
            return Ok(());
        };
        self.write(name, Step::Rested).await?;
        let mut book = self.book();
        book.open.remove(name);
        book.closed.insert(name, self.settings.sessions);
        Ok(())
    }
}
