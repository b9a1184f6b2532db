//! The engines that a fleet has now, and the task of each.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout_at};

use super::FleetOptions;
use super::member::{Member, Shared};
use super::newest::Known;
use super::phase::{Bounds, Phase, PhaseTold, Wanted, phase};
use super::settled::Settled;
use super::usage::Usage;
use crate::engine::{ClientOptions, Expected, Label};
use crate::error::{Error, Result};
use crate::keys::Keys;
use crate::kinds::connect;

/// Time between two looks of an engine's task at an engine that gets no requests.
const TEND_EVERY: Duration = Duration::from_secs(1);

/// The engines of a fleet.
#[derive(Debug)]
pub(super) struct Roster {
    entries: Mutex<Vec<Entry>>,
    left: Mutex<Left>,
    bounds: Bounds,
    phases: Option<PhaseTold>,
    expected: Expected,
    pub(super) shared: Arc<Shared>,
    /// What each engine is called with, but for its keys.
    client: ClientOptions,
    ids: AtomicU64,
    runtime: Handle,
}

#[derive(Debug)]
struct Entry {
    member: Arc<Member>,
    /// Ends with the entry.
    _task: JoinSet<()>,
}

/// Engines that have left.
#[derive(Debug, Default)]
struct Left {
    /// Those that may still have a request, which ends at once.
    ending: Vec<Arc<Member>>,
    /// What the places of the others were doing.
    usage: Usage,
}

impl Left {
    fn sweep(&mut self) {
        let usage = &mut self.usage;
        self.ending.retain(|member| {
            let is_ending = member.state().in_flight > 0;
            if !is_ending {
                usage.add(&member.usage());
            }
            is_ending
        });
    }
}

impl Roster {
    /// Nobody yet. The tasks run where this is called.
    pub(super) fn new(expected: &Expected, options: &FleetOptions) -> Arc<Self> {
        // Each attempt has what is left of the sample's time, which no call cuts short.
        let deadlines = options.calls.with_generate(Duration::MAX);
        let mut client = ClientOptions::default().with_deadlines(deadlines);
        client.ca.clone_from(&options.ca);
        Arc::new(Self {
            entries: Mutex::default(),
            left: Mutex::default(),
            bounds: Bounds { joining: options.joining, syncing: options.syncing },
            phases: options.phases.clone(),
            expected: expected.clone(),
            shared: Arc::new(Shared {
                known: options.newest.clone().map(|newest| Arc::new(Known::new(newest))),
                settled: Settled::default(),
                wanted: Mutex::default(),
                stirred: Notify::new(),
                places: options.concurrency,
            }),
            client,
            ids: AtomicU64::default(),
            runtime: Handle::current(),
        })
    }

    /// The engine at an address, which is nobody's yet.
    pub(super) fn member(&self, address: &str, keys: &Keys) -> Result<Arc<Member>> {
        let engine = connect(address, self.client.clone().with_keys(keys.clone()))?;
        let id = self.ids.fetch_add(1, Relaxed);
        Ok(Arc::new(Member::new(id, engine, self.expected.clone(), self.shared.clone())))
    }

    /// Takes an engine in.
    pub(super) fn enter(self: &Arc<Self>, member: Arc<Member>) -> Result<()> {
        let mut entries = self.entries();
        let engine = member.engine.url();
        if entries.iter().any(|entry| entry.member.engine.url() == engine) {
            return Err(Error::InFleet { engine: engine.to_owned() });
        }
        let mut task = JoinSet::new();
        task.spawn_on(tend(Arc::downgrade(self), member.clone()), &self.runtime);
        entries.push(Entry { member, _task: task });
        drop(entries);
        self.shared.stirred.notify_one();
        Ok(())
    }

    /// Lets an engine go. Requests that are under way on it are aborted, and tried elsewhere.
    pub(super) fn leave(&self, member: &Member) {
        let mut left = self.left();
        let mut entries = self.entries();
        let found = entries.iter().position(|entry| entry.member.id() == member.id());
        let entry = found.map(|at| entries.remove(at));
        drop(entries);
        member.leave();
        let is_gone = entry.is_some();
        left.ending.extend(entry.map(|entry| entry.member));
        left.sweep();
        drop(left);
        if is_gone {
            self.tell(member, None);
        }
        self.shared.stirred.notify_one();
    }

    /// What the places of each engine were doing since it joined, by URL, and those of engines that have left.
    pub(super) fn usage(&self) -> (Vec<(String, Usage)>, Usage) {
        let mut left = self.left();
        left.sweep();
        let mut gone = left.usage.clone();
        left.ending.iter().for_each(|member| gone.add(&member.usage()));
        let usage = |member: Arc<Member>| (member.engine.url().to_owned(), member.usage());
        (self.members().into_iter().map(usage).collect(), gone)
    }

    fn left(&self) -> MutexGuard<'_, Left> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn members(&self) -> Vec<Arc<Member>> {
        self.entries().iter().map(|entry| entry.member.clone()).collect()
    }

    /// The engine at an address.
    pub(super) fn find(&self, address: &str) -> Result<Arc<Member>> {
        let named = connect(address, ClientOptions::default())?;
        let members = self.members();
        let found = members.iter().find(|member| member.engine.url() == named.url());
        found.cloned().ok_or_else(|| Error::NotInFleet {
            engine: named.url().to_owned(),
            engines: members.iter().map(|member| member.engine.url().to_owned()).collect(),
        })
    }

    /// Hears that a version is asked for.
    pub(super) fn want(&self, label: &Label) {
        let mut wanted = self.shared.wanted();
        if wanted.as_ref().is_none_or(|wanted| wanted.is_behind(label)) {
            *wanted = Some(Wanted { label: label.clone(), since: Instant::now() });
            drop(wanted);
            self.members().iter().for_each(|member| member.rewanted());
        }
    }

    fn tell(&self, member: &Member, phase: Option<&Phase>) {
        self.phases.iter().for_each(|told| told.tell(member.engine.url(), phase));
    }

    pub(super) fn phase(&self, member: &Member) -> Phase {
        phase(&member.state(), self.shared.wanted().as_ref(), self.bounds, Instant::now())
    }

    fn entries(&self) -> MutexGuard<'_, Vec<Entry>> {
        // Nothing in here can be left half-changed by a panic.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Refuses no address, and one twice.
pub(super) fn check_once(addresses: &[String], members: &[Arc<Member>]) -> Result<()> {
    let urls: BTreeSet<_> = members.iter().map(|member| member.engine.url()).collect();
    if members.is_empty() || urls.len() != members.len() {
        return Err(Error::Fleet { found: addresses.to_vec() });
    }
    Ok(())
}

/// Brings an engine from phase to phase: looks at it while it gets no requests, and lets it go once it has drained.
async fn tend(roster: Weak<Roster>, member: Arc<Member>) {
    let mut before = None;
    loop {
        // The roster is not held while time passes: it ends its tasks when it ends.
        let Some(phase) = roster.upgrade().map(|roster| roster.phase(&member)) else { return };
        if before.as_ref() != Some(&phase) {
            tracing::info!(engine = member.engine.url(), %phase, "phase of an engine");
            roster.upgrade().inspect(|roster| roster.tell(&member, Some(&phase)));
        }
        // Neither a wake-up nor the passing of time is missed: `changed` keeps one notification until it is waited for.
        let changed = member.changed.notified();
        match &phase {
            Phase::Serving => changed.await,
            Phase::Draining => {
                let (until, is_idle) = member.drains();
                if is_idle || until.is_none_or(|until| until <= Instant::now()) {
                    roster.upgrade().inspect(|roster| roster.leave(&member));
                    return;
                }
                if let Some(until) = until {
                    let _ = timeout_at(until, changed).await;
                }
            }
            Phase::Joining | Phase::Syncing | Phase::Lost { .. } => {
                let look = async {
                    member.look_in_turn().await;
                    sleep(TEND_EVERY).await;
                };
                // An engine that does not answer is let go without its answer.
                tokio::select! {
                    () = look => {}
                    () = changed => {}
                }
            }
        }
        before = Some(phase);
    }
}
