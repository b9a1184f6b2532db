//! Processes are killed again and again, the one that owns the log and the producers that write through it;
//! what was acknowledged to any of them is there every time.
//!
//! 200 kills; `DRIFTLESS_LONG=1` makes it 2,000.
#![allow(clippy::unwrap_used, reason = "in a test, a failed expectation is the answer")]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use driftless_buffer::check::Severity;
use driftless_buffer::reservation::Ack;
use driftless_buffer::sample::Shape;
use driftless_buffer::{Error, Log, Options, Position, Producer, Result, Sample, SyncPolicy};
use driftless_testkit::log::{options, sample};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// What a child is: `owner` or `producer`. Absent in the parent.
const ROLE: &str = "DRIFTLESS_KILL_TEST_ROLE";
const DIR: &str = "DRIFTLESS_KILL_TEST_DIR";
/// Different for every child there ever was.
const LIFE: &str = "DRIFTLESS_KILL_TEST_LIFE";
const PRODUCERS: usize = 3;
/// Far above what any step takes, so that a hang is a failure and not a wait for ever.
const DEADLINE: Duration = Duration::from_secs(120);

fn small() -> Options {
    options().with_segment_bytes(128 << 10)
}

/// The child; does nothing unless the parent test started it.
#[test]
fn child_appends_until_it_is_killed() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let dir = PathBuf::from(std::env::var(DIR).unwrap());
    let life: u64 = std::env::var(LIFE).unwrap().parse().unwrap();
    if role == "owner" { own(&dir, life) } else { produce(&dir, life) }
}

/// Owns the log, serves producers, and has a producing thread of its own.
fn own(dir: &Path, life: u64) {
    let sync = match life % 3 {
        0 => SyncPolicy::EachRecord,
        1 => SyncPolicy::EveryRecords(4),
        _ => SyncPolicy::Within(Duration::from_millis(1)),
    };
    let log = Log::open(dir, small().with_sync(sync)).unwrap();
    let _served = log.serve().unwrap();
    for n in 0.. {
        if n % 7 == 3 {
            drop(log.reserve(&Shape::default()).unwrap());
        }
        append(life, n, |sample| log.append(sample)?.wait()).unwrap();
    }
}

/// Writes through whichever process owns the log at the time.
fn produce(dir: &Path, life: u64) {
    let mut n = 0;
    loop {
        let producer = Producer::connect(dir, &small().identity, DEADLINE).unwrap();
        loop {
            n += 1;
            let reserved = if n % 5 == 3 { producer.reserve(&Shape::default()).map(drop) } else { Ok(()) };
            match reserved.and_then(|()| append(life, n, |sample| producer.append(sample)?.wait())) {
                Ok(()) => {}
                Err(Error::Owner { .. }) => break,
                Err(other) => panic!("{other}"),
            }
        }
    }
}

/// Appends and tells the acknowledgement.
fn append(life: u64, n: u64, append: impl FnOnce(&Sample<'_>) -> Result<Ack>) -> Result<()> {
    let id = life * 1_000_000 + n;
    let ack = append(&sample(id, life, 0).as_sample())?;
    let mut out = std::io::stdout();
    out.write_all(format!("ack {} {id} {life}\n", ack.position()).as_bytes()).unwrap();
    out.flush().unwrap();
    Ok(())
}

/// A running child, and the thread that passes on what it tells.
struct Running {
    child: Child,
    listening: JoinHandle<()>,
}

struct Test {
    dir: tempfile::TempDir,
    lives: u64,
    told: Receiver<[u64; 3]>,
    tell: Sender<[u64; 3]>,
    /// Sample and group by position.
    acknowledged: BTreeMap<u64, [u64; 2]>,
}

impl Test {
    fn spawn(&mut self, role: &str) -> Running {
        self.lives += 1;
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_appends_until_it_is_killed", "--nocapture"])
            .env(ROLE, role)
            .env(DIR, self.dir.path())
            .env(LIFE, self.lives.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (out, tell) = (child.stdout.take().unwrap(), self.tell.clone());
        let listening = std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(std::io::Result::ok) {
                // The harness's own words share the pipe; a line cut by the kill has fewer numbers.
                let Some(at) = line.find("ack ") else { continue };
                let numbers: Vec<u64> =
                    line[at + 4..].split(' ').map_while(|word| word.parse().ok()).collect();
                if let Ok(numbers) = <[u64; 3]>::try_from(numbers) {
                    tell.send(numbers).unwrap();
                }
            }
        });
        Running { child, listening }
    }

    fn note(&mut self, [position, id, group]: [u64; 3]) {
        let old = self.acknowledged.insert(position, [id, group]);
        assert_eq!(old, None, "position {position} was acknowledged twice");
    }

    /// Waits until so many more records are acknowledged.
    fn after(&mut self, acks: usize) {
        for _ in 0..acks {
            let told = self.told.recv_timeout(DEADLINE).unwrap();
            self.note(told);
        }
    }

    fn kill(&mut self, running: Running) {
        let Running { mut child, listening } = running;
        child.kill().unwrap();
        child.wait().unwrap();
        listening.join().unwrap();
        while let Ok(told) = self.told.try_recv() {
            self.note(told);
        }
    }

    /// Everything acknowledged is there, as it was written. No owner is running.
    fn check(&self, what: &str) {
        let log = Log::open(self.dir.path(), small()).unwrap();
        let corrupt = log.recovery().damage.iter().find(|damage| damage.severity == Severity::Corrupt);
        assert_eq!(corrupt, None, "{what}");
        let reader = log.reader();
        for (position, [id, group]) in &self.acknowledged {
            let record = reader.get(Position(*position)).unwrap();
            let record = record.unwrap_or_else(|| panic!("{what}: record {position} is lost"));
            sample(*id, *group, 0).assert_equals(&record);
        }
    }
}

#[test]
fn every_acknowledged_record_survives_every_kill() {
    let kills = if std::env::var_os("DRIFTLESS_LONG").is_some() { 2000 } else { 200 };
    let (tell, told) = channel();
    let dir = tempfile::tempdir().unwrap();
    let mut test = Test { dir, lives: 0, told, tell, acknowledged: BTreeMap::new() };
    let mut rng = StdRng::seed_from_u64(5);
    let mut owner = test.spawn("owner");
    let mut producers: Vec<Running> = (0..PRODUCERS).map(|_| test.spawn("producer")).collect();
    let mut owners = 0;
    for kill in 0..kills {
        test.after(rng.random_range(0..16));
        match rng.random_range(0..=PRODUCERS) {
            0 => {
                test.kill(owner);
                owners += 1;
                if owners % 8 == 0 {
                    test.check(&format!("kill {kill}"));
                }
                owner = test.spawn("owner");
            }
            victim => {
                let next = test.spawn("producer");
                let killed = std::mem::replace(&mut producers[victim - 1], next);
                test.kill(killed);
            }
        }
    }
    test.kill(owner);
    for running in producers {
        test.kill(running);
    }
    test.check("the end");
    let (records, lives) = (test.acknowledged.len(), test.lives);
    println!(
        "{records} records acknowledged to {lives} processes survived {kills} kills, {owners} of the owner (seed 5)"
    );
    assert!(owners > kills / 8 && records as u64 > kills * 3, "{owners} {records}");
}
