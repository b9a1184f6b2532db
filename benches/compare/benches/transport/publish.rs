//! Publishing next to encoding alone.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use driftless_compare::data::Pair;
use driftless_delta::{DigestTable, Element, Profile, encode};
use driftless_store::{Disk, Store};
use driftless_transport::Publisher;
use driftless_transport::publish::{PublisherOptions, Start};
use rayon::prelude::*;

use crate::model::{self, RUN, begin, directory, pairs, publish};
use crate::{Options, judge, median};

const DENSITY: f64 = 0.01;
/// Threads of a publisher by default.
const THREADS_MAX: usize = 8;

/// From the call to the committed manifest, against encoding the same tensors on as many threads and keeping
/// the bytes. The publisher's own baseline moves behind its back, which the next publication waits for.
pub(crate) fn run(options: &Options) {
    let pairs = pairs(options.mib, DENSITY);
    println!("publish of {} MiB at {} % to a directory", options.mib, 100.0 * DENSITY);
    let dir = directory(options);
    let store: Arc<dyn Store> = Arc::new(Disk::new(dir.path().join("store")));
    let mut publisher = begin(&pairs, &store, dir.path(), Profile::Wire, None);
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
    let tables: Vec<_> =
        pairs.iter().map(|pair| DigestTable::of(Element::Bf16, &pair.base).expect("a table")).collect();
    let (mut alone, mut whole, mut bytes) = (Vec::new(), Vec::new(), 0);
    let mut phases: [Vec<f64>; 3] = Default::default();
    for round in 0..2 * options.repeat {
        let forth = round % 2 == 0;
        if forth {
            let begin = Instant::now();
            let encoded: Vec<_> = pool.install(|| {
                let one = |(pair, table): (&Pair, &DigestTable)| {
                    let mut out = Vec::new();
                    let bf16 = Element::Bf16;
                    encode(bf16, &pair.base, &pair.new, table, Profile::Wire, &mut out).expect("a delta");
                    out
                };
                pairs.par_iter().zip(&tables).map(one).collect()
            });
            alone.push(begin.elapsed().as_secs_f64());
            drop(encoded);
        }
        // There and back again: every other round starts from the base.
        let state = if forth { model::new(&pairs) } else { model::base(&pairs) };
        let packed = Arc::new(Mutex::new(Instant::now()));
        let last = packed.clone();
        publisher.on_progress(Box::new(move |_| *last.lock().expect("no panic") = Instant::now()));
        let begin = Instant::now();
        let published = publish(&mut publisher, &state);
        if forth {
            whole.push(begin.elapsed().as_secs_f64());
            bytes = published.publication_bytes;
            let packed = packed.lock().expect("no panic").duration_since(begin);
            let parts = [packed, published.encode.saturating_sub(packed), published.upload];
            parts.into_iter().zip(&mut phases).for_each(|(part, phase)| phase.push(part.as_secs_f64()));
        }
        drop(publisher);
        publisher = reopen(&store, &dir);
    }
    let (alone, whole) = (median(alone), median(whole));
    let [packed, stored, committed] = phases.map(median);
    println!("  encode alone {alone:.3} s, publish {whole:.3} s ({bytes} bytes), {threads} threads");
    println!(
        "  of it: last tensor packed after {packed:.3} s, objects durable {stored:.3} s later, committed {committed:.3} s later"
    );
    judge("publish over encode alone", whole / alone, 1.3, false);
}

/// Another publisher of the run; the one before has waited for its baseline.
fn reopen(store: &Arc<dyn Store>, dir: &tempfile::TempDir) -> Publisher {
    let options = PublisherOptions::new(RUN, Start::Resume, dir.path().join("baseline"));
    Publisher::open(store.clone(), options).expect("a publisher")
}
