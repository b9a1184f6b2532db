//! FIFOs, sockets, devices and directories in place of a log's files: refused by name, and nothing waits for
//! them.
#![allow(clippy::unwrap_used, reason = "in a test, a failed expectation is the answer")]

use std::error::Error as _;
use std::fs;
use std::path::Path;

use driftless_buffer::check::{stat, verify};
use driftless_buffer::{Error, Log, Options, Position, Reader, Result};
use driftless_testkit::log::{options, sample};
use driftless_testkit::odd::{ODD, put};

fn small() -> Options {
    options().with_segment_bytes(64 << 10)
}

/// Two segments and a cursor.
fn make(dir: &Path) {
    for id in 0..2 {
        let log = Log::open(dir, small()).unwrap();
        log.append(&sample(id, id, 0).as_sample()).unwrap().wait().unwrap();
        log.cursor("trainer").unwrap().commit(Position(1)).unwrap();
        log.close().unwrap();
    }
}

fn assert_named(outcome: Result<()>, name: &str, odd: &str, who: &str) {
    let Err(error) = outcome else { panic!("{who}: {name}: {odd} is taken for a file") };
    let cause = error.source().map(ToString::to_string).unwrap_or_default();
    assert!(matches!(&error, Error::Io { path, .. } if path.ends_with(name)), "{who}: {name}: {error:?}");
    assert!(cause.contains(odd), "{who}: {name}: {cause}");
}

#[test]
fn a_log_with_something_odd_in_it_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    make(&dir.path().join("whole"));
    let names = fs::read_dir(dir.path().join("whole")).unwrap();
    let mut names: Vec<String> =
        names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    println!("{names:?}");
    assert!(names.len() >= 4 && names.iter().any(|name| name == "lock"), "{names:?}");
    for name in &names {
        for odd in ODD {
            let log = dir.path().join(format!("{name}-{}", odd.replace(" ", "-")));
            make(&log);
            fs::remove_file(log.join(name)).unwrap();
            put(odd, &log.join(name));
            let opened = Log::open(&log, small()).and_then(|log| log.cursor("trainer").map(drop));
            let readers = [
                ("reader", Reader::open(&log).map(drop)),
                ("stat", stat(&log).map(drop)),
                ("verify", verify(&log).map(drop)),
            ];
            // The one file that only means something while a process writes is not needed by readers of a log
            // at rest.
            let is_read = name != "end";
            if name != "spare.new" {
                assert_named(opened, name, odd, "owner");
            }
            for (who, outcome) in readers {
                let is_cursor = !name.ends_with(".log") && name != "lock";
                if is_read && !(is_cursor && who != "stat") {
                    assert_named(outcome, name, odd, who);
                }
            }
        }
    }
}
