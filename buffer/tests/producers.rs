//! Producers and readers of other processes. Here they are other connections and maps, which is all that the
//! owner sees of them; `kill.rs` has real processes.
#![allow(clippy::unwrap_used, reason = "in a test, a failed expectation is the answer")]

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use driftless_buffer::check::verify;
use driftless_buffer::sample::Shape;
use driftless_buffer::{Error, Identity, Log, Options, Position, Producer, Reader, Sample, SyncPolicy};
use driftless_testkit::log::{options, sample};

const SOON: Duration = Duration::from_secs(30);

fn manual() -> Options {
    options().with_segment_bytes(64 << 10).with_sync(SyncPolicy::Manual)
}

fn connect(dir: &Path) -> Producer {
    Producer::connect(dir, &options().identity, SOON).unwrap()
}

#[test]
fn threads_and_producers_share_one_log() {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::open(dir.path(), options().with_segment_bytes(64 << 10)).unwrap();
    let served = log.serve().unwrap();
    assert!(matches!(log.serve(), Err(Error::Invalid { what: "producers", .. })));
    let reader = log.reader();
    let many = |producer: u64, append: &dyn Fn(&Sample<'_>) -> Position| {
        for n in 0..40 {
            let (id, owned) = (producer * 1000 + n, sample(producer * 1000 + n, producer, 0));
            let position = append(&owned.as_sample());
            // Acknowledged; visible as soon as what was reserved before it is.
            reader.wait(position, SOON).unwrap();
            let record = reader.sample(id).unwrap().unwrap();
            owned.assert_equals(&record);
            assert_eq!(record.position(), position);
        }
    };
    std::thread::scope(|scope| {
        for id in 0..3 {
            let (many, dir) = (&many, dir.path());
            scope.spawn(move || {
                let producer = connect(dir);
                many(id, &|sample| producer.append(sample).unwrap().wait().unwrap().position());
            });
        }
        many(3, &|sample| log.append(sample).unwrap().wait().unwrap().position());
    });
    assert_eq!(log.reader().groups(0, 40).len(), 4);
    drop(served);
    assert!(!dir.path().join("producers").exists());
    log.close().unwrap();
    assert!(verify(dir.path()).unwrap().damage.is_empty());
    assert_eq!(Reader::open(dir.path()).unwrap().iter(Position(0)).count(), 160);
}

#[test]
fn a_producer_writes_in_place_and_shares_the_sync_of_a_group() {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::open(dir.path(), manual()).unwrap();
    let _served = log.serve().unwrap();
    let producer = connect(dir.path());
    let mut space = producer.reserve(&Shape { response: 4, ..Shape::default() }).unwrap();
    space.tokens_mut().copy_from_slice(&[5, 6, 7, 8]);
    space.log_probs_mut().fill(-1.0);
    drop(producer.reserve(&Shape { response: 9, ..Shape::default() }).unwrap());
    let pending = space.commit().unwrap();
    assert_eq!(log.reader().end(), Position(0), "committed, not durable");
    pending.wait().unwrap();
    assert_eq!(log.reader().get(Position(0)).unwrap().unwrap().tokens(), [5, 6, 7, 8]);
    let owned: Vec<_> = (0..20).map(|id| sample(id, 0, 0)).collect();
    let samples: Vec<_> = owned.iter().map(|owned| owned.as_sample()).collect();
    let acks = producer.append_all(&samples).unwrap();
    for (ack, owned) in acks.iter().zip(&owned) {
        owned.assert_equals(&log.reader().get(ack.position()).unwrap().unwrap());
    }
}

/// One message of the protocol, by hand.
fn message(stream: &mut UnixStream, tag: u64, numbers: [u64; 3]) {
    let words = [tag, numbers[0], numbers[1], numbers[2], 0];
    stream.write_all(&words.map(u64::to_le_bytes).concat()).unwrap();
}

fn answer(stream: &mut UnixStream) -> [u64; 4] {
    let mut bytes = [0; 40];
    stream.read_exact(&mut bytes).unwrap();
    let word = |at: usize| u64::from_le_bytes(bytes[at * 8..at * 8 + 8].try_into().unwrap());
    std::io::copy(&mut stream.take(word(4)), &mut std::io::sink()).unwrap();
    [word(0), word(1), word(2), word(3)]
}

const RESERVE: u64 = 3;
const SPACE: u64 = 4;
const COMMIT: u64 = 5;
const WAIT: u64 = 7;
const REFUSED: u64 = 9;

#[test]
fn a_dead_producer_gives_up_what_it_had_reserved() {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::open(dir.path(), options()).unwrap();
    let _served = log.serve().unwrap();
    let mut dying = UnixStream::connect(dir.path().join("producers")).unwrap();
    for position in 0..2 {
        message(&mut dying, RESERVE, [1, 256, 0]);
        let space = answer(&mut dying);
        assert_eq!((space[0], space[3]), (SPACE, position));
    }
    let reader = log.reader();
    let ack = log.append(&sample(1, 0, 0).as_sample()).unwrap().wait().unwrap();
    assert_eq!(reader.end(), Position(0), "the open reservations hide it");
    // The kernel does this to a process that is killed.
    drop(dying);
    assert_eq!(reader.wait(ack.position(), SOON).unwrap(), ack.position().next());
    assert_eq!(reader.iter(Position(0)).count(), 1);
}

#[test]
fn a_producer_that_breaks_the_rules_hurts_itself_alone() {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::open(dir.path(), options()).unwrap();
    let _served = log.serve().unwrap();
    let mut other = UnixStream::connect(dir.path().join("producers")).unwrap();
    message(&mut other, RESERVE, [1, 256, 0]);
    let [.., foreign] = answer(&mut other);

    let mut bad = UnixStream::connect(dir.path().join("producers")).unwrap();
    message(&mut bad, RESERVE, [1, 256, 0]);
    let [.., own] = answer(&mut bad);
    for (tag, numbers) in [
        (COMMIT, [foreign, 0, 0]),
        (COMMIT, [99, 0, 0]),
        (WAIT, [own, 0, 0]),
        (WAIT, [99, 0, 0]),
        (RESERVE, [7, 256, 0]),
        (RESERVE, [1, 64, 0]),
        (RESERVE, [1, 100, 0]),
        (RESERVE, [1, u64::MAX - 63, 0]),
        (77, [0, 0, 0]),
        // A body of zeros is no record; and then there is nothing left to commit.
        (COMMIT, [own, 0, 0]),
        (COMMIT, [own, 0, 0]),
    ] {
        message(&mut bad, tag, numbers);
        assert_eq!(answer(&mut bad)[0], REFUSED, "{tag} {numbers:?}");
    }
    // A text longer than any: the line is cut.
    bad.write_all(&[0xff; 64]).unwrap();
    assert_eq!(bad.read_to_end(&mut Vec::new()).unwrap_or(0), 0);
    drop(other);
    let ack = connect(dir.path()).append(&sample(1, 0, 0).as_sample()).unwrap().wait().unwrap();
    assert_eq!(log.reader().wait(ack.position(), SOON).unwrap(), ack.position().next());
    assert_eq!(log.reader().iter(Position(0)).count(), 1);
}

#[test]
fn refusals_of_the_owner_are_the_errors_of_the_log() {
    let dir = tempfile::tempdir().unwrap();
    let bounded = manual()
        .with_unsynced_bytes_max(4096)
        .with_wait_deadline(Duration::from_millis(1))
        .with_reservation_deadline(Duration::from_millis(20))
        .with_sync(SyncPolicy::Within(Duration::from_millis(1)));
    let log = Log::open(dir.path(), bounded).unwrap();
    let served = log.serve().unwrap();
    let other = Identity { model: "critic".into(), ..options().identity };
    let refused = Producer::connect(dir.path(), &other, SOON).unwrap_err();
    assert!(matches!(refused, Error::Identity { what: "model", .. }), "{refused}");
    let producer = connect(dir.path());
    let huge = producer.reserve(&Shape { metadata: 1 << 20, ..Shape::default() }).unwrap_err();
    assert!(matches!(huge, Error::TooLarge { .. }), "{huge}");
    let shape = Shape { response: 300, ..Shape::default() };
    let held = producer.reserve(&shape).unwrap();
    // The owner looks for reservations held too long by itself: nobody else calls it.
    let full = producer.reserve(&shape);
    assert!(matches!(full, Ok(_) | Err(Error::Full { .. })), "{full:?}");
    drop(full);
    assert_eq!(
        log.reader().wait(Position(0), SOON).unwrap(),
        Position(0).next(),
        "the held one was given up"
    );
    assert!(matches!(held.commit(), Err(Error::Expired { position: Position(0), .. })));
    drop(served);
    let gone = producer.reserve(&shape).unwrap_err();
    assert!(matches!(gone, Error::Owner { .. }), "{gone}");
    let nobody = Producer::connect(dir.path(), &options().identity, Duration::from_millis(20)).unwrap_err();
    assert!(matches!(nobody, Error::Owner { .. }), "{nobody}");
}

#[test]
fn a_producer_waits_for_the_next_owner() {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::open(dir.path(), options()).unwrap();
    let served = log.serve().unwrap();
    let producer = connect(dir.path());
    producer.append(&sample(1, 0, 0).as_sample()).unwrap().wait().unwrap();
    drop((served, log));
    assert!(matches!(producer.append(&sample(2, 0, 0).as_sample()), Err(Error::Owner { .. })));
    std::thread::scope(|scope| {
        let again = scope.spawn(|| connect(dir.path()).append(&sample(2, 0, 0).as_sample()).unwrap().wait());
        let log = Log::open(dir.path(), options()).unwrap();
        let _served = log.serve().unwrap();
        let ack = again.join().unwrap().unwrap();
        sample(2, 0, 0).assert_equals(&log.reader().get(ack.position()).unwrap().unwrap());
        assert_eq!(log.reader().iter(Position(0)).count(), 2);
    });
}

#[test]
fn reader_of_another_process_is_woken_for_what_is_durable() {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::open(dir.path(), manual()).unwrap();
    let reader = Reader::open(dir.path()).unwrap();
    let pending = log.append(&sample(0, 0, 0).as_sample()).unwrap();
    reader.refresh().unwrap();
    assert_eq!(reader.end(), Position(0), "committed, not durable");
    pending.wait().unwrap();
    let mut seen = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Through several segments, some of them sealed while they are followed.
            for id in 1..600 {
                log.append(&sample(id, 0, 0).as_sample()).unwrap().wait().unwrap();
            }
        });
        while seen < 600 {
            let end = reader.wait(Position(seen), SOON).unwrap().0;
            assert!(end > seen, "no news within {SOON:?}");
            for position in seen..end {
                sample(position, 0, 0).assert_equals(&reader.get(Position(position)).unwrap().unwrap());
            }
            seen = end;
        }
    });
    let removed =
        log.retain(&driftless_buffer::Retention { bytes_max: Some(1), ..Default::default() }).unwrap();
    reader.refresh().unwrap();
    assert!(removed.oldest > Position(0) && reader.oldest() == removed.oldest, "{removed:?}");
    // The next owner settles what this one left; the reader goes on.
    drop(log);
    let log = Log::open(dir.path(), manual()).unwrap();
    let ack = log.append(&sample(600, 0, 0).as_sample()).unwrap().wait().unwrap();
    assert_eq!(reader.wait(ack.position(), SOON).unwrap(), ack.position().next());
    sample(600, 0, 0).assert_equals(&reader.get(ack.position()).unwrap().unwrap());
    assert_eq!(reader.identity(), Some(&options().identity));
}
