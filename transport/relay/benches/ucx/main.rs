//! How fast are our links, next to UCX's own measuring program?
//!
//! `cargo bench -p driftless-transport --features ucx --bench ucx [-- --help]`. Needs libucp 1.14 or newer
//! and its `ucx_perftest` (Debian: libucx0, ucx-utils). Both sides move the same bytes in messages of the
//! same size the same way between two processes of this host, in turns, with the same transports.

#![allow(clippy::expect_used, reason = "a bench ends where its own set-up fails")]

use std::collections::VecDeque;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser;
use driftless_relay::fabric::ucx::{Bucket, Ticket, Ucx, UcxLink, UcxOptions};

/// Only a hang reaches it.
const DEADLINE: Duration = Duration::from_secs(300);
/// Messages that are not timed.
const WARM_UP: usize = 8;
/// What is to be reached, as a share of the peer's rate.
const TARGET: f64 = 0.9;

/// Links and ucx_perftest, in turns.
#[derive(Parser)]
struct Options {
    /// MiB that are moved each time.
    #[arg(long, default_value_t = 1024)]
    mib: usize,
    /// MiB of one message.
    #[arg(long, default_value_t = 8)]
    message_mib: usize,
    /// Messages of ours under way at a time. ucx_perftest has up to 32, all from and to one buffer; ours are
    /// in buckets of their own, and the more there are, the less of them the processor's caches hold.
    #[arg(long, default_value_t = 2)]
    window: usize,
    /// How often each side is timed; the medians count.
    #[arg(long, default_value_t = 7)]
    repeat: usize,
    /// Runs one side of ours in a process of its own.
    #[arg(long, hide = true)]
    child: Option<String>,
    /// Given by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

impl Options {
    fn message(&self) -> usize {
        self.message_mib << 20
    }

    fn messages(&self) -> usize {
        (self.mib / self.message_mib).max(1)
    }
}

/// Name, and what UCX is told by its environment.
const WAYS: [(&str, &[(&str, &str)]); 2] = [
    ("loopback TCP", &[("UCX_TLS", "tcp"), ("UCX_NET_DEVICES", "lo")]),
    ("shared memory", &[("UCX_TLS", "posix,sysv,cma,self")]),
];
/// The test of ucx_perftest.
const TEST: &str = "tag_bw";

fn main() {
    let options = Options::parse();
    match options.child.as_deref() {
        Some("receive") => return receive(&options),
        Some(address) => return send(&options, address),
        None => {}
    }
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let fabric = Ucx::open(&UcxOptions::default()).expect("UCX");
    println!(
        "{cores} cores; UCX {}; {} MiB in messages of {} MiB, {} of ours at a time; medians of {} turns (least to most), GB/s",
        fabric.version(),
        options.mib,
        options.message_mib,
        options.window,
        options.repeat
    );
    drop(fabric);
    for (way, environment) in WAYS {
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..options.repeat {
            ours.push(run_ours(&options, environment));
            theirs.push(run_theirs(&options, environment));
        }
        let (ours, theirs) = (Figures::of(ours), Figures::of(theirs));
        let ratio = ours.median / theirs.median;
        let verdict = if ratio >= TARGET { "pass" } else { "MISS" };
        println!("  {verdict} {way}: ours {ours}, {TEST} {theirs}, ratio {ratio:.2} (>= {TARGET})");
    }
}

struct Figures {
    least: f64,
    median: f64,
    most: f64,
}

impl Figures {
    fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let at = |index: usize| values.get(index).copied().unwrap_or(f64::NAN);
        Self { least: at(0), median: at(values.len() / 2), most: at(values.len().saturating_sub(1)) }
    }
}

impl std::fmt::Display for Figures {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.2} ({:.2}-{:.2})", self.median, self.least, self.most)
    }
}

/// A process that ends with this value.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn run_ours(options: &Options, environment: &[(&str, &str)]) -> f64 {
    let start = |role: &str| {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args(["--child", role]);
        for (name, value) in
            [("--mib", options.mib), ("--message-mib", options.message_mib), ("--window", options.window)]
        {
            command.arg(name).arg(value.to_string());
        }
        command.envs(environment.iter().copied()).env("UCX_LOG_LEVEL", "fatal").stdout(Stdio::piped());
        Process(command.spawn().expect("this program starts"))
    };
    let line = |process: &mut Process| {
        let mut line = String::new();
        let output = process.0.stdout.take().expect("its output");
        BufReader::new(output).read_line(&mut line).expect("a line");
        line.trim().to_owned()
    };
    let mut receiver = start("receive");
    let address = line(&mut receiver);
    let mut sender = start(&address);
    line(&mut sender).parse().expect("a rate")
}

fn run_theirs(options: &Options, environment: &[(&str, &str)]) -> f64 {
    let port =
        TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr()).expect("a port").port();
    let perftest = || {
        let mut command = Command::new("ucx_perftest");
        command.envs(environment.iter().copied()).env("UCX_LOG_LEVEL", "fatal");
        command.args(["-p", &port.to_string()]);
        command
    };
    let server = perftest().stdout(Stdio::null()).spawn().expect("ucx_perftest (Debian: ucx-utils)");
    let _server = Process(server);
    let begin = Instant::now();
    loop {
        let mut client = perftest();
        client.args(["127.0.0.1", "-t", TEST, "-f", "-v", "-s", &options.message().to_string()]);
        client.args(["-n", &options.messages().to_string(), "-w", &WARM_UP.to_string()]);
        let output = client.stderr(Stdio::null()).output().expect("ucx_perftest");
        let text = String::from_utf8_lossy(&output.stdout);
        // iterations, latencies, average and overall bandwidth in MiB/s, and message rates.
        let overall = text.lines().last().and_then(|line| line.split(',').nth(5)?.trim().parse::<f64>().ok());
        if let Some(rate) = overall {
            return rate * f64::from(1 << 20) / 1e9;
        }
        // The server may not listen yet.
        assert!(begin.elapsed() < DEADLINE, "ucx_perftest {TEST}: {text}");
        thread::sleep(Duration::from_millis(50));
    }
}

fn tell(socket: &mut TcpStream, bytes: &[u8]) {
    socket.write_all(&(bytes.len() as u32).to_le_bytes()).expect("the other side");
    socket.write_all(bytes).expect("the other side");
}

fn hear(socket: &mut TcpStream) -> Vec<u8> {
    let mut length = [0; 4];
    socket.read_exact(&mut length).expect("the other side");
    let mut bytes = vec![0; u32::from_le_bytes(length) as usize];
    socket.read_exact(&mut bytes).expect("the other side");
    bytes
}

fn meet(socket: &mut TcpStream) -> (Ucx, UcxLink) {
    let fabric = Ucx::open(&UcxOptions::default()).expect("UCX");
    let mut link = fabric.link("the other side").expect("a link");
    tell(socket, &link.address().expect("an address"));
    link.connect(&hear(socket)).expect("a connection");
    (fabric, link)
}

fn buckets(fabric: &Ucx, options: &Options) -> Vec<Bucket> {
    let bucket = |_| {
        let mut bucket = fabric.bucket(options.message()).expect("memory");
        bucket.fill(7);
        bucket
    };
    (0..options.window.max(1)).map(bucket).collect()
}

/// Moves `messages` messages, as many at a time as there are buckets.
fn pump(
    link: &mut UcxLink,
    buckets: &mut Vec<Bucket>,
    messages: usize,
    mut begin: impl FnMut(&mut UcxLink, Bucket, u64) -> Ticket,
) {
    let mut under_way = VecDeque::new();
    let mut begun = 0;
    while begun < messages || !under_way.is_empty() {
        if begun < messages
            && let Some(bucket) = buckets.pop()
        {
            under_way.push_back(begin(link, bucket, begun as u64));
            begun += 1;
        } else if let Some(ticket) = under_way.pop_front() {
            buckets.push(link.finish(ticket, DEADLINE, &mut || Ok(())).expect("a transfer").0);
        }
    }
}

fn receive(options: &Options) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    println!("{}", listener.local_addr().expect("an address"));
    let (mut socket, _) = listener.accept().expect("a connection");
    let (fabric, mut link) = meet(&mut socket);
    let mut buckets = buckets(&fabric, options);
    for messages in [WARM_UP, options.messages()] {
        pump(&mut link, &mut buckets, messages, |link, bucket, tag| {
            let range = 0..bucket.len();
            link.receive(bucket, range, tag).expect("a transfer")
        });
        tell(&mut socket, b"all");
    }
    // The other side ends first.
    let _ = socket.read(&mut [0]);
}

fn send(options: &Options, address: &str) {
    let mut socket = TcpStream::connect(address).expect("the other side");
    let (fabric, mut link) = meet(&mut socket);
    let mut buckets = buckets(&fabric, options);
    let mut rate = 0.0;
    for messages in [WARM_UP, options.messages()] {
        let begin = Instant::now();
        pump(&mut link, &mut buckets, messages, |link, bucket, tag| {
            let range = 0..bucket.len();
            link.send(bucket, range, tag).expect("a transfer")
        });
        hear(&mut socket);
        rate = (messages * options.message()) as f64 / begin.elapsed().as_secs_f64() / 1e9;
    }
    println!("{rate}");
}
