//! `rollout_external_engines_dns`: a name each of whose addresses is an engine, such as a headless service of Kubernetes.
//!
//! An address that appears is added. One that is missing for a few looks in a row is drained: an answer may lack some of
//! them. A name without any address changes nothing, as name servers fail too.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::lookup_host;
use tokio::runtime::Runtime;
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::changes::{Engine, url_of};
use super::door::Keeper;
use super::watched::{Change, carry_out};
use crate::error::{Result, input};

/// Time between two looks.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// How long one may take.
const LOOKUP: Duration = Duration::from_secs(5);
/// Looks in a row that an engine's address is missing in, before it counts as gone.
const MISSED_MAX: u32 = 3;
/// Most addresses of a name.
const ADDRESSES_MAX: usize = 4096;

/// A name, its port, and what stands before them in an engine's address: `vllm+` or nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Name {
    kind: String,
    host: String,
    port: u16,
}

impl Name {
    /// # Errors
    /// [`crate::Error::Input`] for what is no `name:port`, also of https: no certificate is of a bare address.
    pub(super) fn parse(text: &str) -> Result<Self> {
        let expected = "name:port or http://name:port, with vllm+ before it for vLLM";
        let refused = || input("rollout_external_engines_dns", expected, text);
        let (kind, rest) = text.split_once('+').map_or(("", text), |(kind, rest)| (kind, rest));
        let name = rest.strip_prefix("http://").unwrap_or(rest);
        let (host, port) = name.rsplit_once(':').ok_or_else(refused)?;
        let port = port.parse().map_err(|_| refused())?;
        let is_name = !host.is_empty()
            && host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte));
        let kind = if kind.is_empty() { String::new() } else { format!("{kind}+") };
        let name = Name { kind, host: host.to_owned(), port };
        match is_name && url_of(&format!("{}http://{host}:{port}", name.kind)).is_ok() {
            true => Ok(name),
            false => Err(refused()),
        }
    }

    /// The engines at its addresses now, or why they are not known.
    async fn look_up(&self) -> Result<BTreeSet<String>, String> {
        let found = timeout(LOOKUP, lookup_host((self.host.as_str(), self.port))).await;
        let found =
            found.map_err(|_| format!("no answer within {LOOKUP:?}"))?.map_err(|error| error.to_string())?;
        let engines: BTreeSet<_> =
            taken(found.collect()).map(|address| format!("{}http://{address}", self.kind)).collect();
        if engines.is_empty() { Err("it has no address".to_owned()) } else { Ok(engines) }
    }

    /// The engines at its addresses when a run begins.
    ///
    /// # Errors
    /// [`crate::Error::Input`] if it has none.
    pub(super) fn engines(&self, runtime: &Runtime) -> Result<Vec<Engine>> {
        let found = runtime.block_on(self.look_up()).map_err(|why| {
            let found = format!("{}:{}: {why}", self.host, self.port);
            input("rollout_external_engines_dns", "a name with addresses", found)
        })?;
        Ok(found.into_iter().map(engine).collect())
    }

    /// Follows it, and has `keeper` do what it says. `engines` are those that were found when the run began; those of
    /// these `listed` URLs are the run's anyway.
    pub(super) async fn follow(
        self,
        engines: Vec<Engine>,
        listed: BTreeSet<String>,
        keeper: Arc<Keeper>,
        drains: Duration,
    ) {
        let mut known = Known::default();
        known.see(engines.into_iter().map(|engine| engine.address).collect());
        let mut ticks = interval(LOOK_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut failed = false;
        loop {
            ticks.tick().await;
            match self.look_up().await {
                Ok(mut found) => {
                    failed = false;
                    found.retain(|address| url_of(address).is_ok_and(|url| !listed.contains(&url)));
                    carry_out(known.see(found), &keeper, drains);
                }
                // Once, and not each time.
                Err(why) if !failed => {
                    failed = true;
                    tracing::warn!(name = self.host, why, "the engines stay as they are");
                }
                Err(_) => {}
            }
        }
    }
}

/// The addresses that stand for an engine each: one may have both an IPv4 and an IPv6 address, and those of a link alone have
/// no URL.
fn taken(found: Vec<SocketAddr>) -> impl Iterator<Item = SocketAddr> {
    let is_v4 = found.iter().any(SocketAddr::is_ipv4);
    let is_taken = move |address: &SocketAddr| match address {
        SocketAddr::V4(_) => true,
        SocketAddr::V6(address) => !is_v4 && address.scope_id() == 0,
    };
    found.into_iter().filter(is_taken).take(ADDRESSES_MAX)
}

/// What was added later gets no key unless a user says so, and a name server is no user.
fn engine(address: String) -> Engine {
    Engine { address, keys: false }
}

/// The addresses that a name has, as a function over looks: for how many each was missing.
#[derive(Debug, Default)]
struct Known(BTreeMap<String, u32>);

impl Known {
    fn see(&mut self, found: BTreeSet<String>) -> Change {
        self.0
            .iter_mut()
            .filter(|(address, _)| !found.contains(*address))
            .for_each(|(_, missed)| *missed += 1);
        let gone: Vec<String> =
            self.0.extract_if(.., |_, missed| *missed >= MISSED_MAX).map(|(address, _)| address).collect();
        let added = found
            .into_iter()
            .filter(|address| self.0.insert(address.clone(), 0).is_none())
            .map(engine)
            .collect();
        let removed = gone.iter().filter_map(|address| url_of(address).ok()).collect();
        Change { added, removed }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engine_with_addresses_of_both_kinds_is_one() {
        let taken = |found: &[&str]| {
            let found = found.iter().map(|address| address.parse().unwrap()).collect();
            taken(found).map(|address| address.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(taken(&["[fd00::1]:1", "10.0.0.1:1", "[fd00::2]:1"]), ["10.0.0.1:1"]);
        assert_eq!(taken(&["[fd00::1]:1", "[fe80::1%2]:1"]), ["[fd00::1]:1"]);
    }

    #[test]
    fn name_is_one_with_a_port_and_no_certificate() {
        let name = |kind: &str, host: &str, port| Name { kind: kind.into(), host: host.into(), port };
        assert_eq!(
            Name::parse("rollouts.default.svc:30000").unwrap(),
            name("", "rollouts.default.svc", 30000)
        );
        assert_eq!(Name::parse("vllm+http://rollouts:8000").unwrap(), name("vllm+", "rollouts", 8000));
        for text in
            ["", "rollouts", "rollouts:", "rollouts:x", ":1", "https://a:1", "tgi+a:1", "a/b:1", "a:1/b"]
        {
            let refused = Name::parse(text).unwrap_err().to_string();
            assert!(refused.contains("name:port"), "{text}: {refused}");
        }
    }

    #[test]
    fn address_missing_once_stays_and_one_that_stays_away_goes() {
        let of = |addresses: &[&str]| addresses.iter().map(|address| format!("http://{address}")).collect();
        let change = |added: &[&str], removed: &[&str]| Change {
            added: added.iter().map(|address| engine(format!("http://{address}"))).collect(),
            removed: removed.iter().map(|address| format!("http://{address}")).collect(),
        };
        let mut known = Known::default();
        for (found, added, removed) in [
            (&["a:1", "b:1"][..], &["a:1", "b:1"][..], &[][..]),
            (&["a:1"], &[], &[]),
            (&["a:1", "b:1", "c:1"], &["c:1"], &[]),
            (&["b:1"], &[], &[]),
            (&["b:1"], &[], &[]),
            (&["b:1"], &[], &["a:1", "c:1"]),
            (&["a:1", "b:1"], &["a:1"], &[]),
        ] {
            assert_eq!(known.see(of(found)), change(added, removed), "{found:?}");
        }
    }

    #[test]
    fn addresses_are_engines_without_keys_and_none_is_refused() {
        let runtime = Runtime::new().unwrap();
        let engines = Name::parse("vllm+localhost:7").unwrap().engines(&runtime).unwrap();
        assert!(engines.contains(&engine("vllm+http://127.0.0.1:7".into())), "{engines:?}");
        assert!(engines.iter().all(|engine| !engine.keys));
        let refused = Name::parse("nowhere.invalid:7").unwrap().engines(&runtime).unwrap_err().to_string();
        assert!(
            refused.contains("rollout_external_engines_dns") && refused.contains("nowhere.invalid"),
            "{refused}"
        );
    }
}
