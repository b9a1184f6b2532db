//! What leads from one version of a model to another.

use std::ops::ControlFlow;

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
    /// If true, the first version is to be taken in full, without the base: it is an anchor, or a reference
    /// to a directory.
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
        known: Option<Committed>,
    ) -> Result<Chain> {
        if let Some(have) = from
            && have.version >= to
        {
            return self.nothing_to_do(model, have, to);
        }
        let mut walk =
            Walk { run: self, model, from, known, floor: None, versions: Vec::new(), cost: 0, anchor: None };
        let mut version = to;
        loop {
            match walk.step(version)? {
                ControlFlow::Continue(before) => version = before,
                ControlFlow::Break(chain) => return Ok(chain),
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

/// A walk back from a version to what the reader has, or to where it can start.
struct Walk<'a> {
    run: &'a Run,
    model: &'a str,
    from: Option<Base>,
    /// A manifest that was read before.
    known: Option<Committed>,
    /// The model's floor, once it was read.
    floor: Option<Version>,
    /// The versions so far, newest first.
    versions: Vec<Committed>,
    /// Bytes of their deltas.
    cost: u64,
    anchor: Option<Anchor>,
}

/// The newest anchor on the way, where the reader could start over.
struct Anchor {
    /// Versions from it on.
    versions: usize,
    /// Bytes that starting over moves.
    cost: u64,
}

impl Walk<'_> {
    /// Takes `version` in. Continues with the one before it, or ends with the chain.
    fn step(&mut self, version: Version) -> Result<ControlFlow<Chain, Version>> {
        let committed = match self.read(version) {
            Err(Error::Collected { .. }) if self.anchor.is_some() => {
                return Ok(ControlFlow::Break(self.chain(true)));
            }
            read => read?,
        };
        if let Some(newer) = self.versions.last() {
            check_base(newer, committed.identity())?;
        }
        let manifest = &committed.manifest;
        if manifest.is_anchor() && self.anchor.is_none() {
            let cost = self.cost.saturating_add(manifest.full_piece_bytes());
            self.anchor = Some(Anchor { versions: self.versions.len() + 1, cost });
        }
        self.cost = self.cost.saturating_add(manifest.delta_piece_bytes());
        let (base, stands_alone) = (manifest.base, manifest.kind != Kind::Delta);
        let reached = self.from.filter(|have| base.is_some_and(|base| base.version == have.version));
        if let Some(have) = reached {
            check_base(&committed, have)?;
        }
        self.versions.push(committed);
        let is_cheaper = |anchor: &Anchor| self.from.is_none() || anchor.cost < self.cost;
        let restart = stands_alone || self.anchor.as_ref().is_some_and(is_cheaper);
        Ok(match base {
            Some(base) if !restart && reached.is_none() => ControlFlow::Continue(base.version),
            _ => ControlFlow::Break(self.chain(restart)),
        })
    }

    fn read(&mut self, version: Version) -> Result<Committed> {
        let read = match self.known.take_if(|known| known.manifest.version == version) {
            Some(known) => Ok(known),
            None => self.run.read(self.model, version),
        };
        if read.is_ok() && self.floor.is_some_and(|floor| version >= floor) {
            return read;
        }
        let (committed, floor) = self.run.unless_collected(self.model, version, read)?;
        self.floor = Some(floor);
        Ok(committed)
    }

    /// The versions so far, or with `restart` those from the anchor on, if there is one.
    fn chain(&mut self, restart: bool) -> Chain {
        let mut versions = std::mem::take(&mut self.versions);
        if let (true, Some(anchor)) = (restart, &self.anchor) {
            versions.truncate(anchor.versions);
        }
        versions.reverse();
        Chain { restart, versions }
    }
}

/// Refuses a version that is not the one which `newer` builds on.
fn check_base(newer: &Committed, found: Base) -> Result<()> {
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
