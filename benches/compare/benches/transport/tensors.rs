//! The same bytes in many tensors next to few, as mixtures of experts have them.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use driftless_compare::data::{Pair, Shape, synthetic};
use driftless_store::{Disk, Store};
use driftless_transport::publish::Profile;
use driftless_transport::{Replica, Run, Version};

use crate::model::{self, RUN, begin, directory, publish};
use crate::{Options, judge, median};

const DENSITY: f64 = 0.01;
const FEW: usize = 200;
const MANY: usize = 20_000;
const TINY: usize = 100_000;

/// Publishing, following version by version, and following all versions in one apply; then a checkpoint of
/// nothing but names.
pub(crate) fn run(options: &Options) {
    println!("{FEW} and {MANY} tensors of {} MiB together, {} % changed", options.mib, 100.0 * DENSITY);
    let [few, many] = [FEW, MANY].map(|tensors| {
        let elements = (options.mib << 20) / 2 / tensors;
        let times = live(&synthetic(Shape { tensors, elements }, DENSITY, 1), options, options.repeat);
        let [publish, follow, fold] = times;
        println!(
            "  {tensors}: published in {publish:.3} s, followed in {follow:.3} s, folded in {fold:.3} s"
        );
        times
    });
    for ((what, few), many) in ["publishing", "following", "folding"].into_iter().zip(few).zip(many) {
        judge(&format!("{what} many over few"), many / few, 1.5, false);
    }
    let tiny = synthetic(Shape { tensors: TINY, elements: 3 }, DENSITY, 1);
    let begin = Instant::now();
    let [publish, follow, fold] = live(&tiny, options, 1);
    println!(
        "  {TINY} of 3 elements: published in {publish:.3} s, followed in {follow:.3} s, folded in {fold:.3} s; {:.1} s with all that \
         is around it",
        begin.elapsed().as_secs_f64()
    );
    judge("publishing and following them, seconds", publish + follow, 10.0, false);
}

/// Seconds to publish a delta, until the baseline is ready for the next; to follow it, until it is durable;
/// and to follow all of them in one apply.
fn live(pairs: &[Pair], options: &Options, repeat: usize) -> [f64; 3] {
    let dir = directory(options);
    let store: Arc<dyn Store> = Arc::new(Disk::new(dir.path().join("store")));
    let mut publisher = begin(pairs, &store, dir.path(), Profile::Wire, options.shard_mib);
    publisher.wait().expect("a baseline");
    let versions = 2 * repeat as u64;
    let published = (1..=versions).map(|version| {
        let state = if version % 2 == 1 { model::new(pairs) } else { model::base(pairs) };
        let begin = Instant::now();
        publish(&mut publisher, &state);
        publisher.wait().expect("a baseline");
        begin.elapsed().as_secs_f64()
    });
    let published = median(published.collect());
    let run = publisher.run().clone();
    drop(publisher);
    std::fs::remove_dir_all(dir.path().join("baseline")).expect("the publisher is gone");
    let mut host = Host::new(&run, dir.path());
    let followed = median((1..=versions).map(|version| host.advance(version)).collect());
    drop(host);
    let folded = Host::new(&run, dir.path()).advance(versions);
    [published, followed, folded]
}

/// A host at version 0.
struct Host<'a> {
    replica: Replica,
    run: &'a Run,
}

impl<'a> Host<'a> {
    fn new(run: &'a Run, dir: &Path) -> Self {
        assert_eq!(run.name(), RUN);
        let host = dir.join("host");
        if host.exists() {
            std::fs::remove_dir_all(&host).expect("nobody has it");
        }
        let mut replica = Replica::open(host).expect("a replica");
        replica.advance(run, "policy", Version(0), Some(&dir.join("base"))).expect("version 0");
        replica.sync().expect("a disk");
        Self { replica, run }
    }

    /// Seconds until a version is durable.
    fn advance(&mut self, version: u64) -> f64 {
        let begin = Instant::now();
        self.replica.advance(self.run, "policy", Version(version), None).expect("an advance");
        self.replica.sync().expect("a disk");
        begin.elapsed().as_secs_f64()
    }
}
