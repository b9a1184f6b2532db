//! Reads a replica some MiB at a time, and compares it with the digests that it should have.

use driftless_delta::{BLOCK_ELEMENTS, Digest};

use super::Replica;
use super::state::{State, read_optional};
use crate::error::{Error, Result};
use crate::manifest::Base;

/// How far a scrub has come.
#[derive(Debug, Default)]
pub(crate) struct Scrub {
    /// The version that `mains` is of.
    version: Option<Base>,
    /// For each tensor of the checkpoint, where its entry stands in the manifest.
    mains: Vec<usize>,
    /// The tensor; behind them come the auxiliary files.
    item: usize,
    block: usize,
}

impl Replica {
    /// Reads the next `bytes` or a little more, or to the end of a round, and compares them. Returns how many it read; none while
    /// there is no finished version.
    ///
    /// # Errors
    ///
    /// [`Error::DamagedReplica`] names what differs; the next call begins there. The file system's errors.
    pub(crate) fn scrub(&self, scrub: &mut Scrub, bytes: u64) -> Result<u64> {
        let Some(state) = self.state.as_ref().filter(|_| !self.unfinished) else { return Ok(0) };
        if scrub.version != self.identity() {
            // What is the same place in another version has other bytes; no byte is left out for it.
            scrub.version = self.identity();
            let entries = (0..).zip(&state.manifest.tensors).flat_map(|(index, tensor)| {
                let names = std::iter::once(&tensor.name).chain(&tensor.aliases);
                names.map(move |name| (name, index))
            });
            let mut entries: Vec<(&String, usize)> = entries.collect();
            entries.sort_unstable();
            scrub.mains = entries.into_iter().map(|(_, index)| index).collect();
        }
        let mut read = 0;
        while read < bytes {
            match state.check_next(scrub).map_err(|error| self.judge(error))? {
                Some(more) => read += more,
                None => {
                    (scrub.item, scrub.block) = (0, 0);
                    break;
                }
            }
        }
        Ok(read)
    }
}

impl State {
    /// Checks a block, or a file, and goes on to the next; returns its bytes, or `None` at the end of the round.
    fn check_next(&self, scrub: &mut Scrub) -> Result<Option<u64>> {
        let Some(main) = scrub.mains.get(scrub.item) else {
            let Some(file) = self.manifest.files.get(scrub.item - scrub.mains.len()) else { return Ok(None) };
            let path = self.checkpoint.dir().join(&file.name);
            let bytes = read_optional(&path)?.unwrap_or_default();
            file.blake3.check(&bytes, format_args!("`{}`", path.display()))?;
            scrub.item += 1;
            return Ok(Some(bytes.len() as u64));
        };
        let Some(tensor) = self.manifest.tensors.get(*main) else { return Ok(None) };
        let element = tensor.dtype.element();
        let bytes = self.checkpoint.tensor(scrub.item).unwrap_or_default();
        let Some(block) = bytes.chunks(BLOCK_ELEMENTS * element.size()).nth(scrub.block) else {
            (scrub.item, scrub.block) = (scrub.item + 1, 0);
            return Ok(Some(0));
        };
        let found = Digest::of(element, (scrub.block * BLOCK_ELEMENTS) as u64, block);
        let expected = self.tables.get(&tensor.name).and_then(|table| table.blocks().get(scrub.block));
        if expected != Some(&found) {
            return Err(Error::TensorMismatch {
                tensor: tensor.name.clone(),
                what: "digest of a block",
                expected: expected.map_or_else(|| "none".to_owned(), ToString::to_string),
                found: found.to_string(),
            });
        }
        scrub.block += 1;
        Ok(Some(block.len() as u64))
    }
}
