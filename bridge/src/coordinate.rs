//! A coordinator for many hosts: every follower prepares a version while its engines generate, then all
//! engines change to it.
//!
//! A round waits for a straggler no longer than a set time. The straggler keeps its version: a request that
//! asks for the new one ([`Fleet::generate`](crate::Fleet::generate)) does not go to its engines. The next
//! round, of the same version or a later one, includes it.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::time::Duration;

use derive_setters::Setters;
use driftless_transport::follow::{PrepareReply, Status};
use serde_json::json;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout_at};

use crate::engine::Label;
use crate::error::{Error, Result};
use crate::http::{Call, Connection, Level, Link, Reply, excerpt};
use crate::keys::Keys;

/// Largest reply of a follower: the status of a host's engines.
const REPLY_BYTES_MAX: usize = 1 << 20;
/// Between two questions to a follower that is busy.
const BUSY_PAUSE: Duration = Duration::from_millis(50);

/// Options of a [`Coordinator`].
#[derive(Debug, Clone, Setters)]
#[setters(prefix = "with_", strip_option)]
#[non_exhaustive]
pub struct CoordinatorOptions {
    /// The token that the followers ask for, as the API key.
    pub keys: Keys,
    /// To connect to a follower.
    pub connect: Duration,
    /// How many hosts have to be prepared before any engine is paused, and activated before the round
    /// succeeds. 0 means all.
    pub hosts_min: usize,
    /// Once so many are, how much longer the others are waited for, in each of the two steps.
    pub grace: Duration,
    /// How long a host may take to prepare a version.
    pub prepare_deadline: Duration,
    /// How long a host may take to activate it on all its engines; above the followers' own deadline for one
    /// engine.
    pub activate_deadline: Duration,
}

impl Default for CoordinatorOptions {
    /// No token, 10 s to connect, all hosts, 5 s of grace, 30 minutes to prepare, 11 minutes to activate.
    fn default() -> Self {
        Self {
            keys: Keys::default(),
            connect: Duration::from_secs(10),
            hosts_min: 0,
            grace: Duration::from_secs(5),
            prepare_deadline: Duration::from_secs(1800),
            activate_deadline: Duration::from_secs(660),
        }
    }
}

/// What became of one host in a roll.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HostOutcome {
    /// The follower's URL.
    pub url: String,
    /// Time until the version was on its disk, if it is.
    pub prepared: Option<Duration>,
    /// From the order to activate until all its engines served the version, if they do.
    pub activated: Option<Duration>,
    /// Why it is a straggler, if it is one.
    pub failure: Option<String>,
}

/// What became of a version.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Rolled {
    /// The label that engines carry for it.
    pub label: Label,
    /// Every host, in the order in which they were given.
    pub hosts: Vec<HostOutcome>,
}

impl Rolled {
    /// The hosts that are not on the version.
    pub fn stragglers(&self) -> impl Iterator<Item = &HostOutcome> {
        self.hosts.iter().filter(|host| host.activated.is_none())
    }
}

/// Moves the followers of several hosts from version to version together. They have to be told to leave that
/// to it (`driftless follow --coordinated`); a roll is repeated freely, and does nothing on hosts that are
/// there.
#[derive(Debug)]
pub struct Coordinator {
    hosts: Vec<Connection>,
    options: CoordinatorOptions,
}

impl Coordinator {
    /// A coordinator of the followers at these addresses, `host:port` or `http://host:port`. Nothing is sent
    /// yet.
    ///
    /// # Errors
    /// [`Error::Address`] for any other form; [`Error::Fleet`] for no address or one twice.
    pub fn new(followers: &[String], options: CoordinatorOptions) -> Result<Self> {
        let link = Link {
            keys: &options.keys,
            ca: None,
            connect: options.connect,
            reply_bytes_max: REPLY_BYTES_MAX,
        };
        let connect = |address: &String| Connection::new(address, link);
        let hosts = followers.iter().map(connect).collect::<Result<Vec<_>>>()?;
        let urls: BTreeSet<_> = hosts.iter().map(|host| &host.engine).collect();
        if hosts.is_empty() || urls.len() != hosts.len() {
            return Err(Error::Fleet { found: followers.to_vec() });
        }
        Ok(Self { hosts, options })
    }

    /// Brings every host to the version of `label`: prepare everywhere, and where that succeeded activate
    /// everywhere. A host that prepared something else is a straggler. Stragglers are named in what is
    /// returned.
    ///
    /// # Errors
    /// [`Error::Unprepared`] if too few hosts were prepared in time: then no engine was paused.
    /// [`Error::Unactivated`] if too few were activated.
    pub async fn roll(&self, label: &Label) -> Result<Rolled> {
        let outcome = |host: &Connection| HostOutcome { url: host.engine.clone(), ..HostOutcome::default() };
        let mut hosts: Vec<HostOutcome> = self.hosts.iter().map(outcome).collect();
        let all: Vec<usize> = (0..hosts.len()).collect();
        let prepared = self.each(&mut hosts, &all, self.options.prepare_deadline, |host, deadline| {
            let label = label.clone();
            async move { prepare(&host, &label, deadline).await }
        });
        let prepared = prepared.await?;
        prepared.iter().for_each(|(index, took)| hosts[*index].prepared = Some(*took));
        if prepared.len() < self.hosts_min() {
            let (version, wanted) = (label.version(), self.hosts_min());
            return Err(Error::Unprepared { version, wanted, hosts: describe(&hosts) });
        }
        let ready: Vec<usize> = prepared.into_keys().collect();
        let activated = self.each(&mut hosts, &ready, self.options.activate_deadline, |host, deadline| {
            let label = label.clone();
            async move { activate(&host, &label, deadline).await }
        });
        activated.await?.into_iter().for_each(|(index, took)| hosts[index].activated = Some(took));
        let rolled = Rolled { label: label.clone(), hosts };
        for host in rolled.stragglers() {
            tracing::warn!(host = host.url, failure = host.failure, label = %rolled.label, "a straggler");
        }
        if rolled.hosts.len() - rolled.stragglers().count() < self.hosts_min() {
            let (label, hosts) = (rolled.label.to_string(), describe(&rolled.hosts));
            return Err(Error::Unactivated { label, wanted: self.hosts_min(), hosts });
        }
        Ok(rolled)
    }

    fn hosts_min(&self) -> usize {
        match self.options.hosts_min {
            0 => self.hosts.len(),
            some => some.min(self.hosts.len()),
        }
    }

    /// Asks some hosts at once, and returns how long those took that succeeded; the others have a failure then. All
    /// have until `limit`; once enough have succeeded, the others have the grace.
    async fn each<F: Future<Output = Result<Duration>> + Send + 'static>(
        &self,
        hosts: &mut [HostOutcome],
        of: &[usize],
        limit: Duration,
        ask: impl Fn(Connection, Instant) -> F,
    ) -> Result<BTreeMap<usize, Duration>> {
        let begin = Instant::now();
        let mut end = begin + limit;
        let mut asked = JoinSet::new();
        for &index in of {
            let answer = ask(self.hosts[index].clone(), begin + limit);
            asked.spawn(async move { (index, answer.await) });
        }
        let (mut late, mut succeeded) = (BTreeSet::from_iter(of), BTreeMap::new());
        while let Ok(Some(answer)) = timeout_at(end, asked.join_next()).await {
            let (index, answer) = answer.map_err(Error::set_up("a task of the coordinator"))?;
            late.remove(&index);
            match answer {
                Ok(took) => drop(succeeded.insert(index, took)),
                Err(error) => hosts[index].failure = Some(error.to_string()),
            }
            if succeeded.len() >= self.hosts_min() {
                end = end.min(Instant::now() + self.options.grace);
            }
        }
        // A call that is given up goes on at its follower, which then has the version sooner.
        for &index in late {
            let (engine, after) = (hosts[index].url.clone(), begin.elapsed());
            let error = Error::Deadline { engine, call: "the coordinator's order".into(), after };
            hosts[index].failure = Some(error.to_string());
        }
        Ok(succeeded)
    }
}

/// Has a follower prepare the version of `label`; how long it took.
async fn prepare(host: &Connection, label: &Label, end: Instant) -> Result<Duration> {
    let begin = Instant::now();
    let body = json!({ "version": label.version() });
    let (call, reply) = order(host, "/prepare", Some(&body), end).await?;
    let reply: PrepareReply = host.decode(call, &reply.body)?;
    if reply.label == label.to_string() {
        return Ok(begin.elapsed());
    }
    Err(host.malformed(call, &format!("label {label}"), &excerpt(reply.label.as_bytes())))
}

/// Has a follower activate what it prepared, which has to be `label` on every one of its engines.
async fn activate(host: &Connection, label: &Label, end: Instant) -> Result<Duration> {
    let begin = Instant::now();
    let (call, reply) = order(host, "/activate", None, end).await?;
    let status: Status = host.decode(call, &reply.body)?;
    let wanted = label.to_string();
    let is_it = |label: Option<&String>| label == Some(&wanted);
    let found = match status.applied {
        Some(ack) if is_it(Some(&ack.label)) && ack.engines.iter().all(|of| is_it(of.label.as_ref())) => {
            return Ok(begin.elapsed());
        }
        Some(ack) => format!("{} on disk, {:?}", excerpt(ack.label.as_bytes()), ack.engines),
        None => "nothing".to_owned(),
    };
    Err(Error::LabelMismatch { engine: host.engine.clone(), expected: wanted, found })
}

/// Sends an order, again while the follower is busy with another one, until `end`.
async fn order<'a>(
    host: &Connection,
    path: &'a str,
    body: Option<&'a serde_json::Value>,
    end: Instant,
) -> Result<(Call<'a>, Reply)> {
    loop {
        let deadline = end.saturating_duration_since(Instant::now());
        let call = Call::post(path, Level::Normal, body, deadline);
        let reply = host.send(call).await?;
        let busy = reply.status == 409 && String::from_utf8_lossy(&reply.body).contains("\"busy\"");
        match reply.status {
            200 => return Ok((call, reply)),
            _ if busy && Instant::now() + BUSY_PAUSE < end => sleep(BUSY_PAUSE).await,
            _ => return Err(host.status_error(call, &reply)),
        }
    }
}

fn describe(hosts: &[HostOutcome]) -> Vec<String> {
    let failed = hosts.iter().filter_map(|host| Some(format!("{} ({})", host.url, host.failure.as_ref()?)));
    failed.collect()
}
