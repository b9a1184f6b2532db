//! A publishing process killed at every named moment: the store shows whole versions, and the same command
//! goes on.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

use std::path::Path;
use std::process::{Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use driftless_store::{Disk, Store};
use driftless_testkit::publications::{MODEL, RUN, Weights, assert_reader, options, orphans, step};
use driftless_testkit::random::Random;
use driftless_transport::publish::{Mode, Start};
use driftless_transport::{Dtype, Publisher, Run};

/// The moments of a publication, those of the baseline's own move included, and how often one passes them.
const POINTS: [(&str, u64); 9] = [
    ("publish.encode", 3),
    ("publish.upload", 3),
    ("publish.manifest", 1),
    ("publish.committed", 1),
    ("follow.fetch", 2),
    ("follow.journal", 1),
    ("follow.apply", 2),
    ("follow.sync", 1),
    ("follow.marker", 1),
];
/// Tells the child where to work, and where to die: `<point>:<passes before>`.
const DIR: &str = "DRIFTLESS_TEST_DIR";
const KILL: &str = "DRIFTLESS_TEST_KILL";

/// What the trainer has at a version: dense enough for several objects.
fn weights(version: u64) -> Weights {
    let mut random = Random(version);
    let mut weights = Weights::small(1);
    weights.set("x.large", Dtype::Bf16, &[1000, 900], |_| random.next() as u8);
    weights.step(version, 10);
    weights
}

fn open(dir: &Path, start: Start) -> (Arc<dyn Store>, Publisher) {
    let store: Arc<dyn Store> = Arc::new(Disk::new(dir.join("store")));
    let mut options = options(start, &dir.join("baseline"));
    options.object_bytes_max = 1 << 20;
    let publisher = Publisher::open(store.clone(), options).unwrap();
    (store, publisher)
}

fn die_at(point: &str, passes: u64) {
    let passed = AtomicU64::new(0);
    let callback = move || {
        if passed.fetch_add(1, Ordering::SeqCst) == passes {
            std::process::abort();
        }
    };
    fail::cfg_callback(point, callback).unwrap();
}

/// What the killed process runs. On its own, without a directory to work in, there is nothing to do.
#[test]
fn child() {
    let Some(dir) = std::env::var_os(DIR) else { return };
    let (_, mut publisher) = open(Path::new(&dir), Start::Resume);
    if let Some((point, passes)) = std::env::var(KILL).ok().as_deref().and_then(|kill| kill.split_once(':')) {
        die_at(point, passes.parse().unwrap());
    }
    let next = publisher.version().unwrap().next().0;
    publisher.publish(&weights(next), step(next), Mode::Delta).unwrap();
}

fn run_child(dir: &Path, kill: Option<String>) -> ExitStatus {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child"]).env(DIR, dir).env_remove(KILL);
    if let Some(kill) = kill {
        command.env(KILL, kill);
    }
    command.output().unwrap().status
}

#[test]
fn a_publisher_killed_anywhere_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let (store, mut publisher) = open(dir.path(), Start::NewRun);
    publisher.publish(&weights(0), step(0), Mode::Delta).unwrap();
    drop(publisher);
    let run = Run::open(store.clone(), RUN).unwrap();
    let newest = || run.newest_version(MODEL).unwrap().unwrap().0;
    let follower = dir.path().join("follower");
    for (point, passes) in POINTS {
        for pass in 0..passes {
            let (kill, before) = (format!("{point}:{pass}"), newest());
            let status = run_child(dir.path(), Some(kill.clone()));
            assert!(status.code().is_none(), "{kill} was not reached: {status}");
            let after = newest();
            let committed = u64::from(point == "publish.committed" || point.starts_with("follow."));
            assert_eq!(after - before, committed, "{kill}");
            assert_reader(&store, &follower, after, &weights(after));

            let status = run_child(dir.path(), None);
            assert!(status.success(), "after {kill}: {status}");
            assert_eq!(newest(), after + 1, "after {kill}");
            assert_reader(&store, &follower, after + 1, &weights(after + 1));
            assert_eq!(orphans(&run), Vec::<String>::new(), "after {kill}");
        }
    }
    assert_reader(&store, &dir.path().join("late"), newest(), &weights(newest()));
}
