//! What a reader that goes through a whole log keeps in memory: resident pages, anonymous and of the map,
//! after reading a log of 256 MiB and one of 1 GiB and letting every record go; and with the batch still
//! held.

use std::path::Path;

use driftless_buffer::{Log, Position, Reader, SyncPolicy};

use crate::Row;
use crate::data::{Data, RECORD, options};

pub(crate) fn run(dir: &Path) -> Vec<Row> {
    let data = Data::new();
    let small = read(&dir.join("small"), &data, 256 << 20);
    let large = read(&dir.join("large"), &data, 1 << 30);
    println!(
        "memory after reading a log: 256 MiB: {:.1} MiB; 1 GiB: {:.1} MiB; index alone {:.2} MiB",
        small,
        large,
        (1 << 30) as f64 / RECORD as f64 * 200.0 / (1 << 20) as f64
    );
    vec![Row::at_most("resident memory after reading 1 GiB of log, MiB", large, 256.0)]
}

/// MiB that stay resident after reading everything.
fn read(dir: &Path, data: &Data, bytes: usize) -> f64 {
    let log = Log::open(dir, options(SyncPolicy::Manual, 32 << 20)).expect("a log");
    for id in 0..bytes / RECORD {
        let pending = log.append(&data.sample(id)).expect("room in the log");
        if id % 64 == 63 {
            pending.wait().expect("a durable record");
        }
    }
    log.close().expect("a durable log");
    let before = resident();
    let reader = Reader::open(dir).expect("a log");
    let mut sum = 0;
    for record in reader.iter(Position(0)) {
        let record = record.expect("a whole record");
        sum += record.tokens().iter().map(|&token| i64::from(token)).sum::<i64>();
    }
    std::hint::black_box(sum);
    let after = resident();
    drop(reader);
    after - before
}

/// MiB of this process that are in memory, maps of files included.
fn resident() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("the kernel's figures");
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("a figure");
    let kib: f64 = line.split_whitespace().nth(1).and_then(|word| word.parse().ok()).expect("a number");
    kib / 1024.0
}
