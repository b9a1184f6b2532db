//! Activation by a push: every engine that is pushed into receives a version at once, into its memory.
//!
//! The order is that of activation from disk (pause, flush, fence, load, look, label, continue), with more
//! steps. While a push is under way an engine holds a mixture of two versions; if it fails the engines stay
//! paused and fenced until one succeeds. Where engines give memory back for as long as it takes
//! ([`PushOptions::release`]), they have it again before they carry the version's label.

use std::path::PathBuf;
use std::sync::Arc;

use derive_setters::Setters;
use driftless_http::runtime::{self, wait};
use driftless_store::BoxError;
use driftless_transport::activate::{Activate, Activated, Compared, How, Target};
use tokio::runtime::Handle;

use super::occupation;
use super::{Member, Push};
use crate::activate::pause::{self, Ask, Pause, left_paused, relabel};
use crate::activate::{self, Compare, attach};
use crate::engine::{
    Check, ClientOptions, Engine as _, Expected, Identity, Label, PauseMode, Sums, check, check_tensors,
    check_tied,
};
use crate::error::{Error, Result};
use crate::kinds::connect_sglang;
use crate::sglang::{Client, MemoryTag};

/// Options of a [`PushActivator`]. The default: no keys, default deadlines, running requests go back to the queue,
/// nothing is given back.
#[derive(Debug, Clone, Default, Setters)]
#[setters(prefix = "with_", strip_option)]
#[non_exhaustive]
pub struct PushOptions {
    /// Keys and deadlines of the engines' clients.
    pub client: ClientOptions,
    /// What happens to running requests. With [`PauseMode::InPlace`] they keep the KV cache of the old
    /// weights.
    pub pause: PauseMode,
    /// A checkpoint directory of the model that the engines were started with, for engines whose own model
    /// path cannot be read from here.
    #[setters(into)]
    pub base: Option<PathBuf>,
    /// What engines with `--enable-memory-saver` give back while they are updated; their requests are aborted
    /// then. Never [`MemoryTag::Weights`], which an update writes to.
    pub release: Vec<MemoryTag>,
    /// Whether engines are taken whose live weights cannot be compared.
    pub compare: Compare,
}

/// Activates versions on several engines at once. One follower drives it as if it were one engine.
#[derive(Debug)]
pub struct PushActivator<P> {
    push: P,
    runtime: Handle,
    options: PushOptions,
    clients: Vec<Client>,
    /// What the engines said when they were attached, in the order of the clients.
    identities: Vec<Option<Identity>>,
    /// Label of the last successful activation: an engine that reports it is still the process that was
    /// attached.
    activated: Option<String>,
    /// What is known of their pauses.
    pauses: Vec<Pause>,
}

/// What is decided before an engine is paused.
struct Decided {
    client: Client,
    identity: Identity,
    /// Label of the weights that it has now, if they are known.
    serving: Option<String>,
    /// What it has to report afterwards.
    sums: Sums,
    /// Whether it is the process of the last activation.
    same: bool,
    /// What it gives back meanwhile.
    release: Vec<MemoryTag>,
    /// What somebody let it give back before.
    released: Vec<MemoryTag>,
}

impl<P: Push> PushActivator<P> {
    /// An activator of the SGLang engines at these addresses, each `host:port` or `http://host:port`. Nothing
    /// is sent yet.
    ///
    /// # Errors
    /// [`Error::Address`] for any other form of address, and for another kind of engine; [`Error::Fleet`]
    /// when there is none, or one of them twice; [`Error::SetUp`] when the threads of this process's
    /// connections cannot be started.
    pub fn new(addresses: &[String], push: P, options: PushOptions) -> Result<Self> {
        let clients = addresses.iter().map(|address| connect_sglang(address, options.client.clone()));
        let clients = clients.collect::<Result<Vec<_>>>()?;
        let urls: std::collections::BTreeSet<_> = clients.iter().map(Client::url).collect();
        if urls.is_empty() || urls.len() < clients.len() {
            return Err(Error::Fleet { found: addresses.to_vec() });
        }
        let (identities, pauses) = (vec![None; clients.len()], vec![Pause::default(); clients.len()]);
        let runtime = runtime::handle().map_err(Error::threads)?;
        Ok(Self { push, runtime, options, clients, identities, activated: None, pauses })
    }

    /// The labels of their weights, where those are known.
    fn look(&mut self, clients: &[Client]) -> Result<Vec<Option<String>>> {
        wait(&self.runtime, async {
            let mut labels = Vec::new();
            for (client, pause) in clients.iter().zip(&mut self.pauses) {
                labels.push(pause.look(client).await?);
            }
            Ok(labels)
        })
    }

    fn activate_all(&mut self, target: &Target<'_>) -> Result<Activated> {
        let plans = self.plan(target)?;
        let members = plans.iter().map(|plan| Member {
            engine: plan.client.clone(),
            ranks: plan.identity.tp,
            sessions: plan.identity.sessions,
        });
        self.push.set_members(members.collect(), plans.iter().all(|plan| plan.same));
        // Slow the first time, and needs no pause.
        self.push.form()?;
        let outcome = self.transact(&plans, target);
        let ended = self.end(&plans, target.label, outcome.as_ref().err());
        let pause = self.pauses.iter().map(Pause::took).max().unwrap_or_default();
        tracing::info!(label = target.label, ?pause, failed = outcome.is_err(), "activation by a push");
        ended.and(outcome)?;
        let compared = compared(&plans);
        self.identities = plans.into_iter().map(|plan| Some(plan.identity)).collect();
        self.activated = Some(target.label.to_owned());
        Ok(Activated::default().with_pause(pause).with_how(How::Pushed).with_compared(compared))
    }

    fn plan(&mut self, target: &Target<'_>) -> Result<Vec<Decided>> {
        let (checkpoint, place) = (target.checkpoint, target.checkpoint.dir());
        let expected = Expected::from_snapshot(checkpoint, place)?;
        let clients: Vec<_> = self.clients.iter().map(|client| client.limited(target.limit)).collect();
        let labels = self.look(&clients)?;
        // Whoever fails here is asked anew the next time, and so is everyone else.
        let nobody = vec![None; clients.len()];
        let (known, activated) = (std::mem::replace(&mut self.identities, nobody), self.activated.take());
        let mut plans = Vec::new();
        for ((client, label), known) in clients.iter().zip(labels).zip(known) {
            let (base, activated) = (self.options.base.as_deref(), activated.clone());
            let (identity, released, server) = wait(&self.runtime, async {
                let serving = client.model_info().await?.weight_version;
                let released = occupation::released(client, serving.as_deref())?;
                let same = known.is_some() && activated.is_some() && serving == activated;
                let identity = attach(Arc::new(client.clone()), base, target, known, activated).await?;
                let server = if same { None } else { Some(client.server_info().await?) };
                Ok::<_, Error>((identity, released, server))
            })?;
            Check { engine: client.url() }.quantization(&expected, &["none"])?;
            if let Some(server) = &server {
                self.push.admit(client.url(), server)?;
            }
            check_tensors(checkpoint, place, &expected.config, identity.dtype)?;
            check_tied(checkpoint, place, target.manifest)?;
            let sums = client.sums(&identity, checkpoint, place)?;
            if let (Sums::Unknown { reason }, Compare::Require) = (&sums, self.options.compare) {
                return Err(Error::NotComparable { engine: client.url().into(), why: reason.clone() });
            }
            let release = if identity.saves_memory { self.options.release.clone() } else { Vec::new() };
            let (client, same) = (client.clone(), server.is_none());
            plans.push(Decided { client, identity, serving: label, sums, same, release, released });
        }
        Ok(plans)
    }

    fn transact(&mut self, plans: &[Decided], target: &Target<'_>) -> Result<()> {
        let mode = self.options.pause;
        self.pauses.iter_mut().for_each(|pause| pause.begin(mode));
        wait(&self.runtime, async {
            for plan in plans {
                make_ready(plan, mode, target.label).await?;
            }
            Ok::<_, Error>(())
        })?;
        self.pauses.iter_mut().for_each(Pause::touched);
        // A version's label is the last thing that an engine gets, once every engine was looked at.
        self.push.push(target.weights, None)?;
        wait(&self.runtime, async {
            for plan in plans {
                take_back(&plan.client, target.label).await?;
                check(&plan.client, &plan.sums).await?;
            }
            for plan in plans {
                relabel(&plan.client, target.label).await?;
            }
            Ok(())
        })
    }

    /// Ends every engine's pause, once it has its memory, and tells of the first that should go on and does
    /// not.
    fn end(&mut self, plans: &[Decided], label: &str, failed: Option<&Error>) -> Result<()> {
        let limit = pause::last_words();
        wait(&self.runtime, async {
            let mut ended = Ok(());
            for (plan, pause) in plans.iter().zip(&mut self.pauses) {
                let client = &plan.client.limited(&limit);
                let each = match take_back(client, label).await {
                    Ok(()) => pause.end(client, plan.serving.as_deref(), Ask::Token, failed).await,
                    Err(source) => Err(left_paused(client, failed, source)),
                };
                ended = ended.and(each);
            }
            ended
        })
    }
}

/// What was compared of all engines once they had been pushed into.
fn compared(plans: &[Decided]) -> Compared {
    let mut tensors = 0;
    for plan in plans {
        match &plan.sums {
            Sums::Known(sums) => tensors += sums.len() as u64,
            Sums::Unknown { reason } => return Compared::Not { why: reason.clone() },
        }
    }
    Compared::Checksums { tensors }
}

/// Brings an engine to where it can be pushed into: paused, without its cache, labelled as a mixture, and
/// with room.
async fn make_ready(plan: &Decided, mode: PauseMode, label: &str) -> Result<()> {
    let client = &plan.client;
    if !plan.released.is_empty() {
        client.pause(mode).await?;
        // Whoever let it give its memory back has emptied its cache; the update needs the weights' memory.
        return occupation::resume(client, label, &plan.released, &[MemoryTag::Weights]).await;
    }
    activate::make_ready(client, mode, label).await?;
    if plan.release.is_empty() {
        return Ok(());
    }
    occupation::release(client, label, &plan.release).await
}

/// Gives an engine back the memory that it is without.
async fn take_back(client: &Client, label: &str) -> Result<()> {
    let tags = occupation::released(client, client.model_info().await?.weight_version.as_deref())?;
    occupation::resume(client, label, &tags, &tags).await
}

impl<P: Push> Activate for PushActivator<P> {
    fn name(&self) -> String {
        self.clients.iter().map(Client::url).collect::<Vec<_>>().join(",")
    }

    fn serving(&mut self) -> Result<Option<String>, BoxError> {
        let limit = pause::last_words();
        let clients: Vec<_> = self.clients.iter().map(|client| client.limited(&limit)).collect();
        let labels: std::collections::BTreeSet<_> = self.look(&clients)?.into_iter().collect();
        let one = if labels.len() == 1 { labels.into_iter().next().flatten() } else { None };
        Ok(one.filter(|label| label.parse::<Label>().is_ok()))
    }

    fn activate(&mut self, target: &Target<'_>) -> Result<Activated, BoxError> {
        Ok(self.activate_all(target)?)
    }

    fn is_paused(&self) -> bool {
        self.pauses.iter().any(Pause::is_on)
    }
}
