//! What the gateway adds to a turn: later turns offered open-loop from many open sessions over HTTP, first turns whose
//! tools other sessions had, and memory of a session at rest, beside a route of the same server that does nothing:
//! `cargo bench -p driftless-agent --bench gateway -- DIR [CHECKPOINT]`. DIR has the journal; a memory file system leaves
//! its disk out. Without a CHECKPOINT the tokenizer is a small one.

#![allow(clippy::unwrap_used, reason = "a measurement fails by panicking")]

mod load;
mod serve;
#[allow(dead_code, unreachable_pub, reason = "tests use more of it")]
#[path = "../../tests/sessions/toy.rs"]
mod toy;

use std::fmt;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use load::{Talks, offered, one};

/// Sessions that are open.
const SESSIONS: usize = 1000;
/// Later turns a second, and for how long.
const RATE: u32 = 200;
const SECONDS: u32 = 20;

fn main() {
    let mut args = std::env::args().skip(1).filter(|arg| arg != "--bench");
    let (first, checkpoint) = (args.next().unwrap_or_else(|| "/dev/shm".to_owned()), args.next());
    if first == "serve" {
        return serve::serve(Path::new(&checkpoint.unwrap()), args.next().as_deref().map(Path::new));
    }
    let home = tempfile::tempdir_in(&first).unwrap();
    let served = Served::start(home.path(), checkpoint.map(PathBuf::from));
    measure(&served, home.path());
}

/// The server, in a process of its own: its memory is that of sessions alone.
struct Served {
    child: Child,
    /// A route that reads a body, a gateway whose sessions know nothing, and one whose engine draws nothing.
    plain: SocketAddr,
    parsed: SocketAddr,
    gateway: SocketAddr,
}

impl Served {
    fn start(home: &Path, checkpoint: Option<PathBuf>) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.arg("serve").arg(home).args(checkpoint).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut addr = || lines.next().unwrap().unwrap().parse().unwrap();
        let (plain, parsed, gateway) = (addr(), addr(), addr());
        Served { child, plain, parsed, gateway }
    }

    /// Bytes of memory that it has.
    fn resident(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        self.child.wait().unwrap();
    }
}

fn measure(served: &Served, home: &Path) {
    let (mut talks, sync) = (Talks::new(SESSIONS + 1), synced(home));
    println!("fdatasync of 4 KiB in DIR: {sync}");
    let unknown = one(served.gateway, &talks, SESSIONS).0;
    let before = served.resident();
    let (first, tokens): (Vec<_>, Vec<_>) = (0..SESSIONS).map(|at| one(served.gateway, &talks, at)).unzip();
    let first = Quantiles::of(first);
    println!(
        "first turn of {} kB: {unknown:.1?} with an unknown head, then {first}",
        talks.body(0).len() / 1000
    );
    // An id of each token, and a log-probability of each that was sampled, which are few.
    let columns = tokens.iter().sum::<u64>() * 4;
    let taken = served.resident().saturating_sub(before);
    println!(
        "a session at rest: {} kB, of which columns of tokens {} kB, and the rest {} kB",
        taken / SESSIONS as u64 / 1000,
        columns / SESSIONS as u64 / 1000,
        taken.saturating_sub(columns) / SESSIONS as u64 / 1000
    );
    let all: Vec<_> =
        [("no-op route", served.plain), ("no-op sessions", served.parsed), ("sessions", served.gateway)]
            .into_iter()
            .map(|(name, addr)| {
                let (took, late) = offered(addr, &mut talks, SESSIONS, RATE, SECONDS);
                let (took, late) = (Quantiles::of(took), Quantiles::of(late));
                println!("{name}, {RATE} turns/s: {took}; sent late {late}");
                if late.p99 > Duration::from_millis(1) {
                    println!(
                        "  the generator is late: these figures are the machine's rather than the server's"
                    );
                }
                took
            })
            .collect();
    let [plain, _, whole] = all[..] else { unreachable!("three are measured") };
    println!(
        "added to a later turn: {:.2?} p50, {:.2?} p99; {:.1}x the no-op route at p50",
        whole.p50.saturating_sub(plain.p50),
        whole.p99.saturating_sub(plain.p99),
        whole.p50.as_secs_f64() / plain.p50.as_secs_f64()
    );
}

/// The half and the 99th of 100.
#[derive(Clone, Copy)]
struct Quantiles {
    p50: Duration,
    p99: Duration,
}

impl Quantiles {
    fn of(mut times: Vec<Duration>) -> Self {
        times.sort();
        Quantiles { p50: times[times.len() / 2], p99: times[times.len() * 99 / 100] }
    }
}

impl fmt::Display for Quantiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.2?} p50, {:.2?} p99", self.p50, self.p99)
    }
}

/// What the disk takes by itself.
fn synced(home: &Path) -> Quantiles {
    let mut file = File::create(home.join("synced")).unwrap();
    let write = |_| {
        let begun = Instant::now();
        file.write_all(&[7; 4096]).unwrap();
        file.sync_data().unwrap();
        begun.elapsed()
    };
    Quantiles::of((0..500).map(write).collect())
}
