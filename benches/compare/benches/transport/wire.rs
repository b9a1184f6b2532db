//! A version's way across a long link, next to slime's bytes on the same one.

use std::net::SocketAddr;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use driftless_compare::peers::xor_zstd;
use driftless_store::wait::Stop;
use driftless_store::{Key, PutMode, Store, open_with};
use driftless_testkit::link::{Link, Shape};
use driftless_testkit::s3::Server;
use driftless_transport::follow::FollowerOptions;
use driftless_transport::publish::Profile;
use driftless_transport::{Follower, Version};
use rayon::prelude::*;

use crate::model::{self, RUN, begin, directory, host_directory, pairs, publish};
use crate::{Options, judge};

/// From the committed manifest to the follower's word that engines can load the version: poll, fetch, check,
/// durable journal, bytes in the page cache. For slime only the transfer, by the same client and as parallel
/// as ours.
pub(crate) fn run(options: &Options) {
    let pairs = pairs(options.wire_mib, options.wire_density);
    println!(
        "{} MiB at {} % across {} Mb/s and {} ms, poll every {} ms",
        options.wire_mib,
        100.0 * options.wire_density,
        options.link_mbps,
        options.link_ms,
        options.poll_ms
    );
    let dir = directory(options);
    let server = Server::start();
    let home = store(server.addr);
    let mut publisher = begin(&pairs, &home, dir.path(), Profile::Wire, None);
    let rate = options.link_mbps * 1_000_000 / 8;
    let delay = Duration::from_millis(options.link_ms) / 2;
    let link = Link::to(server.addr, Shape { rate: Some(rate), delay, ..Shape::default() }).expect("a link");
    let far = store(link.addr());

    let host = host_directory(options);
    let mut follow = FollowerOptions::new(RUN, host.path().join("host"), "host");
    follow.hf_checkpoint = Some(dir.path().join("base"));
    (follow.poll, follow.engine_poll) = [Duration::from_millis(options.poll_ms); 2].into();
    let follower = Follower::open(far.clone(), follow, Vec::new()).expect("a follower");
    follower.prepare(None).expect("version 0");
    follower.sync().expect("a disk");
    publisher.wait().expect("a baseline");
    let stop = Stop::new();
    let looping = {
        let (follower, stop) = (follower.clone(), stop.clone());
        thread::spawn(move || follower.run_until(&stop, false))
    };
    let published = publish(&mut publisher, &model::new(&pairs));
    let before = seconds(&follower);
    let seen =
        watch(&link, || follower.status().applied.is_some_and(|applied| applied.version >= Version(1)));
    let durable = Instant::now();
    stop.stop();
    looping.join().expect("no panic").expect("it followed");
    let durable = durable.elapsed();
    let after = seconds(&follower);
    let (ours, share) = (seen.took, seen.share(rate));
    println!("  ours: {} bytes, visible after {:.2} s", published.publication_bytes, ours.as_secs_f64());
    println!(
        "  of it: bytes flow from {:.2} s to {:.2} s; fetch to durable journal {:.2} s, overwriting {:.2} s; durable in place {:.2} s after it was visible",
        seen.at(0.01).as_secs_f64(),
        seen.at(0.99).as_secs_f64(),
        after[0] - before[0],
        after[1] - before[1],
        durable.as_secs_f64()
    );
    publisher.wait().expect("a baseline");

    let payload: Vec<u8> =
        pairs.par_iter().map(|pair| xor_zstd::encode(&pair.base, &pair.new).0).collect::<Vec<_>>().concat();
    let key = Key::new("slime").expect("a key");
    home.put(&key, &payload, PutMode::Create).expect("space");
    let begin = Instant::now();
    let got = far.get(&key, None).expect("slime's bytes").len();
    let theirs = begin.elapsed();
    println!("  slime: {got} bytes, transferred after {:.2} s, not applied", theirs.as_secs_f64());
    if got < 100_000_000 {
        println!("  (the targets are for 100 MB of slime's bytes and more)");
    }
    judge("slime's bytes over ours in time", theirs.as_secs_f64() / ours.as_secs_f64(), 2.5, true);
    judge("share of the line while bytes flow", share, 0.9, true);
}

/// What came down the link, and when, until somebody had what he waited for.
struct Seen {
    took: Duration,
    samples: Vec<(Duration, u64)>,
}

/// Watches the link until `done`.
fn watch(link: &Link, done: impl Fn() -> bool) -> Seen {
    let begin = Instant::now();
    let mut samples = vec![(Duration::ZERO, link.carried().down)];
    while !done() {
        thread::sleep(Duration::from_millis(5));
        samples.push((begin.elapsed(), link.carried().down));
    }
    Seen { took: begin.elapsed(), samples }
}

impl Seen {
    /// When a share of all bytes was through.
    fn at(&self, share: f64) -> Duration {
        self.sample(share).0
    }

    /// The share of the line's rate between the first and the last twentieth of what came down.
    fn share(&self, rate: u64) -> f64 {
        let ((from, low), (to, high)) = (self.sample(0.05), self.sample(0.95));
        (high - low) as f64 / (to - from).as_secs_f64().max(1e-9) / rate as f64
    }

    fn sample(&self, share: f64) -> (Duration, u64) {
        let (first, last) = (self.samples[0].1, self.samples[self.samples.len() - 1].1);
        let bytes = first + ((last - first) as f64 * share) as u64;
        *self.samples.iter().find(|(_, down)| *down >= bytes).unwrap_or(&self.samples[0])
    }
}

/// Seconds that the follower's applies took so far: fetch to durable journal, and overwriting.
fn seconds(follower: &Follower) -> [f64; 2] {
    let page = follower.metrics();
    ["journal", "overwrite"].map(|phase| {
        let name = format!("apply_seconds_total{{phase=\"{phase}\"}} ");
        let value = page.lines().find_map(|line| line.split_once(&name)).map(|(_, value)| value.parse());
        value.expect("it is there").expect("a number")
    })
}

fn store(addr: SocketAddr) -> Arc<dyn Store> {
    let settings = [
        ("AWS_ACCESS_KEY_ID", "key-id".to_owned()),
        ("AWS_SECRET_ACCESS_KEY", "key".to_owned()),
        ("AWS_ENDPOINT_URL", format!("http://{addr}")),
    ];
    open_with("s3://bucket/bench", &settings.map(|(name, value)| (name.to_owned(), value))).expect("a store")
}
