//! A [`Router`] decides how a version's objects come, before the first of them is fetched.

use std::fmt::Debug;

use super::keeper::Keeper;
use super::{Follower, Routed};
use crate::ids::Version;
use crate::manifest::{Base, Manifest};
use crate::replica::{Arrival, Observe};
use crate::run::Committed;

/// Decides for each version which way its objects come, and sees to it that they do.
///
/// A follower has one store, so that whoever decides sets that up, such as by `relay::Relays::use_ucx`.
pub trait Router: Debug + Send + Sync {
    /// Called before anything of a version but its manifests is fetched, again when another chain leads to it. What it
    /// returns is logged and in the status.
    fn route(&self, arrival: &Arrival) -> Routed;
}

/// Watches an advance on behalf of a follower.
pub(super) struct Watcher<'a> {
    pub(super) follower: &'a Follower,
    pub(super) keeper: &'a Keeper,
}

impl Observe for Watcher<'_> {
    fn planned(&self, oldest: Version) {
        self.keeper.planned(oldest);
    }

    fn arriving(&self, base: Option<(Base, &Manifest)>, chain: &[Committed]) {
        let Some(router) = &self.follower.options().router else { return };
        let Some(arrival) = Arrival::of(base, chain) else { return };
        let routed = router.route(&arrival);
        let Routed { way, reason, .. } = &routed;
        tracing::info!(version = %arrival.version, bytes = arrival.bytes, way, reason, "how the version comes");
        self.follower.status_mut().route = Some(routed);
    }

    fn fetching(&self) {
        self.keeper.fetching();
    }
}
