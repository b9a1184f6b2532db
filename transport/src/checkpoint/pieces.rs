//! Checkpoint directories that are read by calls, in pieces.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use driftless_store::os::regular;

use super::{Listed, header, no_shard};
use crate::error::{Error, Result};
use crate::snapshot::TensorInfo;

/// The tensors of a checkpoint directory, for a process that must outlive whatever becomes of the files: nothing is mapped,
/// so that a file that is made shorter is an error.
#[derive(Debug)]
pub struct Pieces {
    tensors: Vec<TensorInfo>,
    places: Vec<(usize, Range<usize>)>,
    files: Vec<(PathBuf, File)>,
}

impl Pieces {
    /// Opens a directory. Every weight file's header is read, no tensor is.
    ///
    /// # Errors
    /// As [`Checkpoint::open`](super::Checkpoint::open), but for auxiliary files, which are not looked at.
    pub fn open(dir: &Path) -> Result<Self> {
        let listed = Listed::read(dir)?;
        let open = |name: &String| {
            let path = dir.join(name);
            regular::open(&path).map(|file| (path, file)).map_err(|source| no_shard(dir, name, source))
        };
        let files = listed.names.iter().map(open).collect::<Result<Vec<_>>>()?;
        let headers = files.iter().map(|(path, file)| header::read(path, file));
        let (tensors, places) = listed.table(dir, headers.collect::<Result<_>>()?)?.into_values().unzip();
        Ok(Self { tensors, places, files })
    }

    /// The tensors, sorted by name.
    #[must_use]
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// Reads the bytes of `tensors()[index]` from `offset` on.
    ///
    /// # Errors
    /// [`Error::TensorMismatch`] for bytes that the tensor has not; [`Io`](driftless_store::Error::Io) for those that its
    /// file has no more.
    pub fn read(&self, index: usize, offset: u64, into: &mut [u8]) -> Result<()> {
        let place = self.places.get(index).and_then(|(file, range)| Some((self.files.get(*file)?, range)));
        let end = offset.checked_add(into.len() as u64);
        match (place, end) {
            (Some(((path, file), range)), Some(end)) if end <= range.len() as u64 => file
                .read_exact_at(into, range.start as u64 + offset)
                .map_err(|source| Error::io("read", path, source)),
            _ => {
                let name = self.tensors.get(index).map_or("none", |info| &info.name);
                let length = place.map_or(0, |(_, range)| range.len());
                Err(Error::mismatch(
                    name,
                    "bytes that are read",
                    format!("within {length}"),
                    format!("{end:?}"),
                ))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;
    use crate::snapshot::Tensors;

    fn checkpoint(dir: &Path) -> PathBuf {
        let tensors = Tensors::new().tensor("a", Dtype::U8, [3], vec![1, 2, 3]).unwrap();
        let tensors = tensors.tensor("b", Dtype::Bf16, [2], vec![4, 5, 6, 7]).unwrap();
        super::super::write_checkpoint(dir, &tensors, u64::MAX).unwrap();
        dir.join("model.safetensors")
    }

    #[test]
    fn pieces_are_those_of_the_tensors_and_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("c");
        checkpoint(&dir);
        let pieces = Pieces::open(&dir).unwrap();
        assert_eq!(pieces.tensors().iter().map(|info| info.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        let read = |index, offset, length| {
            let mut bytes = vec![0; length];
            pieces.read(index, offset, &mut bytes).map(|()| bytes)
        };
        assert_eq!(read(0, 0, 3).unwrap(), [1, 2, 3]);
        assert_eq!(read(1, 1, 2).unwrap(), [5, 6]);
        assert!(read(1, 4, 0).unwrap().is_empty());
        for (index, offset, length) in [(0, 1, 3), (1, 5, 0), (1, u64::MAX, 2), (2, 0, 0)] {
            let error = read(index, offset, length).unwrap_err();
            assert!(matches!(error, Error::TensorMismatch { .. }), "{error}");
        }
    }

    #[test]
    fn files_that_end_early_are_errors_when_opened_and_when_read() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("c");
        let path = checkpoint(&dir);
        let whole = std::fs::read(&path).unwrap();
        let pieces = Pieces::open(&dir).unwrap();
        File::options().write(true).open(&path).unwrap().set_len(whole.len() as u64 - 7).unwrap();
        let error = pieces.read(1, 0, &mut [0; 4]).unwrap_err().to_string();
        assert!(error.contains("model.safetensors"), "{error}");
        for length in 0..whole.len() {
            std::fs::write(&path, &whole[..length]).unwrap();
            assert!(matches!(Pieces::open(&dir).unwrap_err(), Error::Corrupt { .. }), "{length}");
        }
        // A header that would not fit into memory.
        for header in [u64::MAX, 1 << 40, 100_000_000] {
            let bytes = [&header.to_le_bytes()[..], &whole[8..]].concat();
            std::fs::write(&path, bytes).unwrap();
            assert!(matches!(Pieces::open(&dir).unwrap_err(), Error::Corrupt { .. }), "{header}");
        }
        std::fs::remove_file(&path).unwrap();
        assert!(Pieces::open(&dir).unwrap_err().to_string().contains("no such file"));
    }
}
