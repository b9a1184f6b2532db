//! What leads from one version of a model to another.

use driftless_store::Error as StoreError;

use crate::error::{Error, Result};
use crate::ids::Version;
use crate::manifest::{Base, Kind};
use crate::run::{Committed, Run};

/// The publications that lead to a version, oldest first, each one's base checked against the one in front of
/// it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Chain {
    /// If true, the first version is to be taken in full, without the base: it is an anchor, or a reference to a
    /// directory.
    pub restart: bool,
    /// The versions; none if the reader is there already.
    pub versions: Vec<Committed>,
}

impl Run {
    /// What leads a reader that has `from` (or nothing) to version `to`.
    ///
    /// Prefers the deltas behind `from`; starts over at an anchor where there is no other way (versions were
    /// collected), or where that moves fewer bytes. A reader that has nothing starts at the newest anchor up
    /// to `to`, or at version 0's reference.
    ///
    /// # Errors
    /// [`Error::Rewind`] if `from` is newer than `to`; [`Error::BrokenChain`] if a manifest is not the one
    /// that the next version builds on, `from` included; [`Error::Collected`] if a version was collected and no
    /// anchor stands between it and `to`; the errors of [`Run::get`].
    pub fn chain(&self, model: &str, from: Option<Base>, to: Version) -> Result<Chain> {
        self.chain_with(model, from, to, None)
    }

    /// [`Run::chain`], for a reader that has read one of the manifests already.
    pub(crate) fn chain_with(
        &self,
        model: &str,
        from: Option<Base>,
        to: Version,
        mut known: Option<Committed>,
    ) -> Result<Chain> {
        if let Some(have) = from
            && have.version >= to
        {
            return self.nothing_to_do(model, have, to);
        }
        // Newest first. `cost` is what the deltas read so far weigh; `anchor`, how many versions to keep to
        // start over at the newest anchor, and what that weighs.
        let mut versions: Vec<Committed> = Vec::new();
        let mut cost = 0u64;
        let mut anchor: Option<(usize, u64)> = None;
        let (mut version, mut floor) = (to, None);
        loop {
            let read = match known.take_if(|known| known.manifest.version == version) {
                Some(known) => Ok(known),
                None => self.read(model, version),
            };
            let read = match (read, floor) {
                (Ok(committed), Some(floor)) if version >= floor => Ok(committed),
                (read, _) => self.unless_collected((model, version), read).map(|(committed, now)| {
                    floor = Some(now);
                    committed
                }),
            };
            let committed = match (read, anchor) {
                (Err(Error::Collected { .. }), Some((keep, _))) => {
                    versions.truncate(keep);
                    versions.reverse();
                    return Ok(Chain { restart: true, versions });
                }
                (committed, _) => committed?,
            };
            if let Some(newer) = versions.last() {
                check_link(newer, committed.identity())?;
            }
            if committed.manifest.is_anchor() && anchor.is_none() {
                anchor =
                    Some((versions.len() + 1, cost.saturating_add(committed.manifest.full_piece_bytes())));
            }
            cost = cost.saturating_add(committed.manifest.delta_piece_bytes());
            let stands_alone = committed.manifest.kind != Kind::Delta;
            let base = committed.manifest.base;
            versions.push(committed);

            let reached = from.filter(|have| base.is_some_and(|base| base.version == have.version));
            if let (Some(have), Some(committed)) = (reached, versions.last()) {
                check_link(committed, have)?;
            }
            let restart =
                stands_alone || anchor.is_some_and(|(_, anchor_cost)| from.is_none() || anchor_cost < cost);
            match base {
                Some(base) if !restart && reached.is_none() => version = base.version,
                _ => {
                    if let (true, Some((keep, _))) = (restart, anchor) {
                        versions.truncate(keep);
                    }
                    versions.reverse();
                    return Ok(Chain { restart, versions });
                }
            }
        }
    }

    /// The chain of a reader that is at `to` already, or refuses to go back.
    fn nothing_to_do(&self, model: &str, have: Base, to: Version) -> Result<Chain> {
        if have.version > to {
            let subject = format!("model `{model}`");
            return Err(Error::Rewind { subject, run_id: self.id(), have: have.version, wanted: to });
        }
        let found = self.get(model, to)?.digest;
        if found != have.manifest_digest {
            return Err(Error::Store(StoreError::DigestMismatch {
                subject: self.manifest_key(model, to)?.to_string(),
                expected: have.manifest_digest,
                found,
            }));
        }
        Ok(Chain { restart: false, versions: Vec::new() })
    }
}

/// Refuses a version that is not the one which `newer` builds on.
fn check_link(newer: &Committed, found: Base) -> Result<()> {
    match newer.manifest.base {
        Some(base) if base.manifest_digest != found.manifest_digest => Err(Error::BrokenChain {
            version: newer.manifest.version,
            base: base.version,
            expected: base.manifest_digest,
            found: found.manifest_digest,
        }),
        _ => Ok(()),
    }
}
