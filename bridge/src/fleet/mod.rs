//! Many engines: routing, a minimum version per request, retries, waiting for a version. Some may be down.

mod lease;
mod member;
mod newest;
mod phase;
mod places;
mod queue;
mod roster;
mod route;
mod settled;
mod usage;
mod wait;

use std::sync::Arc;
use std::time::Duration;

use derive_setters::Setters;

use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::engine::{Attached, Ca, Deadlines, Expected, GenerateRequest, Generation, Label, Tell};
use crate::error::{Error, Result};
use crate::keys::Keys;
use lease::{Answer, Attempt, Lease};
use member::{LOOK_EVERY, Member, Standing};
pub use newest::Newest;
pub use phase::{Phase, PhaseTold};
use queue::{Queue, Waiter};
use roster::{Roster, check_once};
pub use route::Route;
use route::{Near, Router};
pub use usage::{Cause, Free, Tokens, Usage};
use wait::{Bounds, Seen, Verdict, judge};

/// How much longer than enough engines the others are waited for, unless told.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long an engine may take to answer, and to come to a version, before it is lost, unless told.
const JOINING: Duration = Duration::from_secs(600);
const SYNCING: Duration = Duration::from_secs(300);

/// What there is to say of a fleet of which every engine was taken away.
const NO_ENGINE: &str = "the fleet has no engine";

/// Options of a [`Fleet`].
#[derive(Debug, Clone, Setters)]
#[setters(prefix = "with_", strip_option)]
#[non_exhaustive]
pub struct FleetOptions {
    /// Our requests under way on one engine at a time.
    pub concurrency: usize,
    /// What one sample may take: its attempts, pauses of its engine included, and the time without any engine
    /// that may take it. Its turn while engines are busy does not count.
    pub deadline: Duration,
    /// How many engines have to answer for [`Fleet::attach`], and to serve a version for
    /// [`Fleet::wait_for_those_up`]. `None` means all for the former, one for the latter.
    pub engines_min: Option<usize>,
    /// Once so many serve a version, how much longer the others are waited for.
    pub patience: Duration,
    /// How long an engine that was added may take to answer, before its phase is [`Phase::Lost`].
    pub joining: Duration,
    /// How long an engine may take to serve what is asked for, before its phase is [`Phase::Lost`].
    pub syncing: Duration,
    /// How requests find their engine.
    pub route: Route,
    /// Deadlines of single calls. What bounds a generation is `deadline`, whatever this says.
    pub calls: Deadlines,
    /// Who vouches for engines at `https://` addresses, as [`ClientOptions::ca`](crate::ClientOptions::ca).
    pub ca: Option<Ca>,
    /// Those of the addresses whose engines get no key.
    pub keyless: Vec<String>,
    /// Refuses engines that serve a version that was not published. Any version will do, if `None`.
    pub newest: Option<Newest>,
    /// Hears of the phases of engines.
    pub phases: Option<PhaseTold>,
}

impl Default for FleetOptions {
    /// 64 requests per engine, 10 minutes, all engines, 10 s of patience, 10 minutes to join and 5 to sync, the least
    /// loaded engine, default deadlines, the system's CAs, keys for all, any version.
    fn default() -> Self {
        Self {
            concurrency: 64,
            deadline: Duration::from_secs(600),
            engines_min: None,
            patience: PATIENCE,
            joining: JOINING,
            syncing: SYNCING,
            route: Route::default(),
            calls: Deadlines::default(),
            ca: None,
            keyless: Vec::new(),
            newest: None,
            phases: None,
        }
    }
}

/// What is known of one engine of a fleet.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct EngineStatus {
    /// Its URL.
    pub url: String,
    /// Where it is on its way.
    pub phase: Phase,
    /// Whether it answered the last time it was asked anything.
    pub up: bool,
    /// The label it served then.
    pub serving: Option<String>,
    /// Our requests under way on it.
    pub in_flight: usize,
    /// Its last failure.
    pub failure: Option<String>,
}

/// A set of engines that serve one model, which may change. Shared by reference between tasks.
///
/// Each engine has a task of its own, which looks at it every second while it gets no requests: engines that went down,
/// were refused or are late come back by themselves. One that was down is asked anew who it is.
#[derive(Debug)]
pub struct Fleet {
    roster: Arc<Roster>,
    vocabulary: u64,
    options: FleetOptions,
    /// Asks for places.
    ask: mpsc::Sender<Waiter>,
}

impl Fleet {
    /// Attaches every engine, all at once; addresses are those of [`connect`](crate::connect); kinds may be
    /// mixed.
    ///
    /// With [`FleetOptions::engines_min`], an engine that does not answer is attached once it does: when a request lacks
    /// an engine, or a version is waited for. One that is refused then stays out, and the log says why.
    ///
    /// # Errors
    /// Those of [`Attached::attach`], for the first address that fails, or, with `engines_min`, that is refused;
    /// [`Error::Unattached`] if fewer than that answer; [`Error::Fleet`] for no address or one twice.
    pub async fn attach(
        addresses: &[String],
        keys: &Keys,
        expected: &Expected,
        options: FleetOptions,
    ) -> Result<Self> {
        let (roster, nothing) = (Roster::new(expected, &options), Keys::default());
        let member = |address: &String| {
            let has_keys = !options.keyless.contains(address);
            roster.member(address, if has_keys { keys } else { &nothing })
        };
        let members = addresses.iter().map(member).collect::<Result<Vec<_>>>()?;
        check_once(addresses, &members)?;
        let attach = |member: &Arc<Member>| {
            let member = member.clone();
            tokio::spawn(async move { member.attach().await })
        };
        let mut away = Vec::new();
        for (member, attaching) in members.iter().zip(members.iter().map(attach).collect::<Vec<_>>()) {
            match joined(attaching).await? {
                Err(error) if error.is_transient() && options.engines_min.is_some() => {
                    member.failed(&error);
                    away.push(member.describe());
                }
                attached => attached?,
            }
        }
        let (wanted, attached) = (options.engines_min.unwrap_or_default(), members.len() - away.len());
        if attached < wanted {
            return Err(Error::Unattached { wanted, attached, away });
        }
        members.into_iter().try_for_each(|member| roster.enter(member))?;
        let vocabulary = expected.config.vocabulary;
        let queue = Queue::new(Router::new(options.route, options.concurrency));
        let ask = places::start(roster.clone(), queue);
        Ok(Self { roster, vocabulary, options, ask })
    }

    /// The URL of the engine at an address.
    ///
    /// # Errors
    /// [`Error::Address`]; [`Error::NotInFleet`].
    pub fn url_of(&self, address: &str) -> Result<String> {
        Ok(self.roster.find(address)?.engine.url().to_owned())
    }

    /// Takes in the engine at an address, and returns its URL. It is attached when it answers, and gets requests once it
    /// serves what they ask for. It gets these keys, and no others.
    ///
    /// # Errors
    /// [`Error::Address`]; [`Error::InFleet`] for an engine that is there already.
    pub fn add(&self, address: &str, keys: &Keys) -> Result<String> {
        let member = self.roster.member(address, keys)?;
        let url = member.engine.url().to_owned();
        self.roster.enter(member)?;
        Ok(url)
    }

    /// Gives an engine no more requests, lets it finish those that it has, and then, or after `deadline`, lets it go as
    /// [`Fleet::remove`] does. It goes also where the future is dropped.
    ///
    /// # Errors
    /// [`Error::Address`]; [`Error::NotInFleet`].
    pub async fn drain(&self, address: &str, deadline: Duration) -> Result<()> {
        let member = self.roster.find(address)?;
        member.drain(later(Instant::now(), deadline));
        member.gone().await;
        Ok(())
    }

    /// Lets an engine go at once. Requests that it has are aborted there, and tried elsewhere. Without any engine left,
    /// requests wait as they do where all are down.
    ///
    /// # Errors
    /// [`Error::Address`]; [`Error::NotInFleet`].
    pub fn remove(&self, address: &str) -> Result<()> {
        self.roster.leave(&*self.roster.find(address)?);
        Ok(())
    }

    /// The engines that were attached, as they were last.
    pub fn engines(&self) -> Vec<Attached> {
        self.roster.members().iter().filter_map(|member| member.attached()).collect()
    }

    /// What is known of each engine, without asking it.
    pub fn status(&self) -> Vec<EngineStatus> {
        let status = |member: &Arc<Member>| {
            let Standing { up, serving, in_flight, failure, .. } = member.state().clone();
            let (url, phase) = (member.engine.url().to_owned(), self.roster.phase(member));
            EngineStatus { url, phase, up, serving, in_flight, failure }
        };
        self.roster.members().iter().map(status).collect()
    }

    /// Asks every engine what it serves, all at once, and returns what is known of each afterwards.
    ///
    /// # Errors
    /// [`Error::Closed`] if this runtime is shut down.
    pub async fn look(&self) -> Result<Vec<EngineStatus>> {
        let looks = self.roster.members().into_iter();
        let looks = looks.map(|member| tokio::spawn(async move { member.look().await }));
        for look in looks.collect::<Vec<_>>() {
            joined(look).await?;
        }
        Ok(self.status())
    }

    /// Generates one sample on some engine, all of it with weights of `minimum` or later versions of its run.
    ///
    /// An attempt whose tokens are older is thrown away. Of one that somebody aborted, and of one on an engine that fails,
    /// the tokens stay whose version is known: see [`Fleet::stream`]. Such a failure is also a token id that is not below
    /// the model's `vocab_size`, a reply without a token, and a version that was not published
    /// ([`FleetOptions::newest`]). The sample is then tried again, elsewhere or
    /// once an engine has caught up, until the fleet's deadline. Dropping the future aborts the request on its engine.
    ///
    /// Requests get places by their priority, and else in the order in which they asked. One that no engine may take yet does not hold up those
    /// behind it. The runtime that attached the fleet has to run meanwhile: a task of it gives the places.
    ///
    /// # Errors
    /// [`Error::Exhausted`] with every engine's last failure; [`Error::Deadline`] of an engine that still answers, and
    /// generated until the fleet's deadline; [`Error::Request`] and [`Error::Status`] for requests that no engine would
    /// take; [`Error::Closed`] if the runtime that attached the fleet is shut down.
    pub async fn generate(&self, request: GenerateRequest, minimum: Option<&Label>) -> Result<Generation> {
        self.stream(request, minimum, &mut |_| {}).await
    }

    /// As [`Fleet::generate`], and tells of tokens that stay, while they come: they are part of the answer, whatever
    /// becomes of their engine. The answer goes on behind them on the same engine or on another one. Pieces follow on each
    /// other, and on [`GenerateRequest::drawn`].
    ///
    /// A token stays once its version is known. That is at the end of a reply, and before it on an engine that served the
    /// newest version when the request began, until [`Fleet::publishing`] says that another one may come. Engines that do
    /// not stream, and answers of few tokens, have no pieces before their end.
    ///
    /// # Errors
    /// As [`Fleet::generate`].
    pub async fn stream(
        &self,
        mut request: GenerateRequest,
        minimum: Option<&Label>,
        told: Tell<'_>,
    ) -> Result<Generation> {
        request.validate(Some(self.vocabulary))?;
        minimum.inspect(|minimum| self.roster.want(minimum));
        let mut left = self.options.deadline;
        let mut again = (!request.drawn.is_empty()).then_some(Cause::GivenUp);
        let mut answer = Answer { drawn: request.drawn.clone(), told };
        loop {
            if let Some(whole) = request.is_drawn() {
                return Ok(whole);
            }
            let Some(lease) = self.lease(&request, minimum, left).await? else {
                return Err(self.exhausted(&request));
            };
            let begin = Instant::now();
            left = lease.left;
            let lease = lease.counted(request.meter.clone(), again);
            match lease.attempt(request.rest(), minimum, &mut answer).await {
                Attempt::Done(rest) => return Ok(request.drawn.whole(rest)),
                Attempt::Over(error) => return Err(error),
                Attempt::Again(cause, reason) => {
                    let kept = answer.drawn.len();
                    again = Some(cause);
                    tracing::debug!(rid = %request.rid, reason, kept, "an answer goes on");
                }
            }
            left = left.saturating_sub(begin.elapsed());
            request.drawn.clone_from(&answer.drawn);
            request.rid = request.rid.next_attempt();
        }
    }

    /// What the places of each engine were doing since it joined, by URL, and those of engines that have left.
    pub fn usage(&self) -> (Vec<(String, Usage)>, Usage) {
        self.roster.usage()
    }

    /// Says that a version is about to be published. Until [`Fleet::published`], tokens wait for the end of their reply to
    /// say which version drew them.
    pub fn publishing(&self) {
        self.roster.shared.settled.set(None);
    }

    /// Says which version is the newest. Tokens that an engine draws with it, from the beginning of a request on, need not
    /// wait any more.
    pub fn published(&self, newest: &Label) {
        self.roster.shared.settled.set(Some(&newest.to_string()));
    }

    /// Waits until every engine that answers serves `label` or a later version of its run, and returns those
    /// that do not: the ones that are down, and the ones that are late. Once [`FleetOptions::engines_min`] are there, the
    /// others are late after [`FleetOptions::patience`], or else after `deadline`. Late ones are not waited for again
    /// until they have caught up once.
    ///
    /// # Errors
    /// [`Error::Behind`] after `deadline`, if fewer than `engines_min` are there.
    pub async fn wait_for_those_up(&self, label: &Label, deadline: Duration) -> Result<Vec<String>> {
        let begin = Instant::now();
        let bounds = Bounds {
            wanted: self.options.engines_min.unwrap_or(1).max(1),
            patience: self.options.patience,
            deadline,
        };
        let mut enough_since = None;
        self.roster.want(label);
        loop {
            let members = self.roster.members();
            // Also at those that are not waited for: they may have caught up.
            members.iter().for_each(|member| member.clone().look_aside());
            let (there, lacking): (Vec<_>, Vec<_>) =
                members.iter().partition(|member| member.state().may_take(Some(label)));
            there.iter().for_each(|member| member.state().left = false);
            let awaited = |member: &&&Arc<Member>| {
                let state = member.state();
                state.up && !state.left && state.draining.is_none()
            };
            let awaited: Vec<_> = lacking.iter().filter(awaited).collect();
            if there.len() >= bounds.wanted {
                enough_since.get_or_insert_with(Instant::now);
            }
            let since_enough = enough_since.map_or(Duration::ZERO, |since: Instant| since.elapsed());
            let elapsed = begin.elapsed();
            let seen = Seen { there: there.len(), awaited: awaited.len(), since_enough, elapsed };
            let laggards = || match members.is_empty() {
                true => vec![NO_ENGINE.to_owned()],
                false => lacking.iter().map(|member| member.describe()).collect(),
            };
            match judge(bounds, seen) {
                Verdict::Wait => tokio::time::sleep(LOOK_EVERY).await,
                Verdict::GoOn => {
                    awaited.iter().for_each(|member| member.state().left = true);
                    return Ok(laggards());
                }
                Verdict::Behind => {
                    let (label, laggards) = (label.to_string(), laggards());
                    return Err(Error::Behind { label, after: deadline, laggards });
                }
            }
        }
    }

    /// Waits for an engine that may take the request and has room. Time without one that may take it is taken
    /// from `left`; `None` when that is used up.
    async fn lease(
        &self,
        request: &GenerateRequest,
        minimum: Option<&Label>,
        left: Duration,
    ) -> Result<Option<Lease>> {
        if left.is_zero() {
            return Ok(None);
        }
        let GenerateRequest { rid, affinity, conversation, priority, .. } = *request;
        let near = Near { conversation, affinity };
        let minimum = minimum.cloned();
        let (answer, lease) = oneshot::channel();
        let waiter = Waiter { rid, minimum, near, priority, left, counted: Instant::now(), answer };
        self.ask.send(waiter).await.map_err(|_| Error::Closed)?;
        match lease.await {
            Ok(lease) => Ok(Some(lease)),
            Err(_) if self.ask.is_closed() => Err(Error::Closed),
            Err(_) => Ok(None),
        }
    }

    fn exhausted(&self, request: &GenerateRequest) -> Error {
        let attempt = |member: &Arc<Member>| {
            let state = member.state();
            format!("{}: {}", member.engine.url(), state.failure.clone().unwrap_or_else(|| state.describe()))
        };
        let mut attempts: Vec<_> = self.roster.members().iter().map(attempt).collect();
        if attempts.is_empty() {
            attempts.push(NO_ENGINE.to_owned());
        }
        let (rid, after) = (request.rid.to_string(), self.options.deadline);
        Error::Exhausted { rid, after, attempts }
    }
}

/// So much later, or as late as the clock goes.
fn later(now: Instant, by: Duration) -> Instant {
    // A century is beyond any wait, and within any clock.
    now + by.min(Duration::from_secs(100 * 365 * 24 * 3600))
}

/// The result of a task of ours, which nobody cancels.
async fn joined<T>(task: JoinHandle<T>) -> Result<T> {
    match task.await {
        Ok(value) => Ok(value),
        Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
        Err(_) => Err(Error::Closed),
    }
}
