//! A batch of 512 samples of 8k tokens, every column of it read in place, against the same scan over plain
//! memory.

use std::hint::black_box;
use std::path::Path;

use driftless_buffer::{GroupQuery, Log, Reader, Record, SyncPolicy};

use crate::Row;
use crate::data::{Data, GROUP, RECORD, median, mib, options, ratio, timed};

const ROUNDS: usize = 41;
const RECORDS: usize = 512;

pub(crate) fn run(dir: &Path) -> Vec<Row> {
    let data = Data::new();
    let log = Log::open(dir, options(SyncPolicy::Manual, 64 << 20)).expect("a log");
    for id in 0..RECORDS {
        drop(log.append(&data.sample(id)).expect("room in the log"));
    }
    log.close().expect("a durable log");
    let reader = Reader::open(dir).expect("a log");
    let first = mib(RECORDS * RECORD, timed(|| drop(black_box(batch(&reader)))));
    let copies: Vec<Data> = (0..RECORDS).map(|_| Data::new()).collect();
    let bare = || copies.iter().map(|data| scan(&data.tokens, &data.log_probs, &data.loss_mask)).sum::<f64>();
    let ours = || {
        let records = batch(&reader);
        records
            .iter()
            .map(|record| scan(record.tokens(), record.log_probs(), record.loss_mask()))
            .sum::<f64>()
    };
    let (mut in_place, mut memory, mut query) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        for turn in 0..2 {
            if (round + turn) % 2 == 0 {
                query.push(timed(|| drop(black_box(batch(&reader)))).as_secs_f64() * 1e6);
                memory.push(mib(RECORDS * RECORD, timed(|| _ = black_box(bare()))));
            } else {
                in_place.push(mib(RECORDS * RECORD, timed(|| _ = black_box(ours()))));
            }
        }
    }
    let row = ratio(&in_place, &memory);
    println!(
        "batch of {RECORDS} x 8k tokens, MiB/s: in place {:.0}, bare memory {:.0}; the first time, checking every CRC, {first:.0}; the query alone {:.0} µs",
        median(in_place),
        median(memory),
        median(query)
    );
    let held = batch(&reader);
    let copied = held.iter().filter(|record| !in_a_map(record)).count();
    vec![
        Row::at_least("batch read, query included, to a bare memory scan", row, 0.9),
        Row::at_most("records of the batch that do not lie in a map of the log", copied as f64, 0.0),
    ]
}

fn batch(reader: &Reader) -> Vec<Record> {
    let groups = reader.find(&GroupQuery::complete(GROUP));
    groups.into_iter().flat_map(|group| group.records).collect()
}

/// Do all columns lie in memory that the kernel says is a segment?
fn in_a_map(record: &Record) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("the kernel's list");
    let segments = maps.lines().filter(|line| line.contains("/segment-")).filter_map(|line| {
        let (range, _) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        Some(usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?)
    });
    let segments: Vec<_> = segments.collect();
    let columns = [
        record.tokens().as_ptr() as usize,
        record.log_probs().as_ptr() as usize,
        record.loss_mask().as_ptr() as usize,
    ];
    columns.iter().all(|at| segments.iter().any(|range| range.contains(at)))
}

/// Sums, in eight parts so that the additions need not wait for each other.
fn scan(tokens: &[i32], log_probs: &[f32], loss_mask: &[u8]) -> f64 {
    let tokens: i64 = tokens.iter().map(|&token| i64::from(token)).sum();
    let mask: u64 = loss_mask.iter().map(|&mask| u64::from(mask)).sum();
    let mut parts = [0f32; 8];
    for chunk in log_probs.chunks_exact(8) {
        parts.iter_mut().zip(chunk).for_each(|(part, value)| *part += value);
    }
    tokens as f64 + mask as f64 + f64::from(parts.iter().sum::<f32>())
}
