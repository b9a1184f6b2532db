//! Activation by a push: every engine that is pushed into receives a version at once, into its memory.
//!
//! The order is that of activation from disk (pause, flush, load, look, continue), with more steps. While a push is under way an engine
//! holds a mixture of two versions, so it carries a label that nobody asks for until its last bucket is loaded; and the engines continue
//! whatever happened, because the label says that what they generate is nobody's. Where engines give memory back for as long as it takes
//! ([`PushOptions::release`]), they have it again before they carry the version's label.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use driftless_transport::{Activate, Activated, BoxError, Checkpoint, Target};

use super::occupation::{self, Occupation, in_doubt, partial};
use super::{HostWeights, Member, Push};
use crate::activate::{attach, empty_cache, look, resume};
use crate::checksums::check_tensors;
use crate::{Client, ClientOptions, Engine, Error, Expected, Label, MemoryTag, PauseMode, Result, checksums};

/// Options of a [`PushActivator`].
#[derive(Debug, Clone)]
pub struct PushOptions {
    /// Keys and deadlines of the engines' clients.
    pub client: ClientOptions,
    /// What happens to running requests. With [`PauseMode::InPlace`] they keep the KV cache of the old weights.
    pub pause: PauseMode,
    /// A checkpoint directory of the model that the engines were started with, for engines whose own model path cannot be read from here.
    pub base: Option<PathBuf>,
    /// What engines with `--enable-memory-saver` give back while they are updated; their requests are aborted then. Never
    /// [`MemoryTag::Weights`], which an update writes to.
    pub release: Vec<MemoryTag>,
}

impl Default for PushOptions {
    /// No keys, default deadlines, running requests go back to the queue, nothing is given back.
    fn default() -> Self {
        Self { client: ClientOptions::default(), pause: PauseMode::Retract, base: None, release: Vec::new() }
    }
}

/// Activates versions on several engines at once. One follower drives it as if it were one engine.
#[derive(Debug)]
pub struct PushActivator<P> {
    push: P,
    options: PushOptions,
    clients: Vec<Client>,
    /// The engines as they were attached, in the order of the clients.
    engines: Vec<Option<Engine>>,
    /// Label of the last successful activation: an engine that reports it is still the process that was attached.
    activated: Option<String>,
    /// Whether an engine may be paused because of us. True at first: an earlier process may have died between pause and continue.
    resume_owed: bool,
}

/// What is decided before an engine is paused.
struct Plan {
    engine: Engine,
    /// Checksums it must report afterwards, where they are comparable.
    sums: Option<BTreeMap<String, String>>,
    /// Whether it is the process of the last activation.
    same: bool,
    /// What it gives back meanwhile.
    release: Vec<MemoryTag>,
    /// What somebody let it give back before.
    released: Vec<MemoryTag>,
}

impl<P: Push> PushActivator<P> {
    /// An activator of the engines at these addresses, each `host:port` or `http://host:port`. Nothing is sent yet.
    ///
    /// # Errors
    /// [`Error::Address`] for any other form of address; [`Error::Fleet`] when there is none, or one of them twice.
    pub fn new(addresses: &[String], push: P, options: PushOptions) -> Result<Self> {
        let clients = addresses.iter().map(|address| Client::new(address, options.client.clone()));
        let clients = clients.collect::<Result<Vec<_>>>()?;
        let urls: std::collections::BTreeSet<_> = clients.iter().map(Client::url).collect();
        if urls.is_empty() || urls.len() < clients.len() {
            return Err(Error::Fleet { found: addresses.to_vec() });
        }
        let engines = clients.iter().map(|_| None).collect();
        Ok(Self { push, options, clients, engines, activated: None, resume_owed: true })
    }

    /// What it pushes with.
    pub fn push(&self) -> &P {
        &self.push
    }

    fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        self.push.runtime().block_on(future)
    }

    fn current_label(&mut self) -> Result<Option<String>> {
        self.resume_if_owed()?;
        let labels = self.block_on(async {
            let mut labels = std::collections::BTreeSet::new();
            for client in &self.clients {
                labels.insert(client.model_info().await?.weight_version);
            }
            Ok::<_, Error>(labels)
        })?;
        let one = if labels.len() == 1 { labels.into_iter().next().flatten() } else { None };
        Ok(one.filter(|label| label.parse::<Label>().is_ok()))
    }

    /// Lets engines continue that an earlier process may have left paused; not those that have no memory to do it with.
    fn resume_if_owed(&mut self) -> Result<()> {
        if self.resume_owed {
            self.block_on(async {
                for client in &self.clients {
                    if Occupation::asked(client).await? == Occupation::Whole {
                        resume(client).await?;
                    }
                }
                Ok::<_, Error>(())
            })?;
            self.resume_owed = false;
        }
        Ok(())
    }

    fn activate_all(&mut self, target: &Target<'_>) -> Result<Duration> {
        self.resume_if_owed()?;
        let plans = self.plan(target)?;
        let members = plans.iter().map(|plan| Member {
            engine: plan.engine.client().clone(),
            ranks: plan.engine.identity().tp,
            sessions: plan.engine.capabilities().sessions,
        });
        self.push.set_members(members.collect(), plans.iter().all(|plan| plan.same));
        // Slow the first time, and needs no pause.
        self.push.form()?;
        let begin = Instant::now();
        let outcome = self.transact(&plans, target);
        let resumed = self.resume_all(target.label);
        let pause = begin.elapsed();
        tracing::info!(label = target.label, ?pause, failed = outcome.is_err(), "activation by a push");
        self.resume_owed = resumed.is_err();
        if let Err(error) = resumed {
            let failed = outcome.err().map(|error| error.to_string());
            return Err(match error {
                Error::LeftPaused { engine, source, .. } => {
                    Error::LeftPaused { engine, first: failed, source }
                }
                other => other,
            });
        }
        outcome?;
        self.engines = plans.into_iter().map(|plan| Some(plan.engine)).collect();
        self.activated = Some(target.label.to_owned());
        Ok(pause)
    }

    fn plan(&mut self, target: &Target<'_>) -> Result<Vec<Plan>> {
        let (checkpoint, place) = (target.checkpoint, target.checkpoint.dir());
        let expected = Expected::from_snapshot(checkpoint, place)?;
        let (known, activated) = (std::mem::take(&mut self.engines), self.activated.take());
        let mut known = known.into_iter();
        let mut plans = Vec::new();
        for client in &self.clients {
            let known = known.next().flatten();
            let plan = self.block_on(async {
                let serving = client.model_info().await?.weight_version;
                let released = match Occupation::of(serving.as_deref()) {
                    Occupation::Whole => Vec::new(),
                    Occupation::Released(tags) => tags,
                    Occupation::InDoubt => return Err(in_doubt(client)),
                };
                let same = known.is_some() && activated.is_some() && serving == activated;
                let base = self.options.base.as_deref();
                let engine = attach(client, base, target, known, activated.clone()).await?;
                if !same {
                    self.push.admit(client.url(), &client.server_info().await?)?;
                }
                let release = if engine.saves_memory() { self.options.release.clone() } else { Vec::new() };
                Ok::<_, Error>(Plan { engine, sums: None, same, release, released })
            });
            // Whoever failed here is asked anew the next time, and so is everyone else.
            self.engines = self.clients.iter().map(|_| None).collect();
            let mut plan = plan?;
            check_tensors(checkpoint, place, &expected.config, plan.engine.identity().dtype)?;
            let comparable = plan.engine.identity().checksums_comparable();
            plan.sums = comparable.then(|| checksums(checkpoint, place)).transpose()?;
            plans.push(plan);
        }
        Ok(plans)
    }

    fn transact(&mut self, plans: &[Plan], target: &Target<'_>) -> Result<()> {
        let mode = self.options.pause;
        self.block_on(async {
            for plan in plans {
                make_ready(plan, mode, target.label).await?;
            }
            Ok::<_, Error>(())
        })?;
        // A version's label is the last thing that an engine gets.
        let whole = plans.iter().all(|plan| plan.released.is_empty() && plan.release.is_empty());
        self.push.push(&HostWeights::<Checkpoint>(target.checkpoint), whole.then_some(target.label))?;
        self.block_on(async {
            for plan in plans {
                let client = plan.engine.client();
                if !whole {
                    take_back(client, target.label).await?;
                    client.set_weight_version(target.label).await?;
                }
                look(&plan.engine, target.label, plan.sums.as_ref()).await?;
            }
            Ok(())
        })
    }

    /// Tells every engine to continue, once it has its memory, and names the first that did not.
    fn resume_all(&self, label: &str) -> Result<()> {
        self.block_on(async {
            let mut outcome = Ok(());
            for client in &self.clients {
                let left = |source| Error::LeftPaused {
                    engine: client.url().into(),
                    first: None,
                    source: Box::new(source),
                };
                let resumed = match take_back(client, label).await {
                    Ok(()) => resume(client).await,
                    Err(error) => Err(error),
                };
                outcome = outcome.and(resumed.map_err(left));
            }
            outcome
        })
    }

    /// Runs on a thread of its own: the caller may be a runtime's thread, where blocking on another one panics.
    fn apart<T: Send>(&mut self, work: impl FnOnce(&mut Self) -> T + Send) -> T {
        std::thread::scope(|scope| match scope.spawn(|| work(self)).join() {
            Ok(value) => value,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    }
}

/// Brings an engine to where it can be pushed into: paused, without its cache, labelled as a mixture, and with room.
async fn make_ready(plan: &Plan, mode: PauseMode, label: &str) -> Result<()> {
    let client = plan.engine.client();
    client.pause(mode).await?;
    if !plan.released.is_empty() {
        // Whoever let it give its memory back has emptied its cache; the update needs the weights' memory.
        return occupation::resume(client, label, &plan.released, &[MemoryTag::Weights]).await;
    }
    empty_cache(client, mode).await?;
    client.set_weight_version(&partial(label)).await?;
    if plan.release.is_empty() {
        return Ok(());
    }
    occupation::release(client, label, &plan.release).await
}

/// Gives an engine back the memory that it is without.
async fn take_back(client: &Client, label: &str) -> Result<()> {
    match Occupation::asked(client).await? {
        Occupation::Whole => Ok(()),
        Occupation::Released(tags) => occupation::resume(client, label, &tags, &tags).await,
        Occupation::InDoubt => Err(in_doubt(client)),
    }
}

impl<P: Push> Activate for PushActivator<P> {
    fn name(&self) -> String {
        self.clients.iter().map(Client::url).collect::<Vec<_>>().join(",")
    }

    fn serving(&mut self) -> Result<Option<String>, BoxError> {
        Ok(self.apart(Self::current_label)?)
    }

    fn activate(&mut self, target: &Target<'_>) -> Result<Activated, BoxError> {
        let pause = self.apart(|this| this.activate_all(target))?;
        Ok(Activated { pause })
    }
}
