//! The suite that every [`Fabric`] passes: a broken rule panics.

use std::thread;
use std::time::Duration;

use driftless_relay::fabric::{Fabric, Link, Wait};
use driftless_relay::{Error, Result};

/// Only a hang reaches it.
const LONG: Duration = Duration::from_secs(120);
/// Of a wait that has to end.
const SHORT: Duration = Duration::from_millis(50);

/// Runs every check within this process.
pub(crate) fn check(fabric: &dyn Fabric) {
    messages_of_any_length_arrive_whole(fabric);
    links_on_threads_do_not_meet(fabric);
    tags_choose_the_message(fabric);
    memory_stays_until_it_is_released(fabric);
    messages_that_do_not_fit_are_refused(fabric);
    waits_end_and_name_the_peer(fabric);
    a_watch_ends_a_wait(fabric);
    what_is_not_connected_does_not_send(fabric);
    a_peer_that_ends_ends_the_wait(fabric);
}

fn link(fabric: &dyn Fabric, peer: &str) -> Box<dyn Link> {
    fabric.link(peer).unwrap()
}

/// A link to another one, which only receives.
fn pair(fabric: &dyn Fabric) -> [Box<dyn Link>; 2] {
    let (mut near, far) = (link(fabric, "far"), link(fabric, "near"));
    near.connect(&far.address().unwrap()).unwrap();
    [near, far]
}

fn bytes(seed: u8, length: usize) -> Vec<u8> {
    (0..length).map(|at| (at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()[6] ^ seed).collect()
}

fn send(link: &mut dyn Link, message: &[u8], tag: u64) -> Result<()> {
    link.memory(message.len())?[..message.len()].copy_from_slice(message);
    link.send(message.len(), tag, &mut Wait { deadline: LONG, watch: &mut || Ok(()) })
}

fn receive(link: &mut dyn Link, room: usize, tag: u64, deadline: Duration) -> Result<Vec<u8>> {
    link.memory(room)?;
    let length = link.receive(room, tag, &mut Wait { deadline, watch: &mut || Ok(()) })?;
    Ok(link.memory(length)?[..length].to_vec())
}

fn messages_of_any_length_arrive_whole(fabric: &dyn Fabric) {
    let [mut near, mut far] = pair(fabric);
    let messages: Vec<_> = [1, 4000, 100_000, 1 << 20, 9 << 20].map(|length| bytes(7, length)).into();
    thread::scope(|scope| {
        scope.spawn(|| {
            for (tag, message) in messages.iter().enumerate() {
                send(&mut *near, message, tag as u64).unwrap();
            }
        });
        for (tag, message) in messages.iter().enumerate() {
            // Into more memory than it needs: its length is learned.
            let found = receive(&mut *far, message.len() + 10, tag as u64, LONG).unwrap();
            assert!(found == *message, "{} bytes", message.len());
        }
    });
}

fn links_on_threads_do_not_meet(fabric: &dyn Fabric) {
    thread::scope(|scope| {
        for number in 0..4 {
            let [mut near, mut far] = pair(fabric);
            let length = |message: u64| 1 + message as usize * 40_000;
            scope.spawn(move || {
                for message in 0..10 {
                    send(&mut *near, &bytes(number, length(message)), message).unwrap();
                }
            });
            scope.spawn(move || {
                for message in 0..10 {
                    let found = receive(&mut *far, length(message), message, LONG).unwrap();
                    assert!(found == bytes(number, length(message)), "pair {number}, message {message}");
                }
            });
        }
    });
}

fn tags_choose_the_message(fabric: &dyn Fabric) {
    let [mut near, mut far] = pair(fabric);
    let mut second = link(fabric, "far");
    second.connect(&far.address().unwrap()).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| send(&mut *near, b"first", 1).unwrap());
        scope.spawn(|| send(&mut *second, b"second", 2).unwrap());
        assert_eq!(receive(&mut *far, 10, 2, LONG).unwrap(), b"second");
        assert_eq!(receive(&mut *far, 10, 1, LONG).unwrap(), b"first");
    });
}

fn memory_stays_until_it_is_released(fabric: &dyn Fabric) {
    let mut link = link(fabric, "nobody");
    assert!(link.memory(100).unwrap().iter().all(|byte| *byte == 0));
    link.memory(100).unwrap().fill(7);
    assert!(link.memory(50).unwrap()[..100].iter().all(|byte| *byte == 7));
    link.release();
    assert!(link.memory(100).unwrap()[..100].iter().all(|byte| *byte == 0));
    assert!(link.memory(1 << 20).unwrap().len() >= 1 << 20);
}

fn messages_that_do_not_fit_are_refused(fabric: &dyn Fabric) {
    let [mut near, mut far] = pair(fabric);
    let length = near.memory(10).unwrap().len();
    let refused = near.send(length + 1, 1, &mut Wait { deadline: LONG, watch: &mut || Ok(()) });
    assert!(matches!(refused, Err(Error::Link { .. })), "{refused:?}");
    let mut near = link(fabric, "far");
    near.connect(&far.address().unwrap()).unwrap();
    thread::scope(|scope| {
        // Its message leaves it, or its peer does: both are fine.
        scope.spawn(|| send(&mut *near, &[7; 11], 1));
        let truncated = receive(&mut *far, 10, 1, LONG);
        let Err(Error::Link { status, .. }) = &truncated else { panic!("{truncated:?}") };
        assert!(status.contains("truncated"), "{status}");
        drop(far);
    });
}

fn waits_end_and_name_the_peer(fabric: &dyn Fabric) {
    let mut link = link(fabric, "10.0.0.9:7421");
    let outcome = receive(&mut *link, 1 << 20, 1, SHORT);
    let Err(error @ Error::LinkTimeout { .. }) = outcome else { panic!("{outcome:?}") };
    assert!(error.to_string().contains("10.0.0.9:7421"), "{error}");
    let late = receive(&mut *link, 10, 2, LONG);
    assert!(matches!(late, Err(Error::LinkLost { .. })), "a link is of no use after that: {late:?}");
}

fn a_watch_ends_a_wait(fabric: &dyn Fabric) {
    let mut link = link(fabric, "watched");
    link.memory(10).unwrap();
    let outcome =
        link.receive(10, 1, &mut Wait { deadline: LONG, watch: &mut || Err("it hung up".to_owned()) });
    assert!(matches!(&outcome, Err(Error::LinkLost { reason, .. }) if reason == "it hung up"), "{outcome:?}");
}

fn what_is_not_connected_does_not_send(fabric: &dyn Fabric) {
    let unconnected = send(&mut *link(fabric, "nobody"), b"a", 1);
    assert!(matches!(unconnected, Err(Error::Link { .. })), "{unconnected:?}");
    for address in [&[][..], &[0; 7], &vec![0; 1 << 20]] {
        assert!(matches!(link(fabric, "nobody").connect(address), Err(Error::Link { .. })));
    }
    let [mut near, far] = pair(fabric);
    let again = near.connect(&far.address().unwrap());
    assert!(matches!(again, Err(Error::Link { .. })), "{again:?}");
}

fn a_peer_that_ends_ends_the_wait(fabric: &dyn Fabric) {
    let [near, mut far] = pair(fabric);
    far.connect(&near.address().unwrap()).unwrap();
    drop(near);
    // Where the fabric does not tell, the deadline does.
    let error = receive(&mut *far, 10, 1, Duration::from_secs(1)).unwrap_err();
    let told = matches!(error, Error::LinkLost { .. } | Error::LinkTimeout { .. } | Error::Link { .. });
    assert!(told && error.to_string().contains("near"), "{error:?}");
}
