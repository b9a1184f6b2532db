//! Groups of 64 records, each group made durable: the log, a plain file with fdatasync, LMDB. They take
//! turns, in every order, so that whatever else the disk does hits all.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use driftless_buffer::{Log, SyncPolicy};
use heed::types::Bytes;
use heed::{Database, Env, EnvFlags, EnvOpenOptions, PutFlags};

use crate::Row;
use crate::data::{Data, GROUP, RECORD, median, mib, options, ratio, timed};

/// Turns; the first is not counted.
const ROUNDS: usize = 97;

pub(crate) fn run(dir: &Path) -> Vec<Row> {
    let data = Data::new();
    let bytes = data.bytes();
    let log = Log::open(dir.join("log"), options(SyncPolicy::Manual, 64 << 20)).expect("a log");
    let mut file = File::create(dir.join("raw")).expect("a file");
    let plain = Lmdb::open(&dir.join("lmdb"), EnvFlags::empty());
    let mapped = Lmdb::open(&dir.join("lmdb-writemap"), EnvFlags::WRITE_MAP);
    let mut rates: [Vec<f64>; 4] = Default::default();
    for round in 0..ROUNDS {
        for which in order(round) {
            let elapsed = timed(|| match which {
                0 => {
                    let samples: Vec<_> = (0..GROUP).map(|n| data.sample(round * GROUP + n)).collect();
                    log.append_all(&samples).expect("room in the log");
                }
                1 => {
                    (0..GROUP).for_each(|_| file.write_all(&bytes).expect("room on the disk"));
                    file.sync_data().expect("a disk that syncs");
                }
                2 => plain.append(round, &bytes),
                _ => mapped.append(round, &bytes),
            });
            if round > 0 {
                rates[which].push(mib(GROUP * RECORD, elapsed));
            }
        }
    }
    let [ours, raw, plain, mapped] = rates;
    let (a, b, c, d) = (ours.clone(), raw.clone(), plain.clone(), mapped.clone());
    println!(
        "durable append, groups of {GROUP} x 72 KiB, MiB/s: log {:.0}, raw append + fdatasync {:.0}, LMDB {:.0}, LMDB with a writable map {:.0}",
        median(a),
        median(b),
        median(c),
        median(d)
    );
    let lmdb = ratio(&ours, &plain).min(ratio(&ours, &mapped));
    vec![
        Row::at_least("durable append, to raw append + fdatasync", ratio(&ours, &raw), 0.9),
        Row::at_least("durable append, to the better LMDB", lmdb, 1.3),
    ]
}

/// Another order every round, so that nobody always comes behind the same one.
fn order(round: usize) -> [usize; 4] {
    let mut order = [0, 1, 2, 3];
    let mut number = round;
    for at in (1..4).rev() {
        order.swap(at, number % (at + 1));
        number /= at + 1;
    }
    order
}

struct Lmdb {
    env: Env,
    database: Database<Bytes, Bytes>,
}

#[expect(unsafe_code, reason = "LMDB's own conditions")]
impl Lmdb {
    fn open(dir: &Path, flags: EnvFlags) -> Self {
        std::fs::create_dir_all(dir).expect("a directory");
        let mut options = EnvOpenOptions::new();
        options.map_size(4 << 30);
        // SAFETY: no other process opens this directory, and neither flag gives up durability.
        let env = unsafe { options.flags(flags).open(dir) }.expect("an LMDB environment");
        let mut transaction = env.write_txn().expect("a transaction");
        let database = env.create_database(&mut transaction, None).expect("a database");
        transaction.commit().expect("a commit");
        Self { env, database }
    }

    fn append(&self, round: usize, bytes: &[u8]) {
        let mut transaction = self.env.write_txn().expect("a transaction");
        for n in 0..GROUP {
            let key = ((round * GROUP + n) as u64).to_be_bytes();
            // Ascending keys at the end: LMDB's fastest way in.
            let put = self.database.put_with_flags(&mut transaction, PutFlags::APPEND, &key, bytes);
            put.expect("room in LMDB");
        }
        transaction.commit().expect("a durable commit");
    }
}
