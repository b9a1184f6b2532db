//! Sessions of many clients at once, over whatever draws tokens.

mod ask;
mod draw;
mod record;
mod rest;

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use driftless_bridge::SamplingParams;
use tokio::sync::Semaphore;

use crate::error::Result;
use crate::family::Family;
use crate::journal::Journal;
use crate::message::{Answer, Ask, Converse, Refusal};
use crate::session::{Bounds, Sample, Seen, Thoughts, Tree};
use ask::Drawing;
pub use draw::Draw;
use record::{Record, Step};
pub use rest::Clock;

/// How sessions are kept.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Name of the model, as clients see it.
    pub model: String,
    /// Tokens that prompt and answer may have together.
    pub context: usize,
    /// What one session may hold.
    pub bounds: Bounds,
    /// What becomes of thoughts once the user asks something else.
    pub thoughts: Thoughts,
    /// Sessions that are open at once, at most. As many names of closed ones are not given again; older ones are
    /// forgotten.
    pub sessions: usize,
    /// Asks of one session that are answered at once, at most.
    pub asks: usize,
    /// How long an ask may wait for an equal one, and how long its draws may take.
    pub deadline: Duration,
    /// A session that nobody asks for as long takes no further asks. One of a journal leaves memory.
    pub idle: Duration,
    /// A journal that is opened loses such sessions once nobody has asked for them for as long.
    pub kept: Duration,
    /// Whether a journal is opened for what its sessions have: all that are in it are open, and none is lost.
    pub all: bool,
    /// Tells when sessions are asked for.
    pub clock: Clock,
    /// Opens sessions of any name that a client asks, if there is one.
    pub visitors: Option<Opening>,
}

impl Default for Settings {
    /// A context of 32,768 tokens, 65,536 sessions, 64 asks of each, an hour for an ask, a day between two, and a week in a
    /// journal.
    fn default() -> Self {
        Settings {
            model: "driftless".to_owned(),
            context: 32_768,
            bounds: Bounds::default(),
            thoughts: Thoughts::default(),
            sessions: 65_536,
            asks: 64,
            deadline: Duration::from_secs(3_600),
            idle: Duration::from_secs(86_400),
            kept: Duration::from_secs(7 * 86_400),
            all: false,
            clock: Clock::default(),
            visitors: None,
        }
    }
}

/// What a session is opened with.
#[derive(Debug, Clone, PartialEq)]
pub struct Opening {
    /// What a client must know; none lets in all.
    pub key: Option<String>,
    /// How its tokens are drawn. A client's own wishes can only make answers shorter.
    pub sampling: SamplingParams,
}

/// Open sessions, kept in a journal or by whoever draws their tokens.
#[derive(Debug)]
pub struct Sessions<D> {
    inner: Arc<Inner<D>>,
}

#[derive(Debug)]
struct Inner<D> {
    family: Family,
    draw: D,
    journal: Option<Journal>,
    settings: Settings,
    book: Mutex<Book>,
}

/// Which sessions there are.
#[derive(Debug, Default)]
struct Book {
    open: HashMap<String, Arc<Session>>,
    closed: Closed,
    /// Open sessions of a journal, by a time before which nobody can have asked for them last.
    rests: BTreeSet<(u64, String)>,
}

/// Names of sessions that were closed, the latest last.
#[derive(Debug, Default)]
struct Closed {
    names: HashSet<String>,
    order: VecDeque<String>,
}

impl Closed {
    fn insert(&mut self, name: &str, most: usize) {
        if self.names.insert(name.to_owned()) {
            self.order.push_back(name.to_owned());
        }
        while self.order.len() > most {
            self.order.pop_front().map(|oldest| self.names.remove(&oldest));
        }
    }
}

#[derive(Debug)]
struct Session {
    opening: Opening,
    tree: Arc<tokio::sync::Mutex<Tree>>,
    asks: Arc<Semaphore>,
    /// Seconds since 1970 of the last ask.
    asked: AtomicU64,
    drawing: Mutex<Vec<Drawing>>,
}

impl<D: Draw> Sessions<D> {
    /// Reads what the journal has, and goes on from there.
    ///
    /// # Errors
    /// As [`Journal::open`], and [`crate::Error::Journal`] for records that are none of sessions.
    pub fn open_journal(journal: &Path, family: Family, draw: D, settings: Settings) -> Result<Self> {
        let mut book = Book::default();
        let journal = Journal::open(journal, |records| {
            let (read, kept) = replay(records, &settings)?;
            book = read;
            Ok(kept)
        })?;
        Ok(Self::of(family, draw, Some(journal), settings, book))
    }

    /// Sessions that end with this value. What draws their tokens keeps them, if anything does.
    #[must_use]
    pub fn in_memory(family: Family, draw: D, settings: Settings) -> Self {
        Self::of(family, draw, None, settings, Book::default())
    }

    fn of(family: Family, draw: D, journal: Option<Journal>, settings: Settings, book: Book) -> Self {
        Sessions { inner: Arc::new(Inner { family, draw, journal, settings, book: Mutex::new(book) }) }
    }

    /// The template and the tokenizer that conversations are written with.
    #[must_use]
    pub fn family(&self) -> &Family {
        &self.inner.family
    }

    /// Opens a session. One that is open with the same key and sampling stays as it is.
    ///
    /// # Errors
    /// [`Refusal::Invalid`] if it is open with others, [`Refusal::Over`] if it was closed, [`Refusal::Busy`] if there
    /// are too many.
    pub async fn open(&self, session: &str, opening: Opening) -> Result<(), Refusal> {
        self.inner.open(session, opening).await.map(drop)
    }

    /// What can be trained of a session: [`Tree::samples`]. Answers that are being drawn are waited for.
    ///
    /// # Errors
    /// [`Refusal::Unknown`] and [`Refusal::Over`].
    pub async fn samples(&self, session: &str, auxiliary: bool, most: usize) -> Result<Vec<Sample>, Refusal> {
        let session = self.inner.find(session)?;
        session.drawn().await;
        let tree = session.tree.lock().await;
        Ok(tree.samples(auxiliary, most))
    }

    /// Closes a session: it takes no further asks, and forgets all of its turns and what is being drawn.
    ///
    /// # Errors
    /// [`Refusal::Unknown`], [`Refusal::Over`] if it was closed before, and [`Refusal::Broken`] for the journal.
    pub async fn close(&self, session: &str) -> Result<(), Refusal> {
        let found = self.inner.find(session)?;
        // What is being written is written before the end.
        let _tree = found.tree.lock().await;
        self.inner.write(session, Step::Closed).await?;
        let mut book = self.inner.book();
        book.open.remove(session);
        // Without a journal a name that was given once is not told from one that never was.
        if self.inner.journal.is_some() {
            book.closed.insert(session, self.inner.settings.sessions);
        }
        Ok(())
    }

    /// Names of the sessions that are open, in order.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.inner.book().open.keys().cloned().collect();
        names.sort();
        names
    }
}

/// A session of a journal.
struct Read {
    opening: Opening,
    tree: Tree,
    /// When it was asked for last.
    asked: u64,
    is_rested: bool,
}

/// The sessions of a journal, and whether each of its records is still of use.
fn replay(records: &[&[u8]], settings: &Settings) -> Result<(Book, Vec<bool>), String> {
    let (now, mut book) = (settings.clock.now(), Book::default());
    let mut read: HashMap<String, Read> = HashMap::new();
    let mut names = Vec::with_capacity(records.len());
    for bytes in records {
        let Record { session, step, at, .. } = Record::from_bytes(bytes)?;
        // Older journals do not say when.
        let asked = at.unwrap_or(now);
        names.push((session.clone(), step == Step::Closed));
        let absent = || format!("a step of `{session}`, which is not open");
        match step {
            Step::Opened { key, sampling } => {
                let opening = Opening { key, sampling: sampling.into() };
                let tree = Tree::new(settings.bounds, settings.thoughts);
                let new = Read { opening, tree, asked, is_rested: false };
                if let Some(before) = read.insert(session.clone(), new).filter(|_| settings.all) {
                    // Its name was forgotten, and given again.
                    let name =
                        (1..).map(|nth| format!("{session}~{nth}")).find(|name| !read.contains_key(name));
                    name.map(|name| read.insert(name, before));
                }
            }
            Step::Turned(turn) => {
                let found = read.get_mut(&session).ok_or_else(absent)?;
                found.tree.commit(*turn).map_err(|reason| format!("session `{session}`: {reason}"))?;
                found.asked = asked;
            }
            Step::Rested => read.get_mut(&session).ok_or_else(absent)?.is_rested = true,
            Step::Closed => {
                read.remove(&session);
                book.closed.insert(&session, settings.sessions);
            }
        }
    }
    let age = |read: &Read| now.saturating_sub(read.asked);
    let is_rested = |read: &Read| !settings.all && (read.is_rested || age(read) > settings.idle.as_secs());
    read.retain(|_, read| !is_rested(read) || age(read) <= settings.kept.as_secs());
    // The end of a session is of use while its name is not given again.
    let is_kept = |(name, is_end): &(String, bool)| match is_end {
        _ if settings.all => true,
        true => book.closed.names.contains(name),
        false => read.contains_key(name),
    };
    let kept = names.iter().map(is_kept).collect();
    for (name, read) in read {
        if is_rested(&read) {
            book.closed.insert(&name, settings.sessions);
            continue;
        }
        book.rests.insert((read.asked, name.clone()));
        book.open.insert(name, Session::of(read.opening, read.tree, read.asked, settings));
    }
    Ok((book, kept))
}

impl Session {
    fn of(opening: Opening, tree: Tree, asked: u64, settings: &Settings) -> Arc<Self> {
        let asks = Arc::new(Semaphore::new(settings.asks));
        let tree = Arc::new(tokio::sync::Mutex::new(tree));
        let (asked, drawing) = (AtomicU64::new(asked), Mutex::default());
        Arc::new(Session { opening, tree, asks, asked, drawing })
    }
}

impl<D: Draw> Inner<D> {
    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, session: &str) -> Result<Arc<Session>, Refusal> {
        let book = self.book();
        if let Some(found) = book.open.get(session) {
            return Ok(found.clone());
        }
        match book.closed.names.contains(session) {
            true => Err(Refusal::Over(format!("session `{session}` was closed"))),
            false => Err(Refusal::Unknown(format!("there is no session `{session}`"))),
        }
    }

    /// The session, opened for a visitor if need be.
    async fn enter(&self, session: &str) -> Result<Arc<Session>, Refusal> {
        let found = match (self.find(session), &self.settings.visitors) {
            (Err(Refusal::Unknown(_)), Some(opening)) => self.open(session, opening.clone()).await?,
            (found, _) => found?,
        };
        let idle = self.settings.idle.as_secs();
        match found.is_in_time(self.settings.clock.now(), idle) {
            true => Ok(found),
            false => Err(Refusal::Over(format!("session `{session}` had no request for {idle} s"))),
        }
    }

    async fn open(&self, session: &str, opening: Opening) -> Result<Arc<Session>, Refusal> {
        let same = |found: Arc<Session>| match found.opening == opening {
            true => Ok(found),
            false => {
                Err(Refusal::Invalid(format!("session `{session}` is open with another key or sampling")))
            }
        };
        match self.find(session) {
            Err(Refusal::Unknown(_)) => {}
            found => return found.and_then(same),
        }
        let most = self.settings.sessions;
        if self.book().open.len() >= most {
            self.look().await;
        }
        if self.book().open.len() >= most {
            return Err(Refusal::Busy(format!("{most} sessions are open, and no more are kept")));
        }
        let step = Step::Opened { key: opening.key.clone(), sampling: (&opening.sampling).into() };
        let tree = Tree::new(self.settings.bounds, self.settings.thoughts);
        let now = self.settings.clock.now();
        let new = Session::of(opening.clone(), tree, now, &self.settings);
        // Whoever is first in the book writes it; asks of it wait for that.
        let written = new.tree.clone().lock_owned().await;
        let found = self.book().open.entry(session.to_owned()).or_insert_with(|| new.clone()).clone();
        if !Arc::ptr_eq(&found, &new) {
            return same(found);
        }
        if let Err(refusal) = self.write(session, step).await {
            self.book().open.remove(session);
            return Err(refusal);
        }
        // Without a journal whoever opened it closes it.
        if self.journal.is_some() {
            self.book().rests.insert((now, session.to_owned()));
        }
        drop(written);
        Ok(found)
    }

    /// Refuses what could not be kept, before anything is drawn for it.
    fn check(&self) -> Result<(), Refusal> {
        let Some(journal) = &self.journal else { return Ok(()) };
        journal.check().map_err(|error| Refusal::Broken(error.to_string()))
    }

    async fn write(&self, session: &str, step: Step) -> Result<(), Refusal> {
        let Some(journal) = &self.journal else { return Ok(()) };
        let broken = |error: &dyn std::error::Error| Refusal::Broken(format!("session `{session}`: {error}"));
        let at = self.settings.clock.now();
        let bytes = Record::new(session, step, at).into_bytes().map_err(|error| broken(&error))?;
        journal.append(bytes).await.map_err(|error| broken(&error))
    }
}

#[async_trait]
impl<D: Draw> Converse for Sessions<D> {
    async fn ask(&self, session: &str, ask: Ask) -> Result<Answer, Refusal> {
        // A client that goes away leaves a turn that is drawn and kept, for when it comes back.
        let answering = tokio::spawn(self.inner.clone().ask(session.to_owned(), ask));
        answering.await.unwrap_or_else(|error| Err(Refusal::Broken(format!("an answer broke off: {error}"))))
    }

    async fn count(&self, session: &str, ask: Ask) -> Result<u64, Refusal> {
        let found = self.inner.enter(session).await?;
        let tree = self.inner.tree(session, &found).await?;
        let (tree, _, seen) = self.inner.clone().see(tree, ask).await?;
        Ok(match seen {
            Seen::Answered(at) => tree.answer(at).prompt_tokens,
            Seen::New(plan) => plan.cached + plan.given.len() as u64,
        })
    }

    async fn close(&self, session: &str, _key: Option<&str>) -> Result<(), Refusal> {
        Sessions::close(self, session).await
    }

    fn check(&self) -> Result<(), Refusal> {
        self.inner.check()
    }

    fn opens(&self, session: &str, key: Option<&str>) -> bool {
        let found = self.inner.book().open.get(session).cloned();
        let opening = found.as_ref().map(|found| &found.opening).or(self.inner.settings.visitors.as_ref());
        opening.is_some_and(|opening| opening.key.as_deref().is_none_or(|expected| key == Some(expected)))
    }

    fn model(&self) -> &str {
        &self.inner.settings.model
    }
}
