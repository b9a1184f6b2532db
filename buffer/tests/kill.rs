//! A writing process is killed again and again; what it acknowledged is there every time.
//!
//! 20 rounds; `DRIFTLESS_LONG=1` makes it 2,000.
#![allow(clippy::unwrap_used, reason = "in a test, a failed expectation is the answer")]

mod common;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use common::{options, sample};
use driftless_buffer::{Log, Options, Position, Severity, SyncPolicy};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

const CHILD: &str = "DRIFTLESS_KILL_TEST_DIR";
const ROUND: &str = "DRIFTLESS_KILL_TEST_ROUND";
const PRODUCERS: u64 = 3;

fn small() -> Options {
    Options { segment_bytes: 128 << 10, ..options() }
}

/// The child: three threads append and tell every acknowledgement. Does nothing unless the parent test started it.
#[test]
fn child_appends_until_it_is_killed() {
    let Ok(dir) = std::env::var(CHILD) else { return };
    let round: u64 = std::env::var(ROUND).unwrap().parse().unwrap();
    let sync = match round % 3 {
        0 => SyncPolicy::EachRecord,
        1 => SyncPolicy::EveryRecords(4),
        _ => SyncPolicy::Within(std::time::Duration::from_millis(1)),
    };
    let log = Log::open(dir, Options { sync, ..small() }).unwrap();
    std::thread::scope(|scope| {
        for producer in 0..PRODUCERS {
            let log = log.clone();
            scope.spawn(move || {
                for n in 0.. {
                    let id = (round * PRODUCERS + producer) * 1_000_000 + n;
                    let owned = sample(id, producer, round);
                    if n % 7 == 3 {
                        drop(log.reserve(&driftless_buffer::Shape::default()).unwrap());
                    }
                    let ack = log.append(&owned.as_sample()).unwrap().wait().unwrap();
                    // One write, so that lines of several threads do not mix.
                    let line = format!("ack {} {id} {producer} {round}\n", ack.position());
                    std::io::stdout().write_all(line.as_bytes()).unwrap();
                }
            });
        }
    });
}

/// Starts the child, kills it after some acknowledgements, and answers all that it told.
fn killed_after(dir: &Path, round: u64, acks: usize) -> Vec<[u64; 4]> {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_appends_until_it_is_killed", "--nocapture"])
        .env(CHILD, dir)
        .env(ROUND, round.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut told = Vec::new();
    let mut read = |told: &mut Vec<[u64; 4]>| -> bool {
        let Some(Ok(line)) = lines.next() else { return false };
        // The harness's own words share the pipe; a line cut by the kill has fewer numbers.
        if let Some(at) = line.find("ack ") {
            let numbers: Vec<u64> = line[at + 4..].split(' ').map_while(|word| word.parse().ok()).collect();
            told.extend(<[u64; 4]>::try_from(numbers));
        }
        true
    };
    while told.len() < acks && read(&mut told) {}
    child.kill().unwrap();
    child.wait().unwrap();
    while read(&mut told) {}
    told
}

#[test]
fn every_acknowledged_record_survives_every_kill() {
    let rounds = if std::env::var_os("DRIFTLESS_LONG").is_some() { 2000 } else { 20 };
    let dir = tempfile::tempdir().unwrap();
    let mut rng = StdRng::seed_from_u64(5);
    let mut acknowledged: BTreeMap<u64, [u64; 3]> = BTreeMap::new();
    for round in 0..rounds {
        let told = killed_after(dir.path(), round, rng.random_range(0..40));
        for [position, id, group, rollout] in told {
            let old = acknowledged.insert(position, [id, group, rollout]);
            assert_eq!(old, None, "position {position} was acknowledged twice");
        }
        if round % 5 == 4 || round + 1 == rounds {
            let log = Log::open(dir.path(), small()).unwrap();
            let corrupt = log.recovery().damage.iter().find(|damage| damage.severity == Severity::Corrupt);
            assert_eq!(corrupt, None, "round {round}");
            let reader = log.reader();
            for (position, [id, group, rollout]) in &acknowledged {
                let record = reader.get(Position(*position)).unwrap();
                let record = record.unwrap_or_else(|| panic!("round {round}: record {position} is lost"));
                sample(*id, *group, *rollout).assert_equals(&record);
            }
        }
    }
    println!("{} acknowledged records survived {rounds} kills (seed 5)", acknowledged.len());
    assert!(acknowledged.len() as u64 > rounds * 3);
}
