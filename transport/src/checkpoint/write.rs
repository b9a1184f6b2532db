//! Writing a checkpoint directory so that a crash leaves the old one or the new one.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{BufWriter, Write as _};
use std::ops::Range;
use std::path::{Path, PathBuf};

use driftless_store::os::watch::{self, Call};
use driftless_store::os::{if_there, remove_dir, sync_dir, sync_file, write_file};
use rustix::fs::{CWD, RenameFlags, renameat_with};

use super::{INDEX, SINGLE, header, index};
use crate::error::{Error, Result};
use crate::snapshot::{Snapshot, TensorInfo};

/// Tensors that are shorter go to the file together.
const WRITE_BYTES: usize = 1 << 18;

/// Names of the weight files written, the index last where there is one.
pub(crate) type WeightFiles = Vec<String>;

/// Writes `snapshot` as a Hugging Face checkpoint directory: `model.safetensors` when it fits in
/// `max_shard_bytes` of tensor data, else shards and an index, and the auxiliary files. A tensor larger than
/// that gets a file of its own.
///
/// Everything is written and synced beside `dir`, which is then created or exchanged by one rename. A reader,
/// or a crash, sees the old directory or the new one. A directory that holds another checkpoint is replaced
/// whole; one that holds anything else is refused.
///
/// # Errors
///
/// [`Error::BadSetting`] when `dir` is in use for something else,
/// [`NoSpace`](driftless_store::Error::NoSpace) and the other file system errors, [`Error::DuplicateTensor`]
/// and [`Error::TensorMismatch`] for a snapshot that contradicts itself. `dir` is untouched then.
pub fn write_checkpoint(dir: impl AsRef<Path>, snapshot: &dyn Snapshot, max_shard_bytes: u64) -> Result<()> {
    let dir = dir.as_ref();
    let replace = replaceable(dir)?;
    let partial = partial_name(dir)?;
    remove_dir(&partial)?;
    let written =
        write_all(&partial, snapshot, max_shard_bytes).and_then(|()| install(&partial, dir, replace));
    if written.is_err()
        && let Err(error) = remove_dir(&partial)
    {
        tracing::warn!(%error, "a partly written checkpoint stays behind");
    }
    written
}

/// Hands the bytes of the tensors at the given positions, in that order, to a sink.
pub(crate) type Stream<'a> = dyn FnMut(&[usize], &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> + 'a;

/// Writes weight files with `tensors`, whose bytes `stream` gives, into the existing directory `dir` and
/// syncs each; not the directory itself.
pub(crate) fn write_weights(
    dir: &Path,
    tensors: &[TensorInfo],
    max_shard_bytes: u64,
    stream: &mut Stream<'_>,
) -> Result<WeightFiles> {
    check_order(tensors)?;
    let sizes = tensors.iter().map(TensorInfo::byte_len).collect::<Result<Vec<_>>>()?;
    let shards = plan(&sizes, max_shard_bytes);
    let count = shards.len();
    if count <= 1 {
        write_shard(&dir.join(SINGLE), tensors, shards.into_iter().next().unwrap_or(0..0), stream)?;
        return Ok(vec![SINGLE.to_owned()]);
    }
    let mut names = WeightFiles::new();
    let mut weight_map = index::WeightMap::new();
    for (position, shard) in shards.into_iter().enumerate() {
        let name = format!("model-{:05}-of-{count:05}.safetensors", position + 1);
        weight_map.extend(tensors[shard.clone()].iter().map(|info| (info.name.clone(), name.clone())));
        write_shard(&dir.join(&name), tensors, shard, stream)?;
        names.push(name);
    }
    write_file(&dir.join(INDEX), index::compose(&weight_map, sizes.iter().sum()).as_bytes())?;
    names.push(INDEX.to_owned());
    Ok(names)
}

/// Greedy shards of consecutive tensors with at most `max` bytes each, except where one tensor alone is
/// larger.
fn plan(sizes: &[u64], max: u64) -> Vec<Range<usize>> {
    let mut shards = Vec::new();
    let (mut start, mut bytes) = (0, 0u64);
    for (position, &size) in sizes.iter().enumerate() {
        if position > start && bytes.checked_add(size).is_none_or(|sum| sum > max) {
            shards.push(start..position);
            (start, bytes) = (position, 0);
        }
        bytes = bytes.saturating_add(size);
    }
    if start < sizes.len() {
        shards.push(start..sizes.len());
    }
    shards
}

fn check_order(tensors: &[TensorInfo]) -> Result<()> {
    for (a, b) in tensors.iter().zip(tensors.iter().skip(1)) {
        if a.name == b.name {
            return Err(Error::DuplicateTensor { tensor: a.name.clone() });
        }
        if a.name > b.name {
            return Err(Error::TensorMismatch {
                tensor: b.name.clone(),
                what: "place in the snapshot",
                expected: "sorted by name".into(),
                found: format!("behind `{}`", a.name),
            });
        }
    }
    Ok(())
}

fn write_shard(
    path: &Path,
    tensors: &[TensorInfo],
    shard: Range<usize>,
    stream: &mut Stream<'_>,
) -> Result<()> {
    let mut order: Vec<(usize, &TensorInfo)> =
        tensors.iter().enumerate().skip(shard.start).take(shard.len()).collect();
    // Wide types first keeps every tensor aligned to its element size; the sort is stable, so names stay in
    // order within a width.
    order.sort_by_key(|(_, info)| std::cmp::Reverse(info.dtype.size()));
    let header = header::compose(&order.iter().map(|(_, info)| *info).collect::<Vec<_>>())?;
    let io = |source| Error::io("write", path, source);
    watch::before(Call::Create, path).map_err(io)?;
    // Many small tensors are one write.
    let mut file = BufWriter::with_capacity(WRITE_BYTES, File::create(path).map_err(io)?);
    watch::before(Call::Write, path).map_err(io)?;
    file.write_all(&header).map_err(io)?;
    let positions: Vec<usize> = order.iter().map(|(position, _)| *position).collect();
    let mut infos = order.iter().map(|(_, info)| *info);
    stream(&positions, &mut |bytes| {
        let Some(info) = infos.next() else { return Ok(()) };
        info.check_bytes(bytes)?;
        watch::before(Call::Write, path).and_then(|()| file.write_all(bytes)).map_err(io)
    })?;
    let file = file.into_inner().map_err(|error| io(error.into_error()))?;
    sync_file(&file, path).map_err(io)
}

fn write_all(dir: &Path, snapshot: &dyn Snapshot, max_shard_bytes: u64) -> Result<()> {
    fs::create_dir_all(dir).map_err(|source| Error::io("create", dir, source))?;
    write_weights(dir, snapshot.tensors(), max_shard_bytes, &mut |order, sink| {
        order.iter().try_for_each(|&index| sink(&snapshot.bytes(index)?))
    })?;
    for file in snapshot.files() {
        write_file(&dir.join(file.name()), file.bytes())?;
    }
    Ok(sync_dir(dir)?)
}

/// Whether `dir` exists with content, which is only accepted when it is a checkpoint and no replica.
fn replaceable(dir: &Path) -> Result<bool> {
    let entries = if_there(fs::read_dir(dir)).map_err(|source| Error::io("list", dir, source))?;
    if entries.is_none_or(|mut entries| entries.next().is_none()) {
        return Ok(false);
    }
    let is_checkpoint = dir.join(SINGLE).exists() || dir.join(INDEX).exists();
    if is_checkpoint && !dir.join(super::STATE_DIR).exists() {
        return Ok(true);
    }
    Err(Error::BadSetting {
        name: "checkpoint directory",
        expected: "a new or empty directory, or a plain checkpoint to replace".into(),
        found: format!("`{}`, which holds something else", dir.display()),
    })
}

/// `.<name>.partial` beside `dir`: on the same file system, so that a rename can install it.
fn partial_name(dir: &Path) -> Result<PathBuf> {
    let name = dir.file_name().ok_or_else(|| Error::BadSetting {
        name: "checkpoint directory",
        expected: "a path that ends in a name".into(),
        found: format!("`{}`", dir.display()),
    })?;
    let mut partial = OsString::from(".");
    partial.push(name);
    partial.push(".partial");
    Ok(dir.with_file_name(partial))
}

fn install(partial: &Path, dir: &Path, replace: bool) -> Result<()> {
    let io = |source: std::io::Error| Error::io("install", dir, source);
    if replace {
        // Afterwards `partial` holds the old checkpoint. Every Linux file system that holds checkpoints can
        // exchange.
        renameat_with(CWD, partial, CWD, dir, RenameFlags::EXCHANGE).map_err(|errno| io(errno.into()))?;
        sync_parent(dir)?;
        return Ok(remove_dir(partial)?);
    }
    fs::rename(partial, dir).map_err(io)?;
    sync_parent(dir)
}

fn sync_parent(dir: &Path) -> Result<()> {
    match dir.parent() {
        Some(parent) if parent != Path::new("") => Ok(sync_dir(parent)?),
        _ => Ok(sync_dir(Path::new("."))?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_are_greedy_and_hold_everything() {
        assert_eq!(plan(&[], 10), Vec::<Range<usize>>::new());
        assert_eq!(plan(&[4, 4, 4], 8), [0..2, 2..3]);
        assert_eq!(plan(&[20, 4, 4], 8), [0..1, 1..3]);
        assert_eq!(plan(&[4, 20, 4], 8), [0..1, 1..2, 2..3]);
        assert_eq!(plan(&[1, 1], 0), [0..1, 1..2]);
        assert_eq!(plan(&[u64::MAX, u64::MAX], u64::MAX), [0..1, 1..2]);
    }
}
