//! The commit of a version, and what is left when it fails.

use std::collections::BTreeSet;

use driftless_store::{ContentDigest, Key};

use super::{Publisher, Standing};
use crate::error::{Error, Result};
use crate::gc::is_publishers;
use crate::ids::Version;
use crate::manifest::{Base, MANIFEST_BYTES_MAX, Manifest};
use crate::run::Committed;

impl Publisher {
    /// Creates the manifest, and finds out what became of it if the store does not say.
    pub(super) fn commit(&mut self, manifest: Manifest) -> Result<Committed> {
        // Until the manifest is known to be there, its objects belong to nothing.
        let version = manifest.version;
        let bytes = manifest.to_bytes().and_then(|bytes| self.sign("manifest", bytes, version));
        let bytes = bytes.inspect_err(|_| self.sweep_due = true)?;
        let committed = Committed::new(manifest, ContentDigest::of(&bytes));
        fail::fail_point!("publish.manifest");
        if let Err(error) = self.run.commit(&self.options.model, version, &bytes) {
            self.resolve_race(&committed, error)?;
        }
        self.note_committed(&committed);
        fail::fail_point!("publish.committed");
        tracing::info!(run = %self.run.id(), model = self.options.model, %version, "committed");
        if let Err(error) = self.run.set_head(&self.options.model, committed.identity()) {
            // Readers list instead; the next version sets it again.
            tracing::warn!(%version, %error, "the head hint was not written");
        }
        if let Some(notify) = &self.options.notify {
            notify.tell(version);
        }
        if std::mem::take(&mut self.sweep_due) {
            self.sweep(&committed);
        }
        Ok(committed)
    }

    /// Signs a document of a version, if this publisher has a key.
    pub(super) fn sign(&self, what: &'static str, document: Vec<u8>, version: Version) -> Result<Vec<u8>> {
        let Some(key) = &self.options.sign_key else { return Ok(document) };
        let signed = key.sign(document, &self.run.place(what, &self.options.model, version));
        if signed.len() as u64 > MANIFEST_BYTES_MAX {
            return Err(Error::TooLarge { what: what.to_owned(), max: MANIFEST_BYTES_MAX });
        }
        Ok(signed)
    }

    /// Notes a version that is behind the newest one known.
    pub(super) fn note_committed(&mut self, committed: &Committed) {
        self.newest = Some(committed.identity());
        let (anchor, bytes) = (committed.manifest.is_anchor(), committed.manifest.delta_piece_bytes());
        self.chain_bytes =
            if anchor { Some(0) } else { self.chain_bytes.map(|chain| chain.saturating_add(bytes)) };
    }

    /// Decides after a failed create whether the version is ours (its answer was lost), another's, or not
    /// there.
    pub(super) fn resolve_race(&mut self, committed: &Committed, error: Error) -> Result<()> {
        let version = committed.manifest.version;
        match self.run.get(&self.options.model, version) {
            Ok(found) if found.digest == committed.digest => Ok(()),
            Ok(found) => {
                self.standing = Standing::Fenced(found.identity());
                // The winner's manifest is there, so nothing else in the version's place can ever be
                // committed.
                self.sweep(&found);
                Err(self.lost(found.identity()))
            }
            // It was committed so long ago that it was collected since.
            Err(Error::Collected { .. }) => {
                self.sweep_place(version, |_| false);
                self.standing = Standing::Lagging(committed.identity());
                let newest = self.run.newest(&self.options.model)?.ok_or(error)?.identity();
                self.standing = Standing::Fenced(newest);
                Err(self.lost(newest))
            }
            Err(Error::NoSuchVersion { .. }) => {
                self.standing = Standing::Lagging(committed.identity());
                self.sweep_due = true;
                Err(error)
            }
            Err(untrusted @ (Error::Unsigned { .. } | Error::BadSignature { .. })) => {
                self.standing = Standing::Lagging(committed.identity());
                self.sweep_due = true;
                Err(untrusted)
            }
            Err(_) => {
                self.standing = Standing::Lagging(committed.identity());
                self.sweep_due = true;
                Err(Error::CommitUnknown {
                    version,
                    store: self.run.store().to_string(),
                    source: Box::new(error),
                })
            }
        }
    }

    pub(super) fn lost(&self, winner: Base) -> Error {
        Error::LostRace {
            run_id: self.run.id(),
            model: self.options.model.clone(),
            version: winner.version,
            winner: winner.manifest_digest,
        }
    }

    /// Removes what failed attempts at a committed version left beside it. Best effort: it costs space,
    /// nothing else.
    pub(super) fn sweep(&self, committed: &Committed) {
        let manifest = &committed.manifest;
        let named: BTreeSet<_> = manifest.objects.iter().map(|object| &object.key).collect();
        self.sweep_place(manifest.version, |key| named.contains(key));
    }

    pub(super) fn sweep_place(&self, version: Version, keep: impl Fn(&Key) -> bool) {
        let root = self.run.version_root(&self.options.model, version);
        let Ok(entries) = root.and_then(|root| Ok(self.run.store().list(&root)?)) else { return };
        for entry in entries.iter().filter(|entry| is_publishers(&entry.key) && !keep(&entry.key)) {
            self.discard(&entry.key);
        }
    }

    /// Removes the objects of an attempt that has no manifest and will get none.
    pub(super) fn sweep_attempt(&mut self, root: &Key, attempt: &str) {
        let Ok(entries) = self.run.store().list(root) else {
            self.sweep_due = true;
            return;
        };
        for entry in entries.iter().filter(|entry| entry.key.name().starts_with(attempt)) {
            self.discard(&entry.key);
        }
    }

    pub(super) fn discard(&self, key: &Key) {
        if let Err(error) = self.run.store().delete(key) {
            tracing::warn!(%key, %error, "an object that no manifest names was left behind");
        }
    }
}
