//! Activation by a push: every engine of a group receives a version at once, into its memory.
//!
//! The order is that of activation from disk (pause, flush, load, look, continue), with two more steps. While a push is under way an engine
//! holds a mixture of two versions, so it carries a label that nobody asks for until its last bucket is loaded; and the engines continue
//! whatever happened, because the label says that what they generate is nobody's.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use driftless_transport::{Activate, Activated, BoxError, Checkpoint, Target};

use super::{Group, HostWeights, Member, Root};
use crate::activate::{attach, empty_cache, look, resume};
use crate::checksums::check_tensors;
use crate::{Client, ClientOptions, Engine, Error, Expected, Label, PauseMode, Result, checksums};

/// Options of a [`DistributedActivator`].
#[derive(Debug, Clone)]
pub struct DistributedOptions {
    /// Keys and deadlines of the engines' clients.
    pub client: ClientOptions,
    /// What happens to running requests. With [`PauseMode::InPlace`] they keep the KV cache of the old weights.
    pub pause: PauseMode,
    /// A checkpoint directory of the model that the engines were started with, for engines whose own model path cannot be read from here.
    pub base: Option<PathBuf>,
}

impl Default for DistributedOptions {
    /// No keys, default deadlines, running requests go back to the queue.
    fn default() -> Self {
        Self { client: ClientOptions::default(), pause: PauseMode::Retract, base: None }
    }
}

/// Activates versions on all engines of a [`Group`] at once. One follower drives it as if it were one engine.
#[derive(Debug)]
pub struct DistributedActivator<R> {
    group: Group<R>,
    options: DistributedOptions,
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
    /// Whether it is the process that the group was formed with.
    same: bool,
}

impl<R: Root> DistributedActivator<R> {
    /// An activator of the engines at these addresses, each `host:port` or `http://host:port`. Nothing is sent yet.
    ///
    /// # Errors
    /// [`Error::Address`] for any other form of address; [`Error::Fleet`] when there is none, or one of them twice.
    pub fn new(addresses: &[String], group: Group<R>, options: DistributedOptions) -> Result<Self> {
        let clients = addresses.iter().map(|address| Client::new(address, options.client.clone()));
        let clients = clients.collect::<Result<Vec<_>>>()?;
        let urls: std::collections::BTreeSet<_> = clients.iter().map(Client::url).collect();
        if urls.is_empty() || urls.len() < clients.len() {
            return Err(Error::Fleet { found: addresses.to_vec() });
        }
        let engines = clients.iter().map(|_| None).collect();
        Ok(Self { group, options, clients, engines, activated: None, resume_owed: true })
    }

    /// The group.
    pub fn group(&self) -> &Group<R> {
        &self.group
    }

    fn current_label(&mut self) -> Result<Option<String>> {
        self.resume_if_owed()?;
        let labels = self.group.block_on(async {
            let mut labels = std::collections::BTreeSet::new();
            for client in &self.clients {
                labels.insert(client.model_info().await?.weight_version);
            }
            Ok::<_, Error>(labels)
        })?;
        let one = if labels.len() == 1 { labels.into_iter().next().flatten() } else { None };
        Ok(one.filter(|label| label.parse::<Label>().is_ok()))
    }

    fn resume_if_owed(&mut self) -> Result<()> {
        if self.resume_owed {
            self.resume_all()?;
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
        self.group.set_members(members.collect(), plans.iter().all(|plan| plan.same));
        // Slow the first time, and needs no pause.
        self.group.form()?;
        let begin = Instant::now();
        let outcome = self.transact(&plans, target);
        let resumed = self.resume_all();
        let pause = begin.elapsed();
        tracing::info!(label = target.label, ?pause, failed = outcome.is_err(), "activation of a group");
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
            let plan = self.group.block_on(async {
                let serving = client.model_info().await?.weight_version;
                let same = known.is_some() && activated.is_some() && serving == activated;
                let base = self.options.base.as_deref();
                let engine = attach(client, base, target, known, activated.clone()).await?;
                if let (false, Some(cumem)) = (same, self.group.root().cumem()) {
                    same_cumem(client, cumem).await?;
                }
                Ok::<_, Error>((engine, same))
            });
            // Whoever failed here is asked anew the next time, and so is everyone else.
            self.engines = self.clients.iter().map(|_| None).collect();
            let (engine, same) = plan?;
            check_tensors(checkpoint, place, &expected.config, engine.identity().dtype)?;
            let comparable = engine.identity().checksums_comparable();
            let sums = comparable.then(|| checksums(checkpoint, place)).transpose()?;
            plans.push(Plan { engine, sums, same });
        }
        Ok(plans)
    }

    fn transact(&mut self, plans: &[Plan], target: &Target<'_>) -> Result<()> {
        let mode = self.options.pause;
        let partial = format!("{}?partial", target.label);
        self.group.block_on(async {
            for plan in plans {
                let client = plan.engine.client();
                client.pause(mode).await?;
                empty_cache(client, mode).await?;
                client.set_weight_version(&partial).await?;
            }
            Ok::<_, Error>(())
        })?;
        self.group.push(&HostWeights::<Checkpoint>(target.checkpoint), Some(target.label))?;
        self.group.block_on(async {
            for plan in plans {
                look(&plan.engine, target.label, plan.sums.as_ref()).await?;
            }
            Ok(())
        })
    }

    /// Tells every engine to continue, and names the first that did not.
    fn resume_all(&self) -> Result<()> {
        self.group.block_on(async {
            let mut outcome = Ok(());
            for client in &self.clients {
                let left = |source| Error::LeftPaused {
                    engine: client.url().into(),
                    first: None,
                    source: Box::new(source),
                };
                outcome = outcome.and(resume(client).await.map_err(left));
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

/// NCCL fails at the engine, and hangs here, when the two do not map memory in the same way.
async fn same_cumem(client: &Client, ours: bool) -> Result<()> {
    let theirs = client.server_info().await?.enable_symm_mem.unwrap_or(false);
    if ours == theirs {
        return Ok(());
    }
    Err(Error::Refused {
        engine: client.url().into(),
        what: "enable_symm_mem, which sets its NCCL_CUMEM_ENABLE,".into(),
        expected: format!("{ours}, as NCCL_CUMEM_ENABLE of this process"),
        found: theirs.to_string(),
    })
}

impl<R: Root> Activate for DistributedActivator<R> {
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
