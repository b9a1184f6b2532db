//! A store in a directory of a file system, local or shared.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Once;

use rustix::fs::{CWD, FlockOperation, RenameFlags, flock, renameat_with};
use rustix::io::Errno;

use crate::error::{Error, Result};
use crate::key::Key;
use crate::os::watch::{self, Call};
use crate::os::{create_dir_synced, regular, remove_file, sync_dir, sync_file};
use crate::store::{Entry, PutMode, Store};

/// Where files are written before they get their name. It starts with a dot, which no key does.
const STAGING: &str = ".staging";
/// How often a put makes its directory again, which deletes remove while it is empty.
const RENAMES_MAX: usize = 100;

/// A store in a directory.
///
/// A put writes a file in `.staging`, syncs it, gives it its name in one step and syncs the directory. While
/// it is being written the staged file is locked (`flock`), so that a later writer can tell what a dead one
/// left behind, and removes it.
pub struct Disk {
    root: PathBuf,
    swept: Once,
}

impl Disk {
    /// The store in directory `root`, which is made at the first put.
    #[must_use]
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), swept: Once::new() }
    }

    fn path(&self, key: &Key) -> PathBuf {
        self.root.join(key.as_str())
    }

    fn error(&self, action: &'static str, key: &Key, source: io::Error) -> Error {
        match Error::io(action, self.path(key), source) {
            Error::Io { source, .. } if absent(&source) => self.not_found(key),
            // Other keys lie there, and no object.
            Error::NotAFile { found: regular::DIRECTORY, .. } => self.not_found(key),
            error => error,
        }
    }

    fn not_found(&self, key: &Key) -> Error {
        Error::NotFound { key: key.clone(), store: self.to_string() }
    }

    /// Writes a locked, synced file in `.staging`.
    fn stage(&self, bytes: &[u8]) -> Result<Staged> {
        let directory = self.root.join(STAGING);
        if !directory.is_dir() {
            create_dir_synced(&directory)?;
        }
        self.swept.call_once(|| sweep(&directory));
        let mut staged = Staged::create(&directory)?;
        let written = watch::before(Call::Write, &staged.path)
            .and_then(|()| staged.file.write_all(bytes))
            .and_then(|()| sync_file(&staged.file, &staged.path));
        written.map_err(|source| Error::io("write", &staged.path, source))?;
        Ok(staged)
    }

    fn collect(&self, directory: &Path, prefix: &str, entries: &mut Vec<Entry>) -> Result<()> {
        let read = match fs::read_dir(directory) {
            // A prefix that is an object or nothing at all has nothing under it.
            Err(error) if absent(&error) => return Ok(()),
            read => read.map_err(|source| Error::io("list", directory, source))?,
        };
        for found in read {
            let found = found.map_err(|source| Error::io("list", directory, source))?;
            let name = found.file_name();
            // Anything that is not a key was not put here by a store.
            let Some(Ok(key)) = name.to_str().map(|name| Key::new(format!("{prefix}/{name}"))) else {
                continue;
            };
            let metadata = match found.metadata() {
                // Deleted since the directory was read.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                metadata => metadata.map_err(|source| Error::io("examine", found.path(), source))?,
            };
            if metadata.is_dir() {
                self.collect(&found.path(), key.as_str(), entries)?;
            } else if metadata.is_file() {
                entries.push(Entry::new(key, metadata.len(), metadata.modified().ok()));
            }
        }
        Ok(())
    }
}

impl fmt::Display for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "file://{}", self.root.display())
    }
}

impl fmt::Debug for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Disk").field("root", &self.root).finish()
    }
}

impl Store for Disk {
    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> Result<()> {
        let path = self.path(key);
        let parent = path.parent().unwrap_or(&self.root);
        // Saves writing a large object only to find its key taken; the rename below is what decides.
        if mode == PutMode::Create && path.exists() {
            return Err(Error::AlreadyExists { key: key.clone(), store: self.to_string() });
        }
        let staged = self.stage(bytes)?;
        let mut changed = BTreeSet::from([parent.to_path_buf()]);
        let mut place = || {
            create_dirs(parent, &mut changed)?;
            // Nothing waits for the disk up to here: a delete would have all that time to remove the directory.
            let renamed = watch::before(Call::Rename, &path).and_then(|()| match mode {
                PutMode::Overwrite => fs::rename(&staged.path, &path),
                PutMode::Create => rename_if_absent(&staged.path, &path),
            });
            match renamed {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    Err(Error::AlreadyExists { key: key.clone(), store: self.to_string() })
                }
                renamed => renamed.map_err(|source| Error::io("rename into place", &path, source)),
            }
        };
        let mut tries = 0;
        loop {
            match place() {
                // The last object of the directory was deleted just now, and the directory with it.
                Err(Error::Io { source, .. }) if absent(&source) && tries < RENAMES_MAX => tries += 1,
                placed => break placed?,
            }
        }
        for directory in &changed {
            match sync_dir(directory) {
                // As above, and what was put is gone as well.
                Err(Error::Io { source, .. }) if absent(&source) => {}
                synced => synced?,
            }
        }
        Ok(())
    }

    fn get(&self, key: &Key, range: Option<Range<u64>>) -> Result<Vec<u8>> {
        let mut file = regular::open(&self.path(key)).map_err(|source| self.error("open", key, source))?;
        let metadata = file.metadata().map_err(|source| self.error("examine", key, source))?;
        let range = crate::store::clamp(key, range, metadata.len())?;
        let length = range.end - range.start;
        let mut bytes = Vec::new();
        usize::try_from(length)
            .map_err(|_| io::ErrorKind::OutOfMemory.into())
            .and_then(|length| bytes.try_reserve_exact(length).map_err(|_| io::ErrorKind::OutOfMemory.into()))
            .and_then(|()| file.seek(SeekFrom::Start(range.start)))
            .and_then(|_| file.take(length).read_to_end(&mut bytes))
            .map_err(|source| self.error("read", key, source))?;
        Ok(bytes)
    }

    fn head(&self, key: &Key) -> Result<Entry> {
        let metadata = fs::metadata(self.path(key)).map_err(|source| self.error("examine", key, source))?;
        regular::check(metadata.file_type()).map_err(|source| self.error("examine", key, source))?;
        Ok(Entry::new(key.clone(), metadata.len(), metadata.modified().ok()))
    }

    fn list(&self, prefix: &Key) -> Result<Vec<Entry>> {
        let mut entries = Vec::new();
        self.collect(&self.path(prefix), prefix.as_str(), &mut entries)?;
        entries.sort_unstable_by(|a, b| a.key.cmp(&b.key));
        Ok(entries)
    }

    fn delete(&self, key: &Key) -> Result<()> {
        let path = self.path(key);
        match remove_file(&path) {
            Err(error) if absent(&error) => return Ok(()),
            removed => removed.map_err(|source| Error::io("delete", &path, source))?,
        }
        // A directory without objects would stay for ever, and be listed each time. One that has some refuses
        // to go.
        if let Some(parent) = path.parent().filter(|parent| *parent != self.root) {
            let _ = fs::remove_dir(parent);
        }
        Ok(())
    }
}

/// A file that is being written; removed again unless it was renamed.
struct Staged {
    path: PathBuf,
    file: File,
}

impl Staged {
    fn create(directory: &Path) -> Result<Self> {
        loop {
            let path = directory.join(hex::encode(rand::random::<[u8; 16]>()));
            let file = watch::before(Call::Create, &path)
                .and_then(|()| File::create_new(&path))
                .map_err(|source| Error::io("create", &path, source))?;
            let locked = flock(&file, FlockOperation::NonBlockingLockExclusive);
            // A sweeper may hold the lock, or have removed the file, in the moment between creating and
            // locking it.
            match locked {
                Ok(()) if path.exists() => return Ok(Self { path, file }),
                Ok(()) | Err(Errno::WOULDBLOCK) => {}
                Err(error) => {
                    // No sweep would know the file for dead: remove it here.
                    let _ = fs::remove_file(&path);
                    return Err(Error::io("lock", path, error.into()));
                }
            }
        }
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        // After the rename there is nothing here; after a failure the next sweep would remove it as well.
        let _ = fs::remove_file(&self.path);
    }
}

/// Removes what dead writers left. Best effort: a file that stays is invisible and costs only space.
fn sweep(directory: &Path) {
    for found in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = found.path();
        let Ok(file) = regular::open(&path) else { continue };
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
            tracing::info!(path = %path.display(), "removing what a dead writer left");
            let _ = fs::remove_file(&path);
        }
    }
}

/// True if an error says that there is no such file; a file where the path needs a directory says so as well.
fn absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// Renames without replacing, in one step: of many callers one succeeds.
fn rename_if_absent(from: &Path, to: &Path) -> io::Result<()> {
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // NFS and some others cannot; there a hard link has the same effect, and `Staged` removes the other
        // name.
        Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => fs::hard_link(from, to),
        renamed => renamed.map_err(io::Error::from),
    }
}

/// Makes a directory and those above it. `changed` gets those that have an entry by that, which may vanish with
/// the power until they are synced.
fn create_dirs(directory: &Path, changed: &mut BTreeSet<PathBuf>) -> Result<()> {
    if directory.is_dir() {
        return Ok(());
    }
    let parent = directory.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    create_dirs(parent, changed)?;
    match watch::before(Call::Create, directory).and_then(|()| fs::create_dir(directory)) {
        // Another writer made it just now, and may not have synced it.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        made => made.map_err(|source| Error::io("create the directory", directory, source))?,
    }
    changed.insert(parent.to_path_buf());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(text: &str) -> Key {
        Key::new(text).unwrap()
    }

    #[test]
    fn staged_file_of_a_dead_writer_is_invisible_and_removed() {
        let directory = tempfile::tempdir().unwrap();
        let staging = directory.path().join(STAGING);
        fs::create_dir(&staging).unwrap();
        fs::write(staging.join("dead"), b"torn").unwrap();
        let live = File::create(staging.join("live")).unwrap();
        flock(&live, FlockOperation::NonBlockingLockExclusive).unwrap();

        let store = Disk::new(directory.path());
        store.put(&key("a/b"), b"x", PutMode::Create).unwrap();
        assert_eq!(store.list(&key("a")).unwrap().len(), 1);
        assert!(!staging.join("dead").exists());
        assert!(staging.join("live").exists(), "a file that its writer holds must stay");
        assert_eq!(fs::read_dir(&staging).unwrap().count(), 1);
    }

    #[test]
    fn a_refused_create_leaves_nothing_behind() {
        let directory = tempfile::tempdir().unwrap();
        let store = Disk::new(directory.path());
        store.put(&key("a"), b"x", PutMode::Create).unwrap();
        assert!(matches!(store.put(&key("a"), b"y", PutMode::Create), Err(Error::AlreadyExists { .. })));
        assert_eq!(fs::read_dir(directory.path().join(STAGING)).unwrap().count(), 0);
    }

    #[test]
    fn directory_goes_with_its_last_object_and_fails_no_put() {
        let directory = tempfile::tempdir().unwrap();
        let store = Disk::new(directory.path());
        for name in ["a/b/x", "a/b/y"] {
            store.put(&key(name), b"x", PutMode::Create).unwrap();
        }
        store.delete(&key("a/b/x")).unwrap();
        assert!(directory.path().join("a/b").exists());
        store.delete(&key("a/b/y")).unwrap();
        assert!(!directory.path().join("a/b").exists() && directory.path().join("a").exists());
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (store, mode) =
                    (&store, if thread % 2 == 0 { PutMode::Create } else { PutMode::Overwrite });
                scope.spawn(move || {
                    for _ in 0..100 {
                        store.put(&key(&format!("a/c/{thread}")), b"x", mode).unwrap();
                        store.delete(&key(&format!("a/c/{thread}"))).unwrap();
                    }
                });
            }
        });
    }

    #[test]
    fn links_stand_in_where_renames_cannot_refuse() {
        let directory = tempfile::tempdir().unwrap();
        let [from, to] = ["from", "to"].map(|name| directory.path().join(name));
        fs::write(&from, b"x").unwrap();
        fs::hard_link(&from, &to).unwrap();
        assert_eq!(fs::hard_link(&from, &to).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(rename_if_absent(&from, &to).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    }

    #[test]
    fn errors_name_the_path() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("file");
        fs::write(&root, b"not a directory").unwrap();
        let error = Disk::new(&root).put(&key("a"), b"x", PutMode::Overwrite).unwrap_err();
        assert!(error.to_string().contains(root.to_str().unwrap()), "{error}");
    }
}
