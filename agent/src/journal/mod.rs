//! A file of records that are durable before anybody is told of them. Records that wait at once share one
//! `fdatasync`.

mod frame;

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use tokio::sync::{mpsc, oneshot};

use crate::error::{Error, Result, io};

/// Records that wait at most; others wait for a place.
const WAITING_MAX: usize = 1024;
/// A group is written once it has as many bytes.
const GROUP_BYTES: usize = 4 << 20;
/// Zeros that are written behind the groups at once: a quarter of the file, within these bounds. A group that overwrites them
/// is durable without a change of the file's size, which file systems write into a journal of their own.
const ROOM: std::ops::RangeInclusive<u64> = 64 << 10..=1 << 20;

/// An open journal. It is locked for this process.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    entries: mpsc::Sender<Entry>,
    /// Why nothing can be written any more.
    failed: Arc<OnceLock<String>>,
}

/// A record, and who waits for it.
struct Entry {
    record: Vec<u8>,
    done: oneshot::Sender<Result<(), String>>,
}

impl Journal {
    /// Opens or makes it. `keep` reads its records and says of each whether it is still of use; others are dropped
    /// from the file. What a crash left half written, nobody was told of, and it is cut off.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Journal`] if another process has it, if a record before the last ones is damaged, and
    /// with what `keep` says.
    pub fn open(path: &Path, keep: impl FnOnce(&[&[u8]]) -> Result<Vec<bool>, String>) -> Result<Self> {
        let mut bytes = Vec::new();
        let (mut file, mut end, records) = recover(path, &mut bytes)?;
        let kept = keep(&records).map_err(|reason| Error::Journal { path: path.to_owned(), reason })?;
        if kept.contains(&false) {
            let kept = records.iter().zip(kept).filter(|(_, keep)| *keep);
            (file, end) = replace(path, kept.map(|(record, _)| *record))?;
        }
        drop(bytes);
        let (entries, waiting) = mpsc::channel(WAITING_MAX);
        let thread = std::thread::Builder::new().name("session journal".to_owned());
        let (groups, failed) = (Groups { file, end, room: end }, Arc::<OnceLock<String>>::default());
        let told = failed.clone();
        thread.spawn(move || write_groups(groups, waiting, &told)).map_err(io("start a thread for", path))?;
        Ok(Journal { path: path.to_owned(), entries, failed })
    }

    /// Whether anything can still be written.
    ///
    /// # Errors
    /// [`Error::Journal`] once the file could not be written.
    pub fn check(&self) -> Result<()> {
        let failed = |reason: &String| Error::Journal { path: self.path.clone(), reason: reason.clone() };
        self.failed.get().map_or(Ok(()), |reason| Err(failed(reason)))
    }

    /// Writes a record; returns once it is durable.
    ///
    /// # Errors
    /// [`Error::Journal`] for a record that is too long, and once the file could not be written: nothing can be
    /// written after that.
    pub async fn append(&self, record: Vec<u8>) -> Result<()> {
        let refused = |reason: String| Error::Journal { path: self.path.clone(), reason };
        if record.len() > frame::RECORD_BYTES_MAX {
            let (found, most) = (record.len(), frame::RECORD_BYTES_MAX);
            return Err(refused(format!("a record of {found} bytes, and at most {most} are kept")));
        }
        let (done, written) = oneshot::channel();
        let gone = |()| refused("its writer has ended".to_owned());
        self.entries.send(Entry { record, done }).await.map_err(|_| gone(()))?;
        written.await.map_err(|_| gone(()))?.map_err(refused)
    }
}

/// Opens, locks and reads the file, and cuts what a crash left and the zeros. Returns where its groups end, too, and its
/// records, which lie in `bytes`.
fn recover<'a>(path: &Path, bytes: &'a mut Vec<u8>) -> Result<(File, u64, Vec<&'a [u8]>)> {
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
        .map_err(io("open", path))?;
    let refused = |reason: String| Error::Journal { path: path.to_owned(), reason };
    match file.try_lock() {
        Ok(()) => {}
        Err(std::fs::TryLockError::WouldBlock) => {
            return Err(refused(
                "another process has it; end that one, or choose another directory".to_owned(),
            ));
        }
        Err(std::fs::TryLockError::Error(error)) => return Err(io("lock", path)(error)),
    }
    file.read_to_end(bytes).map_err(io("read", path))?;
    let (records, end) = frame::read(bytes).map_err(refused)?;
    if bytes[end..].iter().any(|byte| *byte != 0) {
        tracing::warn!(path = %path.display(), bytes = bytes.len() - end, "cut the unfinished end of the journal");
    }
    file.set_len(end as u64).map_err(io("cut", path))?;
    file.sync_all().map_err(io("write", path))?;
    sync_folder(path)?;
    Ok((file, end as u64, records))
}

/// A file with these records in place of the one at `path`, locked before others can open it, and where it ends.
fn replace<'a>(path: &Path, records: impl Iterator<Item = &'a [u8]>) -> Result<(File, u64)> {
    let new = path.with_extension("new");
    let mut file = File::create(&new).map_err(io("make", &new))?;
    file.try_lock().map_err(|error| io("lock", &new)(error.into()))?;
    let mut end = 0;
    for record in records {
        let group = frame::group(std::iter::once(record));
        file.write_all(&group).map_err(io("write", &new))?;
        end += group.len() as u64;
    }
    file.sync_all().map_err(io("write", &new))?;
    std::fs::rename(&new, path).map_err(io("replace", path))?;
    sync_folder(path)?;
    Ok((file, end))
}

fn sync_folder(path: &Path) -> Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(io("write", folder))
}

/// The open file.
struct Groups {
    file: File,
    /// Where the groups end, and where the zeros behind them do.
    end: u64,
    room: u64,
}

impl Groups {
    /// Writes a group; returns once it is durable.
    fn write(&mut self, group: &[u8]) -> std::io::Result<()> {
        self.file.write_all_at(group, self.end)?;
        self.end += group.len() as u64;
        if self.end > self.room {
            // A disk without space for zeros may have some for groups.
            let room = (self.end / 4).clamp(*ROOM.start(), *ROOM.end());
            let zeros = self.file.write_all_at(&vec![0; room as usize], self.end);
            self.room = zeros.map_or(u64::MAX, |()| self.end + room);
        }
        self.file.sync_data()
    }
}

/// Writes what waits, group by group, until nobody can send any more.
fn write_groups(mut groups: Groups, mut waiting: mpsc::Receiver<Entry>, failed: &OnceLock<String>) {
    while let Some(first) = waiting.blocking_recv() {
        let mut group = vec![first];
        let mut bytes = group[0].record.len();
        while bytes < GROUP_BYTES {
            let Ok(next) = waiting.try_recv() else { break };
            bytes += next.record.len();
            group.push(next);
        }
        if failed.get().is_none() {
            let written = frame::group(group.iter().map(|entry| entry.record.as_slice()));
            if let Err(error) = groups.write(&written) {
                let todo = "make room, or mend the disk, and start this again";
                tracing::error!(%error, "the journal of sessions could not be written; {todo}");
                let _ = failed.set(format!("it could not be written: {error}; {todo}"));
            }
        }
        for Entry { done, .. } in group {
            // Whoever waited may have gone.
            let _ = done.send(failed.get().cloned().map_or(Ok(()), Err));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_lie_in_zeros_that_no_start_reads() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sessions");
        let records = [vec![1; 10], vec![2; 65_000], vec![3; 9 << 20], vec![4; 30]];
        let mut rooms = Vec::new();
        for at in 0..records.len() {
            let mut bytes = Vec::new();
            let (file, end, found) = recover(&path, &mut bytes).unwrap();
            assert_eq!(found, records[..at]);
            assert_eq!(file.metadata().unwrap().len(), end, "zeros of an earlier process are cut");
            let mut groups = Groups { file, end, room: end };
            groups.write(&frame::group(std::iter::once(records[at].as_slice()))).unwrap();
            rooms.push(groups.file.metadata().unwrap().len() - groups.end);
        }
        let [least, most] = [*ROOM.start(), *ROOM.end()];
        assert_eq!(rooms, [least, least, most, most]);
    }

    #[test]
    fn groups_within_the_zeros_leave_the_size_of_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let (file, end, _) = recover(&dir.path().join("sessions"), &mut Vec::new()).unwrap();
        let mut groups = Groups { file, end, room: end };
        let group = frame::group(std::iter::once(&[7; 1000][..]));
        let sizes: Vec<u64> = (0..*ROOM.start() as usize / group.len())
            .map(|_| {
                groups.write(&group).unwrap();
                groups.file.metadata().unwrap().len()
            })
            .collect();
        assert!(sizes.iter().all(|size| *size == sizes[0]), "{sizes:?}");
    }
}
