//! The store over a link that breaks.

use driftless_testkit::link::{Link, Shape};

use super::*;

const PART: usize = 64 << 10;
const BODY: usize = 20 * PART + 77;
/// More than the head of any answer.
const HEAD: u64 = 1 << 10;

/// Small parts and short pauses; patient with a busy machine.
fn limits() -> Limits {
    Limits {
        part_bytes: PART,
        pause: [Duration::from_millis(1), Duration::from_millis(20)],
        ..Limits::default()
    }
}

fn filled() -> (Server, Vec<u8>) {
    let server = Server::start();
    let body = body(BODY);
    bucket(&server, limits()).put(&key("object"), &body, PutMode::Create).unwrap();
    (server, body)
}

#[test]
fn a_cut_at_any_byte_costs_one_part_and_no_finished_one() {
    let (server, body) = filled();
    for seed in 0..24u64 {
        let shape = Shape { jitter: Duration::from_millis(1), seed, ..Shape::default() };
        let link = Link::to(server.addr, shape).unwrap();
        let far = bucket_at(link.addr(), limits());
        // From the first byte of the first head to the last of the object.
        let at = seed * (BODY as u64 + 4 * HEAD) / 23;
        link.cut_after(at);
        assert!(far.get(&key("object"), None).unwrap() == body, "cut at {at}");
        let carried = link.carried().down;
        assert!(carried <= (BODY + PART) as u64 + 24 * HEAD, "cut at {at}: {carried} bytes for {BODY}");
    }
}

#[test]
fn a_partition_costs_what_was_under_way() {
    let (server, body) = filled();
    let link = Link::to(server.addr, Shape { rate: Some(4 << 20), ..Shape::default() }).unwrap();
    let far = bucket_at(link.addr(), limits());
    std::thread::scope(|scope| {
        let getting = scope.spawn(|| far.get(&key("object"), None).unwrap());
        let until = |what: &str, done: &dyn Fn() -> bool| {
            loop {
                // Asked for before the look: it may end with what is waited for.
                let ended = getting.is_finished();
                if done() {
                    return;
                }
                assert!(!ended, "it ended before {what}");
                std::thread::yield_now();
            }
        };
        for part in [3, 9, 15] {
            until("the part", &|| link.carried().down >= (part * PART) as u64);
            let before = link.carried().connections;
            link.partition();
            until("it tried again, and in vain", &|| link.carried().connections >= before + 4);
            link.heal();
        }
        assert!(getting.join().unwrap() == body);
    });
    let parts = limits().parts;
    let carried = link.carried().down;
    assert!(carried <= (BODY + 3 * parts * PART) as u64 + 60 * HEAD, "{carried} bytes for {BODY}");
}
