//! A version's way across a long link, next to slime's bytes on the same one.

use std::net::SocketAddr;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use driftless_compare::peers::xor_zstd;
use driftless_testkit::link::{Link, Shape};
use driftless_testkit::s3::Server;
use driftless_transport::{
    Follower, FollowerOptions, Key, Profile, PutMode, Stop, Store, Version, open_with,
};
use rayon::prelude::*;

use crate::model::{RUN, State, begin, directory, pairs, publish};
use crate::{Options, judge};

/// From the committed manifest to the follower's word that the version is on its disk: poll, fetch, check, apply and sync. For
/// slime only the transfer, by the same client and as parallel as ours.
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
    let mut publisher = begin(&pairs, &home, dir.path(), Profile::Wire);
    let rate = options.link_mbps * 1_000_000 / 8;
    let delay = Duration::from_millis(options.link_ms) / 2;
    let link = Link::to(server.addr, Shape { rate: Some(rate), delay, ..Shape::default() }).expect("a link");
    let far = store(link.addr());

    let mut follow = FollowerOptions::new(RUN, dir.path().join("host"), "host");
    follow.hf_checkpoint = Some(dir.path().join("base"));
    follow.poll = Duration::from_millis(options.poll_ms);
    let follower = Follower::open(far.clone(), follow, Vec::new()).expect("a follower");
    follower.prepare(None).expect("version 0");
    let stop = Stop::new();
    let looping = {
        let (follower, stop) = (follower.clone(), stop.clone());
        thread::spawn(move || follower.run_until(&stop, false))
    };
    let published = publish(&mut publisher, &State::new(&pairs));
    let (ours, share) =
        watch(&link, rate, || follower.status().applied.is_some_and(|applied| applied.version >= Version(1)));
    stop.stop();
    looping.join().expect("no panic").expect("it followed");
    let ours_bytes = published.publication_bytes;
    println!("  ours: {ours_bytes} bytes, visible after {:.2} s", ours.as_secs_f64());

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

/// Time until `done`, and the share of the line's rate between the first and the last twentieth of what came down.
fn watch(link: &Link, rate: u64, done: impl Fn() -> bool) -> (Duration, f64) {
    let begin = Instant::now();
    let mut samples = vec![(begin, link.carried().down)];
    while !done() {
        thread::sleep(Duration::from_millis(5));
        samples.push((Instant::now(), link.carried().down));
    }
    let took = begin.elapsed();
    let (first, last) = (samples[0].1, samples[samples.len() - 1].1);
    let at = |share: f64| {
        let bytes = first + ((last - first) as f64 * share) as u64;
        *samples.iter().find(|(_, down)| *down >= bytes).unwrap_or(&samples[0])
    };
    let ((from, low), (to, high)) = (at(0.05), at(0.95));
    let flow = (high - low) as f64 / to.saturating_duration_since(from).as_secs_f64().max(1e-9);
    (took, flow / rate as f64)
}

fn store(addr: SocketAddr) -> Arc<dyn Store> {
    let settings = [
        ("AWS_ACCESS_KEY_ID", "key-id".to_owned()),
        ("AWS_SECRET_ACCESS_KEY", "key".to_owned()),
        ("AWS_ENDPOINT_URL", format!("http://{addr}")),
    ];
    open_with("s3://bucket/bench", &settings.map(|(name, value)| (name.to_owned(), value))).expect("a store")
}
