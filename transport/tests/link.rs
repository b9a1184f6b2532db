//! A run across links that break: an S3 server, a publisher and followers, each behind a link of its own.
#![cfg(feature = "object")]
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use driftless_store::{Store, open_with};
use driftless_testkit::link::{Link, Shape};
use driftless_testkit::publications::{RUN, Weights, assert_same, publisher, step};
use driftless_testkit::random::Random;
use driftless_testkit::s3::Server;
use driftless_transport::follow::FollowerOptions;
use driftless_transport::publish::{Mode, Start};
use driftless_transport::{Checkpoint, Dtype, Follower, Version};

const VERSIONS: u64 = 10;
const SEEDS: [u64; 3] = [1, 2, 3];

fn store(addr: SocketAddr) -> Arc<dyn Store> {
    let settings = [
        ("AWS_ACCESS_KEY_ID", "key-id".to_owned()),
        ("AWS_SECRET_ACCESS_KEY", "key".to_owned()),
        ("AWS_ENDPOINT_URL", format!("http://{addr}")),
    ];
    open_with("s3://bucket/root", &settings.map(|(name, value)| (name.to_owned(), value))).unwrap()
}

fn link(server: &Server, seed: u64) -> Link {
    let (delay, jitter) = (Duration::from_millis(1), Duration::from_millis(2));
    Link::to(server.addr, Shape { delay, jitter, seed, rate: None }).unwrap()
}

/// What happens to a link while something passes over it; how often that has to be met before it ends.
fn disturb(link: &Link, random: &mut Random) -> u64 {
    match random.next() % 4 {
        0 => return 0,
        1 => link.cut_after(random.next() % 200_000),
        2 => link.stall(),
        _ => {
            link.partition();
            return 2;
        }
    }
    1
}

/// Does `what` over a link that is disturbed until `what` has met it, or has no need to.
fn across<T: Send>(link: &Link, random: &mut Random, what: impl FnOnce() -> T + Send) -> T {
    let times = disturb(link, random);
    thread::scope(|scope| {
        let doing = scope.spawn(|| {
            let done = what();
            link.heal();
            done
        });
        link.await_met(times);
        link.heal();
        doing.join().unwrap()
    })
}

#[test]
fn versions_go_forward_and_are_whole_whatever_links_do() {
    for seed in SEEDS {
        println!("seed {seed}");
        let dir = tempfile::tempdir().unwrap();
        let server = Server::start();
        let mut random = Random(seed);
        let home = link(&server, seed);
        let mut weights = Weights::small(1);
        weights.set("x.large", Dtype::Bf16, &[300, 256], |index| index as u8);
        let mut publisher = publisher(&store(home.addr()), Start::NewRun, &dir.path().join("baseline"));
        let far: Vec<(Link, Follower)> = (0..2)
            .map(|number| {
                let link = link(&server, seed + 100 * number);
                let options = FollowerOptions::new(
                    RUN,
                    dir.path().join(format!("host-{number}")),
                    format!("host-{number}"),
                );
                let follower = Follower::open(store(link.addr()), options, vec![]).unwrap();
                (link, follower)
            })
            .collect();
        for version in 0..VERSIONS {
            weights.step(version, 20);
            let mode = if version == 0 { Mode::Full } else { Mode::Delta };
            let published = across(&home, &mut random, || publisher.publish(&weights, step(version), mode));
            assert_eq!(published.unwrap().version, Version(version));
            for (link, follower) in &far {
                // Not every host looks at every version.
                if random.next().is_multiple_of(4) && version + 1 < VERSIONS {
                    continue;
                }
                let had = follower.status().applied.map(|ack| ack.version);
                let prepared = across(link, &mut random, || follower.prepare(None)).unwrap();
                assert!(had <= Some(prepared.version), "{had:?} and then {}", prepared.version);
                assert_eq!(prepared.version, Version(version));
                assert_same(&Checkpoint::open(&follower.options().checkpoint_dir).unwrap(), &weights);
            }
        }
    }
}
