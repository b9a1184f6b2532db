//! Opening a log after a crash: with nothing but an unsealed tail, with a tail eight times as long, and with
//! 100 GB of sealed segments before it. These are sparse: as long and with as many records as 100 GB of 72
//! KiB records, each record tiny.

use std::path::Path;
use std::time::Duration;

use driftless_buffer::{Log, Position, Sample, Scalars, SyncPolicy};

use crate::Row;
use crate::data::{Data, RECORD, median, options, timed};

const SEGMENTS: usize = 100;
const SEGMENT_BYTES: usize = 1 << 30;
/// Records of the tail.
const TAIL: usize = 100;
const ROUNDS: usize = 9;

pub(crate) fn run(dir: &Path) -> Vec<Row> {
    let data = Data::new();
    let tail = crashed(&dir.join("tail"), &data, 0, TAIL);
    let long_tail = crashed(&dir.join("long-tail"), &data, 0, 8 * TAIL);
    let full = crashed(&dir.join("full"), &data, SEGMENTS, TAIL);
    println!(
        "reopen after a crash: {tail:.1?} with a tail of {TAIL} records, {long_tail:.1?} with {}, {full:.1?} with {TAIL} behind {SEGMENTS} GiB of sealed segments, {} records",
        8 * TAIL,
        SEGMENTS * (SEGMENT_BYTES / RECORD)
    );
    vec![Row::at_most(
        "reopen with 100 GiB sealed, to the tail alone",
        full.as_secs_f64() / tail.as_secs_f64(),
        2.0,
    )]
}

/// The median time to open such a log.
fn crashed(dir: &Path, data: &Data, segments: usize, tail: usize) -> Duration {
    for segment in 0..segments {
        let log = Log::open(dir, options(SyncPolicy::Manual, SEGMENT_BYTES as u64)).expect("a log");
        for n in 0..SEGMENT_BYTES / RECORD {
            let id = (segment * (SEGMENT_BYTES / RECORD) + n) as u64;
            let scalars =
                Scalars { sample_id: id, group_id: id / 8, rollout_id: id / 512, ..Scalars::default() };
            drop(log.append(&Sample { scalars, ..Sample::default() }).expect("room in the log"));
        }
        log.close().expect("a sealed segment");
    }
    let mut times = Vec::new();
    for round in 0..ROUNDS {
        let log = Log::open(dir, options(SyncPolicy::Manual, 64 << 20)).expect("a log");
        let from = log.reader().end();
        for n in 0..tail {
            drop(log.append(&data.sample(usize::MAX / 2 + round * tail + n)).expect("room in the log"));
        }
        log.sync().expect("a durable log");
        // As a crash leaves it: not closed.
        drop(log);
        let mut opened = None;
        times.push(
            timed(|| opened = Some(Log::open(dir, options(SyncPolicy::Manual, 64 << 20)))).as_secs_f64(),
        );
        let log = opened.expect("it was opened").expect("a log");
        assert_eq!(log.recovery().scanned, 1, "one segment was open");
        assert!(log.reader().get(Position(from.0 + tail as u64 - 1)).expect("a record").is_some());
        if round + 1 == ROUNDS && segments > 0 {
            // What was put off is done here, once.
            let newest = (segments * (SEGMENT_BYTES / RECORD) - 1) as u64 / 512;
            let one = timed(|| drop(log.reader().groups(newest, 8)));
            let all = timed(|| drop(log.reader().rollouts()));
            println!("    after that, the first question about one rollout: {one:.1?}, about all: {all:.1?}");
        }
        drop(log);
    }
    Duration::from_secs_f64(median(times))
}
