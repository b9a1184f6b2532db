//! Reads a replica some MiB at a time, and compares it with the digests that it should have.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use driftless_delta::{BLOCK_ELEMENTS, Digest};
use rustix::io::Errno;

use super::Replica;
use super::state::State;
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
    /// Reads the next `bytes` or a little more, or to the end of a round, and compares them. Returns how many
    /// it read; none while there is no finished version.
    ///
    /// # Errors
    ///
    /// [`Error::DamagedReplica`] names what differs; the next call begins there. The file system's errors.
    pub(crate) fn scrub(&self, scrub: &mut Scrub, bytes: u64) -> Result<u64> {
        let Some(state) = self.state.as_ref().filter(|_| !self.unfinished) else { return Ok(0) };
        if state.checkpoint.is_written() != Some(true) {
            return Ok(0);
        }
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
            match state.check_next(scrub).map_err(|error| self.classify(error))? {
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
    /// Checks a block, or a file, and goes on to the next; returns its bytes, or `None` at the end of the
    /// round.
    fn check_next(&self, scrub: &mut Scrub) -> Result<Option<u64>> {
        let Some(main) = scrub.mains.get(scrub.item) else {
            let Some(file) = self.manifest.files.get(scrub.item - scrub.mains.len()) else { return Ok(None) };
            let path = self.checkpoint.dir().join(&file.name);
            let bytes = std::fs::read(&path).map_err(|source| unread(&path, source))?;
            file.blake3.check(&bytes, format_args!("`{}`", path.display()))?;
            scrub.item += 1;
            return Ok(Some(bytes.len() as u64));
        };
        let Some(tensor) = self.manifest.tensors.get(*main) else { return Ok(None) };
        let element = tensor.dtype.element();
        let Some(place) = self.checkpoint.place(scrub.item) else { return Ok(None) };
        let begin = (scrub.block * BLOCK_ELEMENTS * element.size()) as u64;
        let length = place.length.saturating_sub(begin).min((BLOCK_ELEMENTS * element.size()) as u64);
        if length == 0 {
            (scrub.item, scrub.block) = (scrub.item + 1, 0);
            return Ok(Some(0));
        }
        let block = read_part(place.path, place.offset + begin, length as usize)?;
        let found = Digest::of(element, (scrub.block * BLOCK_ELEMENTS) as u64, &block);
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
        Ok(Some(length))
    }
}

/// Reads a part of a file. Not through the map: a page that the disk does not give, or that is cut off, would
/// end the process.
fn read_part(path: &Path, offset: u64, length: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![0; length];
    let read = File::open(path).and_then(|file| file.read_exact_at(&mut bytes, offset));
    read.map(|()| bytes).map_err(|source| unread(path, source))
}

/// Bytes that a disk has lost are damage, as wrong ones are. What else prevents a read may pass.
fn unread(path: &Path, source: io::Error) -> Error {
    let lost = match Errno::from_io_error(&source) {
        Some(Errno::IO | Errno::BADMSG) => true,
        // What ext4 and XFS answer for a checksum of theirs that does not fit.
        #[cfg(target_os = "linux")]
        Some(Errno::UCLEAN) => true,
        _ => false,
    };
    if !lost && source.kind() != ErrorKind::UnexpectedEof {
        return Error::io("read", path, source);
    }
    Error::corrupt(format!("`{}`", path.display()), "its content", "bytes that can be read", source)
}
