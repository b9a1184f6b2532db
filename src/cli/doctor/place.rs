//! Where a directory lies, or would lie: its file system and the room there; and checkpoint directories.

use super::findings::{Finding, Group};
use super::{no_answer, within};
use crate::cli::shared::paths;
use indicatif::HumanBytes;
use rustix::fs::{Access, access, statvfs};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What a file system may take to answer: of one whose server is gone, nobody waits for the end.
const DEADLINE: Duration = Duration::from_secs(20);

/// Free bytes in which no checkpoint finds room.
const FULL: u64 = 64 << 20;

/// Kinds of file systems whose files are on another host; those that begin with `fuse` may be.
const NETWORK: [&str; 14] = [
    "9p",
    "afs",
    "beegfs",
    "ceph",
    "cifs",
    "fuse",
    "glusterfs",
    "gpfs",
    "lustre",
    "nfs",
    "nfs4",
    "orangefs",
    "smb3",
    "wekafs",
];

/// A file system, in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) total: u64,
    pub(super) free: u64,
    /// As the kernel calls it.
    pub(super) kind: Option<String>,
}

impl Place {
    /// The one of a directory, or of the nearest one above it that is there.
    pub(super) fn of(dir: &Path) -> io::Result<Place> {
        let there = nearest(dir)?;
        let found = statvfs(&there)?;
        let kind = std::fs::read_to_string("/proc/self/mountinfo").ok();
        let kind = kind.and_then(|mounts| kind_of(&mounts, &there).map(str::to_owned));
        let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
        Ok(Place { total: bytes(found.f_blocks), free: bytes(found.f_bavail), kind })
    }

    pub(super) fn is_remote(&self) -> bool {
        let of = |kind: &str| NETWORK.contains(&kind.split('.').next().unwrap_or(kind));
        self.kind.as_deref().is_some_and(of)
    }
}

/// How much room there is, for people.
pub(super) fn room(place: &Place) -> String {
    let kind = place.kind.as_deref().unwrap_or("an unknown file system");
    format!("{} of {} free, {kind}", HumanBytes(place.free), HumanBytes(place.total))
}

/// The directory itself, or the nearest one above it that is there.
fn nearest(dir: &Path) -> io::Result<PathBuf> {
    let dir = std::path::absolute(dir)?;
    let there = dir.ancestors().find_map(|dir| dir.canonicalize().ok());
    there.ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// The kind of the file system that a path lies in, by `/proc/self/mountinfo`. Of several mounts on one directory the
/// last one counts.
fn kind_of<'a>(mounts: &'a str, path: &Path) -> Option<&'a str> {
    let mount = |line: &'a str| {
        let (mount, file_system) = line.split_once(" - ")?;
        // Spaces are written as octal numbers.
        let at = PathBuf::from(mount.split(' ').nth(4)?.replace("\\040", " "));
        path.starts_with(&at).then_some((at.components().count(), file_system.split(' ').next()?))
    };
    mounts.lines().filter_map(mount).max_by_key(|(depth, _)| *depth).map(|(_, kind)| kind)
}

/// What is known of a checkpoint directory.
#[derive(Debug)]
struct Facts {
    /// Why no follower would take it.
    refused: Option<String>,
    /// Whether files can be made there by this user.
    writable: bool,
    /// Bytes of the weights in it.
    weights: u64,
    /// A follower has it, and there is no whole version in it.
    torn: bool,
    place: Result<Place, String>,
}

pub(super) fn look_at_checkpoint(dir: &Path) -> Vec<Finding> {
    let (dir, asked) = (dir.to_owned(), dir.to_owned());
    match within(DEADLINE, move || read(&asked)) {
        Some(facts) => judge(&dir, &facts),
        None => vec![Group("checkpoint").problem(
            "directory",
            no_answer(DEADLINE, &dir.display().to_string()),
            "look whether the server of this file system is there; take a local disk or /dev/shm",
        )],
    }
}

fn read(dir: &Path) -> Facts {
    let length = |entry: std::fs::DirEntry| {
        let is_weights = entry.path().extension().is_some_and(|end| end == "safetensors");
        entry.metadata().ok().filter(|_| is_weights).map(|metadata| metadata.len())
    };
    let weights = std::fs::read_dir(dir).into_iter().flatten().flatten().filter_map(length).sum();
    Facts {
        refused: paths::check_own("--checkpoint-dir", dir, None).err().map(|error| error.to_string()),
        writable: nearest(dir).is_ok_and(|dir| access(dir, Access::WRITE_OK | Access::EXEC_OK).is_ok()),
        weights,
        torn: weights > 0 && dir.join(".driftless").is_dir() && !dir.join("config.json").exists(),
        place: Place::of(dir).map_err(|error| error.to_string()),
    }
}

fn judge(dir: &Path, facts: &Facts) -> Vec<Finding> {
    let group = Group("checkpoint");
    let shown = dir.display();
    let directory = match &facts.refused {
        Some(why) => group.problem(
            "directory",
            why,
            "give the follower an empty directory of its own; weights of others are not overwritten",
        ),
        None if !facts.writable => group.problem(
            "directory",
            format!("{shown}: this user cannot write there"),
            "run doctor and follower as the engine's user, or give that user the directory (chown)",
        ),
        None if facts.torn => group.note(
            "directory",
            format!("{shown}: no config.json: a follower is writing a version, or was stopped while it did"),
            format!("unless a follower runs: driftless repair {shown}"),
        ),
        None if facts.weights > 0 => {
            group.ok("directory", format!("{shown}: a follower's, {} of weights", HumanBytes(facts.weights)))
        }
        None => group.ok("directory", format!("{shown}: no weights yet")),
    };
    let system = match &facts.place {
        Err(why) => group.problem("room", why, "look at the directory and those above it"),
        Ok(place) if place.free < FULL => group.problem(
            "room",
            format!("full: {}", room(place)),
            "remove files there, or take another disk",
        ),
        Ok(place) if place.is_remote() => group.note(
            "room",
            format!("{}: over a network, where maps, syncs and loads are slow", room(place)),
            "a local disk or /dev/shm; each host has a checkpoint directory of its own",
        ),
        Ok(place) if place.free < facts.weights => group.note(
            "room",
            format!("{}: less than the weights, beside which a full version is written", room(place)),
            "see \"Plan disk space\" in docs/operations.md: about twice the checkpoint's size",
        ),
        Ok(place) => group.ok("room", room(place)),
    };
    vec![directory, system]
}

#[cfg(test)]
mod tests {
    use super::super::findings::State;
    use super::*;

    const MOUNTS: &str = "\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:26 / /dev/shm rw,nosuid - tmpfs tmpfs rw
40 22 0:40 / /mnt/all\\040weights rw shared:9 - nfs4 host:/export rw
41 22 0:41 / /mnt/bucket rw - fuse.s3fs s3fs rw
42 41 0:42 / /mnt/bucket rw - xfs /dev/vdb rw
nonsense
";

    #[test]
    fn file_system_of_a_path_is_that_of_its_nearest_mount() {
        for (path, kind) in [
            ("/home/a", "ext4"),
            ("/dev/shm/policy", "tmpfs"),
            ("/dev/shmem", "ext4"),
            ("/mnt/all weights/run", "nfs4"),
            ("/mnt/bucket", "xfs"),
        ] {
            assert_eq!(kind_of(MOUNTS, Path::new(path)), Some(kind), "{path}");
        }
        assert_eq!(kind_of("", Path::new("/")), None);
        let remote = |kind: &str| Place { total: 1, free: 1, kind: Some(kind.into()) }.is_remote();
        assert!(remote("nfs4") && remote("fuse.s3fs") && !remote("ext4") && !remote("nfsd"));
    }

    #[test]
    fn room_is_that_of_the_nearest_directory_that_is_there() {
        let dir = tempfile::tempdir().expect("a directory");
        let place = Place::of(&dir.path().join("not/there")).expect("a file system");
        assert_eq!(place.total, Place::of(dir.path()).expect("a file system").total);
        assert!(place.total >= place.free);
    }

    #[test]
    fn checkpoint_directory_is_judged_by_whose_it_is_and_its_room() {
        let of = |change: fn(&mut Facts)| {
            let place = Place { total: 1 << 40, free: 1 << 39, kind: Some("xfs".into()) };
            let mut facts =
                Facts { refused: None, writable: true, weights: 16 << 30, torn: false, place: Ok(place) };
            change(&mut facts);
            let findings = judge(Path::new("/d"), &facts);
            [findings[0].state, findings[1].state]
        };
        use State::{Note, Ok as Good, Problem};
        fn place(facts: &mut Facts) -> &mut Place {
            facts.place.as_mut().expect("a place")
        }
        assert_eq!(of(|_| ()), [Good, Good]);
        assert_eq!(of(|facts| facts.weights = 0), [Good, Good]);
        assert_eq!(of(|facts| facts.refused = Some("a file".into())), [Problem, Good]);
        assert_eq!(of(|facts| facts.writable = false), [Problem, Good]);
        assert_eq!(of(|facts| facts.torn = true), [Note, Good]);
        assert_eq!(of(|facts| place(facts).free = 1 << 30), [Good, Note]);
        assert_eq!(of(|facts| place(facts).free = 1 << 20), [Good, Problem]);
        assert_eq!(of(|facts| place(facts).kind = Some("nfs".into())), [Good, Note]);
        assert_eq!(of(|facts| facts.place = Err("gone".into())), [Good, Problem]);
    }
}
